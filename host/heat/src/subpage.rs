//! The subpage tracker: which hot units get a fine scan next (Blowfish, 4.3.2).
//!
//! Before: a coarse cycle sorted the units into generations. After: batches of hot units are watched page by page.
//! Those of which hardly any page was touched are *bloated*: their cold pages are candidates once a second scan agrees
//! (`tracker`).
//! Units: shares of 1. Promise: pure; at most one batch per interval, of no more units than its window allows; backs
//! off while it finds nothing.
//!
//! A round begins with the units that wait for their second scan. Then come those whose last scan is longest ago: first
//! units without any, and of these the second-youngest generation before the youngest. Units with a few hot pages
//! gather in the second-youngest under fair promotion; those touched in every cycle end in the youngest. A unit gets a
//! sample first. It gets a full scan if the sample cannot rule out skew, if it was bloated before, or if first scans
//! found units sparse recently. Where samples tell its blocks apart (`tally`), it gets none. A balanced unit (nearly
//! every page touched) is left out of the next round.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::sample::{Estimate, SplitMix64};
use crate::source::{FineWatch, PageMap, UnitId};
use crate::tally::Told;

/// A hot unit is bloated if a smaller share of its pages is touched.
pub const BLOATED_BELOW: f64 = 0.2;
/// It is balanced if a larger share is.
pub const BALANCED_ABOVE: f64 = 0.8;

/// Units in a batch whatever they cost: otherwise an expensive guest would never be scanned.
const LEAST: usize = 4;

/// How it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most units in a batch for each `every` that it is watched.
    pub batch: usize,
    /// Shortest interval from one batch to the next.
    pub every: Duration,
    /// Longest interval, while nothing is found.
    pub at_most: Duration,
    /// Pages in a sample; `None`: every scan is a full one.
    pub sample: Option<u64>,
}

impl Default for Limits {
    /// The paper's 32 units per 100 ms. A sample of 32 pages tells a bloated unit from one of which half is touched.
    fn default() -> Self {
        Self { batch: 32, every: Duration::from_millis(100), at_most: Duration::from_millis(6400), sample: Some(32) }
    }
}

/// What a fine scan found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// By a sample: it may be bloated and will get a full scan.
    Suspect,
    /// Hardly any page was touched. A second scan will say whether the others are colder.
    Bloated,
    /// Neither.
    Mixed,
    /// Nearly every page was touched.
    Balanced,
}

/// Its state between batches.
#[derive(Clone, Debug)]
pub struct Subpages {
    limits: Limits,
    rng: SplitMix64,
    /// They wait for another scan, a full one if this says so.
    suspects: VecDeque<(UnitId, bool)>,
    /// The rest of the round, and whether the unit gets a full scan at once.
    round: VecDeque<(UnitId, bool)>,
    balanced: HashSet<UnitId>,
    interval: Duration,
    found: bool,
}

impl Subpages {
    /// Starts without a round.
    pub fn new(limits: Limits, rng: SplitMix64) -> Self {
        let (suspects, round, balanced) = Default::default();
        Self { limits, rng, suspects, round, balanced, interval: limits.every, found: false }
    }

    /// Begin a round with these units, in this order. The order matters because a round may be cut short. With each
    /// comes whether it gets a full scan at once. The rest of the last round is dropped, but not its suspects.
    pub fn begin_round(&mut self, units: impl Iterator<Item = (UnitId, bool)>) {
        let skip = std::mem::take(&mut self.balanced);
        let suspects: HashSet<UnitId> = self.suspects.iter().map(|(unit, _)| *unit).collect();
        self.round = units.filter(|(unit, _)| !skip.contains(unit) && !suspects.contains(unit)).collect();
    }

    /// Is there no unit to scan?
    pub fn is_idle(&self) -> bool {
        self.suspects.is_empty() && self.round.is_empty()
    }

    /// From one batch to the next.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// The next batch, ascending, to be watched for `window`. `pages_of` returns how many pages a unit has, 0 if it is
    /// gone. `charge` returns whether the allowance covers a number of pages of a unit.
    pub fn batch(
        &mut self,
        window: Duration,
        pages_of: impl Fn(UnitId) -> u64,
        mut charge: impl FnMut(UnitId, u64) -> bool,
    ) -> Vec<FineWatch> {
        let mut batch: Vec<FineWatch> = Vec::new();
        let times = window.as_millis() / self.limits.every.as_millis().max(1);
        let most = self.limits.batch * (times as usize).max(1);
        while batch.len() < most {
            let suspect = self.suspects.pop_front();
            let Some((unit, full)) = suspect.or_else(|| self.round.pop_front()) else { break };
            let pages = match (pages_of(unit), self.limits.sample) {
                (0, _) => continue,
                (of, Some(sample)) if !full => self.rng.spread(sample, of),
                (of, _) => PageMap::first(of),
            };
            if !charge(unit, pages.count()) && batch.len() >= LEAST {
                // It is the first of the next batch.
                if suspect.is_some() {
                    self.suspects.push_front((unit, full));
                } else {
                    self.round.push_front((unit, full));
                }
                break;
            }
            batch.push(FineWatch { unit, pages });
        }
        batch.sort_unstable_by_key(|watch| watch.unit);
        self.found = false;
        batch
    }

    /// Judge one unit of the batch: `touched` of `watched` pages, of the `of` it has.
    pub fn judge(&mut self, unit: UnitId, touched: u64, watched: u64, of: u64) -> Verdict {
        let estimate = Estimate::new(touched, watched, of);
        if watched < of && estimate.may_be_below(BLOATED_BELOW) {
            self.suspects.push_back((unit, true));
            return Verdict::Suspect;
        }
        if watched >= of && estimate.share < BLOATED_BELOW {
            self.found = true;
            return Verdict::Bloated;
        }
        if estimate.share > BALANCED_ABOVE {
            self.balanced.insert(unit);
            return Verdict::Balanced;
        }
        Verdict::Mixed
    }

    /// The samples of a unit tell its blocks apart, or may do so with one more. Returns `None` if they do not: then
    /// [`Self::judge`] judges it.
    pub fn judge_blocks(&mut self, unit: UnitId, told: Told) -> Option<Verdict> {
        match told {
            Told::Nothing => None,
            Told::Maybe => {
                self.suspects.push_back((unit, false));
                Some(Verdict::Suspect)
            }
            Told::Blocks => {
                self.found = true;
                Some(Verdict::Mixed)
            }
        }
    }

    /// The batch is over: wait longer while nothing is found.
    pub fn end_batch(&mut self) {
        // Its full scan may find a suspect bloated.
        let found = self.found || !self.suspects.is_empty();
        self.interval = if found { self.limits.every } else { (self.interval * 2).min(self.limits.at_most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::{btree_set, vec};
    use proptest::prelude::*;

    /// One batch fits.
    const WINDOW: Duration = Duration::from_millis(100);

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 0, unit }
    }

    fn sampled(number: u32) -> (UnitId, bool) {
        (unit(number), false)
    }

    /// Run batches until nothing is left. Returns the units found bloated, and how many pages were watched.
    fn run(tracker: &mut Subpages, touched_of: &dyn Fn(UnitId) -> PageMap) -> (Vec<UnitId>, u64) {
        let (mut bloated, mut watched) = (Vec::new(), 0);
        while !tracker.is_idle() {
            for watch in tracker.batch(WINDOW, |_| 512, |_, _| true) {
                watched += watch.pages.count();
                let touched = watch.pages.and(touched_of(watch.unit)).count();
                if tracker.judge(watch.unit, touched, watch.pages.count(), 512) == Verdict::Bloated {
                    bloated.push(watch.unit);
                }
            }
            tracker.end_batch();
        }
        bloated.sort_unstable();
        (bloated, watched)
    }

    #[test]
    fn every_bloated_unit_is_found_and_evenly_hot_ones_are_only_sampled() {
        let touched_of = |id: UnitId| if id.unit < 10 { PageMap::first(8) } else { PageMap::ALL };
        let mut tracker = Subpages::new(Limits::default(), SplitMix64::new(1));
        tracker.begin_round((0..100).map(sampled));
        let (bloated, watched) = run(&mut tracker, &touched_of);
        assert_eq!(bloated, (0..10).map(unit).collect::<Vec<_>>());
        assert_eq!(watched, 100 * 32 + 10 * 512);
    }

    #[test]
    fn a_balanced_unit_is_skipped_for_one_round() {
        let mut tracker = Subpages::new(Limits::default(), SplitMix64::new(1));
        for (round, expected) in [(0, 3), (1, 1), (2, 3)] {
            tracker.begin_round((0..3).map(sampled));
            let batch = tracker.batch(WINDOW, |_| 512, |_, _| true);
            assert_eq!(batch.len(), expected, "round {round}");
            for watch in batch {
                let touched = if watch.unit == unit(0) { watch.pages.count() / 2 } else { watch.pages.count() };
                tracker.judge(watch.unit, touched, watch.pages.count(), 512);
            }
            tracker.end_batch();
        }
    }

    #[test]
    fn a_round_that_the_allowance_cuts_short_continues_there() {
        let mut tracker = Subpages::new(Limits::default(), SplitMix64::new(1));
        tracker.begin_round((0..10).map(|number| (unit(number), number == 5)));
        let mut seen = Vec::new();
        while !tracker.is_idle() {
            let mut left = 0..6;
            let batch = tracker.batch(WINDOW, |_| 512, |_, _| left.next().is_some());
            assert!(batch.len() <= 6, "{batch:?}");
            seen.extend(batch.iter().map(|watch| (watch.unit.unit, watch.pages.count())));
            for watch in &batch {
                tracker.judge(watch.unit, 512, 512, 512);
            }
            tracker.end_batch();
        }
        assert_eq!(seen, (0..10).map(|number| (number, if number == 5 { 512 } else { 32 })).collect::<Vec<_>>());
        // With no allowance at all there are still a few.
        tracker.begin_round((10..20).map(sampled));
        assert_eq!(tracker.batch(WINDOW, |_| 512, |_, _| false).len(), LEAST);
    }

    #[test]
    fn it_backs_off_while_nothing_is_found_and_returns_at_once_when_something_is() {
        let limits = Limits { sample: None, batch: 1, ..Limits::default() };
        let mut tracker = Subpages::new(limits, SplitMix64::new(1));
        for (touched, expected) in [(400, 200), (400, 400), (400, 800), (10, 100), (400, 200)] {
            tracker.begin_round([sampled(0)].into_iter());
            let watch = tracker.batch(WINDOW, |_| 512, |_, _| true)[0];
            assert_eq!(watch.pages, PageMap::ALL);
            tracker.judge(watch.unit, touched, 512, 512);
            tracker.end_batch();
            assert_eq!(tracker.interval(), Duration::from_millis(expected));
        }
    }

    proptest! {
        #[test]
        fn a_batch_is_bounded_ascending_without_repeats_and_of_units_that_exist(
            rounds in vec((btree_set(0u32..300, 0..300), any::<u64>()), 1..10),
            batch in 1usize..40,
        ) {
            let mut tracker = Subpages::new(Limits { batch, ..Limits::default() }, SplitMix64::new(3));
            for (units, heat) in rounds {
                tracker.begin_round(units.iter().copied().map(sampled));
                for _ in 0..3 {
                    let watches = tracker.batch(WINDOW, |id| if id.unit % 7 == 0 { 0 } else { 512 }, |_, _| true);
                    prop_assert!(watches.len() <= batch);
                    prop_assert!(watches.is_sorted_by(|a, b| a.unit < b.unit));
                    for watch in watches {
                        prop_assert!(watch.unit.unit % 7 != 0 && !watch.pages.is_empty());
                        let touched = (heat >> (watch.unit.unit % 10)) % (watch.pages.count() + 1);
                        tracker.judge(watch.unit, touched, watch.pages.count(), 512);
                    }
                    tracker.end_batch();
                    prop_assert!(tracker.interval() >= Duration::from_millis(100));
                    prop_assert!(tracker.interval() <= Duration::from_millis(6400));
                }
            }
        }
    }
}
