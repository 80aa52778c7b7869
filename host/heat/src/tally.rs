//! Tally: what samples of a unit say of its blocks, each of [`BLOCK`] pages.
//!
//! Before: fine cycles watched some pages of each block. After: placement knows which blocks are hotter than the
//! others, at the cost of some faults, where a full scan of the unit takes hundreds.
//! Units: pages, those of older samples at a lower weight. Promise: pure; 64 bytes.

use crate::source::{BLOCK, PageMap};

const BLOCKS: usize = 8;
const ALL: [usize; BLOCKS] = [0, 1, 2, 3, 4, 5, 6, 7];
/// Weight of what was known before, at each further sample.
const KEPT: f32 = 0.75;
/// Blocks differ if Pearson's statistic of their touched pages is above this: one of 40,000 units whose blocks are
/// equally hot seems uneven (seven degrees of freedom). It is at most the number of pages, so one sample cannot tell.
const UNEVEN: f64 = 33.0;
/// They may differ, and a second sample is worth its cost: one of 20 even units.
const MAYBE_UNEVEN: f64 = 14.0;
/// Pages of a sample.
const SAMPLE: f64 = 32.0;
/// Weight of the pages of two samples: with these, a unit that is not known to be uneven gets no third one at once.
const TWO_SAMPLES: f32 = 48.0;

/// What a unit's samples tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    /// Nothing of its blocks: they may be equally hot, or all bloated.
    Nothing,
    /// Its blocks may differ: another sample will tell.
    Maybe,
    /// Some blocks are hotter than others, and most pages of the hottest one are touched. A full scan would tell little
    /// more.
    Blocks,
}

/// Pages that were watched and touched, by block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Tally {
    watched: [f32; BLOCKS],
    touched: [f32; BLOCKS],
}

impl Tally {
    /// Adds a sample.
    pub fn push(&mut self, watched: PageMap, touched: PageMap) {
        for (block, (watched, touched)) in watched.0.iter().zip(touched.0).enumerate() {
            self.watched[block] = self.watched[block] * KEPT + watched.count_ones() as f32;
            self.touched[block] = self.touched[block] * KEPT + (watched & touched).count_ones() as f32;
        }
    }

    /// The share of the pages of these blocks that are touched.
    fn share(&self, blocks: &[usize]) -> f64 {
        let sum = |pages: &[f32; BLOCKS]| blocks.iter().map(|block| f64::from(pages[*block])).sum::<f64>();
        sum(&self.touched) / sum(&self.watched).max(1.0)
    }

    /// The share of all pages that is probably touched, if it was this share of other units before anything was known
    /// of this one: that weighs as much as a sample. By samples alone, equal units would change places by chance.
    pub fn expected(&self, of_others: f64) -> f64 {
        let sum = |pages: &[f32; BLOCKS]| f64::from(pages.iter().sum::<f32>());
        (sum(&self.touched) + of_others * SAMPLE) / (sum(&self.watched) + SAMPLE)
    }

    /// Pearson's statistic: how much the blocks differ. By chance alone it is 7 on average, one less than the blocks.
    fn apart(&self) -> f64 {
        let share = self.share(&ALL);
        let chance = share * (1.0 - share);
        let of = |block: &usize| f64::from(self.watched[*block]) * (self.share(&[*block]) - share).powi(2) / chance;
        if chance > 0.0 { ALL.iter().map(of).sum() } else { 0.0 }
    }

    /// Are some blocks hotter than others, and not only by chance?
    pub fn is_uneven(&self) -> bool {
        self.apart() > UNEVEN
    }

    /// The share of the hottest block.
    fn hottest(&self) -> f64 {
        ALL.iter().map(|block| self.share(&[*block])).fold(0.0, f64::max)
    }

    /// What it tells.
    pub fn told(&self) -> Told {
        if self.is_uneven() && self.hottest() > 0.5 {
            return Told::Blocks;
        }
        let few = self.watched.iter().sum::<f32>() < TWO_SAMPLES;
        if few && self.apart() > MAYBE_UNEVEN { Told::Maybe } else { Told::Nothing }
    }

    /// All pages: those of hot blocks, with the share of them that is touched, then the others. By shares of their own,
    /// cold blocks would change places by chance.
    pub fn levels(&self) -> Vec<(f64, PageMap)> {
        let pages = |of: &[usize]| PageMap(std::array::from_fn(|word| if of.contains(&word) { u64::MAX } else { 0 }));
        let (is_uneven, hottest) = (self.is_uneven(), self.hottest());
        let (hot, rest): (Vec<usize>, Vec<usize>) =
            ALL.iter().partition(|block| !is_uneven || self.share(&[**block]) > hottest / 2.0);
        let levels = [hot, rest].into_iter().filter(|blocks| !blocks.is_empty());
        levels.map(|blocks| (self.share(&blocks), pages(&blocks))).collect()
    }
}

const _: () = assert!(BLOCK == 64, "a block is a word of a map");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::SplitMix64;

    /// Samples of a unit whose blocks' pages are touched with these chances.
    fn sampled(samples: usize, chances: [f64; BLOCKS], rng: &mut SplitMix64) -> Tally {
        let mut tally = Tally::default();
        for _ in 0..samples {
            let watched = rng.spread(32, 512);
            let mut touched = PageMap::NONE;
            for page in watched.iter() {
                if (rng.below(1 << 20) as f64) < chances[(page / BLOCK) as usize] * f64::from(1 << 20) {
                    touched.set(page);
                }
            }
            tally.push(watched, touched);
        }
        tally
    }

    #[test]
    fn what_is_expected_of_a_unit_begins_with_what_others_have_and_ends_with_its_own_samples() {
        let mut rng = SplitMix64::new(2);
        assert_eq!(Tally::default().expected(0.2), 0.2);
        let one = sampled(1, [1.0; BLOCKS], &mut rng).expected(0.2);
        let many = sampled(40, [1.0; BLOCKS], &mut rng).expected(0.2);
        assert!((one - 0.6).abs() < 0.01 && many > 0.8, "{one} {many}");
    }

    #[test]
    fn two_or_three_samples_tell_a_hot_block_and_which_it_is() {
        let mut rng = SplitMix64::new(1);
        let chances = std::array::from_fn(|block| if block == 5 { 0.95 } else { 0.05 });
        let told = |samples, rng: &mut SplitMix64| {
            (0..1000).filter(|_| sampled(samples, chances, rng).told() == Told::Blocks).count()
        };
        assert_eq!(told(1, &mut rng), 0, "one sample alone never does");
        let (two, three) = (told(2, &mut rng), told(3, &mut rng));
        assert!(two > 700 && three > 950, "{two} {three}");
        let maybe = (0..1000).filter(|_| sampled(1, chances, &mut rng).told() == Told::Maybe).count();
        assert!(maybe > 700, "{maybe}");
        let (share, hottest) = sampled(3, chances, &mut rng).levels()[0];
        assert!(share > 0.5 && hottest.count() == BLOCK && hottest.get(5 * BLOCK), "{share} {hottest:?}");
    }

    #[test]
    fn blocks_that_are_equally_hot_are_not_told_apart_however_often_they_are_sampled() {
        let mut rng = SplitMix64::new(2);
        for chance in [0.0, 0.02, 0.1, 0.5, 0.9, 1.0] {
            for samples in [1, 2, 3, 10] {
                let uneven = (0..1000).filter(|_| sampled(samples, [chance; BLOCKS], &mut rng).is_uneven()).count();
                assert!(uneven <= 1, "{chance}, {samples} samples: {uneven} of 1000");
            }
        }
    }

    #[test]
    fn a_block_of_which_few_pages_are_hot_still_needs_a_full_scan() {
        let mut rng = SplitMix64::new(3);
        let chances = std::array::from_fn(|block| if block == 2 { 0.3 } else { 0.0 });
        assert_eq!(sampled(20, chances, &mut rng).told(), Told::Nothing);
    }

    #[test]
    fn a_unit_that_has_changed_is_told_by_its_last_samples() {
        let mut rng = SplitMix64::new(4);
        let only = |hot: usize| std::array::from_fn(|block| if block == hot { 1.0 } else { 0.0 });
        let mut tally = sampled(10, only(1), &mut rng);
        for _ in 0..8 {
            let watched = rng.spread(32, 512);
            tally.push(watched, watched.and(PageMap::first(BLOCK)));
        }
        let levels = tally.levels();
        assert!(tally.told() == Told::Blocks && levels[0].1 == PageMap::first(BLOCK), "{levels:?}");
    }

    #[test]
    fn hot_blocks_are_one_level_and_colder_ones_another() {
        let mut rng = SplitMix64::new(5);
        let chances = [0.02, 1.0, 0.1, 0.9, 0.02, 0.02, 0.9, 0.02];
        let levels: Vec<u64> = sampled(30, chances, &mut rng).levels().iter().map(|(_, pages)| pages.count()).collect();
        assert_eq!(levels, [3 * 64, 5 * 64]);
    }

    #[test]
    fn a_short_unit_and_no_sample_at_all_are_even() {
        assert_eq!(Tally::default().levels(), [(0.0, PageMap::ALL)]);
        let mut tally = Tally::default();
        (0..4).for_each(|_| tally.push(PageMap::first(10), PageMap::first(3)));
        assert_eq!((tally.told(), tally.levels().len()), (Told::Nothing, 1));
    }
}
