//! Touches: messages of a VM's fault workers to its tracking worker.
//!
//! Before: the zap scan began a cycle. After: the scan reads which pages were touched, and what that cost the guest.
//! Threads: fault workers mark, the tracking worker reads; atomics only. Units: pages of a region; nanoseconds.
//! Promise: marking never waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ballast_base::{PAGES_PER_UNIT, PageIdx};
use ballast_heat::{PageMap, UnitId};

/// Most units that can be watched page by page at a time.
pub const FINE_UNITS: usize = 512;
/// Time that a waiting thread loses before its fault is read and after it is resolved, on the CPU of the worker: 3.6 us
/// measured in all, less the part that the worker sees.
const UNSEEN: Duration = Duration::from_micros(2);

/// Reports of fault workers to the tracker of one VM.
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
pub(crate) struct KeepRegistered(Arc<Touches>);

impl Drop for KeepRegistered {
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
    /// Watches these units, in ascending order, page by page from now on, at most [`FINE_UNITS`].
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

    /// Begins a cycle, which runs until the returned value is dropped.
    pub fn begin_cycle(self: &Arc<Self>) -> KeepRegistered {
        self.running.store(true, Ordering::Release);
        KeepRegistered(self.clone())
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

    /// Faults since [`Touches::begin`], and how long threads waited for them.
    pub fn cost(&self) -> (u64, Duration) {
        let waited = Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed));
        (self.faults.load(Ordering::Relaxed), waited)
    }

    /// Marks a page of a unit that is watched page by page; returns false if the unit is not.
    pub fn mark(&self, unit: UnitId, page: PageIdx) -> bool {
        let Some(slot) = self.slot(unit) else { return false };
        let page = page.0 % PAGES_PER_UNIT;
        slot.pages[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
        true
    }

    /// Counts a fault that the watch caused.
    pub fn count_fault(&self, tracked: bool) {
        self.faults.fetch_add(u64::from(tracked), Ordering::Relaxed);
    }

    /// Charges the watch with the wait for such a fault, which was read at `since`.
    pub fn charge(&self, since: Instant) {
        let waited = since.elapsed() + UNSEEN;
        self.waited_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }
}
