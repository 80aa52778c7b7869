//! Touches: messages of a VM's fault workers to its tracking worker.
//!
//! Before: the zap scan began a cycle. After: it reads which pages were touched, and the time that guest threads lost.
//! Threads: fault workers mark, the tracking worker reads; atomics only. Units: pages of a region; nanoseconds.
//! Promise: marking never waits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use ballast_base::{PAGES_PER_UNIT, PageIdx};
use ballast_heat::source::MOST_FINE;
use ballast_heat::{PageMap, UnitId};

/// Time that a thread loses before its fault is read and after it is resolved: of 3.6 us measured in all, the part that
/// the fault worker cannot see.
const UNSEEN: Duration = Duration::from_micros(2);

#[derive(Debug)]
pub(crate) struct Touches {
    running: AtomicBool,
    /// Slots in use, sorted by unit.
    fine: AtomicUsize,
    slots: Box<[Slot]>,
    waited_ns: AtomicU64,
}

/// Guard: while it lives, a cycle runs and no chunk is unregistered.
#[derive(Debug)]
pub(crate) struct KeepRegistered(Arc<Touches>);

impl Drop for KeepRegistered {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
    }
}

/// A unit in a fine cycle.
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
            slots: (0..MOST_FINE).map(|_| Slot::default()).collect(),
            waited_ns: AtomicU64::new(0),
        }
    }
}

impl Touches {
    /// Begins to record touches of these units page by page: at most [`MOST_FINE`], in ascending order.
    pub fn begin(&self, fine: impl Iterator<Item = UnitId>) {
        self.fine.store(0, Ordering::Release);
        let mut count = 0;
        for (slot, unit) in self.slots.iter().zip(fine) {
            slot.pages.iter().for_each(|pages| pages.store(0, Ordering::Relaxed));
            slot.unit.store(number(unit), Ordering::Relaxed);
            count += 1;
        }
        self.fine.store(count, Ordering::Release);
        self.waited_ns.store(0, Ordering::Relaxed);
    }

    pub fn begin_cycle(self: &Arc<Self>) -> KeepRegistered {
        self.running.store(true, Ordering::Release);
        KeepRegistered(self.clone())
    }

    pub fn is_running(&self) -> bool {
        self.running.load(Ordering::Acquire)
    }

    fn slot(&self, unit: UnitId) -> Option<&Slot> {
        let used = &self.slots[..self.fine.load(Ordering::Acquire)];
        let at = used.binary_search_by_key(&number(unit), |slot| slot.unit.load(Ordering::Relaxed)).ok()?;
        used.get(at)
    }

    /// Pages of a unit touched since [`Touches::begin`].
    pub fn pages(&self, unit: UnitId) -> PageMap {
        let Some(slot) = self.slot(unit) else { return PageMap::NONE };
        PageMap(std::array::from_fn(|word| slot.pages[word].load(Ordering::Relaxed)))
    }

    /// The time that threads waited for faults of tracking since [`Touches::begin`].
    pub fn cost(&self) -> Duration {
        Duration::from_nanos(self.waited_ns.load(Ordering::Relaxed))
    }

    /// Marks a page as touched; returns false if its unit is not recorded page by page.
    pub fn mark(&self, unit: UnitId, page: PageIdx) -> bool {
        let Some(slot) = self.slot(unit) else { return false };
        let page = page.0 % PAGES_PER_UNIT;
        slot.pages[page as usize / 64].fetch_or(1 << (page % 64), Ordering::Relaxed);
        true
    }

    /// Adds the wait for a fault that tracking caused and that was read at `since`.
    pub fn charge(&self, since: Instant) {
        let waited = since.elapsed() + UNSEEN;
        self.waited_ns.fetch_add(waited.as_nanos() as u64, Ordering::Relaxed);
    }
}
