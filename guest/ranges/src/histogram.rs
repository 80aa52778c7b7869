//! How often each unit was sampled recently: exact while it fits, unbiased and bounded always.
//!
//! Before: samples one by one. After: [`crate::fitted`] finds the ranges in it. New samples are kept in a list and
//! counted when it is full, so that a sample costs a few nanoseconds.
//! Units: of 2 MiB; counts in [`SAMPLE`]ths. Promise: pure; at most [`MOST_UNITS`] units and [`MOST_NEW`] samples are
//! held, 4 MiB, and twice that while they are counted.

use crate::range::SAMPLE;

/// Most units with a count. 512 GiB that are touched within a few seconds.
pub const MOST_UNITS: usize = 1 << 18;
/// Most samples that are not counted yet.
const MOST_NEW: usize = 1 << 16;

/// A unit that was sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unit {
    /// Its number.
    pub number: u32,
    /// Samples, in [`SAMPLE`]ths.
    pub count: u32,
    /// Its variance, in the same.
    pub variance: u32,
}

impl Unit {
    /// Samples of a unit, of which an observation counts as `each`.
    pub fn sampled(number: u32, samples: u32, each: u32) -> Self {
        let count = samples.saturating_mul(SAMPLE as u32);
        Self { number, count, variance: count.saturating_mul(each.max(1)) }
    }
}

/// Counts of units.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Ascending; no count is zero.
    units: Vec<Unit>,
    new: Vec<Unit>,
    most: usize,
    /// Smallest count that is told from zero: a sample, or more since counts were thinned.
    grain: u32,
}

impl Histogram {
    /// For at most this number of units.
    pub fn new(most: usize) -> Self {
        Self { units: Vec::new(), new: Vec::new(), most: most.max(1), grain: SAMPLE as u32 }
    }

    /// Record samples of a unit.
    pub fn record(&mut self, new: Unit) {
        self.new.push(new);
        if self.new.len() >= MOST_NEW {
            self.count();
        }
    }

    /// The units with a count, ascending, as of the last [`Self::count`].
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    /// Returns the count that weighs as one sample. A unit that was kept when counts were thinned also stands for units
    /// that were dropped, so its larger count is no stronger evidence than one sample.
    pub fn grain(&self) -> u64 {
        self.grain.into()
    }

    /// Halves every count.
    pub fn halve(&mut self) {
        self.count();
        self.grain = (self.grain / 2).max(SAMPLE as u32);
        self.units.retain_mut(|unit| {
            (unit.count, unit.variance) = (unit.count / 2, unit.variance / 2);
            unit.count > 0
        });
    }

    /// Counts the recorded samples.
    pub fn count(&mut self) {
        if self.new.is_empty() {
            return;
        }
        self.new.sort_unstable_by_key(|unit| unit.number);
        let mut merged: Vec<Unit> = Vec::with_capacity(self.units.len() + self.new.len());
        let (mut old, mut new) = (self.units.iter().peekable(), self.new.iter().peekable());
        loop {
            let next = match (old.peek(), new.peek()) {
                (Some(a), Some(b)) if a.number <= b.number => old.next(),
                (Some(_), None) => old.next(),
                _ => new.next(),
            };
            let Some(next) = next else { break };
            match merged.last_mut() {
                Some(last) if last.number == next.number => {
                    last.count = last.count.saturating_add(next.count);
                    last.variance = last.variance.saturating_add(next.variance);
                }
                _ => merged.push(*next),
            }
        }
        merged.retain(|unit| unit.count > 0);
        self.new.clear();
        self.units = merged;
        for least in (1..63).map(|bits| 1u64 << bits) {
            if self.units.len() <= self.most {
                break;
            }
            self.thin(least);
        }
        self.units.truncate(self.most);
    }

    /// Thins the counts to free space: each count below `least`, a power of two, becomes `least` or zero at random, so
    /// that the expected count of any part of memory stays the same, as far as a count can hold it.
    fn thin(&mut self, least: u64) {
        self.grain = self.grain.max(u32::try_from(least).unwrap_or(u32::MAX));
        self.units.retain_mut(|unit| {
            let count = u64::from(unit.count);
            if count >= least {
                return true;
            }
            let variance = u64::from(unit.variance).saturating_mul(least) / count.max(1);
            let most = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
            (unit.count, unit.variance) = (most(least), most(variance));
            mixed(u64::from(unit.number) ^ least << 32) % least < count
        });
    }
}

/// Mixes a number (the last steps of SplitMix64), so that whether a unit stays does not depend on its address.
fn mixed(number: u64) -> u64 {
    let mixed = (number ^ number >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ mixed >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_sample_is_counted_once_in_its_unit(samples in proptest::collection::vec((0u32..50, 0u32..5), 0..300)) {
            let mut histogram = Histogram::new(MOST_UNITS);
            let mut expected = [0u32; 50];
            for (number, count) in &samples {
                histogram.record(Unit::sampled(*number, *count, 3));
                expected[*number as usize] += count * SAMPLE as u32;
            }
            histogram.count();
            let nonzero = (0..).zip(expected).filter(|(_, count)| *count > 0);
            let expected: Vec<Unit> =
                nonzero.map(|(number, count)| Unit { number, count, variance: 3 * count }).collect();
            prop_assert_eq!(histogram.units(), &expected[..]);
            histogram.halve();
            let halved: Vec<Unit> = expected.iter().map(|unit| {
                Unit { count: unit.count / 2, variance: unit.variance / 2, ..*unit }
            }).collect();
            prop_assert_eq!(histogram.units(), &halved[..]);
        }

        #[test]
        fn it_stays_bounded_whatever_it_is_given(
            samples in proptest::collection::vec(any::<(u32, u32)>(), 0..500), most in 0usize..40,
        ) {
            let mut histogram = Histogram::new(most);
            for (number, count) in samples {
                histogram.record(Unit::sampled(number, count, 1));
            }
            histogram.count();
            prop_assert!(histogram.units().len() <= most.max(1));
            prop_assert!(histogram.units().is_sorted_by(|a, b| a.number < b.number));
        }
    }

    #[test]
    fn what_makes_room_leaves_the_sum_of_a_part_of_memory_nearly_as_it_was() {
        let mut histogram = Histogram::new(10_000);
        for number in 0..60_000 {
            // One part is twice as hot as the other.
            histogram.record(Unit::sampled(number, if number < 30_000 { 2 } else { 1 }, 1));
        }
        histogram.count();
        let units = histogram.units();
        let sum = |part: &[Unit]| part.iter().map(|unit| f64::from(unit.count)).sum::<f64>() / SAMPLE as f64;
        let (hot, cold) = units.split_at(units.partition_point(|unit| unit.number < 30_000));
        assert!(units.len() <= 10_000, "{}", units.len());
        assert!((sum(hot) / 60_000.0 - 1.0).abs() < 0.05 && (sum(cold) / 30_000.0 - 1.0).abs() < 0.05);
    }
}
