//! Has QEMU's guest report its free memory, so that it is discarded and never stored (Blowfish, section 4.4).
//!
//! Before: `command_line` has found that Ballast can manage guest RAM. After: QEMU has a balloon device whose only work
//! is free page reporting, if the operator requested it; otherwise a note tells the operator the cost of its absence.
//! Promise: a pure function of the words (a function argument tells which files are of huge pages). No device is added
//! without a request, because a VM must migrate to the operator's own command line. A balloon on the command line stays
//! as it is, because QEMU takes only one.
//!
//! A report that a page is free is only safe while the guest cannot allocate the page. The guest's kernel takes free
//! blocks out of its allocator, and returns them when QEMU has punched them out of guest RAM, which is a discard
//! (`preload`). A page that an agent calls free may be in use when the host hears of it, so it is evicted like any
//! other page.

use ballast_base::Invalid;

use super::command_line::Edit;
use super::options::{Opt, options};

const DEVICE: &str = "virtio-balloon-pci,id=ballast-balloon,free-page-reporting=on";
/// Machines with a PCI bus on which QEMU finds a place for a device. The names of their versions begin with these.
const MACHINES: [&str; 4] = ["pc", "q35", "virt", "pseries"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reporting {
    Add([Edit; 2]),
    Advise(String),
    /// The balloon on the command line reports, or the device is unknown, or the machine cannot have one.
    Leave,
}

pub fn reporting(
    wanted: bool,
    program: &str,
    words: &[String],
    is_huge_file: &dyn Fn(&str) -> bool,
) -> Result<Reporting, Invalid> {
    const COST: &str = "free memory of the guest will be stored, not discarded";
    let options = options(words)?;
    let is_balloon = |option: &&Opt| match option.name.as_str() {
        "device" => option.head.starts_with("virtio-balloon"),
        name => name == "balloon",
    };
    if let Some(balloon) = options.iter().find(is_balloon) {
        return match (balloon.is_on("free-page-reporting"), wanted) {
            (true, _) => Ok(Reporting::Leave),
            (false, false) => Ok(Reporting::Advise(format!(
                "`-{} {}`: without free-page-reporting=on, {COST}",
                balloon.name, balloon.text
            ))),
            (false, true) => Err(format!(
                "--balloon: QEMU takes one balloon only; write free-page-reporting=on for `-{} {}`",
                balloon.name, balloon.text
            )
            .into()),
        };
    }
    // Huge pages that are punched are free to others, and the guest would get none when it needs them again.
    let is_huge = |option: &Opt| {
        option.name == "object" && (option.is_on("hugetlb") || option.get("mem-path").is_some_and(is_huge_file))
    };
    let obstacle = if options.iter().any(|option| !option.is_read) {
        Some("a balloon may be in the file of -readconfig, which cannot be read here")
    } else if !has_pci(program, &options) {
        Some("this machine is not known to have a place for it on a PCI bus")
    } else if options.iter().any(is_huge) {
        Some("huge pages that the guest reports would be free to others")
    } else {
        None
    };
    match (obstacle, wanted) {
        (None, true) => Ok(Reporting::Add(["-device", DEVICE].map(|word| Edit::Append(word.into())))),
        (None, false) => Ok(Reporting::Advise(format!(
            "the guest has no balloon with free page reporting: {COST} (--balloon adds one)"
        ))),
        (Some(why), true) => Err(format!("--balloon: {why}").into()),
        (Some(_), false) => Ok(Reporting::Leave),
    }
}

fn has_pci(program: &str, options: &[Opt]) -> bool {
    let machine = options.iter().rfind(|option| option.name == "machine" && !option.head.is_empty());
    match machine {
        Some(machine) => {
            let rest = MACHINES.iter().find_map(|known| machine.head.strip_prefix(known));
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
        }
        // `pc` is QEMU's default for these.
        None => ["x86_64", "i386", "kvm"].iter().any(|end| program.ends_with(end)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(wanted: bool, program: &str, line: &str) -> Result<Reporting, Invalid> {
        let words: Vec<String> = line.split_ascii_whitespace().map(str::to_owned).collect();
        reporting(wanted, program, &words, &|path| path.starts_with("/dev/hugepages"))
    }

    #[test]
    fn a_guest_gets_a_balloon_if_asked_for_and_else_its_absence_is_said() {
        for line in [
            "-m 1G -object memory-backend-memfd,id=ram0,size=1G,share=on",
            "-M pc-i440fx-9.2",
            "-machine type=q35,accel=kvm -machine memory-backend=ram0",
            "-machine q35 -object memory-backend-file,id=r,mem-path=/dev/shm/a,share=on",
        ] {
            let added = of(true, "/usr/bin/qemu-system-x86_64", line).expect(line);
            let Reporting::Add([name, device]) = added else { panic!("{line}") };
            assert_eq!((name, device), (Edit::Append("-device".into()), Edit::Append(DEVICE.into())));
            let Ok(Reporting::Advise(why)) = of(false, "qemu-system-x86_64", line) else { panic!("{line}") };
            assert!(why.contains("stored") && why.contains("--balloon"), "{why}");
        }
        assert!(matches!(of(true, "qemu-system-aarch64", "-machine virt,gic-version=3"), Ok(Reporting::Add(_))));
    }

    #[test]
    fn a_balloon_that_is_there_stays_and_one_that_could_report_is_named() {
        for balloon in ["virtio-balloon-pci,free-page-reporting=on", "driver=virtio-balloon,free-page-reporting"] {
            for wanted in [true, false] {
                let line = format!("-device {balloon}");
                assert_eq!(of(wanted, "qemu-kvm", &line), Ok(Reporting::Leave), "{balloon}");
            }
        }
        for balloon in ["-device virtio-balloon-pci,id=b", "-balloon virtio"] {
            let Ok(Reporting::Advise(why)) = of(false, "qemu-kvm", balloon) else { panic!("{balloon}") };
            assert!(why.contains(balloon) && why.contains("free-page-reporting=on"), "{why}");
            let why = of(true, "qemu-kvm", balloon).expect_err(balloon).to_string();
            assert!(why.contains(balloon) && why.contains("one balloon only"), "{why}");
        }
    }

    #[test]
    fn a_machine_without_pci_and_ram_of_huge_pages_get_none() {
        for line in [
            "-machine microvm",
            "-machine isapc",
            "-readconfig /none/vm.cfg",
            "-object memory-backend-memfd,id=r,size=1G,hugetlb=on",
            "-object memory-backend-file,id=r,size=1G,share=on,mem-path=/dev/hugepages/a",
        ] {
            assert_eq!(of(false, "qemu-system-x86_64", line), Ok(Reporting::Leave), "{line}");
            of(true, "qemu-system-x86_64", line).expect_err(line);
        }
        assert_eq!(of(false, "qemu-system-s390x", "-m 1G"), Ok(Reporting::Leave));
    }
}
