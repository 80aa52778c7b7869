//! Offers: the elements of a round of picks, each a unit or a part of one, in the order of eviction.
//!
//! Before: a round begins. After: `pick` proposes the pages of one offer after the other.
//! Threads: a VM's reclaim worker. Units: units of 2 MiB, and the pages in them.
//! Promise: at any time the offers of a unit have no page in common.
//!
//! | Order | Pages |
//! |---|---|
//! | 0 | the oldest generation |
//! | 1 | cold pages of bloated units |
//! | 2 | cold pages of other units that had fine scans; the third generation |
//! | 3, 4 | the rest of the second and of the youngest generation |
//!
//! A unit has a generation; if it is not one huge page, each of its blocks has one. Within an order, the memory
//! untouched for longest goes first; of memory that the last cycle saw touched, the unit touched in the fewest cycles
//! goes first. A limit below the memory touched in every cycle must be met from the youngest generation, where only the
//! number of cycles with a touch tells the hottest memory from the rest.
//!
//! The last tie-break is random and differs from round to round. A program that reads more than its limit in a loop
//! would lose, by address or by time, each page shortly before it reads the page again. In random order, of a loop over
//! 1/0.9 of the limit about four pages of five stay.

use crate::entry::Entry;
use crate::generations::{Blocks, OLDEST};
use crate::moment::Moment;
use crate::source::{PageMap, UnitId};
use crate::tracker::Tracker;

pub(super) const BLOAT: u8 = 1;
const COLD_PART: u8 = 2;

/// Some pages of a unit that may be reclaimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Offer {
    pub order: u8,
    /// Time of the last touch.
    pub seen: Moment,
    /// Number of remembered cycles that saw the unit touched.
    pub often: u32,
    pub tie_break: u64,
    pub unit: UnitId,
    pub part: Part,
    /// The first page of the unit that no call has checked.
    pub from: u16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    All,
    /// Pages that its last fine scans found cold.
    Cold,
    Warm,
    /// Blocks of this generation, without the cold pages of a younger one.
    Blocks(u8),
}

impl Offer {
    /// The pages of the unit that it offers now. Pages that scans saw touched since the round was made are not cold.
    pub fn wanted(&self, tracker: &Tracker) -> PageMap {
        let of = tracker.units().pages_of(self.unit);
        let scanned = tracker.units().scanned(self.unit);
        let cold = scanned.and_then(|scanned| scanned.cold(of)).unwrap_or_default();
        let blocks = tracker.units().blocks(self.unit).unwrap_or_default();
        match self.part {
            Part::All => PageMap::ALL,
            Part::Cold if self.order == BLOAT && scanned.is_none_or(|scanned| scanned.bloat(of).is_none()) => {
                PageMap::NONE
            }
            // The oldest blocks are a separate offer.
            Part::Cold if blocks != Blocks::default() => cold.without(blocks.pages(OLDEST)),
            Part::Cold => cold,
            Part::Warm => PageMap::ALL.without(cold),
            Part::Blocks(OLDEST) => blocks.pages(OLDEST),
            Part::Blocks(generation) => blocks.pages(generation).without(cold),
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Round {
    pub number: u64,
    pub is_tracked: bool,
}

/// A random number for a unit in a round (the output function of SplitMix64).
fn tie_break(unit: UnitId, round: u64) -> u64 {
    let mut word = round.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ (u64::from(unit.region) << 32 | u64::from(unit.unit));
    word = (word ^ word >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    word = (word ^ word >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    word ^ word >> 31
}

pub(super) fn offer(tracker: &Tracker, unit: UnitId, round: Round, granule: u64, out: &mut Vec<Offer>) {
    let units = tracker.units();
    let often = units.entry(unit).map_or(0, Entry::frequency);
    let tie_break = tie_break(unit, round.number);
    let mut push = |order, seen, part| {
        out.push(Offer { order, seen, often, tie_break, unit, part, from: 0 });
    };
    if !round.is_tracked {
        return push(0, Moment(0), Part::All);
    }
    let order = |generation| match OLDEST - generation {
        0 => 0,
        younger => COLD_PART + younger - 1,
    };
    let seen = units.seen(unit).unwrap_or(Moment(u32::MAX));
    // Memory that no cycle has watched is new, so of the youngest generation.
    let generation = units.generation(unit).unwrap_or(0);
    let of = units.pages_of(unit);
    let scanned = units.scanned(unit).filter(|scanned| granule == 1 && generation < OLDEST && scanned.is_uneven(of));
    if let Some(scanned) = scanned {
        push(if scanned.bloat(of).is_some() { BLOAT } else { COLD_PART }, seen, Part::Cold);
    }
    match units.blocks(unit) {
        Some(blocks) => {
            for generation in (0..=OLDEST).filter(|generation| !blocks.pages(*generation).is_empty()) {
                push(order(generation), tracker.seen_in(generation).min(seen), Part::Blocks(generation));
            }
        }
        None if scanned.is_some() => push(order(generation), seen, Part::Warm),
        None => push(order(generation), seen, Part::All),
    }
}
