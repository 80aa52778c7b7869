//! Four generations, as in the kernel's multi-generational LRU.
//!
//! Before: a cycle said which units were touched. After: reclaim takes the oldest generation first.
//! Units: generation 0 is the youngest, 3 the oldest. Promise: pure; a cycle that ages everything costs one addition.
//!
//! A huge page is 512 times as likely to be touched as a base page, so a touch of it must mean less. *Fair* promotion
//! (Blowfish, 4.3.1): a touched base page becomes youngest at once; a touched huge page becomes one generation younger
//! than it was; an untouched one becomes one older. A huge page that is touched in most cycles climbs, one that is
//! touched rarely drifts into the oldest generation.
//!
//! To see the touch of each base page would cost a fault for each. A cycle sees *blocks* of 64 base pages cheaply, so
//! blocks have generations, and a base page has that of its block until a fine scan says more.
//!
//! The place of a unit is the number of the cycle in which it would have been youngest (its *birth*), so that
//! everything ages when the number of the current cycle grows.

use crate::Entry;
use crate::source::{BLOCK, PageMap};

/// How many generations there are; the oldest is `GENERATIONS - 1`.
pub const GENERATIONS: usize = 4;
const SPAN: u32 = GENERATIONS as u32 - 1;

/// The clock of the generations.
#[derive(Clone, Copy, Debug)]
pub struct Generations {
    now: u32,
}

impl Default for Generations {
    /// Nothing has aged yet.
    fn default() -> Self {
        // So that the oldest generation has a birth above zero.
        Self { now: SPAN }
    }
}

impl Generations {
    /// Birth of something that is youngest.
    pub const fn youngest(&self) -> u32 {
        self.now
    }

    /// Everything becomes one generation older; what was oldest stays oldest.
    pub fn advance(&mut self) {
        self.now += 1;
    }

    /// The generation of a unit with this birth.
    pub fn of(&self, birth: u32) -> usize {
        self.now.saturating_sub(birth).min(SPAN) as usize
    }

    /// The new birth of a unit that was touched in the cycle that [`Self::advance`] just ended.
    pub fn touched(&self, birth: u32) -> u32 {
        // Two younger than it has become, which is one younger than it was.
        (birth.max(self.now - 1 - SPAN.min(self.now - 1)) + 2).min(self.now)
    }

    /// The new birth of a unit that the cycle did not report: it neither ages nor climbs.
    pub fn unseen(&self, birth: u32) -> u32 {
        (birth.max(self.now - 1 - SPAN.min(self.now - 1)) + 1).min(self.now)
    }
}

/// The generations of the eight blocks of a unit that is not one huge page, by the rule of base pages.
///
/// Four bits for each block: the last cycles that saw the unit, the newest in bit 0. By default all are oldest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks(u32);

impl Blocks {
    const COUNT: u64 = 8;

    /// All in one generation.
    pub fn all_in(generation: usize) -> Self {
        Self(0x1111_1111 << generation.min(GENERATIONS - 1))
    }

    /// All blocks one generation older.
    #[must_use]
    pub fn aged(self) -> Self {
        // The oldest bit of a block must not become the newest of the next.
        Self(self.0 << 1 & 0xEEEE_EEEE)
    }

    /// These blocks youngest.
    #[must_use]
    pub fn touched(self, touched: u8) -> Self {
        let newest = (0..Self::COUNT).map(|block| u32::from(touched >> block & 1) << (block * 4));
        Self(newest.fold(self.0, |bits, bit| bits | bit))
    }

    fn of(self, block: u64) -> usize {
        ((self.0 >> (block * 4) & 0xF).trailing_zeros() as usize).min(GENERATIONS - 1)
    }

    /// The pages of the blocks in a generation.
    pub fn pages(self, generation: usize) -> PageMap {
        let blocks = (0..Self::COUNT).filter(|block| self.of(*block) == generation);
        blocks.fold(PageMap::NONE, |pages, block| {
            pages.or(PageMap::first((block + 1) * BLOCK).without(PageMap::first(block * BLOCK)))
        })
    }
}

/// The generation of a base page: youngest if the last scan of its unit saw it touched, one older for each that did
/// not, oldest if none did.
pub fn of_page(entry: Entry) -> usize {
    entry.age().min(SPAN) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Touched, untouched, or nothing learned.
    fn step(generations: &mut Generations, birth: &mut u32, seen: Option<bool>) {
        generations.advance();
        match seen {
            Some(true) => *birth = generations.touched(*birth),
            Some(false) => {}
            None => *birth = generations.unseen(*birth),
        }
    }

    proptest! {
        #[test]
        fn a_unit_moves_by_one_generation(history in proptest::collection::vec(any::<Option<bool>>(), 0..200)) {
            let mut generations = Generations::default();
            let (mut birth, mut expected) = (generations.youngest(), 0usize);
            for seen in history {
                step(&mut generations, &mut birth, seen);
                expected = match seen {
                    Some(true) => expected.saturating_sub(1),
                    Some(false) => (expected + 1).min(GENERATIONS - 1),
                    None => expected,
                };
                prop_assert_eq!(generations.of(birth), expected);
                prop_assert!(birth <= generations.youngest());
            }
        }

        #[test]
        fn a_base_page_is_never_older_than_a_fair_unit_with_the_same_history(
            history in proptest::collection::vec(any::<bool>(), 4..200),
        ) {
            let mut generations = Generations::default();
            let (mut birth, mut entry) = (0, Entry::default());
            for touched in history {
                step(&mut generations, &mut birth, Some(touched));
                entry.push(touched);
                prop_assert!(of_page(entry) <= generations.of(birth));
            }
        }
    }

    proptest! {
        #[test]
        fn a_touched_block_is_youngest_at_once_and_one_older_with_each_cycle_that_does_not_touch_it(
            start in 0..GENERATIONS, history in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let (mut blocks, mut expected) = (Blocks::all_in(start), [start; 8]);
            for touched in history {
                blocks = blocks.aged().touched(touched);
                for (block, generation) in expected.iter_mut().enumerate() {
                    *generation = if touched >> block & 1 == 1 { 0 } else { (*generation + 1).min(GENERATIONS - 1) };
                }
                for generation in 0..GENERATIONS {
                    let pages = blocks.pages(generation);
                    let of = |page: u64| expected[(page / BLOCK) as usize] == generation;
                    prop_assert!((0..512).all(|page| pages.get(page) == of(page)));
                }
            }
        }
    }

    #[test]
    fn a_unit_touched_every_third_cycle_ends_oldest_and_a_hot_one_youngest() {
        let mut generations = Generations::default();
        let (mut warm, mut hot) = (generations.youngest(), 0);
        for cycle in 0..12 {
            generations.advance();
            if cycle % 3 == 0 {
                warm = generations.touched(warm);
            }
            hot = generations.touched(hot);
        }
        assert_eq!((generations.of(warm), generations.of(hot)), (3, 0));
    }
}
