//! Tracking finds exactly the touched memory, and leaves memory as it was: against the real kernel, with a guest that
//! is threads of this test. Needs root (userfaultfd); most need `MADV_COLLAPSE`.

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, PAGES_PER_UNIT};
use ballast_heat::source::BLOCK;
use ballast_heat::{AccessSource, PageMap, Seen, UnitId, Watch};
use ballast_page::page_state::{State, Word};
use ballast_pager::scan::source::Scans;
use ballast_pager::vm::Hold;
use ballast_pager::vm::stats::Counter;
use ballast_testvm::Finally;
use common::{Rig, coarse, pages, random, unit, until};

const UNITS: u64 = 8;
const RAM: Bytes = Bytes(UNITS * 2 * MIB);
const AMPLE: Bytes = Bytes(64 * MIB);
const QUICK: Duration = Duration::from_millis(5);

fn all() -> Watch {
    coarse(UNITS)
}

fn fine(units: &[u64]) -> Watch {
    Watch { coarse: Vec::new(), fine: units.iter().map(|number| unit(*number)).collect() }
}

fn touched(seen: &[(UnitId, Seen)]) -> Vec<u64> {
    seen.iter().filter(|(_, seen)| seen.touched()).map(|(unit, _)| u64::from(unit.unit)).collect()
}

fn pages_of(seen: &[(UnitId, Seen)]) -> Vec<(u64, PageMap)> {
    let of = |(unit, seen): &(UnitId, Seen)| match seen {
        Seen::Fine { touched } => (u64::from(unit.unit), *touched),
        Seen::Coarse { .. } | Seen::Blocks { .. } => panic!("{unit:?} was watched as a whole"),
    };
    seen.iter().map(of).collect()
}

#[test]
fn exactly_the_touched_units_are_reported_for_one_fault_each_and_huge_again() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    for of_cycle in [vec![], vec![0], vec![1, 2, 7], vec![], (0..UNITS).collect::<Vec<_>>()] {
        let before = rig.minor_faults();
        source.start(&all()).expect("start");
        assert_eq!(rig.mapped_huge(), Bytes(0), "all of it is zapped");
        for unit in &of_cycle {
            for page in (0..PAGES_PER_UNIT).step_by(37) {
                rig.fill(unit * PAGES_PER_UNIT + page, 1);
                assert!(rig.holds(unit * PAGES_PER_UNIT + (page + 5) % PAGES_PER_UNIT, 1));
            }
        }
        assert_eq!(rig.mapped_huge().0, of_cycle.len() as u64 * HUGE_SIZE as u64, "a touched unit is huge at once");
        let report = source.end().expect("end");
        assert_eq!(report.units.len() as u64, UNITS);
        assert_eq!(touched(&report.units), of_cycle);
        until("they are counted", || rig.minor_faults() - before == of_cycle.len() as u64);
        assert_eq!(rig.mapped_huge(), RAM);
    }
    rig.check_bytes();
}

#[test]
fn exactly_the_touched_pages_are_reported_and_the_units_are_huge_again() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    let some = pages([0, 1, 2, 63, 64, 200, 511]);
    for _ in 0..3 {
        let before = rig.minor_faults();
        source.start(&fine(&[1, 2, 6])).expect("start");
        assert_eq!(rig.mapped_huge().0, RAM.0 - 3 * HUGE_SIZE as u64, "the others are left alone");
        for page in some.iter() {
            assert!(rig.holds(PAGES_PER_UNIT + page, 1));
        }
        rig.fill(6 * PAGES_PER_UNIT + 77, 1);
        assert!(rig.holds(3 * PAGES_PER_UNIT, 1), "not watched");
        let report = source.end().expect("end");
        assert_eq!(pages_of(&report.units), [(1, some), (2, PageMap::NONE), (6, pages([77]))]);
        until("they are counted", || rig.minor_faults() - before == some.count() + 1);
        assert_eq!(rig.mapped_huge(), RAM);
    }
    rig.check_bytes();
}

#[test]
fn units_that_are_touched_while_one_cycle_follows_another_are_all_huge_again() {
    const TURNS: u64 = 100;
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let (rig, done) = (&rig, &done);
            scope.spawn(move || {
                let state = AtomicU64::new(0x9E37_79B9_7F4A_7C15 ^ thread);
                while !done.load(Ordering::Relaxed) {
                    assert!(rig.holds(random(&state) % rig.pages, 1), "a byte was lost");
                }
            });
        }
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        for _ in 0..TURNS {
            // A fault of the first cycle may be served when the second one is about to zap that page.
            for _ in 0..2 {
                source.start(&all()).expect("start");
                source.end().expect("end");
            }
            until("all of it is huge", || rig.mapped_huge() == RAM);
        }
    });
}

/// Touches all pages of a unit, block by block. The worker maps the touched page before the rest of its block: a thread
/// that touches the rest before that faults once more.
fn touch_blocks(rig: &Rig, unit: u64) {
    for block in (unit * PAGES_PER_UNIT..(unit + 1) * PAGES_PER_UNIT).step_by(BLOCK as usize) {
        assert!(rig.holds(block, 1), "a byte was lost");
        rig.wait_until_booked();
        assert!((block..block + BLOCK).all(|page| rig.holds(page, 1)), "a byte was lost");
    }
}

#[test]
fn base_pages_are_tracked_too_for_a_few_faults_a_unit() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    let mut source = Scans::new(rig.vm.clone());
    for _ in 0..2 {
        let before = rig.minor_faults();
        source.start(&all()).expect("start");
        touch_blocks(&rig, 3);
        let report = source.end().expect("end");
        assert_eq!(touched(&report.units), [3]);
        rig.wait_until_booked();
        assert!(rig.minor_faults() - before <= 8);
        source.start(&all()).expect("start");
        assert!([0, 63, 64 * 6].iter().all(|page| rig.holds(2 * PAGES_PER_UNIT + page, 1)));
        assert!(rig.holds(5 * PAGES_PER_UNIT + 511, 1));
        let mut expected: Vec<_> = (0..UNITS).map(|number| (unit(number), Seen::Blocks { touched: 0 })).collect();
        expected[2].1 = Seen::Blocks { touched: 0b100_0001 };
        expected[5].1 = Seen::Blocks { touched: 0b1000_0000 };
        assert_eq!(source.end().expect("end").units, expected);
        source.start(&fine(&[3])).expect("start");
        assert!([5, 6, 400].iter().all(|page| rig.holds(3 * PAGES_PER_UNIT + page, 1)));
        assert_eq!(pages_of(&source.end().expect("end").units), [(3, pages([5, 6, 400]))]);
    }
    // Untouched pages are still unmapped; a touch outside of a cycle maps its neighbours, too.
    rig.wait_until_booked();
    let before = rig.minor_faults();
    (0..UNITS).for_each(|unit| touch_blocks(&rig, unit));
    assert!(rig.minor_faults() - before <= UNITS * 8);
}

#[test]
fn huge_pages_of_hugetlbfs_are_tracked_as_a_whole() {
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None) else { return };
    rig.fill_all();
    let mut source = Scans::new(rig.vm.clone());
    let mut watch = all();
    watch.fine = vec![watch.coarse.pop().expect("the last")];
    source.start(&watch).expect("start");
    assert!(rig.holds(PAGES_PER_UNIT + 9, 1) && rig.holds((UNITS - 1) * PAGES_PER_UNIT, 1));
    assert_eq!(touched(&source.end().expect("end").units), [1, UNITS - 1]);
    until("both faults are counted", || rig.minor_faults() == 2);
    let before = rig.minor_faults();
    rig.check_bytes();
    assert_eq!(rig.minor_faults(), before, "all of it is mapped again");
}

#[test]
fn a_unit_that_loses_pages_in_a_cycle_stays_tracked_and_keeps_its_bytes() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    source.start(&all()).expect("start");
    let hole = 2 * PAGES_PER_UNIT + 1;
    rig.discard(hole..hole + 1);
    assert_eq!(rig.word(hole).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
    assert!(rig.holds(hole + 1, 1));
    let report = source.end().expect("end");
    assert_eq!(touched(&report.units), [2]);
    rig.fill(hole, 1);
    rig.check_bytes();
    until("it is huge again when it is whole", || rig.mapped_huge() == RAM);
}

#[test]
fn refaults_of_evicted_pages_count_as_touches_and_not_as_a_cost_of_tracking() {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    rig.set_limit(Some(Bytes(RAM.0 / 2)));
    until("resident is at the limit", || rig.resident().0 <= RAM.0 / 2);
    rig.set_limit(None);
    until("nothing is on its way out", || rig.vm.stats().get(Counter::Quarantined) == 0);
    let far_of = |unit: u64| {
        let mut pages = unit * PAGES_PER_UNIT..(unit + 1) * PAGES_PER_UNIT;
        pages.find(|page| rig.state_of(*page) == State::Far)
    };
    let far: Vec<u64> = (0..UNITS).filter_map(far_of).collect();
    assert!(!far.is_empty());
    let mut source = Scans::new(rig.vm.clone());
    source.start(&all()).expect("start");
    assert!(far.iter().all(|page| rig.holds(*page, 1)));
    let report = source.end().expect("end");
    assert_eq!(touched(&report.units), far.iter().map(|page| page / PAGES_PER_UNIT).collect::<Vec<_>>());
    assert_eq!(report.cost.guest, Duration::ZERO);
    rig.check_bytes();
}

#[test]
fn a_cycle_that_never_ends_leaves_every_word_resident_and_every_byte() {
    // As after the death of an engine during a cycle.
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    let mut watch = all();
    watch.fine = vec![unit(7)];
    watch.coarse.pop();
    source.start(&watch).expect("start");
    std::mem::forget(source);
    let region = rig.vm.region(0).expect("region");
    assert!((0..rig.pages).all(|page| region.word(ballast_base::PageIdx(page)) == Word::INITIAL));
    rig.check_bytes();
}

#[test]
fn a_cycle_whose_zaps_fail_is_undone() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    let mut source = Scans::new(rig.vm.clone());
    rig.view.peer().disconnect();
    rig.break_client();
    assert!(source.start(&all()).is_err());
    assert_eq!(rig.mapped_huge(), RAM);
    assert!(source.end().is_err(), "no cycle runs");
    rig.check_bytes();
}

#[test]
fn a_vm_is_tracked_when_asked_and_left_alone_while_it_is_held() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    assert!(!rig.vm.heat.is_tracked());
    rig.vm.set_track(true);
    until("three cycles", || {
        rig.check_bytes();
        rig.vm.heat.lock().cycles().0 >= 3
    });
    assert!(rig.vm.heat.is_tracked());
    rig.vm.hold(Hold::Shared, Some("test".into()));
    until("it is left alone", || !rig.vm.heat.is_tracked());
    assert_eq!(rig.mapped_huge(), RAM);
    rig.wait_until_booked();
    let (cycles, faults) = (rig.vm.heat.lock().cycles(), rig.minor_faults());
    rig.check_bytes();
    assert_eq!((rig.vm.heat.lock().cycles(), rig.minor_faults()), (cycles, faults));
    rig.vm.hold(Hold::Shared, None);
    until("it is tracked again", || rig.vm.heat.lock().cycles().0 > cycles.0);
}

#[test]
fn reclaim_evicts_memory_that_tracking_found_cold() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    rig.vm.set_track(true);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                // The guest's hot set: the first three units.
                assert!((0..3 * PAGES_PER_UNIT).step_by(8).all(|page| rig.word(page).load(Ordering::Relaxed) != 1));
                std::thread::yield_now();
            }
        });
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        until("its heat is known", || rig.knows_hot_units(3));
        rig.set_limit(Some(Bytes(RAM.0 / 2)));
        until("resident is at the limit", || rig.resident().0 <= RAM.0 / 2);
        let far = rig.vm.stats().get(Counter::Far);
        let of_hot = (0..3 * PAGES_PER_UNIT).filter(|page| rig.state_of(*page) != State::Resident);
        assert!(far > 0);
        // Half of RAM is colder than the hot set, which then loses hardly any page.
        assert!(of_hot.count() as u64 <= far / 8, "hot pages went first");
    });
    rig.check_bytes();
}

#[test]
fn a_guest_that_writes_and_discards_while_tracked_and_squeezed_reads_its_writes() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, Duration::from_millis(1)) else { return };
    attack(&rig);
}

#[test]
fn a_guest_on_base_pages_that_writes_and_discards_while_tracked_reads_its_writes() {
    attack(&Rig::new(RAM, AMPLE, Duration::from_millis(1)));
}

fn attack(rig: &Rig) {
    const EVICTED: u64 = 5_000;
    const CYCLES: u64 = 20;
    (0..rig.pages).for_each(|page| rig.word(page).store(0, Ordering::Relaxed));
    rig.vm.set_track(true);
    let stats = rig.vm.stats();
    let [done, calm] = [(); 2].map(|()| AtomicBool::new(false));
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (done, calm) = (&done, &calm);
            scope.spawn(move || {
                let mut versions = vec![0u64; rig.pages as usize];
                let state = AtomicU64::new(0x9E37_79B9_7F4A_7C15 ^ thread);
                let mut step = 0u64;
                while !done.load(Ordering::Relaxed) {
                    step += 1;
                    // Each thread owns every second page, and sometimes touches only a hot unit.
                    let wide = step % 4096 < 2048 && !calm.load(Ordering::Relaxed);
                    let range = if wide { rig.pages / 2 } else { PAGES_PER_UNIT / 2 };
                    let page = random(&state) % range * 2 + thread;
                    let expected = versions[page as usize];
                    assert_eq!(rig.word(page).load(Ordering::Relaxed), expected, "page {page} at step {step}");
                    versions[page as usize] = step << 16 | page;
                    if step.is_multiple_of(1024) {
                        rig.discard(page..page + 1);
                        assert_eq!(rig.word(page).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
                    }
                    rig.word(page).store(versions[page as usize], Ordering::Relaxed);
                }
                for (page, version) in versions.iter().enumerate().skip(thread as usize).step_by(2) {
                    assert_eq!(rig.word(page as u64).load(Ordering::Relaxed), *version, "page {page} at the end");
                }
            });
        }
        // Runs also if a wait panics, because the scope joins the guest's threads.
        let _end = Finally(|| done.store(true, Ordering::Relaxed));
        let cycles = || rig.vm.heat.lock().cycles();
        // Only huge pages are scanned page by page.
        let looked = || rig.mapped_huge() == Bytes(0) || cycles().1 > 0;
        while stats.get(Counter::Evicted) < EVICTED || cycles().0 < CYCLES || !looked() {
            let before = cycles().0;
            rig.set_limit(Some(Bytes(RAM.0 * 3 / 4)));
            // If the engine gets little CPU time, every page is touched again before its eviction.
            let begun = Instant::now();
            until("the limit is kept", || {
                calm.store(begun.elapsed() > Duration::from_secs(1), Ordering::Relaxed);
                rig.resident().0 <= RAM.0 * 3 / 4
            });
            calm.store(false, Ordering::Relaxed);
            rig.set_limit(None);
            until("another cycle", || cycles().0 > before);
        }
    });
    assert!(!rig.reported("worker-panic") && !rig.reported("page-lost"));
}

#[test]
fn units_that_reclaim_broke_are_huge_again_although_the_vm_is_tracked() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK) else { return };
    rig.set_limit(Some(Bytes(RAM.0 / 2)));
    until("resident is at the limit", || rig.resident().0 <= RAM.0 / 2);
    rig.vm.set_track(true);
    until("it is tracked", || rig.vm.heat.lock().cycles().0 > 0);
    rig.set_limit(None);
    rig.check_bytes();
    until("all of it is mapped huge between two cycles", || rig.mapped_huge() == RAM);
    rig.check_bytes();
}
