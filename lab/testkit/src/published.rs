//! The published rule of a classifier of ranges (Demeter §3.2.1), to compare with: a range is split where it has far
//! more accesses than both of its neighbours.
//!
//! Before: samples, by address. After: ranges. The paper leaves some points open; here the two roots are neighbours, a
//! side without a neighbour counts as a neighbour without accesses, and `tau_merge` is 8 splits. The paper also keeps
//! the time of a range's last access, but no rule uses it, so it is not kept here. Units: counts in samples, positions
//! in units of 2 MiB. Promise: pure; at most [`MOST_RANGES`] ranges.

use ballast_ranges::{Fitted, Range, Roots, SAMPLE};

/// Most ranges. The paper states no bound and sees fewer than 50.
pub const MOST_RANGES: usize = 4096;

/// `alpha` times `tau_split` (§3.2.1, §5.2.3): how many more accesses than a neighbour a range must have, times vCPUs.
const SPLIT: u64 = 2 * 15;
/// Two empty neighbours are one range again after this number of splits elsewhere. Not in the paper.
const TAU_MERGE: u64 = 8;

#[derive(Clone, Copy, Debug)]
struct Leaf {
    first: u64,
    units: u64,
    count: u64,
    born: u64,
    /// Number of splits at the time when the count had decayed to zero.
    empty_since: Option<u64>,
}

/// A rule that makes ranges from samples.
pub trait Classifier {
    /// Its name in tables.
    fn name(&self) -> &'static str;

    /// Records sampled accesses.
    fn record(&mut self, address: u64, samples: u32);

    /// Ends an epoch (500 ms): makes new ranges, then halves all counts.
    fn end_epoch(&mut self);

    /// Returns the ranges of the last epoch, ascending; together they are the roots.
    fn ranges(&self) -> &[Range];
}

/// The published rule.
#[derive(Clone, Debug)]
pub struct Published {
    roots: Roots,
    /// CPUs that make accesses.
    vcpus: u64,
    /// Ascending; they tile the roots.
    leaves: Vec<Leaf>,
    ranges: Vec<Range>,
    epoch: u64,
    /// Number of divisions so far.
    pub splits: u64,
}

impl Published {
    /// Starts with one range for each root.
    pub fn new(roots: Roots, vcpus: u64) -> Self {
        let leaf = |(first, units)| Leaf { first, units, count: 0, born: 0, empty_since: Some(0) };
        let leaves = roots.spans().map(leaf).collect();
        let mut made = Self { roots, vcpus, leaves, ranges: Vec::new(), epoch: 0, splits: 0 };
        made.publish();
        made
    }

    fn publish(&mut self) {
        let range = |leaf: &Leaf| {
            let (start, end) = self.roots.addresses(leaf.first, leaf.units);
            let count = leaf.count.saturating_mul(SAMPLE);
            Range { start, end, count, variance: count, born: leaf.born }
        };
        self.ranges = self.leaves.iter().map(range).collect();
    }

    fn split(&mut self) {
        let threshold = SPLIT * self.vcpus;
        let counts: Vec<u64> = self.leaves.iter().map(|leaf| leaf.count).collect();
        let neighbour = |at: Option<usize>| at.and_then(|at| counts.get(at)).copied().unwrap_or(0);
        let mut room = MOST_RANGES.saturating_sub(self.leaves.len());
        let mut leaves = Vec::with_capacity(self.leaves.len() + 1);
        for (at, leaf) in self.leaves.iter().enumerate() {
            let most = neighbour(at.checked_sub(1)).max(neighbour(at.checked_add(1)));
            let is_significant = leaf.count.checked_sub(most).is_some_and(|more| more > 0 && more >= threshold);
            if leaf.units < 2 || !is_significant || room == 0 {
                leaves.push(*leaf);
                continue;
            }
            room -= 1;
            self.splits += 1;
            let units = leaf.units / 2;
            let (low, high) = (leaf.count / 2, leaf.count - leaf.count / 2);
            leaves.push(Leaf { units, count: low, born: self.epoch, ..*leaf });
            let (first, units) = (leaf.first + units, leaf.units - units);
            leaves.push(Leaf { first, units, count: high, born: self.epoch, empty_since: None });
        }
        self.leaves = leaves;
    }

    fn merge(&mut self) {
        let splits = self.splits;
        let is_old = |leaf: &Leaf| leaf.empty_since.is_some_and(|since| splits - since >= TAU_MERGE);
        let roots: Vec<u64> = self.roots.spans().map(|(first, _)| first).collect();
        let mut merged: Vec<Leaf> = Vec::with_capacity(self.leaves.len());
        for leaf in &self.leaves {
            match merged.last_mut() {
                Some(last) if is_old(last) && is_old(leaf) && !roots.contains(&leaf.first) => {
                    last.units += leaf.units;
                    last.born = self.epoch;
                }
                _ => merged.push(*leaf),
            }
        }
        self.leaves = merged;
    }
}

impl Classifier for Published {
    fn name(&self) -> &'static str {
        "published"
    }

    fn record(&mut self, address: u64, samples: u32) {
        let Some(unit) = self.roots.unit_of(address) else { return };
        let after = self.leaves.partition_point(|leaf| leaf.first <= u64::from(unit));
        let leaf = &mut self.leaves[after - 1];
        leaf.count = leaf.count.saturating_add(u64::from(samples));
    }

    fn end_epoch(&mut self) {
        self.epoch += 1;
        self.split();
        self.publish();
        for leaf in &mut self.leaves {
            leaf.count /= 2;
            leaf.empty_since = (leaf.count == 0).then(|| leaf.empty_since.unwrap_or(self.splits));
        }
        self.merge();
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }
}

impl Classifier for Fitted {
    fn name(&self) -> &'static str {
        "fitted"
    }

    fn record(&mut self, address: u64, samples: u32) {
        self.record(address, samples, 1);
    }

    fn end_epoch(&mut self) {
        self.end_epoch();
    }

    fn ranges(&self) -> &[Range] {
        self.ranges()
    }
}
