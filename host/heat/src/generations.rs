//! Four generations, as in the kernel's multi-generational LRU.
//!
//! Before: a cycle said which units were touched. After: reclaim takes the oldest generation first.
//! Units: generation 0 is the youngest, 3 the oldest. Promise: pure.
//!
//! A huge page is 512 times as likely to be touched as a base page, so a touch of it must count less. *Fair* promotion
//! (Blowfish, 4.3.1): a touched base page becomes youngest at once; a touched huge page becomes one generation younger;
//! an untouched one becomes one older. A huge page that is touched in most cycles becomes young, one that is touched
//! rarely drifts into the oldest generation.
//!
//! Seeing the touch of each base page would cost a fault for each. A cycle sees *blocks* of 64 base pages cheaply, so
//! blocks have generations, and a base page has that of its block until a fine scan knows more.

use crate::source::PageMap;

pub const OLDEST: u8 = 3;

pub fn after_cycle(generation: u8, touched: bool) -> u8 {
    if touched { generation.saturating_sub(1) } else { (generation + 1).min(OLDEST) }
}

/// Generations of the eight blocks of a unit that is not one huge page, by the rule of base pages.
///
/// Four bits for each block: the last cycles that saw the unit, the newest in bit 0. By default all are oldest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks(u32);

impl Blocks {
    pub fn all_in(generation: u8) -> Self {
        Self(0x1111_1111 << generation.min(OLDEST))
    }

    /// All blocks one generation older, but the touched ones youngest.
    #[must_use]
    pub fn after_cycle(self, touched: u8) -> Self {
        // A block's oldest bit must not become the next block's newest.
        let aged = self.0 << 1 & 0xEEEE_EEEE;
        let newest = (0..8).map(|block| u32::from(touched >> block & 1) << (block * 4));
        Self(newest.fold(aged, |bits, bit| bits | bit))
    }

    fn of(self, block: usize) -> u8 {
        ((self.0 >> (block * 4) & 0xF).trailing_zeros() as u8).min(OLDEST)
    }

    pub fn pages(self, generation: u8) -> PageMap {
        PageMap(std::array::from_fn(|block| if self.of(block) == generation { u64::MAX } else { 0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::BLOCK;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_touched_block_is_youngest_at_once_and_ages_with_each_cycle_without_a_touch(
            start in 0..=OLDEST, history in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let (mut blocks, mut expected) = (Blocks::all_in(start), [start; 8]);
            for touched in history {
                blocks = blocks.after_cycle(touched);
                for (block, generation) in expected.iter_mut().enumerate() {
                    *generation = if touched >> block & 1 == 1 { 0 } else { (*generation + 1).min(OLDEST) };
                }
                for generation in 0..=OLDEST {
                    let pages = blocks.pages(generation);
                    let of = |page: u64| expected[(page / BLOCK) as usize] == generation;
                    prop_assert!((0..512).all(|page| pages.get(page) == of(page)));
                }
            }
        }
    }

    #[test]
    fn a_unit_touched_every_third_cycle_ends_oldest_and_a_hot_one_youngest() {
        let (mut warm, mut hot) = (0, OLDEST);
        for cycle in 0..12 {
            warm = after_cycle(warm, cycle % 3 == 0);
            hot = after_cycle(hot, true);
        }
        assert_eq!((warm, hot), (OLDEST, 0));
    }
}
