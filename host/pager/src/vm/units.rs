//! Units: the engine's knowledge of each 2 MiB of a region.
//!
//! Before: a chunk is registered, and `huge::learn` notes which of its units are mapped huge. After: reclaim,
//! tracking and `coalesce` note what they did to a unit, and faults read it.
//! Threads: any; atomics only. It is in the engine's memory: a successor begins with no knowledge.
//!
//! | What | Used by | If it is wrong |
//! |---|---|---|
//! | the stage (`unit.rs`) | code that maps a unit as a whole | bytes are lost: see there |
//! | how it is mapped | `coalesce`, which maps huge units huge again; the zap scan | base pages, or one more fault |
//! | touches | the zap scan | memory looks colder or hotter than it is |

use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx, PageRange};
use ballast_heat::source::BLOCK;

use ballast_page::unit::{Stage, Unit};

/// It was once seen mapped huge, so it is worth mapping huge again.
const HUGE: u8 = 1;
/// Pages of it were zapped since: it is no longer mapped huge.
const BROKEN: u8 = 1 << 1;
/// It was whole when it was last looked at, and not disturbed since.
const WHOLE: u8 = 1 << 2;
/// Its base pages were zapped to watch them: a touch may map its neighbours, too.
const ZAPPED: u8 = 1 << 3;

/// The running cycle watches it: touches are recorded.
const TRACKED: u16 = 1 << 8;

/// The units of one region, counted from its start.
#[derive(Debug)]
pub struct Units(Box<[UnitState]>);

impl Units {
    /// For a region of this number of pages; a partial unit at its end is left out.
    pub fn new(pages: PageCount) -> Self {
        Self((0..pages.0 / PAGES_PER_UNIT).map(|_| UnitState::default()).collect())
    }

    /// How many there are.
    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Has the region no whole unit?
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// One unit.
    pub fn get(&self, unit: u64) -> Option<&UnitState> {
        self.0.get(usize::try_from(unit).ok()?)
    }

    /// The unit of a page, unless the page is in a partial unit at the region's end.
    pub fn of(&self, page: PageIdx) -> Option<&UnitState> {
        self.get(page.unit())
    }

    /// Some of these pages are in Quarantine and about to be zapped. See [`Unit::disturb`].
    pub fn disturb(&self, pages: PageRange, pause: impl Fn()) {
        self.covering(pages).for_each(|unit| unit.disturb(&pause));
    }

    fn covering(&self, pages: PageRange) -> impl Iterator<Item = &UnitState> {
        pages.units().filter_map(|unit| self.get(unit))
    }
}

/// The pages of a unit.
pub fn pages_of(unit: u64) -> impl Iterator<Item = PageIdx> + Clone {
    PageRange::of_unit(unit).iter()
}

/// The state of one unit.
#[derive(Debug, Default)]
pub struct UnitState {
    stage: AtomicU8,
    /// How it is mapped.
    mapped: AtomicU8,
    /// [`TRACKED`], and a bit for each eighth that the running cycle saw touched, unless it watches page by page.
    touched: AtomicU16,
}

impl UnitState {
    /// The stage of the unit as a whole.
    pub fn as_whole(&self) -> Unit<'_> {
        Unit::new(&self.stage)
    }

    /// Returns whether a fault on it needs no further look.
    pub fn is_quiet(&self) -> bool {
        self.as_whole().stage() == Stage::Plain && !self.is_zapped() && !self.is_tracked()
    }

    /// Some of its pages are in Quarantine now and will be zapped as soon as this returns. See [`Unit::disturb`].
    fn disturb(&self, pause: impl Fn()) {
        self.as_whole().disturb(pause);
        self.mark(|mapped| {
            // The zap of one page unmaps all of a huge mapping.
            let unmapped = if mapped & (HUGE | BROKEN) == HUGE { ZAPPED } else { 0 };
            mapped & !WHOLE | BROKEN | unmapped
        });
    }

    /// Changes how it is mapped. Returns the value before.
    fn mark(&self, change: impl Fn(u8) -> u8) -> u8 {
        self.mapped
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |mapped| Some(change(mapped)))
            .expect("there is always a change")
    }

    /// It is mapped huge.
    pub fn seen_huge(&self) {
        self.mark(|mapped| mapped & !(BROKEN | WHOLE | ZAPPED) | HUGE);
    }

    /// Is it mapped huge, as far as is known, or was it until tracking zapped it?
    pub fn is_huge(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & (HUGE | BROKEN) == HUGE
    }

    /// It is not mapped huge any more, and its pages are not mapped at all.
    pub fn tear(&self) {
        self.mark(|mapped| mapped & !WHOLE | BROKEN | ZAPPED);
    }

    /// Was it once mapped huge, and has been zapped in part since?
    pub fn is_broken(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & (HUGE | BROKEN) == HUGE | BROKEN
    }

    /// It can never be mapped huge again.
    pub fn give_up(&self) {
        self.mark(|mapped| mapped & !HUGE);
    }

    /// It was found whole. Returns whether it was whole before, too, without a disturbance in between.
    pub fn found_whole(&self) -> bool {
        self.mark(|mapped| mapped | WHOLE) & WHOLE != 0
    }

    /// Its base pages are about to be zapped to watch them.
    pub fn zap(&self) {
        self.mark(|mapped| mapped | ZAPPED);
    }

    /// Were its base pages zapped to watch them, and may some be unmapped still?
    pub fn is_zapped(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & ZAPPED != 0
    }

    /// Begins to record touches of it.
    pub fn track(&self) {
        self.touched.store(TRACKED, Ordering::Release);
    }

    /// Are touches of it recorded?
    pub fn is_tracked(&self) -> bool {
        self.touched.load(Ordering::Acquire) & TRACKED != 0
    }

    /// Records a touch of a page of it. A fault that maps the unit as a whole next calls this before: by the stage that
    /// it then moves, the tracker sees this.
    pub fn touch(&self, page: PageIdx) {
        self.touched.fetch_or(1 << (page.0 % PAGES_PER_UNIT / BLOCK), Ordering::AcqRel);
    }

    /// Ends the recording of touches. Returns the eighths that were touched.
    pub fn untrack(&self) -> u8 {
        self.touched.swap(0, Ordering::AcqRel) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_huge_is_broken_by_a_disturbance_and_must_be_found_whole_twice() {
        let unit = UnitState::default();
        unit.disturb(|| ());
        assert!(!unit.is_broken());
        unit.seen_huge();
        assert!(!unit.is_broken() && unit.is_quiet());
        unit.disturb(|| ());
        assert!(unit.is_broken() && unit.is_zapped());
        assert!(!unit.found_whole() && unit.found_whole());
        unit.disturb(|| ());
        assert!(!unit.found_whole());
        unit.seen_huge();
        assert!(!unit.is_broken() && unit.is_quiet());
    }

    #[test]
    fn touches_of_a_cycle_are_those_between_its_begin_and_its_end() {
        let unit = UnitState::default();
        // A fault that found the unit tracked may be late.
        unit.touch(PageIdx(0));
        assert!(unit.is_quiet());
        unit.track();
        [PAGES_PER_UNIT + BLOCK, 7 * BLOCK, 7 * BLOCK + 1].into_iter().for_each(|page| unit.touch(PageIdx(page)));
        assert!(unit.is_tracked() && !unit.is_quiet());
        assert_eq!((unit.untrack(), unit.is_tracked(), unit.untrack()), (0b1000_0010, false, 0));
    }

    #[test]
    fn the_part_of_a_unit_at_a_regions_end_is_none() {
        let units = Units::new(PageCount(2 * PAGES_PER_UNIT - 1));
        assert_eq!(units.len(), 1);
        assert!(units.of(PageIdx(PAGES_PER_UNIT - 1)).is_some() && units.of(PageIdx(PAGES_PER_UNIT)).is_none());
        units.disturb(PageRange::of(PageIdx(500), 500), || ());
    }
}
