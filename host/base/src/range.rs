//! A range of pages of one region.
//!
//! Before: a fault, a scan or a message names some pages. After: all crates use one type for them.
//! Threads: any; a plain value. Units: base pages. Promise: the end is never before the start.

use std::fmt;

use crate::{Bytes, PageCount, PageIdx};

/// Neighbouring pages of one region, from `start` to before `end`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageRange {
    start: PageIdx,
    end: PageIdx,
}

impl PageRange {
    /// The pages from `start` to before `end`; none if `end` is not after `start`.
    pub const fn new(start: PageIdx, end: PageIdx) -> Self {
        Self { start, end: if end.0 < start.0 { start } else { end } }
    }

    /// This many pages from `start` on.
    pub const fn of(start: PageIdx, count: u64) -> Self {
        Self { start, end: PageIdx(start.0.saturating_add(count)) }
    }

    /// One page.
    pub const fn one(page: PageIdx) -> Self {
        Self::of(page, 1)
    }

    /// The pages of a unit.
    pub const fn of_unit(unit: u64) -> Self {
        Self { start: PageIdx::first_of_unit(unit), end: PageIdx::first_of_unit(unit + 1) }
    }

    /// The first page.
    pub const fn start(self) -> PageIdx {
        self.start
    }

    /// The page after the last one.
    pub const fn end(self) -> PageIdx {
        self.end
    }

    /// How many pages.
    pub const fn count(self) -> u64 {
        self.end.0 - self.start.0
    }

    /// The bytes these pages hold.
    pub const fn bytes(self) -> Bytes {
        PageCount(self.count()).bytes()
    }

    /// Does the range have no pages?
    pub const fn is_empty(self) -> bool {
        self.start.0 == self.end.0
    }

    /// Is this page in the range?
    pub const fn contains(self, page: PageIdx) -> bool {
        self.start.0 <= page.0 && page.0 < self.end.0
    }

    /// The part before this page.
    pub fn before(self, page: PageIdx) -> Self {
        Self::new(self.start, self.end.min(page).max(self.start))
    }

    /// The part from this page on.
    pub fn from(self, page: PageIdx) -> Self {
        Self::new(self.start.max(page).min(self.end), self.end)
    }

    /// Its pages, one by one.
    pub fn iter(self) -> impl DoubleEndedIterator<Item = PageIdx> + Clone {
        (self.start.0..self.end.0).map(PageIdx)
    }

    /// The first page, and each `granule`-th after it.
    pub fn step_by(self, granule: u64) -> impl Iterator<Item = PageIdx> + Clone {
        (self.start.0..self.end.0).step_by(granule as usize).map(PageIdx)
    }

    /// The units that have a page of the range.
    pub const fn units(self) -> std::ops::Range<u64> {
        if self.is_empty() { 0..0 } else { self.start.unit()..self.end.0.div_ceil(crate::PAGES_PER_UNIT) }
    }

    /// Its parts, cut at the multiples of `size`.
    pub fn pieces(self, size: u64) -> impl Iterator<Item = Self> {
        let mut rest = self;
        std::iter::from_fn(move || {
            let cut = PageIdx((rest.start.0 / size + 1).saturating_mul(size));
            let piece = rest.before(cut);
            rest = rest.from(cut);
            (!piece.is_empty()).then_some(piece)
        })
    }
}

impl fmt::Display for PageRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..{}", self.start, self.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn pieces_are_cut_at_multiples_and_make_the_whole(
            start in 0u64..5000, count in 0u64..5000, size in 1u64..1024,
        ) {
            let range = PageRange::of(PageIdx(start), count);
            let mut next = range.start();
            for piece in range.pieces(size) {
                prop_assert_eq!(piece.start(), next);
                prop_assert_eq!(piece.start().0 / size, (piece.end().0 - 1) / size);
                next = piece.end();
            }
            prop_assert_eq!(next, range.end());
            prop_assert_eq!(range.iter().count() as u64, count);
        }

        #[test]
        fn a_page_is_in_the_part_before_a_cut_or_in_the_one_from_it_on(
            start in 0u64..100, count in 0u64..100, cut in 0u64..300,
        ) {
            let (range, cut) = (PageRange::of(PageIdx(start), count), PageIdx(cut));
            prop_assert_eq!(range.before(cut).count() + range.from(cut).count(), count);
            for page in range.iter() {
                prop_assert_eq!(range.before(cut).contains(page), page < cut);
                prop_assert_eq!(range.from(cut).contains(page), page >= cut);
            }
        }
    }

    #[test]
    fn a_range_that_would_end_before_it_starts_is_empty() {
        let range = PageRange::new(PageIdx(7), PageIdx(3));
        assert!(range.is_empty() && range.units().is_empty() && range.pieces(512).next().is_none());
        assert_eq!(PageRange::of(PageIdx(510), 4).units(), 0..2);
    }
}
