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
    let offered = Uffd::probe_features();
    let bit = |bit: u64| match &offered {
        Ok(features) if features & bit == bit => yes(""),
        Ok(_) => no("the kernel does not offer it"),
        Err(error) => unknown(format!("no userfaultfd: {error}")),
    };
    let mut found = Vec::with_capacity(32);
    let mut add = |name, required, since, (present, detail): Finding, without| {
        found.push(Feature { name, present, since, without, required, detail });
    };
    // Required for a page's journey.
    add("userfaultfd", REQUIRED, "Linux 4.3", kernel::userfaultfd(&offered), "no VM can be managed");
    add(
        "userfaultfd missing faults on shmem",
        REQUIRED,
        "Linux 4.11",
        bit(feature::MISSING_SHMEM),
        "far pages cannot be restored",
    );
    add(
        "userfaultfd minor faults on shmem",
        REQUIRED,
        "Linux 5.14",
        bit(feature::MINOR_SHMEM),
        "no quarantine, so nothing can be reclaimed safely",
    );
    add("userfaultfd thread id", REQUIRED, "Linux 4.14", bit(feature::THREAD_ID), "stall cannot be told per vCPU");
    add("memfd_create", REQUIRED, "Linux 3.17", kernel::memfd_create(), "no guest RAM and no shared state");
    add("punch a hole in a memfd", REQUIRED, "Linux 3.5", kernel::punch(), "memory cannot go back to the host");
    add("SEEK_DATA on a memfd", REQUIRED, "Linux 3.8", kernel::seek_data(), "resident pages cannot be counted");
    add(
        "zap, minor fault, continue",
        REQUIRED,
        "Linux 5.14",
        kernel::minor_round_trip(),
        "a quarantined page cannot be mapped again",
    );
    // Improvements.
    add(
        "userfaultfd poison",
        OPTIONAL,
        "Linux 6.6",
        bit(feature::POISON),
        "a guest that touches a page its store has lost cannot be given a memory error",
    );
    add(
        "/dev/userfaultfd",
        OPTIONAL,
        "Linux 6.1",
        host::device("/dev/userfaultfd"),
        "VMMs not run as root need CAP_SYS_PTRACE or vm.unprivileged_userfaultfd=1: the keeper has none to pass",
    );
    add(
        "vm.unprivileged_userfaultfd",
        OPTIONAL,
        "Linux 5.2",
        host::setting("/proc/sys/vm/unprivileged_userfaultfd"),
        "nothing is lost where there is /dev/userfaultfd: the keeper passes it to VMMs not run as root",
    );
    add(
        "MADV_COLLAPSE on shmem",
        OPTIONAL,
        "Linux 6.1",
        kernel::collapse(),
        "no huge pages after a 4 KiB reclaim; tracking is slower",
    );
    add(
        "collapse spares holes under userfaultfd",
        OPTIONAL,
        "Linux 6.4",
        kernel::collapse_spares_holes(),
        "far pages could be replaced by zeros: huge pages must stay off for guest RAM",
    );
    add(
        "process_madvise(MADV_COLLAPSE)",
        OPTIONAL,
        "Linux 6.1",
        kernel::process_collapse(),
        "no huge pages after a 4 KiB reclaim",
    );
    add(
        "khugepaged spares guest RAM",
        REQUIRED,
        "Linux 6.4, or by its settings",
        khugepaged::finding(),
        "VMs are held at full size: zeros could take the place of far pages",
    );
    add(
        "huge pages for a memfd",
        OPTIONAL,
        "Linux 4.8, and its settings",
        khugepaged::huge_memfds(),
        "guest RAM is in pages of 4 KiB: it is slower to read than the huge pages of private memory",
    );
    add(
        "pidfd",
        REQUIRED,
        "Linux 5.3",
        kernel::pidfd(),
        "an engine that dies is not seen: ballastd does not start one",
    );
    add("/proc/PID/pagemap", OPTIONAL, "Linux 2.6.25", kernel::pagemap(), "mapped pages cannot be checked");
    add(
        "PAGEMAP_SCAN",
        OPTIONAL,
        "Linux 6.7",
        kernel::pagemap_scan(),
        "it is unknown which memory was mapped huge: it stays in 4 KiB pages once reclaimed",
    );
    add("io_uring", OPTIONAL, "Linux 5.1", kernel::io_uring(), "no file store");
    add(
        "pin check by BPF",
        OPTIONAL,
        "Linux 6.10",
        kernel::pin_check(),
        "it is unknown whether a device or a system call holds a page, and only time can exclude it: a VM whose VMM \
         may pin memory (any QEMU) is held to its limit more slowly",
    );
    add(
        "pressure stall information",
        OPTIONAL,
        "Linux 4.20",
        host::readable("/proc/pressure/memory"),
        "host pressure cannot be seen",
    );
    add("DAMON", OPTIONAL, "Linux 5.18", host::damon(), "nothing is lost: tracking does not use it");
    // The environment.
    add("KVM", OPTIONAL, "Linux 2.6.20", host::kvm(), "QEMU emulates (TCG), and guests are slow");
    add(
        "cgroup version 2",
        OPTIONAL,
        "Linux 4.5",
        host::cgroup(),
        "guest RAM is charged to the cgroup that touches it first",
    );
    add(
        "huge page pool",
        OPTIONAL,
        "Linux 2.6",
        host::huge_pool(),
        "nothing is lost: `ballast pool` reserves its own, and guests of ordinary memory need none",
    );
    add(
        "swap",
        OPTIONAL,
        "",
        host::swap(),
        "VMs that run already cannot be adopted with a limit; in use, the kernel also pages out guest RAM by itself",
    );
    add("open files limit", OPTIONAL, "", host::open_files(), "fewer VMs: each uses about 10 descriptors");
    add(
        "vm.max_map_count",
        OPTIONAL,
        "",
        host::max_map_count(),
        "a VM whose RAM is registered in many pieces may be refused more",
    );
    found
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
        // Those tests fail if these are missing, so a probe that says no there is wrong.
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
