//! The seam between *what was touched* (a source) and *what it means* (everything else in this crate).
//!
//! Before: the tracker of a VM decides what to watch in the next cycle. After: a source reports, for each watched unit,
//! the touches between [`AccessSource::start`] and [`AccessSource::end`].
//! Threads: one tracking worker per VM owns its source; it may block in `start` and `end`, and sleeps between them.
//! Units: a unit is 2 MiB; a cycle is the time between a start and its end. The product's source: the pager's `scans`.
//! Promise: a source changes nothing that the guest can see except time, and at the end of a cycle each unit that was
//! mapped huge is mapped huge again.
//!
//! In HugeScope's Figure 5, a watch with coarse units is the coarse phase, and one with fine units the fine phase.

use std::io;
use std::time::Duration;

use ballast_base::PAGES_PER_UNIT;

/// A unit of a VM's RAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UnitId {
    /// Number of the region in its VM.
    pub region: u32,
    /// Number of the 2 MiB in the region. The last one of a region may be shorter.
    pub unit: u32,
}

/// One bit for each page of a unit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageMap(pub [u64; 8]);

impl PageMap {
    /// No page.
    pub const NONE: Self = Self([0; 8]);
    /// Every page.
    pub const ALL: Self = Self([u64::MAX; 8]);

    /// The first `count` pages, or all.
    pub fn first(count: u64) -> Self {
        Self(std::array::from_fn(|word| match count.saturating_sub(word as u64 * 64) {
            0 => 0,
            bits @ 1..64 => (1 << bits) - 1,
            _ => u64::MAX,
        }))
    }

    /// Returns whether it contains this page.
    ///
    /// # Panics
    /// `page` is 512 or more.
    pub fn get(&self, page: u64) -> bool {
        self.0[page as usize / 64] >> (page % 64) & 1 == 1
    }

    /// Adds a page.
    ///
    /// # Panics
    /// `page` is 512 or more.
    pub fn set(&mut self, page: u64) {
        self.0[page as usize / 64] |= 1 << (page % 64);
    }

    /// Number of pages.
    pub fn count(&self) -> u64 {
        self.0.iter().map(|word| u64::from(word.count_ones())).sum()
    }

    /// Returns whether it contains no page.
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

    /// Its pages that are not in the other.
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
}

/// Pages of a block: an eighth of a unit, 256 KiB, and a word of a map.
pub const BLOCK: u64 = PAGES_PER_UNIT / 8;

/// Most units that a cycle watches page by page.
pub const MOST_FINE: usize = 512;

/// Units to watch in a cycle. No unit is in both lists; each is ascending without repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Watch {
    /// Units to watch as a whole.
    pub coarse: Vec<UnitId>,
    /// Units to watch page by page.
    pub fine: Vec<UnitId>,
}

/// The purpose of a cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// All units, as a whole: generations age by it.
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
    /// A unit that is not one huge page, by its eighths of [`BLOCK`] pages, the first in bit 0.
    Blocks {
        /// The eighths with a touched page.
        touched: u8,
    },
    /// Page by page.
    Fine {
        /// The touched pages.
        touched: PageMap,
    },
}

impl Seen {
    /// Returns whether any page was touched.
    pub fn touched(&self) -> bool {
        match self {
            Self::Coarse { touched } => *touched,
            Self::Blocks { touched } => *touched != 0,
            Self::Fine { touched } => !touched.is_empty(),
        }
    }
}

/// Cost of one cycle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// CPU time of the engine's threads, including the faults that they served for the cycle.
    pub cpu: Duration,
    /// Time for which guest threads waited for faults that the cycle caused.
    pub guest: Duration,
}

/// Report of a cycle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CycleReport {
    /// An entry for each watched unit, ascending. A unit that could not be watched (unplugged, far, busy) is missing. A
    /// unit watched page by page may be reported as a whole.
    pub units: Vec<(UnitId, Seen)>,
    /// Cost of the cycle.
    pub cost: Cost,
}

/// Finds the memory that a guest touches.
pub trait AccessSource: Send {
    /// Begins a cycle: touches of the watched memory are recorded from now on. Called only when no cycle runs.
    fn start(&mut self, watch: &Watch) -> io::Result<()>;

    /// Ends the cycle and reports the touches. Also after an error no cycle runs, and the page tables are restored.
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
            let head = PageMap::first(n);
            prop_assert_eq!(head.count(), n.min(PAGES_PER_UNIT));
            prop_assert_eq!(map.and(head).or(map.without(head)), map);
            prop_assert!(map.without(PageMap::ALL).is_empty());
        }
    }
}
