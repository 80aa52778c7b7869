//! Ranges, and their order by heat.
//!
//! Before: a source has samples of accesses. After: [`crate::relocate`] moves pages by the order.
//! Units: addresses and sizes in bytes, times in epochs. Promise: pure; equal input gives an equal order.

use std::cmp::Ordering;

/// Addresses that are taken to be equally hot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// First address.
    pub start: u64,
    /// Address after the last one.
    pub end: u64,
    /// Samples in it, in [`SAMPLE`]ths; older ones count less.
    pub count: u64,
    /// Variance of `count`, in [`SAMPLE`]ths: `count` if each sample was an observation of its own, more if an
    /// observation counts as several.
    pub variance: u64,
    /// The epoch in which it was made.
    pub born: u64,
}

/// Count of one new sample. It can be halved four times.
pub const SAMPLE: u64 = 16;

impl Range {
    /// Returns its size.
    pub fn bytes(&self) -> u64 {
        self.end - self.start
    }

    /// Compares the samples for each byte of two ranges, exactly for any counts.
    pub fn compare_frequency(&self, other: &Self) -> Ordering {
        let ours = u128::from(self.count) * u128::from(other.bytes());
        ours.cmp(&(u128::from(other.count) * u128::from(self.bytes())))
    }
}

/// Sorts ranges, the hottest first (§3.2.1): by accesses for each byte, then the younger range, then the lower address.
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
        let range = |start, end, count, born| Range { start, end, count, variance: count, born };
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
