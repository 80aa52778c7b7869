//! Probes of the kernel: each feature is tried, on memory of our own.
//!
//! Before: nothing; no daemon is needed. After: `ballast doctor` prints it, tests ask what to skip.
//! Threads: any. It takes a few milliseconds; up to 16 MiB of memory are used for that long.
//! Promise: nothing is changed on the machine and nothing is left behind; a feature that could not be tried is
//! `Unknown` and says why.

use crate::Uffd;
use crate::uffd::feature;

mod finding;
mod host;
mod kernel;
pub mod khugepaged;

pub use finding::Presence;
pub use host::kernel_release;

use finding::{Finding, no, unknown, yes};

/// One thing that Ballast uses or checks.
#[derive(Clone, Debug)]
pub struct Feature {
    /// Its name in the kernel's documentation.
    pub name: &'static str,
    /// Is it there?
    pub present: Presence,
    /// The version it appeared in, such as `Linux 5.14`.
    pub since: &'static str,
    /// What Ballast loses without it.
    pub without: &'static str,
    /// Does Ballast need it to manage a VM?
    pub required: bool,
    /// Detail of the finding: a version, a setting, an error, or advice.
    pub detail: String,
}

impl Feature {
    /// Is this a reason not to start?
    pub fn is_missing(&self) -> bool {
        self.required && !matches!(self.present, Presence::Yes | Presence::Warn)
    }
}

const REQUIRED: bool = true;
const OPTIONAL: bool = false;

/// Try everything.
pub fn probe() -> Vec<Feature> {
    let mut found = of_pages();
    found.extend(of_host());
    found
}

fn row(
    (name, since, required): (&'static str, &'static str, bool),
    (present, detail): Finding,
    without: &'static str,
) -> Feature {
    Feature { name, present, since, without, required, detail }
}

fn of_pages() -> Vec<Feature> {
    let offered = Uffd::probe_features();
    let poison = match &offered {
        Ok(features) if features & feature::POISON != 0 => yes(""),
        Ok(_) => no("the kernel does not offer it"),
        Err(error) => unknown(format!("no userfaultfd: {error}")),
    };
    vec![
        row(("userfaultfd", "Linux 4.3", REQUIRED), kernel::userfaultfd(&offered), "no VM can be managed"),
        row(
            ("zap, minor fault, continue", "Linux 5.14", REQUIRED),
            kernel::minor_round_trip(),
            "no quarantine, so nothing can be reclaimed safely",
        ),
        row(
            ("userfaultfd poison", "Linux 6.6", OPTIONAL),
            poison,
            "a guest that touches a page its store has lost cannot be given a memory error",
        ),
        row(
            ("/dev/userfaultfd", "Linux 6.1", OPTIONAL),
            host::device("/dev/userfaultfd"),
            "VMMs not run as root need CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1: the keeper has none to pass",
        ),
        row(
            ("process_madvise(MADV_COLLAPSE)", "Linux 6.1", OPTIONAL),
            kernel::process_collapse(),
            "no huge pages after a 4 KiB reclaim; tracking is slower",
        ),
        row(
            ("khugepaged spares guest RAM", "Linux 6.4, or by its settings", REQUIRED),
            khugepaged::finding(),
            "VMs are held at full size: zeros could take the place of far pages",
        ),
        row(
            ("huge pages for a memfd", "Linux 4.8, and its settings", OPTIONAL),
            khugepaged::huge_memfds(),
            "guest RAM is in pages of 4 KiB: it is slower to read than the huge pages of private memory",
        ),
        row(
            ("PAGEMAP_SCAN", "Linux 6.7", OPTIONAL),
            kernel::pagemap_scan(),
            "it is unknown which memory was mapped huge: it stays in 4 KiB pages once reclaimed",
        ),
        row(("io_uring", "Linux 5.1", OPTIONAL), kernel::io_uring(), "no file store"),
        row(
            ("pin check by BPF", "Linux 6.10", OPTIONAL),
            kernel::pin_check(),
            "it is unknown whether a device or a system call holds a page, and only time can exclude it: a VM whose \
             VMM may pin memory (any QEMU) is held to its limit more slowly",
        ),
    ]
}

fn of_host() -> Vec<Feature> {
    vec![
        row(
            ("pressure stall information", "Linux 4.20", OPTIONAL),
            host::readable("/proc/pressure/memory"),
            "host pressure cannot be seen",
        ),
        row(("KVM", "Linux 2.6.20", OPTIONAL), host::kvm(), "QEMU emulates (TCG), and guests are slow"),
        row(
            ("cgroup version 2", "Linux 4.5", OPTIONAL),
            host::cgroup(),
            "guest RAM is charged to the cgroup that touches it first",
        ),
        row(
            ("swap", "", OPTIONAL),
            host::swap(),
            "VMs that run already cannot be adopted with a limit; in use, the kernel also pages out guest RAM",
        ),
        row(("open files limit", "", OPTIONAL), host::open_files(), "fewer VMs: each uses about 10 descriptors"),
        row(
            ("vm.max_map_count", "", OPTIONAL),
            host::max_map_count(),
            "a VM whose RAM is registered in many pieces may be refused more",
        ),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_descriptors() -> usize {
        std::fs::read_dir("/proc/self/fd").expect("own descriptors").count()
    }

    #[test]
    fn every_feature_says_what_is_lost_and_unknown_says_why() {
        let features = probe();
        for feature in &features {
            assert!(!feature.without.is_empty(), "{} does not say what is lost", feature.name);
            if let Presence::Unknown(why) = &feature.present {
                assert!(!why.is_empty(), "{} is unknown for no reason", feature.name);
            }
        }
        let mut names: Vec<&str> = features.iter().map(|feature| feature.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), features.len(), "two features have one name");
    }

    #[test]
    fn features_that_the_other_tests_of_this_crate_use_are_found() {
        // Other tests fail if these features are missing, so a probe that says no there is wrong.
        for feature in probe().iter().filter(|feature| feature.required) {
            assert_eq!(feature.present, Presence::Yes, "{}: {}", feature.name, feature.detail);
        }
    }

    #[test]
    fn probing_leaves_no_descriptor_behind() {
        // Other tests of this process open and close descriptors meanwhile; growth shows over many rounds.
        const ROUNDS: usize = 20;
        let before = open_descriptors();
        for _ in 0..ROUNDS {
            probe();
        }
        let after = open_descriptors();
        assert!(after < before + ROUNDS, "{before} descriptors became {after}");
    }
}
