//! The budget of all stores of a process in the cluster, and the share of each store.
//!
//! Before: an operator says how much memory far pages may take on other machines. After: a store puts pages only while
//! they fit beside what is stored (not beside what is on its way), and operators see an estimate of what is used.
//! Threads: any, without locks; sums may be off for a moment. Units: pages, at the mean size of those that were put or
//! read recently. As long as these are few, pages of an earlier engine count as if they filled 15/16 of the budget, at
//! most: that engine kept to it.
//! Promise: dropping a store subtracts all pages that it counted. Freed pages count until their keys are unlinked, but
//! they do not limit the puts of their own store, except those that a node has refused to unlink.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ballast_base::{Bytes, PAGE_SIZE};

/// Memory that a server needs for a page in addition to its value: the key, and its own tables.
const KEY_BYTES: u64 = 128;
/// Bytes of a page that does not compress.
const PAGE_MOST: u64 = PAGE_SIZE as u64 + KEY_BYTES;
/// Sizes that the mean needs. Above the second number half of them are forgotten, so that it follows the guests.
const ENOUGH: u64 = 1024;
const MANY: u64 = 1 << 20;

/// Budget of all stores of a process in the cluster.
#[derive(Debug)]
pub struct RemoteBudget {
    limit: Bytes,
    pages: AtomicU64,
    /// Pages that an earlier engine put.
    inherited: AtomicU64,
    /// Sizes that were seen, and their sum.
    seen: AtomicU64,
    seen_bytes: AtomicU64,
}

impl RemoteBudget {
    /// Creates a budget of this size. It covers keys and the servers' tables.
    pub fn new(limit: Bytes) -> Arc<Self> {
        let [pages, inherited, seen, seen_bytes] = [0; 4].map(AtomicU64::new);
        Arc::new(Self { limit, pages, inherited, seen, seen_bytes })
    }

    pub(crate) fn bytes(&self, pages: u64) -> u64 {
        let (seen, bytes) = (self.seen.load(Relaxed), self.seen_bytes.load(Relaxed));
        let inherited = self.inherited.load(Relaxed);
        let mean = match bytes.checked_div(seen) {
            Some(mean) if seen >= ENOUGH || inherited == 0 => mean,
            _ => {
                let room = self.limit.0 - self.limit.0 / 16;
                room.checked_div(inherited).map_or(PAGE_MOST, |fit| fit.min(PAGE_MOST))
            }
        };
        pages.saturating_mul(mean)
    }

    /// A value of this many bytes was put or read, or several of these together.
    pub(crate) fn saw(&self, count: u64, values: u64) {
        self.seen_bytes.fetch_add(values + count * KEY_BYTES, Relaxed);
        let seen = self.seen.fetch_add(count, Relaxed) + count;
        if seen > MANY && self.seen.compare_exchange(seen, seen / 2, Relaxed, Relaxed).is_ok() {
            let _ = self.seen_bytes.fetch_update(Relaxed, Relaxed, |bytes| Some(bytes / 2));
        }
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

    /// Returns whether this many more pages fit. `waiting` pages of this store will be unlinked soon.
    pub fn has_room(&self, count: u64, waiting: u64) -> bool {
        let held = self.budget.pages.load(Relaxed).saturating_sub(waiting);
        self.budget.bytes(held + count) <= self.budget.limit.0
    }

    /// Counts pages that were put, with values of this many bytes together.
    pub fn put(&self, count: u64, values: u64) {
        self.budget.saw(count, values);
        self.add(count);
    }

    pub fn inherit(&self, count: u64) {
        self.budget.inherited.fetch_add(count, Relaxed);
        self.add(count);
    }

    fn add(&self, count: u64) {
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
    #[test]
    fn pages_of_an_earlier_engine_leave_room_until_the_size_of_pages_is_known_and_then_count_with_it() {
        let limit = 1 << 30;
        let budget = RemoteBudget::new(Bytes(limit));
        let (fits, one) = (limit / 1128 * 2 / 3, Share::new(budget.clone()));
        one.inherit(fits);
        assert!(one.has_room(512, 0), "its engine kept to the budget");
        assert!(budget.used().0 <= limit - limit / 16);
        budget.saw(ENOUGH, ENOUGH * 1000);
        assert_eq!(budget.used(), Bytes(fits * 1128));
        assert!(one.has_room(limit / 1128 - fits, 0) && !one.has_room(limit / 1128 - fits + 1, 0));
        // Pages do not compress any more.
        (0..4 * MANY).step_by(512).for_each(|_| budget.saw(512, 512 * 4096));
        assert!(budget.used().0 > fits * 4000, "{}", budget.used().0 / fits);
    }
}
