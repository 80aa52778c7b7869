//! The byte budget that several stores share.
//!
//! Before: an operator says how much memory far pages may take. After: `alloc` charges a slab before it uses it.
//! Threads: any; two atomics, no lock.
//! Units: bytes.
//! Promise: a charge above the limit is refused. What existed before this process (an arena opened, a limit lowered)
//! may lie above the limit; then everything is refused until enough was freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use ballast_base::Bytes;

/// How many bytes a set of stores may hold, and how many they hold.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    /// Signed: a store that frees what another process allocated gives back before it learns of the charge.
    used: AtomicI64,
}

impl Budget {
    /// A budget of `limit`, nothing used.
    pub fn new(limit: Bytes) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit.0), used: AtomicI64::new(0) })
    }

    /// The limit.
    pub fn limit(&self) -> Bytes {
        Bytes(self.limit.load(Ordering::Relaxed))
    }

    /// Change the limit. It holds for the next charge; nothing is evicted.
    pub fn set_limit(&self, limit: Bytes) {
        self.limit.store(limit.0, Ordering::Relaxed);
    }

    /// What the stores of this process have charged.
    pub fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Relaxed).max(0) as u64)
    }

    /// Charge `bytes` unless that would pass the limit; true if charged.
    pub(crate) fn try_charge(&self, bytes: i64) -> bool {
        let limit = i64::try_from(self.limit().0).unwrap_or(i64::MAX);
        self.used
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |used| {
                used.checked_add(bytes).filter(|&after| after <= limit)
            })
            .is_ok()
    }

    /// Add `bytes` (or, negative, give them back) whatever the limit is.
    pub(crate) fn adjust(&self, bytes: i64) {
        self.used.fetch_add(bytes, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_above_the_limit_is_refused_and_a_live_change_counts_at_once() {
        let budget = Budget::new(Bytes(100));
        assert!(budget.try_charge(100));
        assert!(!budget.try_charge(1));
        budget.set_limit(Bytes(50));
        budget.adjust(-60);
        assert!(!budget.try_charge(11));
        assert!(budget.try_charge(10));
        assert_eq!(budget.used(), Bytes(50));
        budget.set_limit(Bytes(u64::MAX));
        assert!(budget.try_charge(1));
    }
}
