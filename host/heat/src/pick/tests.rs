//! Proposals for small tables and for large guests.

use super::*;
use crate::source::Phase;
use crate::source::{CycleReport, PageMap, Seen};
use crate::touched;
use crate::tracker::Settings;
use proptest::collection::vec;
use proptest::prelude::*;
use std::cell::{Cell, RefCell};
use std::time::Duration;

/// `None`: the page is absent or not Resident.
struct Table(Vec<RefCell<Vec<Option<u8>>>>);

impl Pages for Table {
    fn regions(&self) -> u32 {
        self.0.len() as u32
    }
    fn len(&self, region: u32) -> u64 {
        self.0[region as usize].borrow().len() as u64
    }
    fn next_present(&self, region: u32, range: PageRange) -> Option<PageRange> {
        let pages = self.0[region as usize].borrow();
        let until = pages.len().min(range.end().0 as usize);
        let first = (range.start().0 as usize..until).find(|page| pages[*page].is_some())?;
        let end = (first..until).find(|page| pages[*page].is_none()).unwrap_or(until);
        Some(PageRange::new(PageIdx(first as u64), PageIdx(end as u64)))
    }
    fn age(&self, region: u32, page: PageIdx) -> Option<u8> {
        self.0[region as usize].borrow()[page.0 as usize]
    }
    fn set_age(&self, region: u32, page: PageIdx, age: u8) {
        self.0[region as usize].borrow_mut()[page.0 as usize] = Some(age);
    }
}

fn table(regions: &[&[Option<u8>]]) -> Table {
    Table(regions.iter().map(|pages| RefCell::new(pages.to_vec())).collect())
}

fn source() -> HeatSource {
    HeatSource::new(Arc::new(VmHeat::new(Settings::default())))
}

fn pick(source: &mut HeatSource, table: &Table, want: u64) -> Vec<ColdRun> {
    let mut out = Vec::new();
    let has_more = source.pick(table, want, Pick::Cold, &mut out);
    assert!(!has_more, "these tables are small");
    out
}

fn run(region: u32, first: u64, count: u64) -> ColdRun {
    ColdRun { region, pages: PageRange::of(PageIdx(first), count) }
}

fn unit(unit: u32) -> UnitId {
    UnitId { region: 0, unit }
}

/// Runs three coarse cycles that see these units touched.
fn track(source: &HeatSource, table: &Table, hot: &[u32]) {
    cycles(source, table, hot, 3);
}

fn cycles(source: &HeatSource, table: &Table, hot: &[u32], count: usize) {
    let mut tracker = source.heat.lock();
    let _ = tracker.next(Duration::ZERO, table);
    for _ in 0..count {
        let seen = |id: UnitId| (id, Seen::Coarse { touched: hot.contains(&id.unit) });
        let units = tracker.units().present().map(seen).collect();
        tracker.absorb(source.heat.now(), Phase::Coarse, &CycleReport { units, ..CycleReport::default() });
    }
}

fn scan(source: &HeatSource, id: UnitId, touched: PageMap) {
    let seen = Seen::Fine { touched };
    let report = CycleReport { units: vec![(id, seen)], ..CycleReport::default() };
    source.heat.lock().absorb(source.heat.now(), Phase::Fine, &report);
}

#[test]
fn without_tracking_a_round_offers_each_page_once_and_skips_holes() {
    let table = table(&[&[Some(0), None, Some(0), Some(0)], &[], &[Some(0)]]);
    let mut source = source();
    for _ in 0..3 {
        let mut round: Vec<_> = (0..2).flat_map(|_| pick(&mut source, &table, 2)).collect();
        round.sort_by_key(|run| (run.region, run.pages.start()));
        let mut joined = Vec::new();
        round.into_iter().for_each(|run| push_run(&mut joined, run.region, run.pages));
        assert_eq!(joined, [run(0, 0, 1), run(0, 2, 2), run(2, 0, 1)]);
    }
}

#[test]
fn without_tracking_most_pages_of_a_loop_slightly_larger_than_the_limit_stay() {
    const UNITS: usize = 64;
    let (table, mut source) = (table(&[&[Some(0); UNITS * 512]]), source());
    let mut restores = 0;
    for touch in 0..20 * UNITS {
        let far: Vec<usize> = (0..UNITS).filter(|unit| table.0[0].borrow()[unit * 512].is_none()).collect();
        let unit = touch % UNITS;
        if far.contains(&unit) {
            restores += usize::from(touch >= 10 * UNITS);
            table.0[0].borrow_mut()[unit * 512..][..512].fill(Some(0));
        }
        // A tenth of the loop does not fit.
        for run in pick(&mut source, &table, if far.len() < 7 || far.contains(&unit) { 512 } else { 0 }) {
            table.0[0].borrow_mut()[run.pages.start().0 as usize..run.pages.end().0 as usize].fill(None);
        }
    }
    assert!(restores < 10 * UNITS / 2, "{restores} of {} touches restored a unit", 10 * UNITS);
}

/// A region whose pages are all present, and of which only the last is a candidate.
struct Large {
    looks: Cell<u64>,
    checks: Cell<u64>,
}

impl Large {
    const LEN: u64 = 3 * AT_ONCE * PAGES_PER_UNIT;
}

impl Pages for Large {
    fn regions(&self) -> u32 {
        1
    }
    fn len(&self, _: u32) -> u64 {
        Self::LEN
    }
    fn next_present(&self, _: u32, range: PageRange) -> Option<PageRange> {
        self.looks.set(self.looks.get() + 1);
        (range.start() < range.end()).then_some(range)
    }
    fn age(&self, _: u32, page: PageIdx) -> Option<u8> {
        self.checks.set(self.checks.get() + 1);
        (page.0 == Self::LEN - 1).then_some(0)
    }
    fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
}

#[test]
fn a_call_examines_a_bounded_part_of_a_large_guest_and_later_calls_reach_its_end() {
    for cycles in [0, 3] {
        let mut source = source();
        for _ in 0..cycles {
            source.heat.lock().absorb(source.heat.now(), Phase::Coarse, &CycleReport::default());
        }
        let (mut out, mut calls) = (Vec::new(), 0);
        while out.is_empty() {
            let large = Large { looks: Cell::new(0), checks: Cell::new(0) };
            let has_more = source.pick(&large, 1, Pick::Any, &mut out);
            assert!(has_more || !out.is_empty(), "it ended before the last page, after {calls} calls");
            assert!(large.looks.get() <= 2 * AT_ONCE, "{} looks", large.looks.get());
            assert!(large.checks.get() <= MOST_PAGES, "{} checks", large.checks.get());
            calls += 1;
        }
        assert_eq!(out, [run(0, Large::LEN - 1, 1)]);
        assert!(calls > 3, "{calls} calls");
    }
}

struct Regions(RefCell<Vec<u64>>);

impl Pages for Regions {
    fn regions(&self) -> u32 {
        self.0.borrow().len() as u32
    }
    fn len(&self, region: u32) -> u64 {
        self.0.borrow()[region as usize] * PAGES_PER_UNIT
    }
    fn next_present(&self, _: u32, range: PageRange) -> Option<PageRange> {
        (!range.is_empty()).then_some(range)
    }
    fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
        Some(0)
    }
    fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
}

#[test]
fn without_tracking_the_first_call_proposes_pages_however_large_the_guest_is() {
    let huge = Regions(RefCell::new(vec![5 * AT_ONCE]));
    let (mut source, mut out) = (source(), Vec::new());
    source.pick(&huge, 600, Pick::Cold, &mut out);
    let proposed: u64 = out.iter().map(|run| run.pages.count()).sum();
    assert_eq!((proposed, source.is_sorting()), (600, false));

    // A guest that loops over all of its memory would lose each part before its next use by a round in order.
    source.pick(&huge, 64 * PAGES_PER_UNIT, Pick::Cold, &mut out);
    let units = || out.iter().map(|run| run.pages.start().unit());
    assert!(units().max().zip(units().min()).is_some_and(|(last, first)| last - first > 4 * AT_ONCE), "{out:?}");
    source.heat.lock().absorb(source.heat.now(), Phase::Coarse, &CycleReport::default());
    out.clear();
    let mut calls = 0;
    while source.pick(&huge, 600, Pick::Any, &mut out) {
        calls += 1;
        assert_eq!((out.len(), source.is_sorting()), (0, true), "the coldest may be the last");
    }
    let proposed: u64 = out.iter().map(|run| run.pages.count()).sum();
    assert_eq!((calls, proposed, source.is_sorting()), (4, 600, false));
}

#[test]
fn a_round_takes_units_from_all_regions_and_none_twice_while_memory_is_plugged() {
    const REGIONS: u32 = 8;
    let table = Regions(RefCell::new(vec![AT_ONCE; REGIONS as usize]));
    let (mut source, mut offered) = (source(), std::collections::HashSet::new());
    for call in 0..AT_ONCE / 32 * u64::from(REGIONS) {
        if call == 100 {
            // In the middle of the second part.
            *table.0.borrow_mut() = (0..=REGIONS).map(|region| if region == 2 { 0 } else { AT_ONCE }).collect();
        }
        let (before, mut out) = (offered.len(), Vec::new());
        source.pick(&table, 64 * PAGES_PER_UNIT, Pick::Cold, &mut out);
        if source.rounds > 1 {
            break;
        }
        let units = |run: &ColdRun| run.pages.start().unit()..run.pages.end().0.div_ceil(PAGES_PER_UNIT);
        let new: Vec<_> = out.iter().flat_map(|run| units(run).map(move |unit| (run.region, unit))).collect();
        let regions: std::collections::HashSet<_> = new.iter().map(|(region, _)| region).collect();
        assert!(new.len() < 64 || regions.len() > 4, "call {call} has only units of {regions:?}");
        offered.extend(new.iter().copied());
        assert_eq!(offered.len(), before + new.len(), "call {call} offers a unit again: {new:?}");
    }
    let all = (0..REGIONS).flat_map(|region| (0..AT_ONCE).map(move |unit| (region, unit)));
    let missing = all.filter(|unit| unit.0 != 2 && !offered.contains(unit)).count();
    assert_eq!((missing, source.rounds), (0, 2), "{} units of {REGIONS} regions were offered", offered.len());
}

#[test]
fn with_tracking_only_the_oldest_generation_is_cold_and_the_young_ones_go_last() {
    let table = table(&[&[Some(0); 4 * 512]]);
    let mut source = source();
    track(&source, &table, &[0, 2]);
    let mut cold = pick(&mut source, &table, 4096);
    cold.sort_by_key(|run| run.pages.start());
    assert_eq!(cold, [run(0, 512, 512), run(0, 3 * 512, 512)]);
    assert_eq!(pick(&mut source, &table, 4096), [], "nothing else is cold");
    let mut out = Vec::new();
    source.pick(&table, 4096, Pick::Any, &mut out);
    out.sort_by_key(|run| run.pages.start());
    assert_eq!(out, [run(0, 0, 512), run(0, 1024, 512)]);
}

#[test]
fn of_memory_that_the_last_cycle_saw_touched_the_hottest_is_taken_last() {
    let table = table(&[&[Some(0); 4 * 512]]);
    let mut source = source();
    // The first unit is touched in every cycle, the others in some.
    cycles(&source, &table, &[0, 1], 1);
    cycles(&source, &table, &[0, 2], 2);
    cycles(&source, &table, &[0, 1, 2, 3], 4);
    let mut out = Vec::new();
    source.pick(&table, 3 * 512, Pick::Any, &mut out);
    assert_eq!(out, [run(0, 3 * 512, 512), run(0, 512, 1024)]);
}

#[test]
fn memory_touched_in_every_cycle_is_not_taken_by_address() {
    const UNITS: u32 = 32;
    let table = table(&[&[Some(0); UNITS as usize * 512]]);
    let mut source = source();
    let mut first = std::collections::BTreeSet::new();
    for _ in 0..8 {
        cycles(&source, &table, &(0..UNITS).collect::<Vec<_>>(), 1);
        let mut out = Vec::new();
        source.pick(&table, 512, Pick::Any, &mut out);
        first.insert(out[0].pages.start().unit());
    }
    assert!(first.len() > 4, "the same go first in each round: {first:?}");
}

#[test]
fn the_cold_pages_of_a_bloated_hot_unit_are_cold_until_a_scan_sees_them_touched() {
    let table = table(&[&[Some(0); 2 * 512]]);
    let mut source = source();
    track(&source, &table, &[0, 1]);
    scan(&source, unit(1), PageMap::first(50));
    assert_eq!(pick(&mut source, &table, 100), [], "another scan may see others");
    scan(&source, unit(1), PageMap::first(50));
    track(&source, &table, &[0, 1]);
    assert_eq!(pick(&mut source, &table, 100), [run(0, 512 + 50, 100)]);
    scan(&source, unit(1), PageMap::first(300));
    assert_eq!(pick(&mut source, &table, 1000), [], "not bloated any more");
    scan(&source, unit(1), PageMap::first(300));
    track(&source, &table, &[0, 1]);
    let mut out = Vec::new();
    source.pick(&table, 4096, Pick::Any, &mut out);
    assert_eq!(out[0], run(0, 512 + 300, 212), "still the first to go of what is hot");
    assert_eq!(out.iter().map(|run| run.pages.count()).sum::<u64>(), 1024);
}

#[test]
fn a_page_with_quarantine_hits_is_skipped_for_1_3_7_then_15_rounds() {
    let mut byte = 0;
    for rounds in [1, 3, 7, 15, 15] {
        byte = touched(byte);
        assert_eq!(Age::from_byte(byte).credit, rounds);
        let table = table(&[&[Some(byte)]]);
        let mut source = source();
        let skipped = (0..100).take_while(|_| pick(&mut source, &table, 1).is_empty()).count();
        assert_eq!(skipped, rounds as usize);
    }
}

#[test]
fn a_pick_of_any_pages_uses_up_credit_too() {
    let table = table(&[&[Some(touched(0)), Some(0), Some(touched(touched(0)))]]);
    let mut source = source();
    let picks: Vec<_> = (0..4)
        .map(|_| {
            let mut out = Vec::new();
            source.pick(&table, 9, Pick::Any, &mut out);
            out
        })
        .collect();
    assert_eq!(picks, [vec![run(0, 1, 1)], vec![run(0, 0, 2)], vec![run(0, 0, 2)], vec![run(0, 0, 3)]]);
}

proptest! {
    #[test]
    fn a_pick_proposes_only_candidates_once_and_at_most_what_was_wanted(
        regions in vec(vec(proptest::option::of(any::<u8>()), 0..1200), 0..4),
        wants in vec((0u64..2000, any::<bool>()), 1..10),
        hot in proptest::option::of(vec(0u32..3, 0..3)),
        scans in vec((0u32..3, 0u64..512), 0..3),
    ) {
        let table = Table(regions.into_iter().map(RefCell::new).collect());
        let mut source = source();
        if let Some(hot) = hot {
            track(&source, &table, &hot);
            scans.into_iter().for_each(|(index, touched)| scan(&source, unit(index), PageMap::first(touched)));
        }
        for (want, any) in wants {
            let mut picked = Vec::new();
            source.pick(&table, want, if any { Pick::Any } else { Pick::Cold }, &mut picked);
            let pages: Vec<_> = picked.iter()
                .flat_map(|run| run.pages.iter().map(move |page| (run.region, page.0))).collect();
            prop_assert!(pages.len() as u64 <= want);
            for (region, page) in &pages {
                prop_assert!(table.age(*region, PageIdx(*page)).is_some());
            }
            let mut unique = pages.clone();
            unique.sort_unstable();
            unique.dedup();
            prop_assert_eq!(unique.len(), pages.len());
        }
    }

    #[test]
    fn every_candidate_is_proposed_within_sixteen_rounds(
        ages in vec(any::<u8>(), 1..1100), tracked: bool, hot in vec(0u32..3, 0..3),
    ) {
        let table = Table(vec![RefCell::new(ages.iter().map(|age| Some(*age)).collect())]);
        let mut source = source();
        if tracked {
            track(&source, &table, &hot);
        }
        let mut seen = vec![false; ages.len()];
        for _ in 0..20 {
            let mut out = Vec::new();
            source.pick(&table, ages.len() as u64, if tracked { Pick::Any } else { Pick::Cold }, &mut out);
            for run in out {
                run.pages.iter().for_each(|page| seen[page.0 as usize] = true);
            }
        }
        prop_assert!(seen.iter().all(|seen| *seen));
    }
}
