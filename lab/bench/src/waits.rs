//! Times of touches of many guests, as counts per class of length, which can be added.
//!
//! Before: a guest times each touch. After: the bench has percentiles over all guests.
//! Threads: none. Units: nanoseconds. Promise: a percentile is at most 1/32 too long; the longest time is exact.

use serde::{Deserialize, Serialize};

const PER_DOUBLING: u64 = 32;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Waits {
    counts: Vec<u64>,
    worst_ns: u64,
}

/// The class of a length: exact below 32, then 32 for each doubling.
fn class(ns: u64) -> usize {
    let shift = ns.max(PER_DOUBLING).ilog2() - PER_DOUBLING.ilog2();
    (u64::from(shift) * PER_DOUBLING + (ns >> shift)) as usize
}

/// The largest length of a class.
fn most(class: u64) -> u64 {
    if class < 2 * PER_DOUBLING {
        return class;
    }
    let shift = class / PER_DOUBLING - 1;
    ((PER_DOUBLING + class % PER_DOUBLING + 1) << shift) - 1
}

impl Waits {
    pub(crate) fn add(&mut self, ns: u64) {
        let class = class(ns);
        if self.counts.len() <= class {
            self.counts.resize(class + 1, 0);
        }
        self.counts[class] += 1;
        self.worst_ns = self.worst_ns.max(ns);
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        self.counts.iter_mut().zip(&other.counts).for_each(|(sum, count)| *sum += count);
        self.worst_ns = self.worst_ns.max(other.worst_ns);
    }

    pub(crate) fn worst_ns(&self) -> u64 {
        self.worst_ns
    }

    /// The length that `fraction` of the touches did not exceed; 0 if there were none.
    pub(crate) fn percentile_ns(&self, fraction: f64) -> u64 {
        let rank = (self.counts.iter().sum::<u64>() as f64 * fraction).ceil() as u64;
        let mut sum = 0;
        for (class, count) in self.counts.iter().enumerate() {
            sum += count;
            if sum >= rank.max(1) {
                return most(class as u64).min(self.worst_ns);
            }
        }
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_at_most_1_32nd_too_long_and_the_longest_is_exact() {
        for ns in (0..64).chain([65, 1000, 14_000, 123_456_789, 6_000_000_000, u64::MAX >> 1]) {
            let most = most(class(ns) as u64);
            assert!(ns <= most && most - ns <= ns / 32, "{ns}: {most}");
        }
        let (mut waits, mut other) = (Waits::default(), Waits::default());
        (1..=99).for_each(|ns| waits.add(ns * 1000));
        other.add(7_000_000);
        waits.merge(&other);
        let p99 = waits.percentile_ns(0.99);
        assert!((99_000..=102_094).contains(&p99), "{p99}");
        assert_eq!((waits.percentile_ns(1.0), waits.worst_ns()), (7_000_000, 7_000_000));
        assert_eq!(Waits::default().percentile_ns(0.99), 0);
    }
}
