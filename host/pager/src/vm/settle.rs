//! Settling: spares a VMM that frees a unit page by page (a balloon) most of its requests.
//!
//! Before: the VMM has asked to discard [`ASKED`] small pieces of a unit, one after the other. After: the rest of the
//! unit is in memory and has no copy, and the VMM's client frees it without asking, until the next zap there.
//! Threads: the discard worker. Units: pages of a region.
//! Promise: a client is told only of a unit in which each page is Resident: no page moves between that check and the
//! message, so each later zap comes after the message. Nothing is read from a disk or a cluster.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::Range;
use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_page::page_state::State;

use super::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;

/// Number of small discards of a unit after which it is settled: settling costs as much as some more discards.
const ASKED: u32 = 16;
/// Longest time for settling: discards wait for it, and they may be what free memory depends on.
const LONGEST: Duration = Duration::from_millis(50);

/// A unit: process, region, and unit number.
type Unit = (u32, u32, u64);

/// Counts of small discards of a VM, of the unit that the last one was in.
#[derive(Debug, Default)]
pub(crate) struct Small {
    unit: Option<Unit>,
    count: u32,
    /// The client was told of this unit.
    is_told: bool,
}

impl Small {
    /// Counts a discard. Returns the region and the first page of the unit to settle, if one is due.
    pub fn discarded(&mut self, view: &View, ranges: &[Range]) -> Option<(u32, PageIdx)> {
        let [(start, len)] = ranges else { return None };
        let (region, page) = view.find(*start).filter(|_| *len < PAGES_PER_UNIT * PAGE_SIZE as u64)?;
        let is_due = self.is_due((view.pid, region, page.unit()));
        is_due.then(|| (region, PageIdx(page.unit() * PAGES_PER_UNIT)))
    }

    /// Counts a piece of this unit. Returns whether the unit is to be settled. If a try fails because a page is locked,
    /// the next tries come at ever larger counts.
    fn is_due(&mut self, unit: Unit) -> bool {
        if self.unit != Some(unit) {
            *self = Self { unit: Some(unit), ..Self::default() };
        }
        self.count += 1;
        !self.is_told && self.count >= ASKED && self.count.is_power_of_two()
    }

    pub fn told(&mut self) {
        self.is_told = true;
    }
}

impl Vm {
    /// Restores the unit that begins with this page, and tells the client. Returns whether the client was told. Fails
    /// if a page could not be restored; the client then goes on asking.
    pub(crate) fn settle(&self, view: &View, number: u32, first: PageIdx) -> io::Result<bool> {
        let is_noted = |region: &Arc<Region>| region.granule_pages() == 1 && !region.is_on_demand();
        let Some(region) = self.region(number).filter(is_noted) else { return Ok(false) };
        let pages = PageRange::of(first, PAGES_PER_UNIT);
        let is_whole = pages.end() <= region.range().end();
        if !is_whole || !self.life.is_alone() || pages.iter().any(|page| region.is_slow(page)) {
            return Ok(false);
        }
        let begun = Instant::now();
        let mut goes_on = || begun.elapsed() < LONGEST && !self.is_stopping();
        self.restore_through(&region, pages.iter(), &|| self.views(), &mut goes_on)?;
        let _still = self.memory.change_layout();
        let Some(base) = view.base(number).filter(|_| !region.is_removed() && !self.is_stopping()) else {
            return Ok(false);
        };
        let is_settled = |page| {
            let word = region.word(page);
            word.state() == State::Resident && !word.is_locked()
        };
        let all = pages.iter().all(is_settled);
        if all {
            view.peer().settled((base + first.0 * PAGE_SIZE as u64, PAGES_PER_UNIT * PAGE_SIZE as u64));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_settled_once_and_tried_ever_more_rarely_until_then() {
        let mut small = Small::default();
        let due = |small: &mut Small, unit: u64, pieces: u32| {
            let mut due = Vec::new();
            (1..=pieces).for_each(|piece| due.extend(small.is_due((7, 0, unit)).then_some(piece)));
            due
        };
        assert_eq!(due(&mut small, 1, ASKED - 1), [0; 0]);
        assert_eq!(due(&mut small, 2, 4 * ASKED), [ASKED, 2 * ASKED, 4 * ASKED], "the client was not told");
        assert_eq!(due(&mut small, 3, ASKED), [ASKED]);
        small.told();
        assert_eq!(due(&mut small, 3, 4 * ASKED), [0; 0]);
        assert_eq!(due(&mut small, 4, ASKED), [ASKED]);
    }
}
