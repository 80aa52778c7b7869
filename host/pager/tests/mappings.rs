//! A VMM with as many mappings as a process may have; the only test here, as the limit is per process. Needs root.

#[path = "pager/common/mod.rs"]
mod common;

use std::ptr::null_mut;
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_testkit::skip;
use common::{Rig, until};
use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// More mappings take too long.
const MOST: usize = 1 << 18;

#[test]
fn memory_unregistered_for_too_many_mappings_stays_and_reclaim_goes_on() {
    let limit = std::fs::read_to_string("/proc/sys/vm/max_map_count").expect("procfs");
    if limit.trim().parse::<usize>().expect("a number") > MOST {
        return skip("max-map-count", format!("a process may have {} mappings", limit.trim()));
    }
    let rig = Rig::new(Bytes(64 * MIB), Bytes(128 * MIB), Duration::from_millis(20));
    rig.fill_all();
    let mut filler = Vec::with_capacity(MOST);
    for prot in [ProtFlags::READ, ProtFlags::empty()].into_iter().cycle() {
        // SAFETY: the kernel chooses a free range, and nothing touches it.
        match unsafe { mmap_anonymous(null_mut(), PAGE_SIZE, prot, MapFlags::PRIVATE) } {
            Ok(at) => filler.push(at),
            Err(error) => {
                assert_eq!(error, rustix::io::Errno::NOMEM);
                break;
            }
        }
    }
    rig.set_limit(Some(Bytes(16 * MIB)));
    let told = |kind| rig.reports.lock().expect("reports").iter().any(|report| report.0 == kind);
    until("it is said that RAM stays", || told("ram-kept"));
    assert!(!told("reclaim-failed"), "{:?}", rig.reports);
    for at in filler {
        // SAFETY: mapped above, and nothing has the address.
        unsafe { munmap(at, PAGE_SIZE) }.expect("unmap");
    }
    // The pages that stay exceed the limit, so each touch of a far page would be throttled for 0.1 s.
    rig.set_limit(None);
    rig.check_bytes();
}
