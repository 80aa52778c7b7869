//! Pick: which pages reclaim takes next, the coldest first.
//!
//! Before: reclaim says how many pages it wants. After: it puts those proposed into quarantine, the last test.
//! Threads: a VM's reclaim worker owns its source. Units: a round offers each unit with pages in memory once.
//! Promise: a call proposes no page twice, checks each page at most once, and proposes more than wanted only to
//! complete a granule. It looks at a bounded number of units and pages, however large the VM: what it evicts next may
//! be what a fault waits for. The next call goes on where it ended.
//!
//! Cold is what has order 0 or 1 in the table of `offer`. With tracking, a round is made once for each coarse cycle,
//! because nothing else makes memory cold. Without it, everything has order 0, and rounds go through memory by address,
//! as a clock hand does.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;

use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};

use crate::age::Age;
use crate::shared::VmHeat;
use crate::source::UnitId;
use crate::tracker::Tracker;
use crate::{ColdRun, Pages, Pick};

mod offer;

use offer::{BLOAT, Offer, offer};

/// Units that a call puts into the round: 8 GiB, some milliseconds of asking the kernel which are in memory.
const MOST_UNITS: u64 = 4096;
/// Pages that a call checks: 256 MiB, some milliseconds where none may go. An offer counts as one more.
const MOST_PAGES: u64 = 64 << 10;

/// Proposes pages to reclaim: the seam between *how much* (reclaim) and *which* (heat).
#[derive(Debug)]
pub struct HeatSource {
    heat: Arc<VmHeat>,
    /// The next one first.
    round: BinaryHeap<Reverse<Offer>>,
    /// Number of coarse cycles when the round was begun; `None` without tracking.
    made_at: Option<u64>,
    /// The unit from which on none is in the round yet: region and number. `None` when all are.
    making: Option<(u32, u64)>,
}

impl HeatSource {
    /// Starts without a round.
    pub fn new(heat: Arc<VmHeat>) -> Self {
        Self { heat, round: BinaryHeap::new(), made_at: None, making: None }
    }

    /// Propose up to about `want` pages, coldest first, into `out`. Fewer come if fewer are cold; calling again goes
    /// on from there. No page is proposed twice while it stays in quarantine, because then it is not Resident.
    ///
    /// Returns whether there may be more at once: the call ended because it has looked at as much as one may.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64, pick: Pick, out: &mut Vec<ColdRun>) -> bool {
        let heat = self.heat.clone();
        let tracker = heat.lock();
        let cycle = tracker.is_fresh(heat.now()).then(|| tracker.cycles().0);
        let over = self.round.is_empty() && (cycle.is_none() || pick == Pick::Any);
        // One that is being made is used before the next is begun, however short the cycles are.
        if self.making.is_none() && (over || cycle != self.made_at) {
            self.round.clear();
            (self.made_at, self.making) = (cycle, Some((0, 0)));
        }
        if self.make_round(&tracker, pages) {
            return true;
        }
        let mut limits = Limits { wanted: want, checks: MOST_PAGES };
        while limits.wanted > 0 {
            let Some(Reverse(offer)) = self.round.peek().copied() else { return false };
            if pick == Pick::Cold && offer.order > BLOAT {
                return false;
            }
            if limits.checks == 0 {
                return true;
            }
            self.round.pop();
            if let Some(rest) = sweep(&tracker, pages, offer, pick, &mut limits, out) {
                self.round.push(Reverse(rest));
            }
        }
        false
    }

    /// Go on with the round that is being made. Returns whether there is more of it to make.
    fn make_round(&mut self, tracker: &Tracker, pages: &dyn Pages) -> bool {
        let (tracked, mut offers) = (self.made_at.is_some(), Vec::new());
        let mut looks = MOST_UNITS;
        while let Some((region, unit)) = self.making {
            if region >= pages.regions() {
                self.making = None;
            } else if unit >= pages.len(region).div_ceil(PAGES_PER_UNIT) {
                self.making = Some((region + 1, 0));
            } else if looks == 0 {
                return true;
            } else {
                looks -= 1;
                self.making = Some((region, unit + 1));
                if pages.next_present(region, PageRange::of_unit(unit)).is_some() {
                    let unit = UnitId { region, unit: unit as u32 };
                    offer(tracker, unit, tracked, pages.granule(region), &mut offers);
                    self.round.extend(offers.drain(..).map(Reverse));
                }
            }
        }
        false
    }
}

/// How much a call may still propose, and check.
struct Limits {
    wanted: u64,
    checks: u64,
}

/// Propose the pages of one offer until there are enough, or as many as may be were checked. Returns what is left.
fn sweep(
    tracker: &Tracker,
    pages: &dyn Pages,
    offer: Offer,
    pick: Pick,
    limits: &mut Limits,
    out: &mut Vec<ColdRun>,
) -> Option<Offer> {
    let region = offer.unit.region;
    limits.checks = limits.checks.saturating_sub(1);
    if region >= pages.regions() {
        return None;
    }
    let wanted = offer.wanted(tracker);
    let base = PageIdx::first_of_unit(offer.unit.unit.into()).0;
    let stop = pages.len(region).min(base + PAGES_PER_UNIT);
    let granule = pages.granule(region);
    let mut at = base + u64::from(offer.from);
    while let Some(run) = pages.next_present(region, PageRange::new(PageIdx(at), PageIdx(stop))) {
        let end = run.end();
        for page in (run.start().0.next_multiple_of(granule)..end.0).step_by(granule as usize) {
            if limits.wanted == 0 || limits.checks == 0 {
                return Some(Offer { from: (page - base) as u16, ..offer });
            }
            limits.checks -= 1;
            if wanted.get(page - base) && is_candidate(pages, region, PageIdx(page), pick) {
                limits.wanted = limits.wanted.saturating_sub(granule);
                push_run(out, region, PageRange::of(PageIdx(page), granule));
            }
        }
        if end.0 <= at {
            break;
        }
        at = end.0;
    }
    None
}

/// Returns whether the page is Resident, unlocked and without credit. Skipping it uses up one round of its credit.
pub fn is_candidate(pages: &dyn Pages, region: u32, page: PageIdx, pick: Pick) -> bool {
    let Some(byte) = pages.age(region, page) else { return false };
    let age = Age::from_byte(byte);
    if age.credit > 0 && pick == Pick::Cold {
        pages.set_age(region, page, Age { credit: age.credit - 1, ..age }.byte());
        return false;
    }
    true
}

/// Add pages to runs; to the last run if they follow it.
pub fn push_run(out: &mut Vec<ColdRun>, region: u32, pages: PageRange) {
    match out.last_mut() {
        Some(run) if run.region == region && run.pages.end() == pages.start() => {
            run.pages = PageRange::new(run.pages.start(), pages.end());
        }
        _ => out.push(ColdRun { region, pages }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::Phase;
    use crate::source::{CycleReport, PageMap, Seen};
    use crate::touched;
    use crate::tracker::Settings;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::{Cell, RefCell};
    use std::time::Duration;

    /// `None` is a page that is absent or not Resident.
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
        HeatSource::new(Arc::new(VmHeat::new(Settings::default(), 1)))
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

    /// Three coarse cycles that see these units touched.
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
        let seen = Seen::Fine { watched: PageMap::ALL, touched };
        let report = CycleReport { units: vec![(id, seen)], ..CycleReport::default() };
        source.heat.lock().absorb(source.heat.now(), Phase::Fine, &report);
    }

    #[test]
    fn without_tracking_it_goes_round_all_regions_by_address_and_skips_holes() {
        let table = table(&[&[Some(0), None, Some(0), Some(0)], &[], &[Some(0)]]);
        let mut source = source();
        assert_eq!(pick(&mut source, &table, 2), [run(0, 0, 1), run(0, 2, 1)]);
        assert_eq!(pick(&mut source, &table, 9), [run(0, 3, 1), run(2, 0, 1)]);
        assert_eq!(pick(&mut source, &table, 1), [run(0, 0, 1)]);
    }

    /// A region whose pages are all present, and of which only the last may go.
    struct Large {
        looks: Cell<u64>,
        checks: Cell<u64>,
    }

    impl Large {
        const LEN: u64 = 3 * MOST_UNITS * PAGES_PER_UNIT;
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
    fn a_call_looks_at_a_bounded_part_of_a_large_guest_and_the_calls_after_it_come_to_its_end() {
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
                assert!(large.looks.get() <= 2 * MOST_UNITS, "{} looks", large.looks.get());
                assert!(large.checks.get() <= MOST_PAGES, "{} checks", large.checks.get());
                calls += 1;
            }
            assert_eq!(out, [run(0, Large::LEN - 1, 1)]);
            assert!(calls > 3, "{calls} calls");
        }
    }

    #[test]
    fn with_tracking_only_the_oldest_generation_is_cold_and_any_proposes_the_young_ones_last() {
        let table = table(&[&[Some(0); 4 * 512]]);
        let mut source = source();
        track(&source, &table, &[0, 2]);
        assert_eq!(pick(&mut source, &table, 4096), [run(0, 512, 512), run(0, 3 * 512, 512)]);
        assert_eq!(pick(&mut source, &table, 4096), [], "nothing else is cold");
        let mut out = Vec::new();
        source.pick(&table, 4096, Pick::Any, &mut out);
        out.sort_by_key(|run| run.pages.start());
        assert_eq!(out, [run(0, 0, 512), run(0, 1024, 512)]);
    }

    #[test]
    fn of_what_the_last_cycle_saw_touched_the_hottest_goes_last_wherever_it_is() {
        let table = table(&[&[Some(0); 4 * 512]]);
        let mut source = source();
        // The first is touched in every cycle, the others in some.
        cycles(&source, &table, &[0, 1], 1);
        cycles(&source, &table, &[0, 2], 2);
        cycles(&source, &table, &[0, 1, 2, 3], 4);
        let mut out = Vec::new();
        source.pick(&table, 3 * 512, Pick::Any, &mut out);
        assert_eq!(out, [run(0, 3 * 512, 512), run(0, 512, 1024)]);
    }

    #[test]
    fn what_is_touched_in_every_cycle_does_not_go_by_address() {
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
        scan(&source, unit(1), PageMap::first(5));
        assert_eq!(pick(&mut source, &table, 100), [], "another scan may see others");
        scan(&source, unit(1), PageMap::first(5));
        track(&source, &table, &[0, 1]);
        assert_eq!(pick(&mut source, &table, 100), [run(0, 512 + 5, 100)]);
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
    fn a_pick_of_any_pages_proposes_pages_with_credit_too() {
        let table = table(&[&[Some(touched(0)), Some(0), Some(touched(touched(0)))]]);
        let mut out = Vec::new();
        source().pick(&table, 9, Pick::Any, &mut out);
        assert_eq!(out, [run(0, 0, 3)]);
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
}
