//! Touch: what a fault tells the tracker, and how a unit that was zapped to be watched is mapped again.
//!
//! Before: `zap_scan` zapped units and flagged them. After: the fault lane marks what is touched, and maps a huge
//! unit as a whole, some base pages as one run, so that watching leaves nothing slow.
//! Threads: fault lanes mark, one tracker reads; atomics only. Units: pages of a region; nanoseconds.
//! Promise: a fault on a unit that is neither watched nor zapped costs one load. No fault waits for the tracker.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use ballast_base::{HUGE_SIZE, PAGES_PER_UNIT, PageIdx};
use ballast_heat::source::BLOCK;
use ballast_heat::{PageMap, UnitId};
use ballast_sys::remote::Collapsed;
use ballast_sys::uffd::FaultKind;

use crate::coalesce::unit_addr;
use crate::lane::Waiting;
use crate::page_state::State;
use crate::region::Region;
use crate::unit::Mapping;
use crate::units::UnitState;
use crate::view::{RegionView, View};
use crate::vm::Vm;

/// Units that can be watched page by page at a time.
pub const FINE_UNITS: usize = 512;
/// Base pages mapped by one touch of a unit that was zapped: eight touches at most for each unit, of some 15 us. So which
/// of these blocks were touched costs no more to know.
const AROUND: u64 = BLOCK;
/// What a waiting thread loses before its fault is read and after it is answered, on the CPU of the lane: 3.6 us
/// measured in all, less what the lane itself sees.
const UNSEEN: Duration = Duration::from_micros(2);

/// What fault lanes tell the tracker of one VM.
#[derive(Debug)]
pub(crate) struct Touches {
    /// A cycle runs.
    running: AtomicBool,
    /// Slots in use.
    fine: AtomicUsize,
    slots: Box<[Slot]>,
    faults: AtomicU64,
    waited_ns: AtomicU64,
}

/// While it lives, a cycle runs and no chunk is unregistered.
#[derive(Debug)]
pub(crate) struct KeepRegistered<'a>(&'a Touches);

impl Drop for KeepRegistered<'_> {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
    }
}

/// One unit that is watched page by page.
#[derive(Debug, Default)]
struct Slot {
    unit: AtomicU64,
    pages: [AtomicU64; PAGES_PER_UNIT as usize / 64],
}

fn number(unit: UnitId) -> u64 {
    u64::from(unit.region) << 32 | u64::from(unit.unit)
}

impl Default for Touches {
    fn default() -> Self {
        Self {
            running: AtomicBool::new(false),
            fine: AtomicUsize::new(0),
            slots: (0..FINE_UNITS).map(|_| Slot::default()).collect(),
            faults: AtomicU64::new(0),
            waited_ns: AtomicU64::new(0),
        }
    }
}

impl Touches {
    /// Watch these units, in ascending order, page by page from now on, at most [`FINE_UNITS`].
    pub fn begin(&self, fine: impl Iterator<Item = UnitId>) {
        self.fine.store(0, Ordering::Release);
        let mut count = 0;
        for (slot, unit) in self.slots.iter().zip(fine) {
            slot.pages.iter().for_each(|pages| pages.store(0, Ordering::Relaxed));
            slot.unit.store(number(unit), Ordering::Relaxed);
            count += 1;
        }
        self.fine.store(count, Ordering::Release);
        self.faults.store(0, Ordering::Relaxed);
        self.waited_ns.store(0, Ordering::Relaxed);
    }

    /// A cycle runs until what this returns is dropped.
    pub fn begin_cycle(&self) -> KeepRegistered<'_> {
        self.running.store(true, Ordering::Release);
        KeepRegistered(self)
    }

    /// Does a cycle run?
    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    fn slot(&self, unit: UnitId) -> Option<&Slot> {
        let used = &self.slots[..self.fine.load(Ordering::Acquire)];
        let at = used.binary_search_by_key(&number(unit), |slot| slot.unit.load(Ordering::Relaxed)).ok()?;
        used.get(at)
    }

    /// The pages of a unit touched since [`Touches::begin`].
    pub fn pages(&self, unit: UnitId) -> PageMap {
        let Some(slot) = self.slot(unit) else { return PageMap::NONE };
        PageMap(std::array::from_fn(|word| slot.pages[word].load(Ordering::Relaxed)))
    }

    /// Faults since then, and how long threads waited for them.
    pub fn cost(&self) -> (u64, Duration) {
        let waited = Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed));
        (self.faults.load(Ordering::Relaxed), waited)
    }

    fn mark(&self, unit: UnitId, page: PageIdx) -> bool {
        let Some(slot) = self.slot(unit) else { return false };
        let page = page.0 % PAGES_PER_UNIT;
        slot.pages[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
        true
    }

    fn paid(&self, waiting: &Waiting) {
        let waited = waiting.since.elapsed() + UNSEEN;
        self.waited_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }
}

/// What the lane does with a fault on a unit that is not quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Put it aside: the unit is just being mapped.
    Aside,
    /// The whole unit is mapped and whoever waited was woken.
    Mapped,
    /// Serve the page, then call [`served`].
    Serve {
        /// It faults because it is watched: what that cost counts.
        tracked: bool,
        /// Its neighbours were zapped only to be watched: map them, too.
        around: bool,
    },
}

/// A page of the unit was touched.
pub(crate) fn touched(
    vm: &Vm,
    view: &View,
    region: &Region,
    page: PageIdx,
    unit: &UnitState,
    waiting: &Waiting,
) -> Touch {
    if unit.as_whole().is_mapping() {
        return Touch::Aside;
    }
    let id = UnitId { region: region.number, unit: page.unit() as u32 };
    let (mut fine, mut tracked) = (false, unit.is_tracked());
    if tracked {
        // Before the unit is mapped: from then on nobody would see a touch.
        fine = vm.touches.mark(id, page);
        if !fine {
            unit.touch(page);
        }
        // What reclaim took or was about to take would have been a fault without us, too: a VM that misses much would seem dear
        // to track, and then not be tracked, when it needs that most.
        tracked = waiting.fault.kind == FaultKind::Minor && region.word(page).state() == State::Resident;
        vm.touches.faults.fetch_add(u64::from(tracked), Ordering::Relaxed);
    }
    if waiting.fault.kind == FaultKind::Minor
        && let Some(mapping) = unit.as_whole().enter()
    {
        if map_huge(view, region, &[(page.unit(), mapping)]) {
            vm.touches.paid(waiting);
            return Touch::Mapped;
        }
        unit.tear();
    }
    Touch::Serve { tracked, around: unit.is_zapped() && !fine && region.granule_pages() == 1 }
}

/// The page is served.
pub(crate) fn served(
    vm: &Vm,
    region: &Region,
    memory: &RegionView<'_>,
    page: PageIdx,
    waiting: &Waiting,
    (tracked, around): (bool, bool),
) {
    if around && let Err(error) = map_around(region, memory, page) {
        // Whoever wants them will fault, and the lane will say what is wrong.
        tracing::debug!(vm = vm.state.name(), "Mapping pages around page {page}: {error}");
    }
    if tracked {
        vm.touches.paid(waiting);
    }
}

/// Map neighbouring units huge in one view, and wake who waits there. Answers whether that was done.
pub(crate) fn map_huge(view: &View, region: &Region, units: &[(u64, Mapping<'_>)]) -> bool {
    let Some((first, _)) = units.first() else { return true };
    let Some((remote, addr)) = view.remote().zip(unit_addr(view, region, *first)) else { return false };
    let len = (units.len() * HUGE_SIZE) as u64;
    let done = remote.collapse(addr, len).is_ok_and(|outcome| outcome == Collapsed::Done);
    if done {
        units.iter().filter_map(|(unit, _)| region.units().get(*unit)).for_each(UnitState::seen_huge);
        let pages = units.len() as u64 * PAGES_PER_UNIT;
        let _ = view.of_region(region).map(|memory| memory.wake_run(PageIdx::first_of_unit(*first), pages));
    }
    done
}

/// Map the pages around one that was touched, as far as they are Resident.
pub(crate) fn map_around(region: &Region, memory: &RegionView<'_>, page: PageIdx) -> std::io::Result<()> {
    let first = page.0 - page.0 % AROUND;
    map_resident(region, memory, first..(first + AROUND).min(region.pages().0))
}

/// Map those pages of a range that are Resident, under their locks. Base pages only. Never waits for a lock.
pub(crate) fn map_resident(
    region: &Region,
    memory: &RegionView<'_>,
    pages: std::ops::Range<u64>,
) -> std::io::Result<()> {
    let mut at = pages.start;
    while at < pages.end {
        let first = at;
        let mut locks = Vec::with_capacity((pages.end - at) as usize);
        while at < pages.end {
            let cell = region.granule(PageIdx(at)).cell();
            let word = cell.load();
            let free = word.state() == State::Resident && !word.is_locked();
            let Some(lock) = free.then(|| cell.lock(word, word)).flatten() else { break };
            locks.push(lock);
            at += 1;
        }
        memory.map_run(PageIdx(first), locks.len() as u64)?;
        // Past the one that is not ours to map.
        at += 1;
    }
    Ok(())
}
