//! The subpage tracker: which hot units to look into next (Blowfish §4.3.2).
//!
//! Before: a coarse cycle sorted the units into generations. After: small batches of hot units are watched page by page
//! for a moment each; those of which hardly anything was touched are *hot-bloated*, and their cold pages can go.
//! Units: shares of 1. Promise: pure; at most one batch per interval, at most so many units each; backs off while it
//! finds nothing.
//!
//! A round is taken from the second-youngest generation, where units with a few hot pages gather under fair promotion,
//! then from the youngest, where those that are touched in every cycle end. A unit is first sampled; only if skew cannot
//! be ruled out is it scanned in full. A balanced unit (nearly everything touched) is left out of the next round.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use crate::sample::{Dice, Estimate};
use crate::source::{FineWatch, PageMap, UnitId};

/// Fewer of its pages touched than this, and a unit is hot-bloated.
pub const BLOATED_BELOW: f64 = 0.2;
/// More than this, and it is balanced.
pub const BALANCED_ABOVE: f64 = 0.8;

/// How it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Units in one batch.
    pub batch: usize,
    /// From one batch to the next, at least.
    pub every: Duration,
    /// The same, at most, when nothing is found.
    pub at_most: Duration,
    /// Pages of a unit that are watched first; `None` scans every unit in full at once.
    pub sample: Option<u64>,
}

impl Default for Limits {
    /// The paper's 32 units per 100 ms. A sample of 32 pages tells a bloated unit from one half touched.
    fn default() -> Self {
        Self { batch: 32, every: Duration::from_millis(100), at_most: Duration::from_millis(6400), sample: Some(32) }
    }
}

/// What a look into a unit came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Sampled: skew cannot be ruled out, it will be scanned in full.
    Suspect,
    /// Hardly anything was touched.
    Bloated,
    /// Neither.
    Mixed,
    /// Nearly everything was touched.
    Balanced,
}

/// Its state between batches.
#[derive(Clone, Debug)]
pub struct Subpages {
    limits: Limits,
    dice: Dice,
    /// To be scanned in full.
    suspects: VecDeque<UnitId>,
    /// To be looked into first.
    round: VecDeque<UnitId>,
    balanced: HashSet<UnitId>,
    interval: Duration,
    found: bool,
}

impl Subpages {
    /// Nothing to do yet.
    pub fn new(limits: Limits, dice: Dice) -> Self {
        let (suspects, round, balanced) = Default::default();
        Self { limits, dice, suspects, round, balanced, interval: limits.every, found: false }
    }

    /// Begin a round with these units, in this order. What the last round had not come to is dropped, but not a suspect.
    pub fn begin_round(&mut self, units: impl Iterator<Item = UnitId>) {
        let skip = std::mem::take(&mut self.balanced);
        self.round = units.filter(|unit| !skip.contains(unit) && !self.suspects.contains(unit)).collect();
        // Begun at another place each time: a round that is cut short must not see the same units for ever.
        if self.round.len() > self.limits.batch {
            let turn = self.dice.below(self.round.len() as u64) as usize;
            self.round.rotate_left(turn);
        }
    }

    /// Is there anything to look into?
    pub fn is_idle(&self) -> bool {
        self.suspects.is_empty() && self.round.is_empty()
    }

    /// From one batch to the next.
    pub fn interval(&self) -> Duration {
        self.interval
    }

    /// The next batch, ascending. `pages_of` answers how many pages a unit has, 0 if it is gone.
    pub fn batch(&mut self, pages_of: impl Fn(UnitId) -> u64) -> Vec<FineWatch> {
        let mut batch: Vec<FineWatch> = Vec::new();
        while batch.len() < self.limits.batch {
            let full = self.suspects.pop_front();
            let Some(unit) = full.or_else(|| self.round.pop_front()) else { break };
            let pages = match (pages_of(unit), self.limits.sample) {
                (0, _) => continue,
                (of, Some(sample)) if full.is_none() => self.dice.pages(sample, of),
                (of, _) => PageMap::first(of),
            };
            batch.push(FineWatch { unit, pages });
        }
        batch.sort_unstable_by_key(|watch| watch.unit);
        self.found = false;
        batch
    }

    /// One unit of the batch was seen: `touched` of `watched` pages, of which it has `of`.
    pub fn judge(&mut self, unit: UnitId, touched: u64, watched: u64, of: u64) -> Verdict {
        let estimate = Estimate::new(touched, watched, of);
        if watched < of && estimate.may_be_below(BLOATED_BELOW) {
            self.suspects.push_back(unit);
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

    /// The batch is over: wait longer while nothing is found.
    pub fn end_batch(&mut self) {
        // A suspect is not nothing: its scan is still to come.
        let found = self.found || !self.suspects.is_empty();
        self.interval = if found { self.limits.every } else { (self.interval * 2).min(self.limits.at_most) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn unit(unit: u32) -> UnitId {
        UnitId { region: 0, unit }
    }

    /// Run batches until nothing is left; answers which units were called bloated, and how many pages were watched.
    fn run(tracker: &mut Subpages, touched_of: &dyn Fn(UnitId) -> PageMap) -> (Vec<UnitId>, u64) {
        let (mut bloated, mut watched) = (Vec::new(), 0);
        while !tracker.is_idle() {
            for watch in tracker.batch(|_| 512) {
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
        let mut tracker = Subpages::new(Limits::default(), Dice::new(1));
        tracker.begin_round((0..100).map(unit));
        let (bloated, watched) = run(&mut tracker, &touched_of);
        assert_eq!(bloated, (0..10).map(unit).collect::<Vec<_>>());
        assert_eq!(watched, 100 * 32 + 10 * 512);
    }

    #[test]
    fn a_balanced_unit_is_skipped_for_one_round() {
        let mut tracker = Subpages::new(Limits::default(), Dice::new(1));
        for (round, expected) in [(0, 3), (1, 1), (2, 3)] {
            tracker.begin_round((0..3).map(unit));
            let batch = tracker.batch(|_| 512);
            assert_eq!(batch.len(), expected, "round {round}");
            for watch in batch {
                let touched = if watch.unit == unit(0) { watch.pages.count() / 2 } else { watch.pages.count() };
                tracker.judge(watch.unit, touched, watch.pages.count(), 512);
            }
            tracker.end_batch();
        }
    }

    #[test]
    fn it_backs_off_while_nothing_is_found_and_returns_at_once_when_something_is() {
        let limits = Limits { sample: None, batch: 1, ..Limits::default() };
        let mut tracker = Subpages::new(limits, Dice::new(1));
        for (touched, expected) in [(400, 200), (400, 400), (400, 800), (10, 100), (400, 200)] {
            tracker.begin_round([unit(0)].into_iter());
            let watch = tracker.batch(|_| 512)[0];
            assert_eq!(watch.pages, PageMap::ALL);
            tracker.judge(watch.unit, touched, 512, 512);
            tracker.end_batch();
            assert_eq!(tracker.interval(), Duration::from_millis(expected));
        }
    }

    proptest! {
        #[test]
        fn a_batch_is_bounded_ascending_without_repeats_and_of_units_there_are(
            rounds in proptest::collection::vec((proptest::collection::btree_set(0u32..300, 0..300), any::<u64>()), 1..10),
            batch in 1usize..40,
        ) {
            let mut tracker = Subpages::new(Limits { batch, ..Limits::default() }, Dice::new(3));
            for (units, heat) in rounds {
                tracker.begin_round(units.iter().copied().map(unit));
                for _ in 0..3 {
                    let watches = tracker.batch(|id| if id.unit % 7 == 0 { 0 } else { 512 });
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
