//! Offers: what a round of picks has, a unit or a part of one each, in the order in which it is to go.
//!
//! Before: a round begins. After: `pick` proposes the pages of one offer after the other.
//! Threads: a VM's reclaim worker. Units: units of 2 MiB, and the pages in them.
//! Promise: at any moment the offers of a unit have no page in common.
//!
//! | Order | What |
//! |---|---|
//! | 0 | the oldest generation |
//! | 1 | cold pages of bloated units |
//! | 2 | cold pages of other units that had a full scan; the third generation |
//! | 3, 4 | the rest of the second and of the youngest generation |
//!
//! A unit has a generation; where it is not one huge page, each of its blocks has one. Within an order, the memory that
//! is untouched for longest goes first, and of what the same cycle saw touched, the unit that was touched in the fewest
//! cycles: a limit below what is touched in every cycle must be met from the youngest generation, where only that tells
//! the hottest memory from the rest. The last tie-break is random and differs from round to round: by address, a guest
//! whose hottest memory comes first would lose it in every round.

use crate::entry::Entry;
use crate::generations::{Blocks, GENERATIONS};
use crate::inside::Inside;
use crate::moment::Moment;
use crate::sample::SplitMix64;
use crate::source::{PageMap, UnitId};
use crate::tracker::Tracker;

const OLDEST: u8 = 0;
pub(super) const BLOAT: u8 = 1;
const COLD_PART: u8 = 2;

/// Some pages of a unit that may be reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Offer {
    /// See the table above.
    pub order: u8,
    /// Last touch seen.
    pub seen: Moment,
    /// In how many of the cycles that its entry remembers the unit was touched.
    pub often: u32,
    /// The random tie-break of the round; 0 for what is cold, which goes by address.
    pub tie_break: u64,
    pub unit: UnitId,
    pub part: Part,
    /// The first page of the unit that no call has checked.
    pub from: u16,
}

/// Which pages of the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// All.
    All,
    /// Those that its last full scans found cold.
    Cold,
    /// The others.
    Warm,
    /// The blocks of this generation, without the cold pages of a younger one.
    Blocks(u8),
}

impl Offer {
    /// Returns which pages of the unit it offers now. Scans continue, and what they saw touched since the round was
    /// made is no longer cold.
    pub fn wanted(&self, tracker: &Tracker) -> PageMap {
        let (cold, bloated) = match tracker.units().inside(self.unit) {
            Some(Inside::Scanned(scanned)) => (tracker.cold_pages(self.unit).unwrap_or_default(), scanned.bloated),
            _ => (PageMap::NONE, false),
        };
        let blocks = tracker.units().blocks(self.unit).unwrap_or_default();
        let oldest = GENERATIONS - 1;
        match self.part {
            Part::All => PageMap::ALL,
            Part::Cold if self.order == BLOAT && !bloated => PageMap::NONE,
            // The oldest blocks are an offer of their own.
            Part::Cold if blocks != Blocks::default() => cold.without(blocks.pages(oldest)),
            Part::Cold => cold,
            Part::Warm => PageMap::ALL.without(cold),
            Part::Blocks(generation) if usize::from(generation) == oldest => blocks.pages(oldest),
            Part::Blocks(generation) => blocks.pages(generation.into()).without(cold),
        }
    }
}

/// A random number for a unit in a round.
fn tie_break(unit: UnitId, round: u64) -> u64 {
    let of_round = SplitMix64::new(round).next_u64();
    SplitMix64::new(of_round ^ (u64::from(unit.region) << 32 | u64::from(unit.unit))).next_u64()
}

/// Offer a unit, whole or in parts.
pub(super) fn offer(tracker: &Tracker, unit: UnitId, tracked: bool, granule: u64, out: &mut Vec<Offer>) {
    let often = tracker.units().entry(unit).map_or(0, Entry::frequency);
    let mut push = |order, seen, part| {
        let tie_break = if order > BLOAT { tie_break(unit, tracker.cycles().0) } else { 0 };
        out.push(Offer { order, seen, often, tie_break, unit, part, from: 0 });
    };
    if !tracked {
        return push(OLDEST, Moment(0), Part::All);
    }
    let order = |generation| match GENERATIONS - 1 - generation {
        0 => OLDEST,
        younger => COLD_PART + younger as u8 - 1,
    };
    let seen = tracker.units().seen(unit).unwrap_or(Moment(u32::MAX));
    // Memory that no cycle has watched is new: of the youngest generation.
    let generation = tracker.generation(unit).unwrap_or(0);
    let scanned = match tracker.units().inside(unit) {
        Some(Inside::Scanned(scanned)) if granule == 1 && generation < GENERATIONS - 1 => Some(scanned),
        _ => None,
    };
    let scanned = scanned.filter(|_| tracker.cold_pages(unit).is_some());
    if let Some(scanned) = scanned {
        push(if scanned.bloated { BLOAT } else { COLD_PART }, seen, Part::Cold);
    }
    match tracker.units().blocks(unit) {
        Some(blocks) => {
            for generation in (0..GENERATIONS).filter(|generation| !blocks.pages(*generation).is_empty()) {
                push(order(generation), tracker.seen_in(generation).min(seen), Part::Blocks(generation as u8));
            }
        }
        None if scanned.is_some() => push(order(generation), seen, Part::Warm),
        None => push(order(generation), seen, Part::All),
    }
}
