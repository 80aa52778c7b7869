//! Settling: a VMM that frees a unit page by page (a balloon) asks for a few of them only.
//!
//! Before: the VMM has asked for [`ASKED`] small pieces of a unit, one after the other. After: the rest of the unit is
//! in memory and has no copy, and the VMM's client knows that: it frees the rest without asking, until it zaps there.
//! Threads: the one that carries out the VM's discards. Units: pages of a region.
//! Promise: a client is told only of a unit of which each page is Resident: nothing moves from the look at the unit
//! until the message is sent, so that each later zap comes after it. Nothing is read from a disk or a cluster.

use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::Range;
use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_page::page_state::State;

use super::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;

/// Pieces of a unit that are asked for until it is settled: it costs as much as some more of them.
const ASKED: u32 = 16;
/// Longest time for that: discards wait, which may be what memory is short of.
const LONGEST: Duration = Duration::from_millis(50);

/// Pieces of a unit that a client asks for after it was told. It keeps no record of that region then (RAM that was
/// plugged, or that another process had first), and is told of no unit of it any more.
const DEAF: u32 = 64;

/// A unit as a client knows it: process, region, and number.
type Unit = (u32, u32, u64);

/// The small discards of a VM: of which unit the last ones were.
#[derive(Debug, Default)]
pub(crate) struct Small {
    unit: Option<Unit>,
    count: u32,
    /// How many there were when the client was told of this unit.
    told_at: Option<u32>,
    /// Processes and regions.
    deaf: HashSet<(u32, u32)>,
}

impl Small {
    /// This was discarded. Returns the unit that is to be settled, if one is: its region and first page.
    pub fn discarded(&mut self, view: &View, ranges: &[Range]) -> Option<(u32, PageIdx)> {
        let [(start, len)] = ranges else { return None };
        let (region, page) = view.find(*start).filter(|_| *len < PAGES_PER_UNIT * PAGE_SIZE as u64)?;
        let is_due = self.is_due((view.pid, region, page.unit()));
        is_due.then(|| (region, PageIdx(page.unit() * PAGES_PER_UNIT)))
    }

    /// A piece of this unit was discarded. Is the unit to be settled? If it was not, for a page that was on its way, it
    /// is tried again, ever more rarely.
    fn is_due(&mut self, unit: Unit) -> bool {
        if self.unit != Some(unit) {
            (self.unit, self.count, self.told_at) = (Some(unit), 0, None);
        }
        self.count += 1;
        let of = (unit.0, unit.1);
        if self.told_at.is_some_and(|at| self.count - at >= DEAF) {
            self.deaf.insert(of);
        }
        let is_time = self.count >= ASKED && self.count.is_power_of_two();
        is_time && self.told_at.is_none() && !self.deaf.contains(&of)
    }

    /// The client was told of the unit that was due.
    pub fn told(&mut self) {
        self.told_at = Some(self.count);
    }
}

impl Vm {
    /// Brings the unit that begins with this page back, and tells the client. Returns whether it was told.
    ///
    /// # Errors
    /// A page does not come back. The client goes on asking.
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
    fn a_unit_is_settled_once_and_no_more_of_a_region_whose_client_goes_on_asking() {
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
        assert_eq!(due(&mut small, 3, DEAF - 1), [0; 0]);
        assert_eq!(due(&mut small, 4, ASKED), [ASKED], "it was told a moment ago");
        small.told();
        assert_eq!(due(&mut small, 4, DEAF), [0; 0]);
        assert_eq!(due(&mut small, 5, 2 * ASKED), [0; 0], "it does not hear");
        assert!(!small.is_due((7, 1, 5)));
        assert_eq!((1..ASKED).filter(|_| small.is_due((7, 1, 5))).count(), 1, "another region");
    }
}
