//! The budget of all stores of a process in the cluster, and the share of each store.
//!
//! Before: an operator says how much memory far pages may take on other machines. After: a store puts pages only while
//! they fit, and operators see an estimate of what is used.
//! Threads: any, without locks; sums may be off for a moment. Units: pages, at the mean size of the pages that were
//! put.
//! Promise: dropping a store subtracts all pages that it counted. Freed pages count until their keys are unlinked, but
//! they do not limit the puts of their own store, except those that a node has refused to unlink.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ballast_base::{Bytes, PAGE_SIZE};

/// Memory that a server needs for a page in addition to its value: the key, and its own tables.
const KEY_BYTES: u64 = 128;

/// Budget of all stores of a process in the cluster.
#[derive(Debug)]
pub struct RemoteBudget {
    limit: Bytes,
    pages: AtomicU64,
    /// Pages ever put and their bytes, for the mean size.
    put_pages: AtomicU64,
    put_bytes: AtomicU64,
}

impl RemoteBudget {
    /// Creates a budget of this size. It covers keys and the servers' tables.
    pub fn new(limit: Bytes) -> Arc<Self> {
        let [pages, put_pages, put_bytes] = [0; 3].map(AtomicU64::new);
        Arc::new(Self { limit, pages, put_pages, put_bytes })
    }

    /// Returns the estimated size of this many pages.
    pub(crate) fn bytes(&self, pages: u64) -> u64 {
        let (put, bytes) = (self.put_pages.load(Relaxed), self.put_bytes.load(Relaxed));
        let mean = bytes.checked_div(put).unwrap_or(PAGE_SIZE as u64 + KEY_BYTES);
        pages.saturating_mul(mean)
    }

    /// Returns the estimated size of all pages in the cluster.
    pub fn used(&self) -> Bytes {
        Bytes(self.bytes(self.pages.load(Relaxed)))
    }

    /// Returns the limit.
    pub fn limit(&self) -> Bytes {
        self.limit
    }
}

/// The pages of one store in the budget.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Arc<RemoteBudget>,
    /// Estimated number of pages that were put and not unlinked.
    pages: AtomicU64,
}

impl Share {
    pub fn new(budget: Arc<RemoteBudget>) -> Self {
        Self { budget, pages: AtomicU64::new(0) }
    }

    pub fn budget(&self) -> &RemoteBudget {
        &self.budget
    }

    pub fn pages(&self) -> u64 {
        self.pages.load(Relaxed)
    }

    /// Returns whether this many more pages fit. `waiting` pages of this store are about to be unlinked.
    pub fn has_room(&self, count: u64, waiting: u64) -> bool {
        let held = self.budget.pages.load(Relaxed).saturating_sub(waiting);
        self.budget.bytes(held + count) <= self.budget.limit.0
    }

    /// Counts pages that were put, with values of this many bytes together.
    pub fn put(&self, count: u64, values: u64) {
        self.budget.put_pages.fetch_add(count, Relaxed);
        self.budget.put_bytes.fetch_add(values + count * KEY_BYTES, Relaxed);
        self.add(count);
    }

    /// Counts pages that the cluster already has.
    pub fn add(&self, count: u64) {
        self.pages.fetch_add(count, Relaxed);
        self.budget.pages.fetch_add(count, Relaxed);
    }

    /// Subtracts pages, at most as many as this store has counted.
    pub fn sub(&self, count: u64) {
        let less = |pages: &AtomicU64, by: u64| {
            let before = pages.fetch_update(Relaxed, Relaxed, |pages| Some(pages.saturating_sub(by)));
            before.unwrap_or_default().min(by)
        };
        let had = less(&self.pages, count);
        less(&self.budget.pages, had);
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.sub(self.pages());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_store_that_is_dropped_gives_its_share_back_and_no_other_one_s() {
        let budget = RemoteBudget::new(Bytes(1 << 20));
        let (one, other) = (Share::new(budget.clone()), Share::new(budget.clone()));
        one.put(10, 10 * 1000);
        other.put(5, 5 * 1000);
        assert_eq!(budget.used(), Bytes(15 * 1128));
        one.sub(40);
        assert_eq!((one.pages(), budget.used()), (0, Bytes(5 * 1128)));
        one.add(7);
        drop(one);
        assert_eq!(budget.used(), Bytes(5 * 1128));
        let (room, waiting) = ((1 << 20) / 1128 - 5, 2);
        assert!(other.has_room(room, 0) && !other.has_room(room + 1, 0) && other.has_room(room + 2, waiting));
    }
}
