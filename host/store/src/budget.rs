//! The byte budget that several stores share.
//!
//! Before: an operator says how much memory far pages may take. After: `alloc` charges a slab to its store's account
//! before it uses it.
//! Threads: any. Once more than 3/4 of the budget are used, a charge takes a lock, once for a slab. Units: bytes.
//! Promise: a charge above the limit is refused. 1/4 of the limit is reserved, in equal parts, for the stores: what a
//! store has not used of its part is refused to others, so that a store whose pages do not compress stops no other
//! store. Memory from before this process (an arena that it opened) or before a cut of the limit may exceed the limit;
//! then each charge is refused until enough was freed.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use ballast_base::Bytes;
use ballast_sys::lock::Lock;

/// 1/N of the limit is reserved for the stores. Not measured: each of hundreds of stores still has a useful part, and a
/// store that needs all of the budget seldom misses it.
const DIVIDED: i64 = 4;

/// A limit in bytes for a set of stores, and the bytes that they hold.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    /// Signed: a store may subtract a slab of another process before it has added it.
    used: AtomicI64,
    /// The charge of each store. A new store drops the entries of closed stores.
    accounts: Mutex<Vec<Weak<AtomicI64>>>,
}

impl Budget {
    /// A budget of `limit`, with nothing charged.
    pub fn new(limit: Bytes) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit.0), used: AtomicI64::new(0), accounts: Mutex::default() })
    }

    /// The limit, as last set.
    pub fn limit(&self) -> Bytes {
        Bytes(self.limit.load(Ordering::Relaxed))
    }

    /// Changes the limit, for the next charge. Nothing is evicted.
    pub fn set_limit(&self, limit: Bytes) {
        self.limit.store(limit.0, Ordering::Relaxed);
    }

    /// Bytes charged by the stores of this process.
    pub fn used(&self) -> Bytes {
        Bytes(self.used.load(Ordering::Relaxed).max(0) as u64)
    }

    /// Bytes that are reserved for each store.
    pub fn part(&self) -> Bytes {
        let stores = self.accounts().iter().filter(|account| account.strong_count() > 0).count().max(1);
        Bytes(self.limit().0 / DIVIDED as u64 / stores as u64)
    }

    fn accounts(&self) -> MutexGuard<'_, Vec<Weak<AtomicI64>>> {
        self.accounts.locked()
    }

    fn charge_up_to(&self, bytes: i64, most: i64) -> bool {
        let after = |used: i64| used.checked_add(bytes).filter(|&after| after <= most);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, after).is_ok()
    }
}

#[derive(Debug)]
pub(crate) struct Account {
    budget: Arc<Budget>,
    charged: Arc<AtomicI64>,
}

impl Account {
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        let charged = Arc::new(AtomicI64::new(0));
        let mut accounts = budget.accounts();
        accounts.retain(|account| account.strong_count() > 0);
        accounts.push(Arc::downgrade(&charged));
        drop(accounts);
        Self { budget, charged }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Charges `bytes`, unless that would exceed the limit or use a part of other stores. Returns true if charged.
    pub(crate) fn try_charge(&self, bytes: i64) -> bool {
        let limit = i64::try_from(self.budget.limit().0).unwrap_or(i64::MAX);
        // Below this limit, nothing is reserved.
        let charged = self.budget.charge_up_to(bytes, limit - limit / DIVIDED) || {
            let accounts = self.budget.accounts();
            self.budget.charge_up_to(bytes, limit - self.of_others(&accounts, limit, bytes))
        };
        if charged {
            self.charged.fetch_add(bytes, Ordering::AcqRel);
        }
        charged
    }

    /// Bytes that this store must leave to the others, if it charges `unit` bytes at a time.
    fn of_others(&self, accounts: &[Weak<AtomicI64>], limit: i64, unit: i64) -> i64 {
        let stores = accounts.iter().filter(|account| account.strong_count() > 0).count().max(1) as i64;
        let unit = unit.max(1);
        // Only whole units are of use to a store.
        let part = limit / DIVIDED / stores / unit * unit;
        if self.charged.load(Ordering::Acquire) < part {
            return 0;
        }
        let unused = |account: Arc<AtomicI64>| (part - account.load(Ordering::Acquire)).clamp(0, part);
        accounts.iter().filter_map(Weak::upgrade).map(unused).sum()
    }

    /// The total that all stores may hold if this one charges `unit` bytes more.
    pub(crate) fn most(&self, unit: i64) -> Bytes {
        let limit = i64::try_from(self.budget.limit().0).unwrap_or(i64::MAX);
        Bytes((limit - self.of_others(&self.budget.accounts(), limit, unit)).max(0) as u64)
    }

    pub(crate) fn adjust(&self, bytes: i64) {
        self.charged.fetch_add(bytes, Ordering::AcqRel);
        self.budget.used.fetch_add(bytes, Ordering::AcqRel);
    }

    pub(crate) fn set(&self, bytes: i64) {
        let before = self.charged.swap(bytes, Ordering::AcqRel);
        self.budget.used.fetch_add(bytes.wrapping_sub(before), Ordering::AcqRel);
    }
}

impl Drop for Account {
    /// The arena may live on in another process, but this process no longer charges it.
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_charge_above_the_limit_is_refused_and_a_live_change_counts_at_once() {
        let budget = Budget::new(Bytes(100));
        let account = Account::new(budget.clone());
        assert!(account.try_charge(100));
        assert!(!account.try_charge(1));
        budget.set_limit(Bytes(50));
        account.adjust(-60);
        assert!(!account.try_charge(11));
        assert!(account.try_charge(10));
        assert_eq!(budget.used(), Bytes(50));
        budget.set_limit(Bytes(u64::MAX));
        assert!(account.try_charge(1));
        drop(account);
        assert_eq!(budget.used(), Bytes(0));
    }

    #[test]
    fn a_greedy_store_leaves_the_others_their_parts_and_gets_those_of_closed_stores() {
        let budget = Budget::new(Bytes(80));
        let [greedy, one, two, _idle] = std::array::from_fn(|_| Account::new(budget.clone()));
        let take_all = |account: &Account| (0..).take_while(|_| account.try_charge(1)).count();
        // Each of four stores has a part of 80 / 4 / 4.
        assert_eq!(budget.part(), Bytes(5));
        assert_eq!(take_all(&greedy), 80 - 3 * 5);
        assert_eq!(take_all(&one), 5);
        two.adjust(5);
        one.adjust(-5);
        assert_eq!(take_all(&greedy), 0, "the bytes that `one` returned stay reserved for it");
        assert_eq!(take_all(&one), 5);
        drop((one, two));
        // Two stores are left, with parts of 10.
        assert_eq!(take_all(&greedy), 5);
        assert_eq!(budget.used(), Bytes(70));
    }
}
