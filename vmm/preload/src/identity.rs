//! Name and UUID of the VM: from the environment, else from the VMM's command line.
//!
//! Before: the VMM was started, by `ballast run` or with `LD_PRELOAD` alone. After: its client attaches under the name
//! that its operator uses.
//! Threads: any.
//! Promise: text that is not UTF-8 is not taken as a name, because two such names could become one.
//!
//! It reads QEMU's `-name X`, `-name guest=X,...`, `-uuid U`, and `-smbios type=1,...,uuid=U`, with one or two dashes.
//! The last occurrence counts, as in QEMU.

use ballast_base::Uuid;
use ballast_base::wire::{check_name, shown_name};

use crate::mode::text;
use crate::shape;

pub fn name() -> Option<String> {
    text("BALLAST_VM_NAME").or_else(|| own().0)
}

/// The VM's UUID, if it is valid: QEMU refuses an invalid one, too.
pub fn uuid() -> Option<Uuid> {
    text("BALLAST_VM_UUID").map_or_else(|| own().1, |uuid| uuid.parse().ok())
}

/// Name and UUID of the command line. Another VMM's options may mean something else.
fn own() -> (Option<String>, Option<Uuid>) {
    if !shape::is_qemu_here() {
        return (None, None);
    }
    of(&std::fs::read("/proc/self/cmdline").unwrap_or_default())
}

/// Name and UUID of a command line, in which a zero byte ends each word.
fn of(line: &[u8]) -> (Option<String>, Option<Uuid>) {
    let words: Vec<&[u8]> = line.split(|byte| *byte == 0).collect();
    let (mut name, mut uuid) = (None, None);
    for [option, value] in words.array_windows() {
        let Ok(value) = std::str::from_utf8(value) else { continue };
        match *option {
            b"-name" | b"--name" => name = item(value, "guest").or_else(|| first(value)).or(name),
            b"-uuid" | b"--uuid" => uuid = value.parse().ok().or(uuid),
            b"-smbios" | b"--smbios" if item(value, "type").as_deref() == Some("1") => {
                uuid = item(value, "uuid").and_then(|uuid| uuid.parse().ok()).or(uuid);
            }
            _ => {}
        }
    }
    (name.filter(|name| check_name(&shown_name(name)).is_ok()), uuid)
}

/// The items of an option's value. A comma inside an item is written twice.
fn items(value: &str) -> impl Iterator<Item = String> {
    const COMMA: &str = "\u{0}";
    let items: Vec<String> = value.replace(",,", COMMA).split(',').map(|item| item.replace(COMMA, ",")).collect();
    items.into_iter()
}

fn item(value: &str, key: &str) -> Option<String> {
    items(value).filter_map(|item| Some(item.strip_prefix(key)?.strip_prefix('=')?.to_owned())).last()
}

/// The first item, if it has no key.
fn first(value: &str) -> Option<String> {
    items(value).next().filter(|item| !item.contains('='))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(words: &[&str]) -> (Option<String>, Option<String>) {
        let line: String = words.iter().flat_map(|word| [*word, "\0"]).collect();
        let (name, uuid) = of(line.as_bytes());
        (name, uuid.map(|uuid| uuid.to_string()))
    }

    #[test]
    fn a_vm_has_the_name_that_its_operator_uses() {
        let long = "n".repeat(255);
        for name in ["db", "веб-1", "web:1", "a b", "..", "café", "cafe\u{301}", &long] {
            let whole = ["qemu", "-name", &format!("guest={name},debug-threads=on"), "-m", "1G"].map(str::to_owned);
            let whole = whole.each_ref().map(String::as_str);
            assert_eq!(named(&whole).0.as_deref(), Some(name));
            assert_eq!(named(&["qemu", "--name", name]).0.as_deref(), Some(name));
        }
        assert_eq!(named(&["qemu", "-name", "a,,b=c,debug-threads=on"]).0, None, "a key that is unknown");
        assert_eq!(named(&["qemu", "-name", "a,,b,debug-threads=on"]).0.as_deref(), Some("a,b"));
        assert_eq!(named(&["qemu", "-name", "one", "-name", "guest=two"]).0.as_deref(), Some("two"));
        assert_eq!(named(&["qemu", "-name", "debug-threads=on"]), (None, None));
        assert_eq!(named(&["qemu", "-name", &"\u{1}".repeat(255)]).0, None, "too long when it is shown");
        assert_eq!(of(b"qemu\0-name\0w\xff\0").0, None);
    }

    #[test]
    fn the_uuid_is_the_machines() {
        let uuid = "123e4567-e89b-12d3-a456-426614174000";
        assert_eq!(named(&["qemu", "-uuid", uuid]).1.as_deref(), Some(uuid));
        let smbios = format!("type=1,manufacturer=x,uuid={uuid}");
        assert_eq!(named(&["kvm", "-id", "100", "-smbios", &smbios]).1.as_deref(), Some(uuid));
        assert_eq!(named(&["kvm", "-smbios", &smbios.replace("type=1", "type=3")]).1, None);
        assert_eq!(named(&["qemu", "-uuid", "none"]).1, None);
    }
}
