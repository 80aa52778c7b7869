//! Percentiles, medians, spread, and the difference of two measurements of the same thing.
//!
//! Before: a bench has times of single touches, or figures of repetitions. After: a row has figures.
//! Threads: none. Units: those of the values; times of touches are given in ns and returned in us.
//! Promise: without values the result is `None`, or a summary that counts 0.

pub use ballast_testkit::random::next as random;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    /// Number of touches; if it is 0, so are the other fields.
    pub count: u64,
    pub p50_us: f64,
    pub p90_us: f64,
    pub p99_us: f64,
    pub max_us: f64,
}

impl Summary {
    /// The summary of times in nanoseconds, which this sorts.
    pub fn of(times_ns: &mut [u32]) -> Self {
        times_ns.sort_unstable();
        let us = |fraction| percentile(times_ns, fraction).map_or(0.0, |ns| f64::from(ns) / 1e3);
        let count = times_ns.len() as u64;
        Self { count, p50_us: us(0.5), p90_us: us(0.9), p99_us: us(0.99), max_us: us(1.0) }
    }
}

/// The smallest value that at least `fraction` of the values do not exceed (nearest rank).
pub fn percentile<T: Copy>(sorted: &[T], fraction: f64) -> Option<T> {
    let rank = (sorted.len() as f64 * fraction).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

pub fn geomean(values: &[f64]) -> f64 {
    (values.iter().map(|value| value.ln()).sum::<f64>() / values.len().max(1) as f64).exp()
}

/// A figure over the repetitions of a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Self { median: median(&sorted)?, min, max })
    }
}

/// The middle value, or the mean of the two in the middle.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => None,
        odd if odd % 2 == 1 => Some(sorted[middle]),
        _ => Some(f64::midpoint(sorted[middle - 1], sorted[middle])),
    }
}

/// The A/A noise: the difference in percent of two repetitions of the *same* measurement, adjacent in time; the median
/// over the pairs. A difference between two sides means something only if it is well above this.
pub fn aa_noise_pct(values: &[f64]) -> Option<f64> {
    let differ = |pair: &[f64; 2]| ((pair[1] / pair[0] - 1.0) * 100.0).abs();
    let (pairs, _) = values.as_chunks::<2>();
    median(&pairs.iter().map(differ).filter(|pct| pct.is_finite()).collect::<Vec<_>>())
}

/// The 95 % confidence interval of the median of such measurements (bootstrap).
pub fn median_ci95(values: &[f64]) -> Option<(f64, f64)> {
    const DRAWS: usize = 1000;
    let mut seed = 0;
    let mut draw = || values[((u128::from(random(&mut seed)) * values.len() as u128) >> 64) as usize];
    let mut medians: Vec<f64> =
        (0..DRAWS).filter_map(|_| median(&values.iter().map(|_| draw()).collect::<Vec<_>>())).collect();
    medians.sort_by(f64::total_cmp);
    Some((percentile(&medians, 0.025)?, percentile(&medians, 0.975)?))
}

/// The ratio of each repetition of one side to the repetition of the other side next to it.
pub fn ratios(ours: &[f64], theirs: &[f64]) -> Vec<f64> {
    ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).filter(|ratio| ratio.is_finite()).collect()
}

/// The mean; 0 without values.
pub fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Put values into an order that depends on the seed alone.
pub fn shuffle<T>(values: &mut [T], mut seed: u64) {
    for last in (1..values.len()).rev() {
        let other = (u128::from(random(&mut seed)) * (last as u128 + 1)) >> 64;
        values.swap(last, other as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_ranks() {
        let hundred: Vec<u32> = (1..=100).collect();
        for (fraction, expected) in [(0.0, 1), (0.5, 50), (0.501, 51), (0.99, 99), (1.0, 100)] {
            assert_eq!(percentile(&hundred, fraction), Some(expected), "{fraction}");
        }
        assert_eq!(percentile(&[7], 0.99), Some(7));
        assert_eq!(percentile::<u32>(&[], 0.5), None);
    }

    #[test]
    fn the_median_of_an_even_count_is_between_the_two_in_the_middle() {
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[5.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[]), None);
        assert_eq!(Spread::of(&[2.0, 9.0, 4.0]), Some(Spread { median: 4.0, min: 2.0, max: 9.0 }));
        assert_eq!(Spread::of(&[]), None);
    }

    #[test]
    fn noise_is_the_difference_of_neighbours_and_not_of_the_whole_run() {
        // A machine that becomes ten times slower half-way: neighbours still differ by 10 %.
        let noise = aa_noise_pct(&[1.0, 1.1, 10.0, 11.0]).expect("two pairs");
        assert!((noise - 10.0).abs() < 1e-9, "{noise}");
        assert_eq!(aa_noise_pct(&[1.0]), None);
    }

    #[test]
    fn the_interval_holds_the_median_and_narrows_with_more_values() {
        let values = |count: u64| (0..count).map(|i| (i * 37 % count) as f64 / count as f64).collect::<Vec<_>>();
        let (few, many) = (median_ci95(&values(10)).expect("few"), median_ci95(&values(1000)).expect("many"));
        assert!(few.0 < 0.5 && 0.5 < few.1 && many.0 < 0.5 && 0.5 < many.1, "{few:?} {many:?}");
        assert!(many.1 - many.0 < few.1 - few.0, "{few:?} {many:?}");
        assert_eq!(median_ci95(&[]), None);
    }

    #[test]
    fn ratios_pair_repetitions_and_leave_out_pairs_without_a_ratio() {
        assert_eq!(ratios(&[1.0, 2.0, 3.0], &[2.0, 0.0, 1.0]), [0.5, 3.0]);
    }
}
