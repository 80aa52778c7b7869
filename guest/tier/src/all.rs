//! All: the ranges and the pages of all programs, in one space of addresses.
//!
//! Before: each program has ranges and pages of its own. After: a plan ranks and places them together.
//! Threads: any; plain values. Units: addresses, with the program's index in the bits that no address has.
//! Promise: a program whose pages are not all known yet is in no plan, and keeps no other program out of one.

use std::ops::ControlFlow;

use ballast_ranges::Range;
use ballast_ranges::relocate::{Placement, Tier};

use crate::pages::Pages;

/// Lowest bit of a program's index in an address. User space ends below it, also with five levels of tables.
pub const INDEX: u32 = 57;
/// Most programs: their indexes fit above [`INDEX`].
pub const MOST_PROGRAMS: usize = 1 << (64 - INDEX);

/// Returns the index of the program that has an address of this space, and the address in the program.
pub fn place(address: u64) -> (usize, u64) {
    ((address >> INDEX) as usize, address & ((1 << INDEX) - 1))
}

/// Returns the address of this space that an address of the program with this index has.
pub fn joined(index: usize, address: u64) -> u64 {
    (index as u64) << INDEX | address
}

/// Returns the ranges of all programs. `programs`: how often all memory of each was read, and its ranges. A program
/// that was not read yet is left out.
pub fn ranges_of<'a>(programs: impl Iterator<Item = (u32, &'a [Range])>) -> Vec<Range> {
    let known = programs.enumerate().filter(|(_, (rounds, _))| *rounds > 0);
    let indexed = known.flat_map(|(at, (_, ranges))| {
        let index = (at as u64) << INDEX;
        ranges.iter().map(move |range| Range { start: range.start | index, end: range.end | index, ..*range })
    });
    indexed.collect()
}

/// The pages of all programs, and how many of each may be promoted at most.
#[derive(Debug)]
pub struct All<'a>(pub Vec<(&'a Pages, u64)>);

impl All<'_> {
    /// The pages of a range's program, the range without the program's index, and the bits of this index.
    fn of(&self, range: &Range) -> Option<(&Pages, Range, u64)> {
        let ((index, start), (_, end)) = (place(range.start), place(range.end));
        let (pages, _) = self.0.get(index)?;
        Some((pages, Range { start, end, ..*range }, (index as u64) << INDEX))
    }
}

impl Placement for All<'_> {
    fn program(&self, range: &Range) -> (usize, u64) {
        let (index, _) = place(range.start);
        (index, self.0.get(index).map_or(0, |(_, most)| *most))
    }

    fn count(&self, range: &Range) -> (u64, u64) {
        self.of(range).map_or((0, 0), |(pages, plain, _)| pages.count(&plain))
    }

    fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>) {
        let Some((pages, plain, index)) = self.of(range) else { return };
        pages.visit_in(&plain, wanted, &mut |address| each(address | index));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_whose_memory_was_not_read_yet_keeps_no_other_one_out_of_a_plan() {
        let ranges = [1, 2].map(|start| [Range { start, end: start + 1, count: 0, variance: 0, born: 0 }]);
        let programs = [(0, &ranges[0][..]), (3, &ranges[1][..]), (0, &ranges[0][..])];
        let found = ranges_of(programs.into_iter());
        let [range] = found[..] else { panic!("{} ranges", found.len()) };
        assert_eq!((range.start, range.end), (2 | 1 << INDEX, 3 | 1 << INDEX), "it keeps its index");
    }
}
