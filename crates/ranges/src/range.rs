//! Ranges, what makes them, and their order by heat.
//!
//! Before: a source has samples of accesses. After: [`crate::relocate`] moves pages by the order.
//! Units: addresses and sizes in bytes, times in epochs. Promise: pure; of equal input the order is equal.

use std::cmp::Ordering;

/// Addresses that are taken to be equally hot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// Address behind the last one.
    pub end: u64,
    /// Samples in it, old ones for less, in [`SAMPLE`]ths.
    pub count: u64,
    /// The epoch in which it was made.
    pub born: u64,
}

/// What one new sample counts. Halved four times it is still something.
pub const SAMPLE: u64 = 16;

impl Range {
    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Is it hotter for its size than the other? Exact, whatever the counts.
    pub fn compare_frequency(&self, other: &Self) -> Ordering {
        let ours = u128::from(self.count) * u128::from(other.bytes());
        ours.cmp(&(u128::from(other.count) * u128::from(self.bytes())))
    }
}

/// Makes ranges from samples.
pub trait Classifier {
    /// As it stands in tables.
    fn name(&self) -> &'static str;

    /// Record accesses that a source has sampled. Those outside of all roots are counted apart.
    fn record(&mut self, address: u64, samples: u32);

    /// An epoch (500 ms) is over: make new ranges, then forget half.
    fn end_epoch(&mut self);

    /// The ranges of the last epoch, ascending; together they are the roots.
    fn ranges(&self) -> &[Range];

    /// How often ranges were divided so far.
    fn splits(&self) -> u64;

    /// Samples outside of all roots so far.
    fn outside(&self) -> u64;
}

/// Hottest first (§3.2.1): by accesses for its size, then the younger range, then the lower address.
pub fn rank(ranges: &[Range]) -> Vec<Range> {
    let mut ranked = ranges.to_vec();
    ranked.sort_by(|a, b| b.compare_frequency(a).then(b.born.cmp(&a.born)).then(a.start.cmp(&b.start)));
    ranked
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_ranked_by_accesses_for_their_size_then_youth_then_address() {
        let range = |start, end, count, born| Range { start, end, count, born };
        let dense = range(30, 40, 20, 0);
        let large = range(100, 1100, 1000, 0);
        let young = range(2000, 3000, 1000, 4);
        let cold = range(0, 10, 0, 9);
        let none = range(50, 60, 0, 9);
        assert_eq!(rank(&[cold, none, large, young, dense]), [dense, young, large, cold, none]);
        let most = range(0, u64::MAX, u64::MAX, 0);
        assert_eq!(most.compare_frequency(&range(0, 1, 1, 0)), Ordering::Equal);
    }
}
