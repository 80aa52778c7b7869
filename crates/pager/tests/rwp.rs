//! The kernel sees for us which base pages a guest touches (userfaultfd read-write protection): against a kernel that
//! has it, Linux 7.3, with a guest that is threads of this test. `scripts/newer-kernel-suite.sh` runs it where this one
//! has not.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::units::MIB;
use ballast_base::{Bytes, Hva, PAGES_PER_UNIT};
use ballast_heat::source::FineWatch;
use ballast_heat::{AccessSource, PageMap, Seen, Watch};
use ballast_testkit::skip;
use ballast_pager::scan::source::Scans;
use ballast_pager::vm::client_peer::ClientPeer;
use ballast_pager::vm::shard::Shards;
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::tuning::Track;
use ballast_pager::vm::view::View;
use ballast_sys::scm;
use ballast_sys::uffd::{ACCESS_FEATURES, REQUIRED_FEATURES, Uffd};
use ballast_testvm::Finally;
use common::{Rig, coarse, mapped_at, pages, random, unit, until, vacate};

const UNITS: u64 = 8;
const RAM: Bytes = Bytes(UNITS * 2 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

/// A VM of base pages, all of them filled; aloud `None` where the kernel has no such protection.
fn rig(shards: usize) -> Option<Rig> {
    if Uffd::probe_features().is_ok_and(|features| features & ACCESS_FEATURES == ACCESS_FEATURES) {
        let rig = Rig::sharded(RAM, AMPLE, QUICK, shards);
        rig.fill_all();
        return Some(rig);
    }
    skip("rwp", "this kernel has no read-write protection by userfaultfd");
    None
}

#[test]
fn exactly_the_blocks_and_pages_that_were_touched_are_reported_and_no_fault_comes_to_us() {
    for shards in [1, 3] {
        let Some(rig) = rig(shards) else { return };
        let mut source = Scans::new(rig.vm.clone());
        let sample = pages((0..PAGES_PER_UNIT).step_by(16));
        for _ in 0..3 {
            let coarse = vec![unit(0), unit(1), unit(3), unit(7)];
            let fine = [(2, PageMap::ALL), (4, sample), (5, PageMap::ALL)];
            let fine = fine.map(|(number, pages)| FineWatch { unit: unit(number), pages }).to_vec();
            source.start(&Watch { coarse, fine }).expect("start");
            assert!(source.start(&Watch::default()).is_err(), "one cycle at a time");
            // Reads and a write; some next to what is watched.
            assert!([0, 63, 64 * 6].iter().all(|page| rig.holds(PAGES_PER_UNIT + page, 1)));
            rig.fill(3 * PAGES_PER_UNIT + 511, 1);
            assert!([0, 1, 64, 511].iter().all(|page| rig.holds(2 * PAGES_PER_UNIT + page, 1)));
            assert!((0..100).all(|page| rig.holds(4 * PAGES_PER_UNIT + page, 1)));
            assert!(rig.holds(6 * PAGES_PER_UNIT, 1), "not watched");
            let report = source.end().expect("end");
            let seen = |touched, watched| Seen::Fine { watched, touched };
            let expected = [
                (unit(0), Seen::Blocks { touched: 0 }),
                (unit(1), Seen::Blocks { touched: 0b100_0001 }),
                (unit(2), seen(pages([0, 1, 64, 511]), PageMap::ALL)),
                (unit(3), Seen::Blocks { touched: 0b1000_0000 }),
                (unit(4), seen(pages((0..100).step_by(16)), sample)),
                (unit(5), seen(PageMap::NONE, PageMap::ALL)),
                (unit(7), Seen::Blocks { touched: 0 }),
            ];
            assert_eq!(report.units, expected);
            assert_eq!(source.ability().name, "rwp-scan");
            assert_eq!(report.cost.faults, 3 + 1 + 4 + 7);
            assert!(source.end().is_err(), "no cycle runs");
        }
        rig.check_bytes();
        assert_eq!(rig.minor_faults(), 0);
    }
}

#[test]
fn what_is_mapped_huge_is_watched_by_zaps_and_is_huge_afterwards() {
    let Some(rig) = rig(1).and_then(Rig::made_huge) else { return };
    let mut source = Scans::new(rig.vm.clone());
    source.start(&coarse(UNITS)).expect("start");
    assert!(rig.holds(3 * PAGES_PER_UNIT, 1));
    let seen = source.end().expect("end").units;
    let expected = |number| (unit(number), Seen::Coarse { touched: number == 3 });
    assert_eq!(seen, (0..UNITS).map(expected).collect::<Vec<_>>());
    assert_eq!(rig.mapped_huge(), RAM);
    rig.check_bytes();
}

#[test]
fn huge_pages_of_hugetlbfs_are_tracked_as_wholes_without_a_fault() {
    if rig(1).is_none() {
        return;
    }
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None) else { return };
    rig.fill_all();
    let mut source = Scans::new(rig.vm.clone());
    // A sample of one: all of it is watched.
    let fine = vec![FineWatch { unit: unit(7), pages: pages([3, 400]) }];
    source.start(&Watch { coarse: (0..7).map(unit).collect(), fine }).expect("start");
    assert!(rig.holds(PAGES_PER_UNIT + 9, 1) && rig.holds(7 * PAGES_PER_UNIT, 1));
    let report = source.end().expect("end");
    let expected = |number| (unit(number), Seen::Coarse { touched: [1, 7].contains(&number) });
    assert_eq!(report.units, (0..UNITS).map(expected).collect::<Vec<_>>());
    assert_eq!(report.cost.faults, 2);
    rig.check_bytes();
    assert_eq!(rig.minor_faults(), 0);
}

#[test]
fn pages_that_are_away_count_when_they_come_back_and_one_cycle_does_not_hide_from_the_next() {
    let Some(rig) = rig(1) else { return };
    rig.squeeze(Bytes(RAM.0 / 2));
    rig.set_limit(None);
    // A batch that is being picked is in no counter yet: wait for the worker.
    drop(rig.vm.begin_unplug());
    until("nothing is on its way out", || rig.vm.stats().get(Counter::Quarantined) == 0);
    let far: Vec<u64> =
        (0..rig.pages).filter(|page| rig.state_of(*page) != ballast_page::page_state::State::Resident).collect();
    assert!(!far.is_empty());
    let mut source = Scans::new(rig.vm.clone());
    for of_cycle in [far.as_slice(), &[], &far[..1]] {
        source.start(&coarse(UNITS)).expect("start");
        assert!(of_cycle.iter().all(|page| rig.holds(*page, 1)));
        // What was restored is told from what was only watched by what is booked.
        rig.wait_until_booked();
        let mut expected: Vec<u64> = of_cycle.iter().map(|page| page / PAGES_PER_UNIT).collect();
        expected.dedup();
        let report = source.end().expect("end");
        assert_eq!(report.cost.faults == 0, of_cycle.len() != 1, "having pages back is no cost of watching");
        let seen = report.units;
        let touched: Vec<u64> =
            seen.iter().filter(|(_, seen)| seen.touched()).map(|(unit, _)| u64::from(unit.unit)).collect();
        assert_eq!(touched, expected);
    }
    rig.check_bytes();
}

#[test]
fn a_process_that_cannot_see_accesses_and_joins_in_the_middle_of_a_cycle_loses_no_byte_and_no_cycle() {
    let Some(rig) = rig(1) else { return };
    let mut source = Scans::new(rig.vm.clone());
    let watch = coarse(UNITS);
    source.start(&watch).expect("start");
    let (uffd, _) = Uffd::create(REQUIRED_FEATURES).expect("userfaultfd");
    let (control, _theirs) = scm::pair().expect("socketpair");
    let peer = Arc::new(ClientPeer::new(control, 1));
    let view = Arc::new(View::new(1, Shards::new(vec![uffd]).expect("one"), REQUIRED_FEATURES, peer));
    let copy = rig.second_mapping();
    rig.vm.add_view(view, &mapped_at(Hva(copy as u64), RAM)).expect("view");
    assert!(rig.holds(5 * PAGES_PER_UNIT, 1));
    let seen = source.end().expect("end").units;
    assert!(seen.iter().all(|(unit, seen)| seen.touched() == (unit.unit == 5)));
    rig.check_bytes();
    rig.vm.remove_view(1);
    vacate(copy, RAM.0 as usize);
}

#[test]
fn a_cycle_that_nobody_ends_leaves_every_byte_and_no_thread_that_waits() {
    // What an engine killed in the middle of a cycle leaves behind; its successor registers the RAM as it was.
    let Some(rig) = rig(1) else { return };
    let mut source = Scans::new(rig.vm.clone());
    let watch = coarse(UNITS);
    source.start(&watch).expect("start");
    std::mem::forget(source);
    rig.check_bytes();
    rig.add_view();
    let mut source = Scans::new(rig.vm.clone());
    source.start(&watch).expect("start");
    assert!(rig.holds(5 * PAGES_PER_UNIT, 1));
    assert!(source.end().expect("end").units.iter().all(|(unit, seen)| seen.touched() == (unit.unit == 5)));
}

#[test]
fn a_vm_is_tracked_by_it_and_reclaim_takes_what_it_found_cold() {
    let Some(rig) = rig(1) else { return };
    rig.vm.set_track(Track::On);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let state = AtomicU64::new(7);
            while !done.load(Ordering::Relaxed) {
                let page = random(&state) % (3 * PAGES_PER_UNIT);
                assert!(rig.holds(page, 1));
            }
        });
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        until("its heat is known", || rig.knows_hot_units(3));
        assert_eq!(rig.vm.heat.source().map(|source| source.name), Some("rwp-scan"));
        assert_eq!(rig.minor_faults(), 0);
        rig.set_limit(Some(Bytes(RAM.0 / 2)));
        until("resident is at the limit", || rig.resident().0 <= RAM.0 / 2);
        let of_hot =
            (0..3 * PAGES_PER_UNIT).filter(|page| rig.state_of(*page) != ballast_page::page_state::State::Resident);
        let far = rig.vm.stats().get(Counter::Far);
        assert!(of_hot.count() as u64 <= far / 8, "hot pages went first");
    });
    rig.check_bytes();
}
