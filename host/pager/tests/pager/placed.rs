//! A VM's warm memory is kept on a fast node and its cold memory on a slow one, against the real kernel. The guest is
//! threads of this test. Needs root, `MADV_COLLAPSE` and two NUMA nodes: `scripts/newer-kernel-suite.sh` has them.

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::tuning::HostTiers;
use ballast_sys::numa::{self, Place};
use ballast_testkit::skip;
use ballast_testvm::Finally;
use common::{Pipe, Rig, random, until};

const UNITS: u64 = 16;
const RAM: Bytes = Bytes(UNITS * 2 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
/// 1 of this number of pages of a bloated unit is hot.
const EACH: u64 = 64;

/// A VM in huge pages on the fast node, of which `fast_percent` percent may stay there.
fn placed(fast_percent: u32) -> Option<Rig> {
    if !std::fs::read_to_string("/sys/devices/system/node/has_memory").is_ok_and(|nodes| nodes.trim() == "0-1") {
        skip("numa", "the machine has no two nodes");
        return None;
    }
    let tiers = HostTiers { fast_node: 0, slow_node: 1, fast_percent, mib_per_s: 1024 };
    let rig = Rig::on_nodes(RAM, AMPLE, tiers).made_huge()?;
    let addresses: Vec<u64> = (0..rig.pages).map(|page| rig.addr(page).0).collect();
    // The kernel skips a huge page that is held for a moment, or for which the node has no room yet.
    let moved = (0..100).any(|_| {
        numa::move_pages(std::process::id(), &addresses, 0).expect("permitted");
        on_slow(&rig, 0..rig.pages) == 0
    });
    assert!(moved, "all is on the fast node");
    Some(rig)
}

/// Number of these pages on the slow node. Touches them until each has been found.
fn on_slow(rig: &Rig, pages: impl Iterator<Item = u64>) -> u64 {
    let mut left: Vec<u64> = pages.collect();
    let mut slow = 0;
    while !left.is_empty() {
        // A scan may unmap them right after this.
        left.iter().for_each(|page| assert_ne!(rig.word(*page).load(Ordering::Relaxed), 0));
        let addresses: Vec<u64> = left.iter().map(|page| rig.addr(*page).0).collect();
        let found = numa::locate(std::process::id(), &addresses).expect("permitted").expect("this process");
        slow += found.iter().filter(|place| **place == Place::Node(1)).count() as u64;
        let is_found = |at: usize| matches!(found[at], Place::Node(_));
        left = (0..left.len()).filter(|at| !is_found(*at)).map(|at| left[at]).collect();
    }
    slow
}

/// Runs `work` while a thread keeps touching these pages, writes some, and checks its reads.
fn touching(rig: &Rig, pages: &[u64], work: impl FnOnce()) {
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let state = AtomicU64::new(7);
            while !done.load(Ordering::Relaxed) {
                for page in pages {
                    rig.word(*page).load(Ordering::Relaxed);
                }
                let page = pages[(random(&state) % pages.len() as u64) as usize];
                assert!(rig.holds(page, 1), "a byte was lost");
                rig.fill(page, 1);
                std::thread::sleep(Duration::from_micros(500));
            }
        });
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        rig.vm.set_track(true);
        work();
    });
    rig.vm.set_track(false);
}

fn get(rig: &Rig, counter: Counter) -> u64 {
    rig.vm.stats().get(counter)
}

#[test]
fn cold_huge_pages_go_to_the_slow_node_whole_and_come_back_when_they_are_hot() {
    let Some(rig) = placed(50) else { return };
    let half = rig.pages / 2;
    let unit = |unit: u64| unit * PAGES_PER_UNIT..(unit + 1) * PAGES_PER_UNIT;
    let of = |odd: u64| (0..UNITS).filter(move |number| number % 2 == odd).flat_map(unit).collect::<Vec<u64>>();
    for hot in [of(0), of(1)] {
        touching(&rig, &hot, || {
            // Both are checked at once, because a guest without CPU time for a moment looks colder than it is.
            until("hot pages are on the fast node, and the other half is on the slow one", || {
                on_slow(&rig, hot.iter().copied()) == 0 && get(&rig, Counter::SlowNode) == half
            });
        });
    }
    assert!(get(&rig, Counter::MovedDown) >= half && get(&rig, Counter::MovedUp) >= half / 2);
    rig.check_bytes();
    rig.check_census();
}

#[test]
fn the_cold_pages_of_a_bloated_huge_page_are_moved_and_no_touch_faults_for_it() {
    let Some(rig) = placed(25) else { return };
    let hot: Vec<u64> = (0..rig.pages).filter(|page| page % EACH == 3).collect();
    let quarter = rig.pages / 4;
    touching(&rig, &hot, || {
        until("three quarters are on the slow node", || get(&rig, Counter::SlowNode) >= rig.pages - quarter);
        until("what is hot is on the fast one", || on_slow(&rig, hot.iter().copied()) == 0);
    });
    assert!(get(&rig, Counter::Split) >= UNITS / 2, "they were split");
    // Moved pages are mapped, so no touch faults.
    until("no cycle runs", || !rig.vm.heat.is_tracked());
    rig.check_bytes();
    rig.wait_until_booked();
    let before = rig.minor_faults();
    rig.check_bytes();
    assert_eq!(rig.minor_faults(), before);
    rig.check_census();
}

#[test]
fn pages_are_evicted_and_restored_while_they_are_moved_and_no_byte_is_lost() {
    let Some(rig) = placed(25) else { return };
    let hot: Vec<u64> = (0..rig.pages).filter(|page| page % EACH == 3).collect();
    touching(&rig, &hot, || {
        for turn in 0..4 {
            rig.squeeze(Bytes(RAM.0 / 2));
            assert!((0..rig.pages).step_by(7).all(|page| rig.holds(page, 1)), "a byte was lost");
            rig.set_limit(None);
            assert!((0..rig.pages).all(|page| rig.holds(page, 1)), "a byte was lost in turn {turn}");
        }
    });
    rig.check_bytes();
    rig.check_census();
}

#[test]
fn a_huge_page_that_is_held_stays_where_it_is_and_others_are_moved() {
    let Some(rig) = placed(25) else { return };
    // Of equally skewed units, the last is split first.
    let unit = rig.pages - PAGES_PER_UNIT;
    let _pipe = Pipe::with(&rig, unit + 3..unit + 4);
    let hot: Vec<u64> = (0..rig.pages).filter(|page| page % EACH == 3).collect();
    touching(&rig, &hot, || {
        until("it was tried", || get(&rig, Counter::SplitFailed) + get(&rig, Counter::MoveFailed) > 0);
        until("others were moved", || get(&rig, Counter::MovedDown) >= HUGE_SIZE as u64 / PAGE_SIZE as u64);
    });
    assert_eq!(on_slow(&rig, unit..rig.pages), 0);
    rig.check_bytes();
}
