//! Unit: one atomic byte per 2 MiB of a region, by which a whole unit may be mapped at once without its pages' locks.
//!
//! Before: reclaim zaps single pages of a unit that was mapped huge, or tracking zaps all of it. After: `coalesce`, or the
//! fault that says "touched", maps it huge again.
//! Threads: any; every move is one compare-exchange. In the engine's memory: a successor begins with all units Plain.
//! Promise: from the acknowledgement of a zap for quarantine on, no page that is still in Quarantine becomes mapped.
//!
//! | Stage | Meaning | Who moves it on |
//! |---|---|---|
//! | Plain | pages are mapped one by one, under their locks | whoever wants to map or watch the unit: to Arming |
//! | Arming | its 512 words are being read | the same: to Watched or Mapping if all were Resident, else to Plain. reclaim: to Plain |
//! | Watched | zapped as a whole; the next touch maps it as a whole | fault lane, tracker: to Mapping. reclaim: to Plain |
//! | Mapping | every page of it is being mapped | its holder only: to Plain. Reclaim waits; a fault on the unit is put aside |
//!
//! Why that is sound. A page is mapped under its lock ([`crate::page_state`]), **or with its whole unit in stage
//! Mapping**. Reclaim first marks words Quarantine, then moves their units to Plain ([`Unit::disturb`]), then zaps. A unit
//! gets to Mapping only through Arming. If its Arming comes before the disturbance, that either undoes it or waits until
//! the unit was mapped, and the zap comes after. If it comes later it sees the words, which were written before, and
//! gives up. Both sides use read-modify-writes of one byte, so one of them is first, and the later one sees all the
//! earlier one had written.
//!
//! A hole in a unit whose words are all Resident means zeros, so even a kernel that fills holes when it maps a unit
//! changes nothing that the guest can see.

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_heat::source::BLOCK;

use crate::sync::{AtomicU8, Ordering};

/// See the table above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Pages are mapped one by one.
    Plain = 0,
    /// Its words are being read.
    Arming = 1,
    /// The next touch maps all of it.
    Watched = 2,
    /// All of it is being mapped.
    Mapping = 3,
}

const STAGE: u8 = 3;
/// It was once seen mapped huge: worth mapping huge again.
const HUGE: u8 = 1 << 2;
/// Pages of it were zapped since: it is no longer mapped huge.
const BROKEN: u8 = 1 << 3;
/// It was whole when it was last looked at, and not disturbed since.
const WHOLE: u8 = 1 << 4;

/// It is watched in the cycle that runs: touches are remembered.
const TRACKED: u8 = 1 << 5;
/// And was touched in it.
const TOUCHED: u8 = 1 << 6;
/// Its base pages were zapped to watch them: a touch may map its neighbours, too.
const ZAPPED: u8 = 1 << 7;

/// The units of one region, counted from its start.
#[derive(Debug)]
pub struct Units {
    bytes: Box<[AtomicU8]>,
    /// The eighths of each that the cycle that runs saw touched, where pages are mapped one by one.
    blocks: Box<[std::sync::atomic::AtomicU8]>,
}

impl Units {
    /// For a region of that many pages; a part of a unit at its end is none.
    pub fn new(pages: PageCount) -> Self {
        let units = || 0..pages.0 / PAGES_PER_UNIT;
        Self {
            bytes: units().map(|_| AtomicU8::new(0)).collect(),
            blocks: units().map(|_| std::sync::atomic::AtomicU8::new(0)).collect(),
        }
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Has the region no whole unit?
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// One unit.
    pub fn get(&self, unit: u64) -> Option<Unit<'_>> {
        self.bytes.get(usize::try_from(unit).ok()?).map(Unit)
    }

    /// The block of a page is touched. To be seen by whoever sees that its unit is: call this first.
    pub fn touch_block(&self, page: PageIdx) {
        if let Some(blocks) = self.blocks.get(page.unit() as usize) {
            blocks.fetch_or(1 << (page.0 % PAGES_PER_UNIT / BLOCK), Ordering::Relaxed);
        }
    }

    /// The blocks of a unit that were touched since the last call.
    pub fn take_blocks(&self, unit: u64) -> u8 {
        self.blocks.get(unit as usize).map_or(0, |blocks| blocks.swap(0, Ordering::Relaxed))
    }

    /// Is or was any unit of these pages mapped huge?
    pub fn any_huge(&self, first: PageIdx, count: u64) -> bool {
        let units = first.0 / PAGES_PER_UNIT..(first.0 + count).div_ceil(PAGES_PER_UNIT);
        units.filter_map(|unit| self.get(unit)).any(|unit| unit.load() & HUGE != 0)
    }

    /// The unit a page is in, unless it is in the part of one at the region's end.
    pub fn of(&self, page: PageIdx) -> Option<Unit<'_>> {
        self.get(page.0 / PAGES_PER_UNIT)
    }

    /// Pages of `first..first + count` are in Quarantine and about to be zapped. See [`Unit::disturb`].
    pub fn disturb(&self, first: PageIdx, count: u64, pause: impl Fn()) {
        for unit in first.0 / PAGES_PER_UNIT..(first.0 + count).div_ceil(PAGES_PER_UNIT) {
            if let Some(unit) = self.get(unit) {
                unit.disturb(&pause);
            }
        }
    }
}

/// The pages of a unit.
pub fn pages_of(unit: u64) -> impl Iterator<Item = PageIdx> + Clone {
    (unit * PAGES_PER_UNIT..(unit + 1) * PAGES_PER_UNIT).map(PageIdx)
}

/// One unit's byte.
#[derive(Clone, Copy, Debug)]
pub struct Unit<'a>(&'a AtomicU8);

impl<'a> Unit<'a> {
    /// The unit of this byte.
    pub fn new(byte: &'a AtomicU8) -> Self {
        Self(byte)
    }

    fn load(self) -> u8 {
        self.0.load(Ordering::Acquire)
    }

    fn swap(self, from: u8, to: u8) -> bool {
        self.0.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Change the flags, whatever the stage.
    fn flag(self, set: u8, clear: u8) {
        loop {
            let byte = self.load();
            if self.swap(byte, (byte | set) & !clear) {
                return;
            }
        }
    }

    /// Where it is.
    pub fn stage(self) -> Stage {
        match self.load() & STAGE {
            0 => Stage::Plain,
            1 => Stage::Arming,
            2 => Stage::Watched,
            _ => Stage::Mapping,
        }
    }

    /// Is there nothing that a fault on it must look at?
    pub fn is_quiet(self) -> bool {
        self.load() & (STAGE | TRACKED | ZAPPED) == 0
    }

    /// Is every page of it being mapped just now?
    pub fn is_mapping(self) -> bool {
        self.stage() == Stage::Mapping
    }

    /// It is mapped huge.
    pub fn seen_huge(self) {
        self.flag(HUGE, BROKEN | WHOLE | ZAPPED);
    }

    /// Is it mapped huge, as far as is known, or was until tracking zapped it?
    pub fn is_huge(self) -> bool {
        self.load() & (HUGE | BROKEN) == HUGE
    }

    /// It is not mapped huge any more, and its pages are not mapped at all.
    pub fn tear(self) {
        self.flag(BROKEN | ZAPPED, WHOLE);
    }

    /// Its base pages are about to be zapped to watch them.
    pub fn zap(self) {
        self.flag(ZAPPED, 0);
    }

    /// Were they, and may some be unmapped still?
    pub fn is_zapped(self) -> bool {
        self.load() & ZAPPED != 0
    }

    /// Begin to remember touches of it.
    pub fn track(self) {
        self.flag(TRACKED, TOUCHED);
    }

    /// Are touches of it remembered?
    pub fn is_tracked(self) -> bool {
        self.load() & TRACKED != 0
    }

    /// It is touched.
    pub fn touch(self) {
        if self.load() & TOUCHED == 0 {
            self.flag(TOUCHED, 0);
        }
    }

    /// No longer remember; answers whether it was touched.
    pub fn untrack(self) -> bool {
        let touched = self.load() & TOUCHED != 0;
        self.flag(0, TRACKED);
        touched
    }

    /// Was it once mapped huge, and has been zapped in part since?
    pub fn is_broken(self) -> bool {
        self.load() & (HUGE | BROKEN) == HUGE | BROKEN
    }

    /// It can never be mapped huge again.
    pub fn give_up(self) {
        self.flag(0, HUGE);
    }

    /// It was found whole; answers whether it was before, too, without a disturbance in between.
    pub fn found_whole(self) -> bool {
        let before = self.load() & WHOLE != 0;
        if !before {
            self.flag(WHOLE, 0);
        }
        before
    }

    /// Some of its pages are in Quarantine now and will be zapped as soon as this returns. Waits while it is Mapping.
    pub fn disturb(self, pause: impl Fn()) {
        loop {
            let byte = self.load();
            // The zap of one page unmaps all of a huge mapping.
            let unmapped = if byte & (HUGE | BROKEN) == HUGE { ZAPPED } else { 0 };
            // Written also where nothing changes: see the file's head.
            if byte & STAGE == Stage::Mapping as u8 {
                pause();
            } else if self.swap(byte, byte & !(STAGE | WHOLE) | BROKEN | unmapped) {
                return;
            }
        }
    }

    /// Plain to Mapping, if `is_resident` then finds all its words Resident.
    pub fn map(self, is_resident: impl FnOnce() -> bool) -> Option<Mapping<'a>> {
        self.arm(Stage::Mapping, is_resident).then(|| Mapping(self))
    }

    /// Plain to Watched, if `is_resident` then finds all its words Resident. The caller zaps it next.
    pub fn watch(self, is_resident: impl FnOnce() -> bool) -> bool {
        self.arm(Stage::Watched, is_resident)
    }

    /// Watched to Mapping: it was touched, or is watched no longer.
    pub fn enter(self) -> Option<Mapping<'a>> {
        loop {
            let byte = self.load();
            if byte & STAGE != Stage::Watched as u8 {
                return None;
            }
            if self.swap(byte, byte | STAGE) {
                return Some(Mapping(self));
            }
        }
    }

    fn arm(self, to: Stage, is_resident: impl FnOnce() -> bool) -> bool {
        let byte = self.load();
        if byte & STAGE != Stage::Plain as u8 || !self.swap(byte, byte | Stage::Arming as u8) {
            return false;
        }
        let to = if is_resident() { to } else { Stage::Plain };
        loop {
            let byte = self.load();
            if byte & STAGE != Stage::Arming as u8 {
                return false;
            }
            if self.swap(byte, byte & !STAGE | to as u8) {
                return to != Stage::Plain;
            }
        }
    }
}

/// A unit in stage Mapping; Plain again when dropped.
#[derive(Debug)]
pub struct Mapping<'a>(Unit<'a>);

impl Mapping<'_> {
    /// It is mapped huge now.
    pub fn done(&self) {
        self.0.seen_huge();
    }
}

impl Drop for Mapping<'_> {
    fn drop(&mut self) {
        self.0.flag(0, STAGE);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_unit_is_mapped_only_when_its_words_are_resident_and_nobody_else_has_it() {
        let byte = AtomicU8::new(0);
        let unit = Unit::new(&byte);
        assert!(unit.map(|| false).is_none());
        assert!(unit.map(|| unit.map(|| true).is_none()).is_some(), "a unit that is Arming was armed again");
        assert_eq!(unit.stage(), Stage::Plain, "dropped");
        let mapping = unit.map(|| true).expect("free");
        assert!(unit.is_mapping() && unit.map(|| true).is_none());
        drop(mapping);
    }

    #[test]
    fn what_is_disturbed_while_its_words_are_read_is_not_mapped() {
        let byte = AtomicU8::new(0);
        let unit = Unit::new(&byte);
        let read = || {
            unit.disturb(|| unreachable!("nobody maps it"));
            true
        };
        assert!(unit.map(read).is_none());
        assert_eq!(unit.stage(), Stage::Plain);
    }

    #[test]
    fn only_what_was_huge_is_broken_by_a_disturbance_and_must_be_found_whole_twice() {
        let byte = AtomicU8::new(0);
        let unit = Unit::new(&byte);
        unit.disturb(|| ());
        assert!(!unit.is_broken());
        unit.seen_huge();
        assert!(!unit.is_broken());
        unit.disturb(|| ());
        assert!(unit.is_broken());
        assert!(!unit.found_whole() && unit.found_whole());
        unit.disturb(|| ());
        assert!(!unit.found_whole());
        unit.map(|| true).expect("free").done();
        assert!(!unit.is_broken());
    }

    #[test]
    fn the_part_of_a_unit_at_a_regions_end_is_none() {
        let units = Units::new(PageCount(2 * PAGES_PER_UNIT - 1));
        assert_eq!(units.len(), 1);
        assert!(units.of(PageIdx(PAGES_PER_UNIT - 1)).is_some() && units.of(PageIdx(PAGES_PER_UNIT)).is_none());
        units.disturb(PageIdx(500), 500, || ());
    }
}
