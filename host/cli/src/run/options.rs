//! Reads the options of a QEMU command line: which words are options or values, and the items of each value.
//!
//! Before: the operator typed the words. After: `command_line` decides what they mean for guest RAM. Promise: no word
//! that QEMU takes for an option is taken for another's value. QEMU itself refuses invalid options.

use std::collections::BTreeMap;

use ballast_base::Invalid;

/// One option: `-name head,key=value,...`.
#[derive(Debug)]
pub(super) struct Opt {
    pub name: String,
    /// Index of the value's word; `None` if it is in a configuration file.
    pub index: Option<usize>,
    pub text: String,
    /// Its first item, unless that is `key=value`; of those, the value of JSON's `qom-type` or `driver`.
    pub head: String,
    keys: BTreeMap<String, String>,
    /// Whether its content is known; the content of a configuration file may be unreadable.
    pub is_read: bool,
}

impl Opt {
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    pub fn of(name: &str, index: usize, text: String) -> Self {
        let (head, keys) = parse(&text);
        Self { name: name.to_owned(), index: Some(index), text, head, keys, is_read: true }
    }

    pub fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(value, "on" | "yes" | "true" | "y"))
    }
}

/// QEMU options without a value, of all versions.
const FLAGS: &[&str] = &[
    "S",
    "alt-grab",
    "async-teardown",
    "audio-help",
    "ctrl-grab",
    "curses",
    "daemonize",
    "disable-fips",
    "enable-fips",
    "enable-hax",
    "enable-kvm",
    "enable-sync-profile",
    "full-screen",
    "h",
    "help",
    "jitdump",
    "localtime",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-frame",
    "no-hpet",
    "no-kvm",
    "no-kvm-irqchip",
    "no-kvm-pit",
    "no-kvm-pit-reinjection",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nodefconfig",
    "nographic",
    "old-param",
    "only-migratable",
    "perfmap",
    "portrait",
    "preconfig",
    "rtc-td-hack",
    "s",
    "sdl",
    "semihosting",
    "show-cursor",
    "singlestep",
    "snapshot",
    "tdf",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-create",
    "xen-domid-restrict",
];

/// The options of a command line and of the files that it reads (`-readconfig`), in order. Words that are no option are
/// left out.
///
/// # Errors
/// A word that looks like an option follows an option with a value: only the value of `-append` may look so.
pub(super) fn options(words: &[String]) -> Result<Vec<Opt>, Invalid> {
    let mut found = Vec::new();
    let mut index = 0;
    while index < words.len() {
        let Some(name) = option_name(&words[index]) else {
            index += 1;
            continue;
        };
        let next = words.get(index + 1);
        let takes_value = next.is_some() && !FLAGS.contains(&name);
        if let Some(next) = next.filter(|next| takes_value && name != "append" && option_name(next).is_some()) {
            return Err(format!(
                "`ballast run` cannot tell whether `{next}` is an option or the value of `-{name}`; write `-{name}` \
                 last if it takes no value"
            )
            .into());
        }
        let text = if takes_value { words[index + 1].clone() } else { String::new() };
        let (head, keys) = parse(&text);
        let name = if name == "M" { "machine" } else { name }.to_owned();
        let file = (name == "readconfig").then(|| config_file(&text));
        found.push(Opt { name, index: Some(index + 1), text, head, keys, is_read: !matches!(file, Some(None)) });
        found.extend(file.flatten().iter().flat_map(|text| config(text)));
        index += 1 + usize::from(takes_value);
    }
    Ok(found)
}

/// The name of the option in this word, without its one or two hyphens.
fn option_name(word: &str) -> Option<&str> {
    let name = word.strip_prefix('-')?;
    Some(name.strip_prefix('-').unwrap_or(name)).filter(|name| !name.is_empty())
}

/// Whether this command line only queries QEMU's features, or starts a QEMU without a guest.
pub(super) fn is_probe(options: &[Opt]) -> bool {
    /// For these options QEMU lists the values at `help`, and ends.
    const LISTED: &[&str] = &[
        "L", "accel", "audio", "audiodev", "chardev", "cpu", "d", "device", "display", "machine", "net", "netdev",
        "nic", "object", "soundhw", "tpmdev", "trace", "vga", "watchdog",
    ];
    options.iter().any(|option| match option.name.as_str() {
        "version" | "h" | "help" | "audio-help" => true,
        name if LISTED.contains(&name) => {
            matches!(option.head.as_str(), "help" | "?")
                || ["help", "?"].iter().any(|key| option.is_on(key))
                || option.get("model") == Some("help")
        }
        _ => false,
    })
}

/// Whether the machine has no CPU and no memory: management programs use it to query QEMU's features.
pub(super) fn is_without_machine(options: &[Opt]) -> bool {
    let named = options.iter().rfind(|option| option.name == "machine" && !option.head.is_empty());
    named.is_some_and(|machine| machine.head == "none")
}

/// The text of a configuration file. A pipe is not read, because only QEMU may read it.
fn config_file(path: &str) -> Option<String> {
    let is_file = std::fs::metadata(path).is_ok_and(|meta| meta.is_file());
    is_file.then(|| std::fs::read_to_string(path).ok()).flatten()
}

/// The options in QEMU's configuration file: `[group "id"]`, then lines of `key = "value"`.
fn config(text: &str) -> Vec<Opt> {
    let mut found: Vec<Opt> = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(title) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            let (group, id) = title.trim().split_once(char::is_whitespace).unwrap_or((title.trim(), ""));
            let name = match group {
                "memory" => "m",
                "smp-opts" => "smp",
                group => group,
            };
            let id = id.trim().trim_matches('"');
            let keys = (!id.is_empty()).then(|| ("id".to_owned(), id.to_owned())).into_iter().collect();
            let text = format!("[{}] of -readconfig", title.trim());
            found.push(Opt { name: name.into(), index: None, text, head: String::new(), keys, is_read: true });
        } else if let (Some((key, value)), Some(option)) = (line.split_once('='), found.last_mut()) {
            let value = value.trim().trim_matches('"').to_owned();
            option.keys.insert(key.trim().to_owned(), value);
        }
    }
    for option in &mut found {
        option.head = head_of(&option.keys);
    }
    found
}

/// The items of an option's value. A comma inside a value is written twice.
fn parse(text: &str) -> (String, BTreeMap<String, String>) {
    let mut keys = BTreeMap::new();
    let mut head = String::new();
    if let Ok(serde_json::Value::Object(object)) = serde_json::from_str(text) {
        for (key, value) in object {
            let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
            if key == "qom-type" || key == "driver" {
                head.clone_from(&value);
            }
            keys.insert(key, value);
        }
        return (head, keys);
    }
    const COMMA: &str = "\u{0}";
    for (index, item) in text.replace(",,", COMMA).split(',').enumerate() {
        let item = item.replace(COMMA, ",");
        match item.split_once('=') {
            Some((key, value)) => drop(keys.insert(key.to_owned(), value.to_owned())),
            None if index == 0 => head = item,
            // `share` alone means `share=on`.
            None => drop(keys.insert(item, "on".into())),
        }
    }
    if head.is_empty() {
        head = head_of(&keys);
    }
    (head, keys)
}

/// The value that takes the place of the first item if all items have keys.
fn head_of(keys: &BTreeMap<String, String>) -> String {
    let mut named = ["type", "driver", "qom-type"].iter().filter_map(|key| keys.get(*key));
    named.next().cloned().unwrap_or_default()
}

/// The size of guest RAM as written: QEMU merges several `-m`, and the last size holds.
pub(super) fn memory(options: &[Opt]) -> Option<(&Opt, &str)> {
    let sized = |option: &&Opt| option.name == "m" && (option.get("size").is_some() || !option.head.is_empty());
    let memory = options.iter().rfind(sized)?;
    Some((memory, memory.get("size").unwrap_or(&memory.head)))
}
