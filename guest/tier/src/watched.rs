//! A program that is managed: its ranges, its pages, and whether these may be moved now.
//!
//! Before: [`crate::programs`] has chosen it. After: [`crate::engine`] plans with its ranges and pages.
//! Threads: none. Units: epochs, bytes, samples in [`SAMPLE`]ths.
//! Promise: a program whose pages the kernel refuses to move is left alone for a while, and then tried again.

use std::io;

use ballast_ranges::{Fitted, SAMPLE};

use crate::kernel::PageTable;
use crate::nodes::Tiers;
use crate::pages::Pages;
use crate::programs::Program;
use crate::settings::AGAIN_AFTER;

pub(crate) struct Watched {
    pub program: Program,
    pub process: Box<dyn PageTable>,
    pub classifier: Fitted,
    pub pages: Pages,
    pub new: u64,
    /// Samples of an epoch, in the mean of the last ones; older ones count less.
    pub rate: f64,
    /// The epoch from which on its pages may be moved again.
    rests_until: u64,
}

impl Watched {
    pub fn new(program: Program, process: Box<dyn PageTable>, classifier: Fitted) -> Self {
        Self { program, process, classifier, pages: Pages::default(), new: 0, rate: 0.0, rests_until: 0 }
    }

    /// Returns whether the program has memory outside of all classified roots, mapped below all that it had before.
    pub fn outgrows(&self, areas: &[(u64, u64)]) -> bool {
        let ranges = self.classifier.ranges();
        let is_in = |address: u64| {
            let after = ranges.partition_point(|range| range.start <= address);
            ranges[..after].last().is_some_and(|range| address < range.end)
        };
        !areas.iter().all(|(start, end)| is_in(*start) && is_in(end - 1))
    }

    /// Records that the program was chosen again, and maps this memory.
    pub fn chosen(&mut self, program: Program, areas: Vec<(u64, u64)>) {
        self.program = program;
        self.pages.set_areas(areas);
    }

    /// Forgets the places of pages, because the tiers have other nodes now.
    pub fn forget_pages(&mut self) {
        self.pages = Pages::default();
    }

    pub fn begin(&mut self) {
        self.new = 0;
    }

    pub fn end_epoch(&mut self) {
        self.rate = (self.rate + self.new as f64) / 2.0;
        self.classifier.end_epoch();
    }

    pub fn record(&mut self, address: u64, count: u32, each: u32) {
        self.new += u64::from(count) * SAMPLE;
        self.classifier.record(address, count, each);
    }

    pub fn look(&mut self, tiers: &Tiers, most: u64) -> io::Result<()> {
        self.pages.look(&*self.process, tiers, most).map(drop)
    }

    pub fn refused(&mut self, epoch: u64) {
        self.rests_until = epoch + AGAIN_AFTER;
    }

    /// Returns whether the program is left alone because the kernel has refused to move its pages.
    pub fn rests(&self, epoch: u64) -> bool {
        epoch < self.rests_until
    }

    /// Returns how often all of its memory was read, if its pages may be moved: 0 keeps it out of a plan. A plan made
    /// before all was read would take unknown pages for absent.
    pub fn rounds(&self, epoch: u64) -> u32 {
        if self.rests(epoch) { 0 } else { self.pages.rounds() }
    }
}

/// The index of a program among these, which are sorted by process id.
pub(crate) fn index_of(watched: &[Watched], pid: u32) -> Option<usize> {
    watched.binary_search_by_key(&pid, |watched| watched.program.pid).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_ranges::{Roots, UNIT};
    use ballast_sys::Remote;

    fn watched() -> Watched {
        let pid = std::process::id();
        let program = Program { pid, start: 1, resident: 1 << 30 };
        let process = Remote::open(pid).expect("this process");
        Watched::new(program, Box::new(process), Fitted::new(Roots::new(&[(UNIT, 9 * UNIT)]).expect("roots")))
    }

    #[test]
    fn a_program_whose_moves_were_refused_is_in_no_plan_for_30_s_and_then_again() {
        let mut watched = watched();
        let tiers = Tiers::default();
        watched.look(&tiers, 100).expect("nothing to read");
        assert_eq!((watched.rounds(7), watched.rests(7)), (1, false));
        watched.refused(7);
        assert_eq!([8, 66, 67].map(|epoch| watched.rounds(epoch)), [0, 0, 1]);
    }

    #[test]
    fn memory_that_is_mapped_below_all_that_a_program_had_is_told_from_what_grows_inside() {
        let watched = watched();
        let outgrows = |areas: &[(u64, u64)]| {
            watched.outgrows(&areas.iter().map(|(a, b)| (a * UNIT, b * UNIT)).collect::<Vec<_>>())
        };
        assert_eq!([outgrows(&[]), outgrows(&[(1, 2), (5, 9)])], [false, false]);
        assert_eq!([outgrows(&[(0, 1), (2, 3)]), outgrows(&[(2, 3), (8, 10)])], [true, true]);
    }

    #[test]
    fn the_rate_of_samples_follows_what_is_sampled() {
        let mut watched = watched();
        for epoch in 0..40 {
            watched.begin();
            watched.record(2 * UNIT, 5, 1);
            watched.end_epoch();
            assert!(epoch < 20 || (watched.rate - (5 * SAMPLE) as f64).abs() < 1.0);
        }
        watched.begin();
        watched.end_epoch();
        assert!(watched.new == 0 && watched.rate < (3 * SAMPLE) as f64);
    }
}
