//! Queries of a tracker: generations, cold pages, the hot set.
//!
//! Before: `tracker` absorbed the reports. After: `pick` and `ages` read them here.
//! Threads: under the tracker's lock. Units: pages, units, lengths of a fine cycle. Promise: nothing changes.

use super::Tracker;
use crate::entry::RECENT;
use crate::inside::{Inside, Scanned};
use crate::moment::Moment;
use crate::placement::Warmth;
use crate::source::{PageMap, UnitId};
use crate::units::Units;

/// Cycles by which a unit's rate is known.
const RATE_CYCLES: u32 = 8;

impl Tracker {
    /// The generation of a unit with pages in memory: 0 is the youngest.
    pub fn generation(&self, unit: UnitId) -> Option<usize> {
        self.units.birth(unit).map(|birth| self.generations.of(birth))
    }

    /// When memory of this generation, by the rule of base pages, was last seen touched. Of the oldest: no later than
    /// this.
    pub(crate) fn seen_in(&self, generation: usize) -> Moment {
        let ends = self.recent.iter().rev().map(|(_, end)| *end);
        let first = self.recent.front().map(|(begun, _)| *begun);
        Moment::at(ends.chain(first).nth(generation).or(first).unwrap_or_default())
    }

    /// Entries, ages and fine scans of units.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// The cold pages of a bloated unit.
    pub fn candidates(&self, unit: UnitId) -> Option<PageMap> {
        match self.units.inside(unit)? {
            Inside::Scanned(scanned) if scanned.bloated => self.cold_pages(unit),
            _ => None,
        }
    }

    /// The pages of a unit that are colder than the rest. Its last full scans did not see them touched, and of the
    /// pages that scans had missed, the last scan saw touched less than half the share that scans see of all pages.
    /// `None` if there are none, or there was only one scan: of a unit that is lukewarm all over, one scan misses
    /// nearly all pages, which are as warm as the others.
    pub(crate) fn cold_pages(&self, unit: UnitId) -> Option<PageMap> {
        let Inside::Scanned(scanned) = self.units.inside(unit)? else { return None };
        let of = self.units.pages_of(unit);
        let (scans, share) = scanned.share_within(RECENT, of);
        let warmth = scanned.counts(of).of_missed()?;
        (scans > 1 && (2.0 * warmth < share || share == 0.0)).then(|| scanned.cold().and(PageMap::first(of)))
    }

    /// How warm a unit and its pages are, for the choice of memory for them; `None` if it has no page in memory.
    pub fn warmth(&self, unit: UnitId) -> Option<Warmth> {
        let touches = self.units.entry(unit)?.touches() & ((1 << RATE_CYCLES) - 1);
        let all = PageMap::first(self.units.pages_of(unit));
        let (levels, has_cold) = match self.units.inside(unit) {
            // As warm as others turned out to be: it must not displace pages that scans found hot.
            None => (vec![(self.quota.share(), all)], false),
            Some(Inside::Sampled(sampled)) if sampled.tally.is_uneven() => {
                let levels = sampled.tally.levels();
                // All blocks may be above half of the hottest.
                let has_cold = levels.len() > 1;
                (levels, has_cold)
            }
            Some(Inside::Sampled(sampled)) => (vec![(sampled.tally.expected(self.quota.share()), all)], false),
            Some(Inside::Scanned(scanned)) => (scanned.by_touches(), scanned.is_uneven(self.units.pages_of(unit))),
        };
        Some(Warmth { rate: f64::from(touches.count_ones()) / f64::from(RATE_CYCLES), levels, has_cold })
    }

    /// The hot set: each unit touched in the recent cycles, and those of its pages that recent scans saw touched. A
    /// unit without a full scan counts with all its pages. So does a unit whose other pages are more likely than not to
    /// be touched in the time of the recent cycles, because scans are short.
    pub fn hot_pages(&self) -> impl Iterator<Item = (UnitId, PageMap)> {
        let hot = |unit: &UnitId| self.units.entry(*unit).is_some_and(|entry| entry.age() < RECENT);
        self.units.present().filter(hot).map(|unit| {
            let of = self.units.pages_of(unit);
            match self.units.inside(unit) {
                Some(Inside::Scanned(scanned)) if self.unseen(scanned, of) < 0.5 => {
                    (unit, scanned.touched_within(RECENT))
                }
                _ => (unit, PageMap::first(of)),
            }
        })
    }

    /// The chance that a page that none of the recent scans of its unit saw touched is touched in the time of the
    /// recent cycles.
    fn unseen(&self, scanned: &Scanned, of: u64) -> f64 {
        let (scans, _) = scanned.share_within(RECENT, of);
        self.counts.chances().of_unit(scanned.counts(of)).after_misses(scans, self.span_in_scans())
    }

    /// The time of the recent cycles, in lengths of a fine cycle.
    fn span_in_scans(&self) -> f64 {
        if self.fine_length.is_zero() { 1.0 } else { self.recent_span().as_secs_f64() / self.fine_length.as_secs_f64() }
    }

    /// An estimate of how many of its pages are touched in the time of the recent cycles.
    pub(crate) fn touched_pages(&self, unit: UnitId, inside: &Inside) -> u64 {
        let of = self.units.pages_of(unit);
        let chances = self.counts.chances();
        let (chances, share) = match inside {
            Inside::Scanned(scanned) => (chances.of_unit(scanned.counts(of)), scanned.share_within(RECENT, of).1),
            Inside::Sampled(sampled) => (chances, sampled.estimate.share),
        };
        (chances.within(share, self.span_in_scans()) * of as f64).round() as u64
    }
}
