//! Recent refaults of a VM whose guest has an agent.
//!
//! Before: a fault restored a page. After: reclaim counts how often the agent's cold hints were wrong, and tells the
//! agent what its kernel's services touch.
//! Threads: fault and slow workers push, the reclaim worker takes; atomics only. Units: pages of a region.
//! Promise: a push never waits. The oldest refaults are overwritten.

use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::PageIdx;

/// Capacity: 64 MiB of pages, in 128 KiB.
const CAPACITY: u64 = 1 << 14;
/// Bits of a page number: 256 TiB of a region. The higher bits are the region's number.
const PAGE_BITS: u32 = 36;

pub type Place = (u32, PageIdx);

#[derive(Debug)]
pub struct Refaults {
    /// Region and page, plus one; 0: empty.
    slots: Box<[AtomicU64]>,
    /// Refaults pushed so far; refaults taken or overwritten so far.
    pushed: AtomicU64,
    taken: AtomicU64,
}

impl Default for Refaults {
    fn default() -> Self {
        let slots = (0..CAPACITY).map(|_| AtomicU64::new(0)).collect();
        Self { slots, pushed: AtomicU64::new(0), taken: AtomicU64::new(0) }
    }
}

impl Refaults {
    pub fn push(&self, (region, page): Place) {
        let at = self.pushed.fetch_add(1, Ordering::Relaxed) % CAPACITY;
        let entry = u64::from(region) << PAGE_BITS | page.0;
        self.slots[at as usize].store(entry + 1, Ordering::Relaxed);
    }

    /// Takes the oldest refault. Only the reclaim worker calls it.
    pub fn take(&self) -> Option<Place> {
        let pushed = self.pushed.load(Ordering::Relaxed);
        loop {
            let at = self.taken.load(Ordering::Relaxed).max(pushed.saturating_sub(CAPACITY));
            if at == pushed {
                return None;
            }
            self.taken.store(at + 1, Ordering::Relaxed);
            // An empty slot belongs to a push that has not stored yet: that refault is skipped.
            if let Some(entry) = self.slots[(at % CAPACITY) as usize].swap(0, Ordering::Relaxed).checked_sub(1) {
                return Some(((entry >> PAGE_BITS) as u32, PageIdx(entry & ((1 << PAGE_BITS) - 1))));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refaults_are_taken_in_their_order_and_the_oldest_are_forgotten() {
        let refaults = Refaults::default();
        assert_eq!(refaults.take(), None);
        refaults.push((3, PageIdx(7)));
        refaults.push((3, PageIdx(0)));
        let taken = [refaults.take(), refaults.take(), refaults.take()];
        assert_eq!(taken, [Some((3, PageIdx(7))), Some((3, PageIdx(0))), None]);
        (0..CAPACITY + 5).for_each(|page| refaults.push((0, PageIdx(page))));
        assert_eq!(refaults.take(), Some((0, PageIdx(5))));
        assert_eq!(std::iter::from_fn(|| refaults.take()).count() as u64, CAPACITY - 1);
    }
}
