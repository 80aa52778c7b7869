//! The seam between *what was touched* (a source) and *what it means* (everything else in this crate).
//!
//! Before: the tracker of a VM says what to watch in the next cycle. After: a source reports, for each unit watched,
//! what was touched between [`AccessSource::start`] and [`AccessSource::end`].
//! Threads: one tracking worker per VM owns its source; it may block in `start` and `end`, and sleeps between them.
//! Units: a unit is 2 MiB; a cycle is the time between a start and its end. The source of the product is the pager's
//! `scans`; another one, for tests, is [`crate::scripted`].
//! Promise: a source changes nothing that the guest can see but time, and at the end of a cycle every unit that was
//! mapped huge is mapped huge again.
//!
//! In the terms of HugeScope's Figure 5: a watch with coarse units is its coarse phase, one with fine units its fine
//! phase. One cycle may do both.

use std::io;
use std::time::Duration;

use ballast_base::PAGES_PER_UNIT;

const WORDS: usize = PAGES_PER_UNIT as usize / 64;

/// A unit of a VM's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId {
    /// Number of the region in its VM.
    pub region: u32,
    /// Which 2 MiB of the region. The last one of a region may be short.
    pub unit: u32,
}

/// One bit for each page of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageMap(pub [u64; WORDS]);

impl PageMap {
    /// No page.
    pub const NONE: Self = Self([0; WORDS]);
    /// Every page.
    pub const ALL: Self = Self([u64::MAX; WORDS]);

    /// The first `count` pages, or all.
    pub fn first(count: u64) -> Self {
        Self(std::array::from_fn(|word| match count.saturating_sub(word as u64 * 64) {
            0 => 0,
            bits @ 1..64 => (1 << bits) - 1,
            _ => u64::MAX,
        }))
    }

    /// Does it hold this page?
    ///
    /// # Panics
    /// If `page` is not below 512.
    pub fn get(&self, page: u64) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 == 1
    }

    /// Add a page.
    ///
    /// # Panics
    /// If `page` is not below 512.
    pub fn set(&mut self, page: u64) {
        self.0[page as usize / 64] |= 1 << (page % 64);
    }

    /// Number of pages.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Does it hold no page?
    pub fn is_empty(&self) -> bool {
        *self == Self::NONE
    }

    /// The pages in both.
    pub fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & other.0[i]))
    }

    /// The pages in either.
    pub fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] | other.0[i]))
    }

    /// The pages of this one that are not in the other.
    pub fn without(self, other: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i] & !other.0[i]))
    }

    /// Its pages, ascending.
    pub fn iter(self) -> impl Iterator<Item = u64> {
        self.0.into_iter().enumerate().flat_map(|(word, mut bits)| {
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| u64::from(bits.trailing_zeros()))?;
                bits &= bits - 1;
                Some(word as u64 * 64 + bit)
            })
        })
    }

    /// Its pages as runs, `(first, count)`, ascending.
    pub fn runs(self) -> impl Iterator<Item = (u64, u64)> {
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < PAGES_PER_UNIT && !self.get(at) {
                at += 1;
            }
            let first = at;
            while at < PAGES_PER_UNIT && self.get(at) {
                at += 1;
            }
            (first < at).then_some((first, at - first))
        })
    }
}

/// Pages of a block: an eighth of a unit, 256 KiB.
pub const BLOCK: u64 = PAGES_PER_UNIT / 8;

/// A unit to be watched page by page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FineWatch {
    /// Which.
    pub unit: UnitId,
    /// The pages to watch: all, or a sample. A source may watch more, never fewer.
    pub pages: PageMap,
}

/// The units to watch in a cycle. No unit is in both lists; each is in ascending order without repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Units to be watched as wholes.
    pub coarse: Vec<UnitId>,
    /// Units to be watched page by page.
    pub fine: Vec<FineWatch>,
}

/// The purpose of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// All units, as wholes: generations age by it.
    Coarse,
    /// Chosen units, page by page.
    Fine,
}

/// Touches seen in one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// The unit as a whole.
    Coarse {
        /// Some page was touched.
        touched: bool,
    },
    /// A unit that is not one huge page: by its eighths of [`BLOCK`] pages, the first in bit 0.
    Blocks {
        /// Some page of them was touched.
        touched: u8,
    },
    /// Page by page.
    Fine {
        /// The pages that were watched; of the others nothing is known.
        watched: PageMap,
        /// Those of them that were touched.
        touched: PageMap,
    },
}

impl Seen {
    /// Was any page touched?
    pub fn touched(&self) -> bool {
        match self {
            Self::Coarse { touched } => *touched,
            Self::Blocks { touched } => *touched != 0,
            Self::Fine { touched, .. } => !touched.is_empty(),
        }
    }
}

/// Cost of one cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// CPU time of our threads, including the faults that they served for the cycle.
    pub cpu: Duration,
    /// Time guest threads waited for faults that the cycle caused.
    pub guest: Duration,
    /// Those faults.
    pub faults: u64,
}

/// Report of a cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CycleReport {
    /// One entry for each unit that was watched, ascending. A unit that could not be watched (unplugged, far, busy) is
    /// left out. A unit watched page by page may be reported as a whole.
    pub units: Vec<(UnitId, Seen)>,
    /// Its cost.
    pub cost: Cost,
}

/// Abilities of a source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ability {
    /// Its name in the API and in recordings: lower case, hyphens.
    pub name: &'static str,
}

/// Finds out what a guest touched.
pub trait AccessSource: Send {
    /// Its abilities. They may change from one cycle to the next.
    fn ability(&self) -> Ability;

    /// Begin a cycle: from now on, touches of what is watched are recorded. Called only when no cycle runs.
    fn start(&mut self, watch: &Watch) -> io::Result<()>;

    /// End the cycle and report what was touched. Also after an error no cycle runs, and nothing of it remains in the
    /// guest's page tables.
    fn end(&mut self) -> io::Result<CycleReport>;
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_page_map_is_a_set_of_pages(
            pages in proptest::collection::btree_set(0..PAGES_PER_UNIT, 0..512), n in 0u64..600,
        ) {
            let mut map = PageMap::NONE;
            pages.iter().for_each(|page| map.set(*page));
            prop_assert_eq!(map.count(), pages.len() as u64);
            prop_assert_eq!(map.iter().collect::<Vec<_>>(), pages.iter().copied().collect::<Vec<_>>());
            let of_runs: Vec<u64> = map.runs().flat_map(|(first, count)| first..first + count).collect();
            prop_assert_eq!(of_runs, pages.into_iter().collect::<Vec<_>>());
            let head = PageMap::first(n);
            prop_assert_eq!(head.count(), n.min(PAGES_PER_UNIT));
            prop_assert_eq!(map.and(head).or(map.without(head)), map);
            prop_assert!(map.without(PageMap::ALL).is_empty());
        }
    }
}
