//! Has QEMU's guest report its free memory, so that it is discarded and never stored (Blowfish, section 4.4).
//!
//! Before: `command_line` has found that Ballast can manage guest RAM. After: QEMU has a balloon device whose only work
//! is free page reporting, or the operator knows why not.
//! Promise: a pure function of the words (a function argument tells which files are of huge pages). A balloon on the
//! command line stays as it is, since QEMU takes one only.
//!
//! That a page is free is safe to act on only while the guest cannot allocate it. The guest's kernel takes free blocks
//! out of its allocator, and returns them when QEMU has punched them out of guest RAM, which is a discard (`preload`).
//! What an agent calls free may be in use when the host hears of it, so it is evicted like any other page.

use super::command_line::Edit;
use super::options::{Opt, options};

const DEVICE: &str = "virtio-balloon-pci,id=ballast-balloon,free-page-reporting=on";
/// Machines with a PCI bus on which QEMU finds a place for a device. Versions of them have a name after these.
const MACHINES: [&str; 4] = ["pc", "q35", "virt", "pseries"];

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reporting {
    /// Add this device.
    Add([Edit; 2]),
    /// Tell the operator that the balloon on the command line could do it.
    Advise(String),
    /// The balloon on the command line does it, or the machine is none for it.
    Leave,
}

/// Decides for a QEMU command line (without the program).
pub fn reporting(program: &str, words: &[String], is_huge_file: &dyn Fn(&str) -> bool) -> Reporting {
    let options = options(words);
    let is_balloon = |option: &&Opt| match option.name.as_str() {
        "device" => option.head.starts_with("virtio-balloon"),
        name => name == "balloon",
    };
    if let Some(balloon) = options.iter().find(is_balloon) {
        return match balloon.is_on("free-page-reporting") {
            true => Reporting::Leave,
            false => Reporting::Advise(format!(
                "`-{} {}`: with free-page-reporting=on, free memory of the guest would be discarded, not stored",
                balloon.name, balloon.text
            )),
        };
    }
    // A balloon may be in a file that is not read here. Huge pages that are punched are free to others, and the guest
    // would get none when it needs them again.
    let is_other = |option: &Opt| match option.name.as_str() {
        "readconfig" => true,
        "object" => option.is_on("hugetlb") || option.get("mem-path").is_some_and(is_huge_file),
        _ => false,
    };
    if !has_pci(program, &options) || options.iter().any(is_other) {
        return Reporting::Leave;
    }
    Reporting::Add(["-device", DEVICE].map(|word| Edit::Append(word.into())))
}

fn has_pci(program: &str, options: &[Opt]) -> bool {
    let machine = options.iter().rfind(|option| option.name == "machine" && !option.head.is_empty());
    match machine {
        Some(machine) => {
            let rest = MACHINES.iter().find_map(|known| machine.head.strip_prefix(known));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        }
        // QEMU's own choice is `pc` there.
        None => ["x86_64", "i386", "kvm"].iter().any(|end| program.ends_with(end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(program: &str, line: &str) -> Reporting {
        let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
        reporting(program, &words, &|path| path.starts_with("/dev/hugepages"))
    }

    #[test]
    fn a_guest_without_a_balloon_gets_one_that_reports_free_pages() {
        for line in [
            "-m 1G -object memory-backend-memfd,id=ram0,size=1G,share=on",
            "-M pc-i440fx-9.2",
            "-machine type=q35,accel=kvm -machine memory-backend=ram0",
            "-machine q35 -object memory-backend-file,id=r,mem-path=/dev/shm/a,share=on",
        ] {
            let Reporting::Add([name, device]) = of("/usr/bin/qemu-system-x86_64", line) else { panic!("{line}") };
            assert_eq!((name, device), (Edit::Append("-device".into()), Edit::Append(DEVICE.into())));
        }
        assert!(matches!(of("qemu-system-aarch64", "-machine virt,gic-version=3"), Reporting::Add(_)));
    }

    #[test]
    fn a_balloon_that_is_there_stays_and_one_that_could_report_is_named() {
        for balloon in ["virtio-balloon-pci,free-page-reporting=on", "driver=virtio-balloon,free-page-reporting"] {
            assert_eq!(of("qemu-kvm", &format!("-device {balloon}")), Reporting::Leave, "{balloon}");
        }
        for balloon in ["-device virtio-balloon-pci,id=b", "-balloon virtio"] {
            let Reporting::Advise(why) = of("qemu-kvm", balloon) else { panic!("{balloon}") };
            assert!(why.contains(balloon) && why.contains("free-page-reporting=on"), "{why}");
        }
    }

    #[test]
    fn a_machine_without_pci_and_ram_of_huge_pages_get_none() {
        for line in [
            "-machine microvm",
            "-machine isapc",
            "-machine none",
            "-readconfig vm.cfg",
            "-object memory-backend-memfd,id=r,size=1G,hugetlb=on",
            "-object memory-backend-file,id=r,size=1G,share=on,mem-path=/dev/hugepages/a",
        ] {
            assert_eq!(of("qemu-system-x86_64", line), Reporting::Leave, "{line}");
        }
        assert_eq!(of("qemu-system-s390x", "-m 1G"), Reporting::Leave);
    }
}
