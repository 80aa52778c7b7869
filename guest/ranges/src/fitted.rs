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
//! Promise: pure; at most [`MOST_RANGES`] ranges, beside the memory of [`crate::histogram`]; the same samples give the
//! same ranges.

use crate::histogram::{Histogram, MOST_UNITS, Unit};
use crate::range::{Classifier, Range, SAMPLE};
use crate::roots::Roots;

/// Most ranges: each unit of 128 GiB. Where there are more, ranges are joined whether they are alike or not.
pub const MOST_RANGES: usize = 1 << 16;
/// Least gain in log-likelihood of a further range. Akaike's price of a parameter is 1; with it, evenly spread heat
/// begins as 831 ranges by chance, with this as some 10. More than 2 loses much if each unit has its own heat: a
/// quarter of what 0.5 finds with 2,000 samples a second.
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
    /// The fit, if a sample counts `grain`.
    fn fit(&self, grain: u64) -> f64 {
        if self.count == 0 {
            return 0.0;
        }
        let samples = self.count as f64 / grain as f64;
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
    splits: u64,
    outside: u64,
}

impl Fitted {
    /// Starts with one range for each root.
    pub fn new(roots: Roots) -> Self {
        let ranges = roots.ranges().map(|(start, end)| Range { start, end, count: 0, variance: 0, born: 0 }).collect();
        Self { roots, histogram: Histogram::new(MOST_UNITS), ranges, epoch: 0, splits: 0, outside: 0 }
    }
}

/// Finds the best division of these units into halves of halves. Appends it to `leaves` and returns its fit, less its
/// price, and the total count. The recursion is at most 33 deep, because unit numbers have 32 bits.
fn divide(samples: &[Unit], grain: u64, first: u64, units: u64, leaves: &mut Vec<Leaf>) -> (f64, u64) {
    let too_few = TOO_FEW * grain / SAMPLE;
    // Each unit has at least one SAMPLEth.
    let is_short = samples.len() as u64 <= too_few;
    let count = if is_short { samples.iter().map(|unit| u64::from(unit.count)).sum() } else { u64::MAX };
    if units == 1 || count <= too_few {
        let leaf = Leaf { first, units, count };
        leaves.push(leaf);
        return (leaf.fit(grain), leaf.count);
    }
    let (mark, low_units, middle) = (leaves.len(), units / 2, first + units / 2);
    let (low, high) = samples.split_at(samples.partition_point(|unit| u64::from(unit.number) < middle));
    let (low_fit, low_count) = divide(low, grain, first, low_units, leaves);
    let (high_fit, high_count) = divide(high, grain, middle, units - low_units, leaves);
    let both = Leaf { first, units, count: low_count + high_count };
    let apart = low_fit + high_fit - PRICE;
    if apart > both.fit(grain) {
        return (apart, both.count);
    }
    leaves.truncate(mark);
    leaves.push(both);
    (both.fit(grain), both.count)
}

/// Join neighbours whose division does not gain its price.
fn join(leaves: &[Leaf], grain: u64, price: f64) -> Vec<Leaf> {
    let mut joined: Vec<Leaf> = Vec::with_capacity(leaves.len());
    for leaf in leaves {
        let mut next = *leaf;
        while let Some(last) = joined.last() {
            let both = last.with(&next);
            if last.fit(grain) + next.fit(grain) - price > both.fit(grain) {
                break;
            }
            next = both;
            joined.pop();
        }
        joined.push(next);
    }
    joined
}

impl Classifier for Fitted {
    fn name(&self) -> &'static str {
        "fitted"
    }

    fn record(&mut self, address: u64, samples: u32) {
        self.record_rough(address, samples, 1);
    }

    fn record_rough(&mut self, address: u64, samples: u32, each: u32) {
        match self.roots.unit_of(address) {
            Some(unit) => self.histogram.record(Unit::sampled(unit, samples, each)),
            None => self.outside = self.outside.saturating_add(u64::from(samples)),
        }
    }

    fn end_epoch(&mut self) {
        self.epoch += 1;
        self.histogram.count();
        let (samples, grain) = (self.histogram.units(), self.histogram.grain());
        let mut price = PRICE;
        // The last range of each root.
        let mut parts = Vec::new();
        for (first, units) in self.roots.spans() {
            let from = samples.partition_point(|unit| u64::from(unit.number) < first);
            let to = samples.partition_point(|unit| u64::from(unit.number) < first + units);
            let mut leaves = Vec::new();
            divide(&samples[from..to], grain, first, units, &mut leaves);
            parts.push(join(&leaves, grain, price));
        }
        while parts.iter().map(Vec::len).sum::<usize>() > MOST_RANGES {
            price *= 2.0;
            parts = parts.iter().map(|leaves| join(leaves, grain, price)).collect();
        }
        let before = std::mem::take(&mut self.ranges);
        for leaf in parts.iter().flatten() {
            let (start, end) = self.roots.addresses(leaf.first, leaf.units);
            let at = before.partition_point(|range| range.start < start);
            let same = before.get(at).filter(|range| range.start == start && range.end == end);
            let born = same.map_or(self.epoch, |range| range.born);
            self.splits += u64::from(before.get(at).is_none_or(|range| range.start != start));
            let from = samples.partition_point(|unit| u64::from(unit.number) < leaf.first);
            let units = samples[from..].iter().take_while(|unit| u64::from(unit.number) < leaf.first + leaf.units);
            let variance = units.map(|unit| u64::from(unit.variance)).sum();
            self.ranges.push(Range { start, end, count: leaf.count, variance, born });
        }
        self.histogram.halve();
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn recent(&self, address: u64) -> u64 {
        let Some(unit) = self.roots.unit_of(address) else { return 0 };
        let units = self.histogram.units();
        units.binary_search_by_key(&unit, |unit| unit.number).map_or(0, |at| units[at].count.into())
    }

    fn splits(&self) -> u64 {
        self.splits
    }

    fn outside(&self) -> u64 {
        self.outside
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The fit of the best division, by trying all divisions.
    fn best(counts: &[u32]) -> f64 {
        let count = counts.iter().map(|count| u64::from(*count)).sum();
        let whole = Leaf { first: 0, units: counts.len() as u64, count }.fit(SAMPLE);
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
            let (fit, count) = divide(&units, SAMPLE, 0, counts.len() as u64, &mut leaves);
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
