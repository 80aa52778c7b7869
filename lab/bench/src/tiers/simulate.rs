//! Simulates a guest with a fast and a slow tier: the tier that serves its accesses under each way of placing pages.
//!
//! Before: there is a stream, and samples of it. After: the share of accesses that the fast tier served is known, epoch
//! by epoch, and the bytes that were moved for it. No time is measured: the share is computed from the stream's truth.
//! Units: 2 MiB pages; an epoch is 500 ms. Promise: all ways see the same samples and begin with the same placement:
//! memory was first touched in the order of its addresses, so the fast tier has the lowest. The ways that move pages
//! have the same bandwidth and reserve, except for LRU, whose moves are free.

use std::ops::ControlFlow;

use ballast_ranges::relocate::{self, Limits, Placement, Rule, Tier};
use ballast_ranges::{Classifier, Fitted, Range, Roots, UNIT, rank};
use ballast_testkit::published::{Parameters, Published};

/// The end of mappings on x86-64, and the bytes below it that they may use: the roots are those of a real program.
const MAPPINGS_END: u64 = 0x7fff_f7ff_f000;
const MAPPINGS: u64 = 64 << 40;
/// An empty heap.
const HEAP: (u64, u64) = (0x2000_0000, 0x6000_0000);
/// CPUs of the guest (Demeter §5.1).
pub(crate) const VCPUS: u64 = 4;
/// The length of an epoch (Demeter §3.2.1).
pub(crate) const EPOCH_MS: u64 = 500;
/// 2 MiB pages that may be promoted in a second: 1 GiB.
const MOVES_PER_S: u64 = 512;
/// 2 MiB pages of the fast tier that are kept free: 1/N of it, at most 16 MiB.
const RESERVE_PART: u64 = 64;
const MOST_RESERVE: u64 = 8;

pub(crate) fn roots() -> Roots {
    Roots::new(&[HEAP, (MAPPINGS_END - MAPPINGS, MAPPINGS_END)]).expect("two ranges apart")
}

/// An address in the mappings.
pub(crate) fn anywhere(random: u64) -> u64 {
    MAPPINGS_END - 1 - random % MAPPINGS
}

/// The address of offset 0 in memory of this size.
pub(crate) fn base(memory: u64) -> u64 {
    (MAPPINGS_END - memory) / UNIT * UNIT - UNIT
}

/// A classifier with a range for each unit: ranges without a rule, to show the gain or loss of a rule.
#[derive(Debug)]
struct ByUnit {
    base: u64,
    counts: Vec<u64>,
    ranges: Vec<Range>,
    outside: u64,
}

impl ByUnit {
    fn new(base: u64, units: usize) -> Self {
        Self { base, counts: vec![0; units], ranges: Vec::new(), outside: 0 }
    }
}

impl Classifier for ByUnit {
    fn name(&self) -> &'static str {
        "by_unit"
    }

    fn record(&mut self, address: u64, samples: u32) {
        let unit = address.checked_sub(self.base).and_then(|offset| self.counts.get_mut((offset / UNIT) as usize));
        match unit {
            Some(count) => *count += u64::from(samples) * ballast_ranges::SAMPLE,
            None => self.outside += u64::from(samples),
        }
    }

    fn end_epoch(&mut self) {
        let starts = (0..).map(|at| self.base + at * UNIT);
        let range =
            |(start, count): (u64, &u64)| Range { start, end: start + UNIT, count: *count, variance: *count, born: 0 };
        self.ranges = starts.zip(&self.counts).map(range).collect();
        self.counts.iter_mut().for_each(|count| *count /= 2);
    }

    fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    fn splits(&self) -> u64 {
        0
    }

    fn outside(&self) -> u64 {
        self.outside
    }
}

/// A way to place pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Published,
    Ours,
    ByUnit,
    Lru,
    FirstTouch,
}

impl Way {
    pub(crate) const ALL: [Self; 5] = [Self::Ours, Self::Published, Self::ByUnit, Self::Lru, Self::FirstTouch];

    /// The suffix of its keys; ours have none.
    pub(crate) fn suffix(self) -> &'static str {
        match self {
            Self::Ours => "",
            Self::Published => "_published",
            Self::ByUnit => "_by_unit",
            Self::Lru => "_lru",
            Self::FirstTouch => "_first_touch",
        }
    }

    pub(crate) fn classifier(self, base: u64, units: usize, of: Parameters) -> Option<Box<dyn Classifier>> {
        match self {
            Self::Published => Some(Box::new(Published::new(roots(), of))),
            Self::Ours => Some(Box::new(Fitted::new(roots()))),
            Self::ByUnit => Some(Box::new(ByUnit::new(base, units))),
            Self::Lru | Self::FirstTouch => None,
        }
    }

    fn rule(self) -> Rule {
        if self == Self::Published { Rule::Published } else { Rule::Ours }
    }
}

/// The place of each page.
struct Memory {
    base: u64,
    tiers: Vec<Tier>,
}

impl Memory {
    fn index(&self, address: u64) -> usize {
        ((address - self.base) / UNIT) as usize
    }
}

impl Placement for Memory {
    fn visit(&self, range: &Range, each: &mut dyn FnMut(u64, Tier) -> ControlFlow<()>) {
        let end = self.base + self.tiers.len() as u64 * UNIT;
        let (from, to) = (range.start.clamp(self.base, end), range.end.clamp(self.base, end));
        for at in self.index(from)..self.index(to) {
            if each(self.base + at as u64 * UNIT, self.tiers[at]).is_break() {
                return;
            }
        }
    }
}

/// A guest under one way.
pub(crate) struct Guest {
    way: Way,
    classifier: Option<Box<dyn Classifier>>,
    memory: Memory,
    fast: u64,
    /// Most promotions in an epoch.
    most: u64,
    /// For LRU: the time of each page's last sample.
    sampled: Vec<u64>,
    clock: u64,
    moved: u64,
}

impl Guest {
    pub(crate) fn new(way: Way, units: usize, fast: usize) -> Self {
        Self::tuned(way, units, fast, Parameters::of(VCPUS), EPOCH_MS)
    }

    /// With other parameters of the published rule, or epochs of another length.
    pub(crate) fn tuned(way: Way, units: usize, fast: usize, of: Parameters, epoch_ms: u64) -> Self {
        let base = base(units as u64 * UNIT);
        let tiers = (0..units).map(|at| if at < fast { Tier::Fast } else { Tier::Slow }).collect();
        let classifier = way.classifier(base, units, of);
        let most = MOVES_PER_S * epoch_ms / 1000;
        let memory = Memory { base, tiers };
        Self { way, classifier, memory, fast: fast as u64, most, sampled: vec![0; units], clock: 0, moved: 0 }
    }

    /// The share of these accesses that the fast tier serves.
    pub(crate) fn hits(&self, units: &[f64]) -> f64 {
        let fast = self.memory.tiers.iter().zip(units).filter(|(tier, _)| **tier == Tier::Fast);
        fast.map(|(_, share)| share).sum()
    }

    /// End an epoch in which these accesses, given as offsets, were sampled.
    pub(crate) fn end_epoch(&mut self, samples: &[u64]) {
        if self.way == Way::Lru {
            for offset in samples {
                self.clock += 1;
                self.sampled[(offset / UNIT) as usize] = self.clock;
            }
            let mut order: Vec<usize> = (0..self.sampled.len()).collect();
            order.sort_by_key(|at| std::cmp::Reverse(self.sampled[*at]));
            let (fast, slow) = order.split_at(self.fast as usize);
            let tiers = &mut self.memory.tiers;
            self.moved += fast.iter().filter(|at| tiers[**at] == Tier::Slow).count() as u64;
            fast.iter().for_each(|at| tiers[*at] = Tier::Fast);
            slow.iter().for_each(|at| tiers[*at] = Tier::Slow);
        }
        let Some(classifier) = &mut self.classifier else { return };
        samples.iter().for_each(|offset| classifier.record(self.memory.base + offset, 1));
        classifier.end_epoch();
        let used = self.memory.tiers.iter().filter(|tier| **tier == Tier::Fast).count() as u64;
        let reserve = (self.fast / RESERVE_PART).clamp(1, MOST_RESERVE);
        let limits = Limits { fast: self.fast, free: self.fast - used, reserve, most: self.most };
        let plan = relocate::plan(&rank(classifier.ranges()), &self.memory, limits, self.way.rule());
        self.moved += (plan.promote.len() + plan.demote.len()) as u64;
        for (list, tier) in [(plan.demote, Tier::Slow), (plan.promote, Tier::Fast)] {
            for address in list {
                let at = self.memory.index(address);
                self.memory.tiers[at] = tier;
            }
        }
    }

    /// Ranges at the end, and splits so far.
    pub(crate) fn ranges(&self) -> Option<(usize, u64)> {
        self.classifier.as_ref().map(|classifier| (classifier.ranges().len(), classifier.splits()))
    }

    /// Bytes that were moved from one tier to the other so far.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved * UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tiers::stream::{Kind, Stream};

    /// The share of accesses that the fast tier serves in the end, and the oracle's share.
    fn served(way: Way, kind: Kind, fast: usize) -> (f64, f64) {
        const MEMORY: u64 = 512 * UNIT;
        let mut stream = Stream::new(kind, MEMORY, 3, 0);
        let mut guest = Guest::new(way, 512, fast);
        let mut state = 4;
        for _ in 0..40 {
            let samples = stream.sample(5000, &mut state);
            guest.end_epoch(&samples);
            stream.advance();
        }
        (guest.hits(stream.units()), stream.oracle(fast).0)
    }

    #[test]
    fn ours_is_within_2_points_of_the_oracle_on_contiguous_and_scattered_heat() {
        for kind in [Kind::Contiguous, Kind::Scattered(4), Kind::Scattered(16)] {
            let (ours, oracle) = served(Way::Ours, kind, 160);
            assert!(oracle - ours < 0.02, "{kind:?}: {ours} of {oracle}");
        }
    }

    #[test]
    fn first_touch_serves_little_of_what_is_touched_later() {
        let (first, oracle) = served(Way::FirstTouch, Kind::Contiguous, 100);
        assert!(first < 0.05 && oracle > 0.9, "{first} of {oracle}");
    }
}
