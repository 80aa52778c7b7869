//! Reads the options of a QEMU command line: which words are options or values, and the items of each value.
//!
//! Before: the operator typed the words. After: `command_line` decides what they mean for guest RAM.
//! Promise: a pure function of the words. It refuses nothing; QEMU refuses what is wrong.

use std::collections::BTreeMap;

/// One option: `-name head,key=value,...`.
#[derive(Debug)]
pub(super) struct Opt {
    pub name: String,
    /// Index of the value's word.
    pub index: usize,
    pub text: String,
    /// Its first item, if that is not `key=value` (or JSON's `qom-type`, `driver`).
    pub head: String,
    keys: BTreeMap<String, String>,
}

impl Opt {
    pub fn get(&self, key: &str) -> Option<&str> {
        self.keys.get(key).map(String::as_str)
    }

    pub fn is_on(&self, key: &str) -> bool {
        self.get(key).is_some_and(|value| matches!(value, "on" | "yes" | "true" | "y"))
    }
}

/// QEMU options without a value; every other takes the next word.
const FLAGS: &[&str] = &[
    "S",
    "s",
    "alt-grab",
    "ctrl-grab",
    "curses",
    "daemonize",
    "enable-fips",
    "enable-kvm",
    "full-screen",
    "h",
    "help",
    "mem-prealloc",
    "no-acpi",
    "no-fd-bootchk",
    "no-hpet",
    "no-quit",
    "no-reboot",
    "no-shutdown",
    "no-user-config",
    "nodefaults",
    "nographic",
    "old-param",
    "only-migratable",
    "portrait",
    "preconfig",
    "semihosting",
    "singlestep",
    "snapshot",
    "usb",
    "version",
    "win2k-hack",
    "xen-attach",
    "xen-domid-restrict",
];

/// The options of a command line, in order. Words that are no option are left out.
pub(super) fn options(words: &[String]) -> Vec<Opt> {
    let mut found = Vec::new();
    let mut index = 0;
    while index < words.len() {
        let name = match words[index].strip_prefix('-') {
            Some(name) if !name.is_empty() => name.strip_prefix('-').unwrap_or(name).to_owned(),
            _ => {
                index += 1;
                continue;
            }
        };
        let takes_value = !FLAGS.contains(&name.as_str()) && index + 1 < words.len();
        let text = if takes_value { words[index + 1].clone() } else { String::new() };
        let (head, keys) = parse(&text);
        let name = if name == "M" { "machine".into() } else { name };
        found.push(Opt { name, index: index + 1, text, head, keys });
        index += 1 + usize::from(takes_value);
    }
    found
}

/// The items of an option's value. QEMU writes a comma inside a value twice.
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
    for key in ["type", "driver", "qom-type"] {
        if head.is_empty() {
            head = keys.get(key).cloned().unwrap_or_default();
        }
    }
    (head, keys)
}
