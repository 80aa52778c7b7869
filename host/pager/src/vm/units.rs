//! Units: the engine's knowledge of each 2 MiB of a region.
//!
//! Before: a chunk is registered, and `huge::learn` marks its units that are mapped huge. After: reclaim, tracking and
//! `coalesce` note their changes of a unit, and faults read them.
//! Threads: any; atomics only. It is in the engine's memory: the next engine begins without it.
//!
//! | Part | Used by | If it is wrong |
//! |---|---|---|
//! | the stage (`unit.rs`) | code that maps a unit as a whole | bytes are lost: see there |
//! | the mapping | `coalesce`, which maps huge units huge again; the zap scan | base pages, or one more fault |
//! | touches | the zap scan | memory looks colder or hotter than it is |

use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};

use ballast_base::{PAGES_PER_UNIT, PageCount, PageIdx, PageRange};
use ballast_heat::source::BLOCK;

use ballast_page::unit::{Stage, Unit};

/// It was mapped huge once, so it is worth mapping huge again.
const HUGE: u8 = 1;
/// Pages of it were zapped since, so it is no longer mapped huge.
const BROKEN: u8 = 1 << 1;
/// It was whole in the last pass of coalescing, and was not disturbed since.
const WHOLE: u8 = 1 << 2;
/// Its base pages were zapped by tracking: a fault may map the neighbours, too.
const ZAPPED: u8 = 1 << 3;

/// The running cycle watches it: touches are recorded.
const TRACKED: u16 = 1 << 8;

#[derive(Debug)]
pub struct Units(Box<[UnitState]>);

impl Units {
    /// Units of a region of this many pages, without a partial unit at its end.
    pub fn new(pages: PageCount) -> Self {
        Self((0..pages.0 / PAGES_PER_UNIT).map(|_| UnitState::default()).collect())
    }

    pub fn len(&self) -> u64 {
        self.0.len() as u64
    }

    pub fn get(&self, unit: u64) -> Option<&UnitState> {
        self.0.get(usize::try_from(unit).ok()?)
    }

    /// The unit of a page; `None` in a partial unit at the region's end.
    pub fn of(&self, page: PageIdx) -> Option<&UnitState> {
        self.get(page.unit())
    }

    /// Pages of these units are in Quarantine and about to be zapped: see [`Unit::disturb`].
    pub fn disturb(&self, pages: PageRange, pause: impl Fn()) {
        self.covering(pages).for_each(|unit| unit.disturb(&pause));
    }

    fn covering(&self, pages: PageRange) -> impl Iterator<Item = &UnitState> {
        pages.units().filter_map(|unit| self.get(unit))
    }
}

#[derive(Debug, Default)]
pub struct UnitState {
    stage: AtomicU8,
    /// Flags [`HUGE`] to [`ZAPPED`].
    mapped: AtomicU8,
    /// [`TRACKED`], and a bit for each eighth of the unit touched in this cycle, unless pages are recorded one by one.
    touched: AtomicU16,
}

impl UnitState {
    pub fn as_whole(&self) -> Unit<'_> {
        Unit::new(&self.stage)
    }

    /// Returns whether a fault on the unit needs no further check.
    pub fn is_quiet(&self) -> bool {
        self.as_whole().stage() == Stage::Plain && !self.is_zapped() && !self.is_tracked()
    }

    /// Pages of it are in Quarantine, and are zapped after this returns: see [`Unit::disturb`].
    fn disturb(&self, pause: impl Fn()) {
        self.as_whole().disturb(pause);
        self.mark(|mapped| {
            // A zap of one page unmaps a huge mapping as a whole.
            let unmapped = if mapped & (HUGE | BROKEN) == HUGE { ZAPPED } else { 0 };
            mapped & !WHOLE | BROKEN | unmapped
        });
    }

    fn mark(&self, change: impl Fn(u8) -> u8) -> u8 {
        self.mapped
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |mapped| Some(change(mapped)))
            .expect("there is always a change")
    }

    pub fn seen_huge(&self) {
        self.mark(|mapped| mapped & !(BROKEN | WHOLE | ZAPPED) | HUGE);
    }

    /// Returns whether it is mapped huge, as far as the engine knows, or was until tracking zapped it.
    pub fn is_huge(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & (HUGE | BROKEN) == HUGE
    }

    /// Records that it is no longer mapped huge, and that none of its pages is mapped.
    pub fn tear(&self) {
        self.mark(|mapped| mapped & !WHOLE | BROKEN | ZAPPED);
    }

    /// Returns whether it was mapped huge once and was zapped in part since.
    pub fn is_broken(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & (HUGE | BROKEN) == HUGE | BROKEN
    }

    /// Records that it can never be mapped huge again.
    pub fn give_up(&self) {
        self.mark(|mapped| mapped & !HUGE);
    }

    /// Records that it is whole. Returns whether it was whole in the last pass, too, and not disturbed since.
    pub fn found_whole(&self) -> bool {
        self.mark(|mapped| mapped | WHOLE) & WHOLE != 0
    }

    /// Records that its base pages are about to be zapped by tracking.
    pub fn zap(&self) {
        self.mark(|mapped| mapped | ZAPPED);
    }

    /// Returns whether tracking zapped its base pages, and some may still be unmapped.
    pub fn is_zapped(&self) -> bool {
        self.mapped.load(Ordering::Acquire) & ZAPPED != 0
    }

    pub fn track(&self) {
        self.touched.store(TRACKED, Ordering::Release);
    }

    pub fn is_tracked(&self) -> bool {
        self.touched.load(Ordering::Acquire) & TRACKED != 0
    }

    /// Records a touch of a page of it. A fault that then maps the unit as a whole calls this first: the stage that it
    /// changes makes the touch visible to the tracker.
    pub fn touch(&self, page: PageIdx) {
        self.touched.fetch_or(1 << (page.0 % PAGES_PER_UNIT / BLOCK), Ordering::AcqRel);
    }

    /// Ends the recording. Returns a bit for each eighth that was touched.
    pub fn untrack(&self) -> u8 {
        self.touched.swap(0, Ordering::AcqRel) as u8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_huge_unit_is_broken_by_a_disturbance_and_must_be_found_whole_twice() {
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
        // A fault that found the unit tracked may come late.
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
