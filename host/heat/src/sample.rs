//! Sample: estimates which share of a unit is touched from a random sample of its pages.
//!
//! Before: the subpage tracker wants to know which hot units are worth a full scan. After: those that may be bloated
//! get one. A full scan costs the guest a fault for every page it touches; a sample of 32 pages a sixteenth of that.
//! Units: shares of 1. Promise: pure; the same seed gives the same pages.

use ballast_base::PAGES_PER_UNIT;

use crate::source::{BLOCK, PageMap};

/// A small random number generator: well distributed, and predictable from its seed.
#[derive(Clone, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// From a seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ mixed >> 31
    }

    /// The next number below `limit`, which is not 0.
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(limit)) >> 64) as u64
    }

    /// `count` of the first `of` pages, each set of that size as likely as any other; all if there are not more.
    pub fn pages(&mut self, count: u64, of: u64) -> PageMap {
        let of = of.min(PAGES_PER_UNIT);
        let mut picked = PageMap::NONE;
        // Floyd's algorithm: one random number for each page.
        for top in of.saturating_sub(count)..of {
            let page = self.below(top + 1);
            picked.set(if picked.get(page) { top } else { page });
        }
        picked
    }

    /// The same of a unit of `of` pages: from each of its blocks as many as from any other, if it is whole.
    pub fn spread(&mut self, count: u64, of: u64) -> PageMap {
        const BLOCKS: u64 = PAGES_PER_UNIT / BLOCK;
        if of < PAGES_PER_UNIT || count >= of || !count.is_multiple_of(BLOCKS) {
            return self.pages(count, of);
        }
        // A block is a word of the map.
        PageMap(std::array::from_fn(|_| self.pages(count / BLOCKS, BLOCK).0[0]))
    }
}

/// Share of a unit's pages that were touched, as far as is known.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Estimate {
    /// The best estimate.
    pub share: f64,
    /// The true share is at least this, in 19 of 20 cases.
    pub low: f64,
    /// And at most this.
    pub high: f64,
}

impl Estimate {
    /// From `touched` pages among `watched`, which are a random sample of `of`.
    ///
    /// Wilson's interval, with the correction for a finite population: with all pages watched it is a point. Unlike the
    /// normal interval it has a width when no page, or every page, of a small sample was touched.
    pub fn new(touched: u64, watched: u64, of: u64) -> Self {
        const Z: f64 = 1.96;
        if watched == 0 || of == 0 {
            return Self { share: 0.5, low: 0.0, high: 1.0 };
        }
        let of = of.max(watched);
        let (n, p) = (watched as f64, touched.min(watched) as f64 / watched as f64);
        let rest = if of > 1 { (of - watched) as f64 / (of - 1) as f64 } else { 0.0 };
        let z2 = Z * Z * rest;
        let middle = (p + z2 / (2.0 * n)) / (1.0 + z2 / n);
        let half = (z2 * (p * (1.0 - p) / n + z2 / (4.0 * n * n))).sqrt() / (1.0 + z2 / n);
        // What was seen is certain: these are touched, those are not.
        let floor = touched.min(watched) as f64 / of as f64;
        let ceiling = 1.0 - (watched - touched.min(watched)) as f64 / of as f64;
        // Rounding must not push the estimate out of the interval.
        Self { share: p, low: (middle - half).max(floor).min(p), high: (middle + half).min(ceiling).max(p) }
    }

    /// May fewer than this share of the pages be touched?
    pub fn may_be_below(&self, share: f64) -> bool {
        self.low < share
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_sample_has_the_size_asked_for_and_only_pages_there_are(seed: u64, count in 0u64..600, of in 0u64..600) {
            let picked = SplitMix64::new(seed).pages(count, of);
            prop_assert_eq!(picked.count(), count.min(of).min(512));
            prop_assert!(picked.without(PageMap::first(of)).is_empty());
            let spread = SplitMix64::new(seed).spread(count, of);
            prop_assert_eq!(spread.count(), picked.count());
            prop_assert!(spread.without(PageMap::first(of)).is_empty());
            let even = spread.0.iter().all(|word| word.count_ones() == spread.0[0].count_ones());
            prop_assert!(even || of < 512 || count % 8 != 0);
        }

        #[test]
        fn an_estimate_is_a_share_within_its_interval(touched in 0u64..600, watched in 0u64..512, of in 0u64..600) {
            let estimate = Estimate::new(touched, watched, of);
            prop_assert!(0.0 <= estimate.low && estimate.low <= estimate.high && estimate.high <= 1.0, "{estimate:?}");
            let (low, high) = (estimate.low - 1e-9, estimate.high + 1e-9);
            prop_assert!((low..=high).contains(&estimate.share), "{estimate:?}");
        }
    }

    #[test]
    fn a_full_scan_has_no_error() {
        let estimate = Estimate::new(100, 512, 512);
        assert!((estimate.share - 100.0 / 512.0).abs() < 1e-9 && estimate.high - estimate.low < 1e-9, "{estimate:?}");
    }

    #[test]
    fn the_truth_is_in_the_interval_in_at_least_nine_of_ten_draws() {
        let mut rng = SplitMix64::new(7);
        for hot in [0, 8, 50, 102, 256, 410, 512] {
            let truth = rng.pages(hot, 512);
            let hits = (0..1000)
                .filter(|_| {
                    let watched = rng.pages(32, 512);
                    let seen = Estimate::new(watched.and(truth).count(), 32, 512);
                    let share = hot as f64 / 512.0;
                    seen.low <= share && share <= seen.high
                })
                .count();
            assert!(hits >= 900, "{hot} hot pages: in {hits} of 1000 intervals");
        }
    }

    #[test]
    fn an_evenly_hot_unit_needs_no_full_scan_and_a_bloated_one_does() {
        assert!(!Estimate::new(30, 32, 512).may_be_below(0.2));
        assert!(!Estimate::new(16, 32, 512).may_be_below(0.2));
        assert!(Estimate::new(3, 32, 512).may_be_below(0.2));
    }
}
