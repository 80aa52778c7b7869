//! Our rule: ranges are fitted to the samples. A range is divided where the gain in likelihood exceeds the price of a
//! further range, at any depth.
//!
//! The published rule compares a range with its neighbours. If hot units are scattered evenly, large neighbours are
//! equally hot, and it divides nothing; only small ranges differ. So this rule starts with the smallest ranges:
//!
//! ```text
//! count      samples of the last epochs by unit of 2 MiB, halved in each epoch ([`crate::histogram`])
//! divide     each root into halves, halves of halves, ... units; from the smallest up, two halves stay divided if
//!                fit(low) + fit(high) - PRICE > fit(both),   fit(range) = count * ln(count / units)
//!            where the fit of a half is that of its best division, so one deep difference keeps all divisions above it
//! join       neighbours at the same price, also those that are not halves of one range
//! ```
//!
//! `fit` is the log-likelihood of the samples if all units of a range are equally hot (Poisson), without the terms that
//! are the same for all divisions. Evenly spread heat is one range; one hot spot is found in one epoch at any depth.
//!
//! Before: samples, by address. After: ranges. Units: counts in [`SAMPLE`]ths, positions in units of 2 MiB.
//! Promise: pure; the same samples give the same ranges.

use crate::histogram::{Histogram, Unit};
use crate::range::{Range, SAMPLE};
use crate::roots::Roots;

/// Least gain in log-likelihood of a further range. Akaike's price of a parameter is 1; with it, evenly spread heat
/// begins as 831 ranges by chance, with this as some 10. A price above 2 loses much if each unit has its own heat: a
/// quarter of what a price of 0.5 finds with 2,000 samples a second.
const PRICE: f64 = 1.5;
/// A range with this number of [`SAMPLE`]ths or fewer is never divided: a division gains at most `ln(3)` for each
/// sample (three units, all samples in the lower half, which is one unit), which is less than the price. Without this
/// check, half a million units a second anywhere in 64 TiB took a third of a CPU.
const TOO_FEW: u64 = 21;

#[derive(Clone, Copy, Debug)]
struct Leaf {
    first: u64,
    units: u64,
    count: u64,
}

impl Leaf {
    fn fit(&self) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let samples = self.count as f64 / SAMPLE as f64;
        samples * (samples / self.units as f64).ln()
    }

    fn with(&self, next: &Self) -> Self {
        Self { first: self.first, units: self.units + next.units, count: self.count + next.count }
    }
}

/// Our rule.
#[derive(Clone, Debug)]
pub struct Fitted {
    roots: Roots,
    histogram: Histogram,
    /// Ascending; they tile the roots.
    ranges: Vec<Range>,
    epoch: u64,
}

impl Fitted {
    /// Starts with one range for each root.
    pub fn new(roots: Roots) -> Self {
        let ranges = roots.ranges().map(|(start, end)| Range { start, end, count: 0, variance: 0, born: 0 }).collect();
        Self { roots, histogram: Histogram::default(), ranges, epoch: 0 }
    }
}

/// Finds the best division of these units into halves of halves. Appends it to `leaves` and returns its fit, less its
/// price, and the total count. The recursion is at most 33 deep, because unit numbers have 32 bits.
fn divide(samples: &[Unit], first: u64, units: u64, leaves: &mut Vec<Leaf>) -> (f64, u64) {
    // Each unit has at least one SAMPLEth.
    let is_short = samples.len() as u64 <= TOO_FEW;
    let count = if is_short { samples.iter().map(|unit| u64::from(unit.count)).sum() } else { u64::MAX };
    if units == 1 || count <= TOO_FEW {
        let leaf = Leaf { first, units, count };
        leaves.push(leaf);
        return (leaf.fit(), leaf.count);
    }
    let (mark, low_units, middle) = (leaves.len(), units / 2, first + units / 2);
    let (low, high) = samples.split_at(samples.partition_point(|unit| u64::from(unit.number) < middle));
    let (low_fit, low_count) = divide(low, first, low_units, leaves);
    let (high_fit, high_count) = divide(high, middle, units - low_units, leaves);
    let both = Leaf { first, units, count: low_count + high_count };
    let apart = low_fit + high_fit - PRICE;
    if apart > both.fit() {
        return (apart, both.count);
    }
    leaves.truncate(mark);
    leaves.push(both);
    (both.fit(), both.count)
}

/// Joins neighbours whose division does not gain its price.
fn join(leaves: &[Leaf]) -> Vec<Leaf> {
    let mut joined: Vec<Leaf> = Vec::with_capacity(leaves.len());
    for leaf in leaves {
        let mut next = *leaf;
        while let Some(last) = joined.last() {
            let both = last.with(&next);
            if last.fit() + next.fit() - PRICE > both.fit() {
                break;
            }
            next = both;
            joined.pop();
        }
        joined.push(next);
    }
    joined
}

impl Fitted {
    /// Records accesses that a source has sampled, unless they are outside of all roots. An observation counts as
    /// `each` samples, here and at other addresses: more than 1 if one page was looked at for a large range.
    pub fn record(&mut self, address: u64, samples: u32, each: u32) {
        if let Some(unit) = self.roots.unit_of(address) {
            self.histogram.record(Unit::sampled(unit, samples, each));
        }
    }

    /// Ends an epoch (500 ms): makes new ranges, then halves all counts.
    pub fn end_epoch(&mut self) {
        self.epoch += 1;
        self.histogram.count();
        let samples = self.histogram.units();
        // The last range of each root.
        let mut parts = Vec::new();
        for (first, units) in self.roots.spans() {
            let from = samples.partition_point(|unit| u64::from(unit.number) < first);
            let to = samples.partition_point(|unit| u64::from(unit.number) < first + units);
            let mut leaves = Vec::new();
            divide(&samples[from..to], first, units, &mut leaves);
            parts.push(join(&leaves));
        }
        let before = std::mem::take(&mut self.ranges);
        for leaf in parts.iter().flatten() {
            let (start, end) = self.roots.addresses(leaf.first, leaf.units);
            let at = before.partition_point(|range| range.start < start);
            let same = before.get(at).filter(|range| range.start == start && range.end == end);
            let born = same.map_or(self.epoch, |range| range.born);
            let from = samples.partition_point(|unit| u64::from(unit.number) < leaf.first);
            let units = samples[from..].iter().take_while(|unit| u64::from(unit.number) < leaf.first + leaf.units);
            let variance = units.map(|unit| u64::from(unit.variance)).sum();
            self.ranges.push(Range { start, end, count: leaf.count, variance, born });
        }
        self.histogram.halve();
    }

    /// Returns the ranges of the last epoch, ascending; together they are the roots.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// Returns the count of the unit of 2 MiB with this address after the last epoch's end, in [`SAMPLE`]ths: half of
    /// the sum of the former count and the new samples.
    pub fn recent(&self, address: u64) -> u64 {
        let Some(unit) = self.roots.unit_of(address) else { return 0 };
        let units = self.histogram.units();
        units.binary_search_by_key(&unit, |unit| unit.number).map_or(0, |at| units[at].count.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The fit of the best division, by trying all divisions.
    fn best(counts: &[u32]) -> f64 {
        let count = counts.iter().map(|count| u64::from(*count)).sum();
        let whole = Leaf { first: 0, units: counts.len() as u64, count }.fit();
        let (low, high) = counts.split_at(counts.len() / 2);
        if low.is_empty() { whole } else { whole.max(best(low) + best(high) - PRICE) }
    }

    proptest! {
        #[test]
        fn no_division_into_halves_of_halves_describes_the_samples_better(
            counts in proptest::collection::vec(prop_oneof![4 => Just(0u32), 4 => 0u32..40, 1 => 0u32..5000], 1..70),
        ) {
            let units = (0..).zip(&counts).filter(|(_, count)| **count > 0);
            let unit = |(number, count): (u32, &u32)| Unit { number, count: *count, variance: *count };
            let units: Vec<Unit> = units.map(unit).collect();
            let mut leaves = Vec::new();
            let (fit, count) = divide(&units, 0, counts.len() as u64, &mut leaves);
            prop_assert!((fit - best(&counts)).abs() < 1e-6, "{fit}, {} is possible: {leaves:?}", best(&counts));
            prop_assert_eq!(count, counts.iter().map(|count| u64::from(*count)).sum::<u64>());
            prop_assert_eq!(leaves.iter().map(|leaf| leaf.count).sum::<u64>(), count);
            prop_assert_eq!(leaves.iter().map(|leaf| leaf.units).sum::<u64>(), counts.len() as u64);
        }
    }

    #[test]
    fn what_is_too_few_never_pays_for_a_range() {
        let most = TOO_FEW as f64 / SAMPLE as f64 * 3f64.ln();
        assert!(most <= PRICE && most + 3f64.ln() / SAMPLE as f64 > PRICE, "{most}");
    }
}
