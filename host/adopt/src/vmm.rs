//! Which VM a process runs, by its program, its command line and its cgroup.
//!
//! Before: a process was found. After: it is a VMM with a name and a size, or no VMM. Threads: any; pure functions.
//! Units: bytes. Promise: nothing is guessed: a size that the command line does not state is unknown.

use std::fmt;

use ballast_base::{GIB, KIB, MIB};

/// A program that runs VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// Any of QEMU's emulators, also under a distribution's own name.
    Qemu,
    /// Cloud Hypervisor.
    CloudHypervisor,
    /// Firecracker, also under its jailer.
    Firecracker,
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Qemu => "qemu",
            Self::CloudHypervisor => "cloud-hypervisor",
            Self::Firecracker => "firecracker",
        })
    }
}

/// A VM as its VMM's command line describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vmm {
    /// The program that runs it.
    pub program: Program,
    /// Its name, if it has one.
    pub name: Option<String>,
    /// RAM at boot, if the command line says it.
    pub memory: Option<u64>,
    /// RAM with all DIMMs that may be plugged in, if the command line states it.
    pub most: Option<u64>,
}

impl Program {
    /// The program with this file name; `None` if it is no VMM.
    pub fn of(executable: &str) -> Option<Self> {
        match executable {
            "firecracker" => Some(Self::Firecracker),
            "cloud-hypervisor" | "cloud-hypervisor-static" => Some(Self::CloudHypervisor),
            "qemu-kvm" | "kvm" => Some(Self::Qemu),
            _ => executable.starts_with("qemu-system-").then_some(Self::Qemu),
        }
    }
}

impl Vmm {
    /// The VM of a process. `executable` is the name of its file; `args` its words, the first of which is the program.
    pub fn of(executable: &str, args: &[&str], cgroups: &str) -> Option<Self> {
        let program = Program::of(executable)?;
        let args = args.get(1..).unwrap_or_default();
        let (name, memory) = match program {
            Program::Qemu => (qemu_name(args), qemu_memory(args)),
            Program::CloudHypervisor => (None, option(args, "--memory").and_then(cloud_hypervisor_memory)),
            Program::Firecracker => (option(args, "--id").map(str::to_owned), None),
        };
        let most = if program == Program::Qemu { qemu_most(args) } else { None };
        let name = name.or_else(|| libvirt_name(cgroups)).filter(|name| !name.is_empty());
        // With 0, Cloud Hypervisor has memory zones, and QEMU its own default.
        let memory = memory.filter(|bytes| *bytes > 0);
        Some(Self { program, name, memory, most })
    }
}

/// The value of an option, which is the next word or follows `=`.
fn option<'a>(args: &[&'a str], name: &str) -> Option<&'a str> {
    let at = args.iter().position(|arg| *arg == name || arg.strip_prefix(name).is_some_and(|r| r.starts_with('=')))?;
    args[at].split_once('=').map_or_else(|| args.get(at + 1).copied(), |(_, value)| Some(value))
}

/// The value of a QEMU option, which may begin with one hyphen or two. The last occurrence counts.
fn qemu_option<'a>(args: &[&'a str], name: &str) -> Option<&'a str> {
    let is_it = |arg: &&str| arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) == Some(name);
    args.get(args.iter().rposition(is_it)? + 1).copied()
}

/// The value of a key in `a=1,b=2`. The first word may stand without its key.
fn key<'a>(value: &'a str, name: &str, is_first: bool) -> Option<&'a str> {
    value.split(',').enumerate().find_map(|(at, pair)| match pair.split_once('=') {
        Some((key, value)) => (key == name).then_some(value),
        None => (at == 0 && is_first).then_some(pair),
    })
}

fn qemu_name(args: &[&str]) -> Option<String> {
    key(qemu_option(args, "name")?, "guest", true).map(str::to_owned)
}

/// QEMU's default, if the command line has no `-m`.
const QEMU_DEFAULT: u64 = 128 * MIB;
/// QEMU rounds the size of RAM up to a multiple of this, for example that of `-m 1.3G`.
const QEMU_MULTIPLE: u64 = 8 * KIB;

fn qemu_memory(args: &[&str]) -> Option<u64> {
    let Some(value) = qemu_option(args, "m") else { return Some(QEMU_DEFAULT) };
    size(key(value, "size", true)?, MIB)?.checked_next_multiple_of(QEMU_MULTIPLE)
}

fn qemu_most(args: &[&str]) -> Option<u64> {
    size(key(qemu_option(args, "m")?, "maxmem", false)?, MIB)
}

fn cloud_hypervisor_memory(value: &str) -> Option<u64> {
    size(key(value, "size", false)?, 1)
}

/// A size such as `512`, `1.5G` or `1048576k`, as VMMs read it; a number without a unit counts in `unit`.
pub fn size(text: &str, unit: u64) -> Option<u64> {
    let (number, unit) = match text.char_indices().last()? {
        (_, last) if last.is_ascii_digit() => (text, unit),
        (at, last) => {
            let unit = match last.to_ascii_uppercase() {
                'B' => 1,
                'K' => KIB,
                'M' => MIB,
                'G' => GIB,
                'T' => 1024 * GIB,
                _ => return None,
            };
            (&text[..at], unit)
        }
    };
    match number.parse::<u64>() {
        Ok(number) => number.checked_mul(unit),
        Err(_) => number.parse::<f64>().ok().filter(|number| *number > 0.0).map(|number| (number * unit as f64) as u64),
    }
}

/// The name of a libvirt domain, from its scope: `machine-qemu\x2d3\x2dweb.scope`.
fn libvirt_name(cgroups: &str) -> Option<String> {
    let scope = cgroups.lines().find_map(|line| line.split('/').find(|part| part.starts_with("machine-qemu")))?;
    let name = scope.strip_suffix(".scope")?.replace("\\x2d", "-");
    // `machine-qemu-ID-NAME`
    name.splitn(4, '-').nth(3).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(line: &str) -> Option<Vmm> {
        let args: Vec<&str> = line.split(' ').collect();
        Vmm::of(args[0], &args, "")
    }

    #[test]
    fn a_vmm_is_known_by_its_program_and_named_by_its_command_line() {
        for (line, program, name, memory, most) in [
            ("qemu-system-x86_64 -m 512", Program::Qemu, None, Some(512 * MIB), None),
            ("qemu-system-x86_64 -name web -m 1.5G", Program::Qemu, Some("web"), Some(1536 * MIB), None),
            (
                "qemu-kvm -name guest=db,debug-threads=on -m size=1048576k,slots=4",
                Program::Qemu,
                Some("db"),
                Some(GIB),
                None,
            ),
            (
                "kvm -id 100 -name debug-threads=on,guest=a -m 2048,maxmem=4G",
                Program::Qemu,
                Some("a"),
                Some(2 * GIB),
                Some(4 * GIB),
            ),
            ("qemu-system-aarch64 --name x -m 1G -m 2G", Program::Qemu, Some("x"), Some(2 * GIB), None),
            ("qemu-system-x86_64 -nodefaults", Program::Qemu, None, Some(128 * MIB), None),
            ("qemu-system-x86_64 -m lots", Program::Qemu, None, None, None),
            ("qemu-system-x86_64 -m 1.3G", Program::Qemu, None, Some(1_395_867_648), None),
            ("qemu-system-x86_64 -m 99999999999999999999G", Program::Qemu, None, None, None),
            ("cloud-hypervisor --memory size=0 --memory-zone id=a,size=1G", Program::CloudHypervisor, None, None, None),
            ("cloud-hypervisor --memory size=512M,shared=on", Program::CloudHypervisor, None, Some(512 * MIB), None),
            ("cloud-hypervisor --memory=size=1G", Program::CloudHypervisor, None, Some(GIB), None),
            ("firecracker --id ci-7 --api-sock /s", Program::Firecracker, Some("ci-7"), None, None),
        ] {
            assert_eq!(of(line), Some(Vmm { program, name: name.map(str::to_owned), memory, most }), "{line}");
        }
        for none in ["qemu-img convert", "bash -c qemu-system-x86_64", "virtqemud", "firecracker2"] {
            assert_eq!(of(none), None, "{none}");
        }
    }

    #[test]
    fn libvirts_scope_names_a_domain_without_a_name() {
        let scope = "0::/machine.slice/machine-qemu\\x2d3\\x2dmy\\x2dweb.scope/libvirt/emulator\n";
        let named = |cgroups| Vmm::of("qemu-kvm", &["qemu-kvm"], cgroups).and_then(|vmm| vmm.name);
        assert_eq!(named(scope).as_deref(), Some("my-web"));
        assert_eq!(named("0::/user.slice\n"), None);
    }

    #[test]
    fn sizes_are_read_as_the_vmm_reads_them() {
        assert_eq!(
            ["4", "4k", "4B", "0.5G", "3T"].map(|text| size(text, MIB)),
            [Some(4 * MIB), Some(4 * KIB), Some(4), Some(512 * MIB), Some(3 << 40)]
        );
        for wrong in ["", "G", "-1", "1X", "99999999999999999999G", "é"] {
            assert!(size(wrong, MIB).is_none_or(|size| size == u64::MAX), "{wrong}");
        }
    }
}
