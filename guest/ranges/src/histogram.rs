//! How often each unit was sampled recently.
//!
//! Before: samples one by one. After: [`crate::fitted`] finds the ranges in it. New samples are kept in a list until
//! the end of an epoch, so that a sample costs a few nanoseconds.
//! Units: of 2 MiB; counts in [`SAMPLE`]ths. Promise: pure; 12 bytes for each unit that was sampled in the last epochs.

use crate::range::SAMPLE;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Unit {
    pub number: u32,
    /// Samples, in [`SAMPLE`]ths.
    pub count: u32,
    /// Variance of the count, in the same unit.
    pub variance: u32,
}

impl Unit {
    /// Samples of a unit, of which an observation counts as `each`.
    pub fn sampled(number: u32, samples: u32, each: u32) -> Self {
        let count = samples.saturating_mul(SAMPLE as u32);
        Self { number, count, variance: count.saturating_mul(each.max(1)) }
    }
}

#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// Ascending; no count is zero.
    units: Vec<Unit>,
    new: Vec<Unit>,
}

impl Histogram {
    pub fn record(&mut self, new: Unit) {
        self.new.push(new);
    }

    /// The units with a count, ascending, as of the last [`Self::count`].
    pub fn units(&self) -> &[Unit] {
        &self.units
    }

    pub fn halve(&mut self) {
        self.count();
        self.units.retain_mut(|unit| {
            (unit.count, unit.variance) = (unit.count / 2, unit.variance / 2);
            unit.count > 0
        });
    }

    /// Merges the recorded samples into the counts.
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_sample_is_counted_once_in_its_unit(samples in proptest::collection::vec((0u32..50, 0u32..5), 0..300)) {
            let mut histogram = Histogram::default();
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
    }
}
