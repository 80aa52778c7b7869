//! A unit of 2 MiB of a program: the known state of its 512 pages, as bits.
//!
//! Before: a page table's entries. After: [`crate::pages`] counts and visits the pages that may be moved.
//! Threads: none of its own. Units: pages, 64 in a word. Promise: 256 bytes for each unit.

use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT};
pub(crate) use ballast_ranges::UNIT;

pub(crate) const PAGE: u64 = PAGE_SIZE as u64;
pub(crate) const WORDS: usize = PAGES_PER_UNIT as usize / 64;

#[derive(Clone, Debug, Default)]
pub(crate) struct Unit {
    pub present: [u64; WORDS],
    pub fast: [u64; WORDS],
    /// Pages that are mapped more than once: the kernel moves none of these for one process.
    pub shared: [u64; WORDS],
    /// Pages that could not be moved, and are left alone for a while.
    pub kept: [u64; WORDS],
}

/// A page that is present.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    pub is_fast: bool,
    pub is_shared: bool,
}

/// Returns the number of the unit that an address is in, and its page's word and bit there.
pub(crate) fn place(address: u64) -> (u64, usize, u64) {
    let page = address % UNIT / PAGE;
    (address / UNIT, (page / 64) as usize, 1 << (page % 64))
}

impl Unit {
    /// Sets the seen state of a page; `None`: it is absent.
    pub fn see(&mut self, (word, bit): (usize, u64), seen: Option<Seen>) {
        let put = |bits: &mut [u64; WORDS], is_set: bool| {
            bits[word] = if is_set { bits[word] | bit } else { bits[word] & !bit };
        };
        put(&mut self.present, seen.is_some());
        put(&mut self.fast, seen.is_some_and(|page| page.is_fast));
        put(&mut self.shared, seen.is_some_and(|page| page.is_shared));
    }

    /// Returns the pages of a word that may be moved.
    pub fn free(&self, word: usize) -> u64 {
        self.present[word] & !self.shared[word] & !self.kept[word]
    }

    /// Returns how many pages may be moved, and how many of them are fast.
    pub fn counts(&self) -> (u64, u64) {
        let each = (0..WORDS).map(|word| (self.free(word), self.free(word) & self.fast[word]));
        each.fold((0, 0), |sum, (free, fast)| {
            (sum.0 + u64::from(free.count_ones()), sum.1 + u64::from(fast.count_ones()))
        })
    }

    /// Returns the share of its present pages that is fast.
    pub fn fast_share(&self) -> f64 {
        let ones = |words: &[u64; WORDS]| words.iter().map(|word| word.count_ones()).sum::<u32>();
        f64::from(ones(&self.fast)) / f64::from(ones(&self.present).max(1))
    }
}
