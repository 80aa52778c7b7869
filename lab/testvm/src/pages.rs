//! Sets of pages of guest RAM, and the pages that an operation touches.
//!
//! Before: `workload` has a plan of cells. After: `model` and tests compare sets.
//! Threads: none. Units: pages of 4 KiB. Promise: pure.

use ballast_base::{Bytes, PageIdx};

use crate::guest::{self, Params};

/// A set of pages of guest RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageSet {
    bits: Vec<u64>,
}

impl PageSet {
    /// The empty set, for RAM of `ram` bytes.
    pub fn new(ram: Bytes) -> Self {
        Self { bits: vec![0; ram.pages_floor().0.div_ceil(64) as usize] }
    }

    /// Add one page.
    pub fn insert(&mut self, page: PageIdx) {
        self.bits[(page.0 / 64) as usize] |= 1 << (page.0 % 64);
    }

    /// Returns true if the page is in the set.
    pub fn contains(&self, page: PageIdx) -> bool {
        self.bits.get((page.0 / 64) as usize).is_some_and(|bits| bits >> (page.0 % 64) & 1 != 0)
    }

    /// Returns the number of pages in the set.
    pub fn len(&self) -> u64 {
        self.bits.iter().map(|bits| u64::from(bits.count_ones())).sum()
    }

    /// Returns true if the set is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the pages in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = PageIdx> {
        (0..self.bits.len() as u64 * 64).map(PageIdx).filter(|page| self.contains(*page))
    }

    /// Add every page of `other`.
    pub fn union(&mut self, other: &Self) {
        self.bits.iter_mut().zip(&other.bits).for_each(|(bits, more)| *bits |= more);
    }

    /// Add the pages that hold used words of a cell.
    pub(crate) fn insert_cell(&mut self, params: &Params, cell: u64) {
        let first = cell * params.cell_words * 8;
        let last = first + params.words_of(cell) * 8 - 1;
        (PageIdx::containing(first).0..=PageIdx::containing(last).0).for_each(|page| self.insert(PageIdx(page)));
    }

    /// Add the pages that an operation on a cell touches.
    pub(crate) fn insert_operation(&mut self, params: &Params, cell: u64) {
        params.pages_of_operation(cell, |page| self.insert(page));
    }
}

impl Params {
    /// Call `each` with the pages that an operation on a cell touches, in ascending order, some more than once.
    pub(crate) fn pages_of_operation(&self, cell: u64, mut each: impl FnMut(PageIdx)) {
        let (words, first) = (self.words_of(cell), cell * self.cell_words);
        if self.thorough != 0 {
            let last = (first + words) * 8 - 1;
            return (PageIdx::containing(first * 8).0..=PageIdx::containing(last).0).map(PageIdx).for_each(each);
        }
        (0..guest::SAMPLES).for_each(|i| each(PageIdx::containing((first + guest::sample(i, words)) * 8)));
    }
}
