//! The byte budget that several stores share.
//!
//! Before: an operator says how much memory far pages may take. After: `alloc` charges a slab to its store's account
//! before it uses it.
//! Threads: any; charges take a lock once more than 3/4 of the budget is used, which they do once for a slab.
//! Units: bytes.
//! Promise: a charge above the limit is refused. 1/4 of the limit is divided among the stores: what a store has not
//! used of its part is refused to others, so that one whose pages do not compress stops no other store. What existed
//! before this process (an arena opened, a limit lowered) may lie above the limit; then everything is refused until
//! enough was freed.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use ballast_base::Bytes;

/// 1/N of the limit is divided among the stores. Not measured: enough for a useful part for each of hundreds of stores,
/// and so little that a store that needs all of the budget seldom misses it.
const DIVIDED: i64 = 4;

/// How many bytes a set of stores may hold, and how many they hold.
#[derive(Debug)]
pub struct Budget {
    limit: AtomicU64,
    /// Signed: a store that frees a slab of another process subtracts it before it learns of the charge.
    used: AtomicI64,
    /// The charge of each store. The next new store drops those of stores that are gone.
    accounts: Mutex<Vec<Weak<AtomicI64>>>,
}

impl Budget {
    /// A budget of `limit`, nothing used.
    pub fn new(limit: Bytes) -> Arc<Self> {
        Arc::new(Self { limit: AtomicU64::new(limit.0), used: AtomicI64::new(0), accounts: Mutex::default() })
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

    /// What no other store can take of what each store has not used.
    pub fn part(&self) -> Bytes {
        let stores = self.accounts().iter().filter(|account| account.strong_count() > 0).count().max(1);
        Bytes(self.limit().0 / DIVIDED as u64 / stores as u64)
    }

    fn accounts(&self) -> MutexGuard<'_, Vec<Weak<AtomicI64>>> {
        self.accounts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn charge_up_to(&self, bytes: i64, most: i64) -> bool {
        let after = |used: i64| used.checked_add(bytes).filter(|&after| after <= most);
        self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, after).is_ok()
    }
}

/// One store's part of a budget.
#[derive(Debug)]
pub(crate) struct Account {
    budget: Arc<Budget>,
    charged: Arc<AtomicI64>,
}

impl Account {
    /// A new store shares this budget.
    pub(crate) fn new(budget: Arc<Budget>) -> Self {
        let charged = Arc::new(AtomicI64::new(0));
        let mut accounts = budget.accounts();
        accounts.retain(|account| account.strong_count() > 0);
        accounts.push(Arc::downgrade(&charged));
        drop(accounts);
        Self { budget, charged }
    }

    /// The budget that it is a part of.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Charge `bytes`, unless that would exceed the limit or take a part reserved for others. Returns true if charged.
    pub(crate) fn try_charge(&self, bytes: i64) -> bool {
        let limit = i64::try_from(self.budget.limit().0).unwrap_or(i64::MAX);
        // Up to here any store may take what is left.
        let charged = self.budget.charge_up_to(bytes, limit - limit / DIVIDED) || {
            let accounts = self.budget.accounts();
            self.budget.charge_up_to(bytes, limit - self.of_others(&accounts, limit, bytes))
        };
        if charged {
            self.charged.fetch_add(bytes, Ordering::AcqRel);
        }
        charged
    }

    /// The part of a budget that this store must leave to others, if it uses `unit` bytes at a time.
    fn of_others(&self, accounts: &[Weak<AtomicI64>], limit: i64, unit: i64) -> i64 {
        let stores = accounts.iter().filter(|account| account.strong_count() > 0).count().max(1) as i64;
        let unit = unit.max(1);
        // No store can use a part of a unit.
        let part = limit / DIVIDED / stores / unit * unit;
        if self.charged.load(Ordering::Acquire) < part {
            // It takes of its own part. That makes no other store's part smaller.
            return 0;
        }
        let unused = |account: Arc<AtomicI64>| (part - account.load(Ordering::Acquire)).clamp(0, part);
        accounts.iter().filter_map(Weak::upgrade).map(unused).sum()
    }

    /// The most that all stores may hold when this one takes `unit` bytes more.
    pub(crate) fn most(&self, unit: i64) -> Bytes {
        let limit = i64::try_from(self.budget.limit().0).unwrap_or(i64::MAX);
        Bytes((limit - self.of_others(&self.budget.accounts(), limit, unit)).max(0) as u64)
    }

    /// Add `bytes` (or, if negative, subtract them) regardless of the limit.
    pub(crate) fn adjust(&self, bytes: i64) {
        self.charged.fetch_add(bytes, Ordering::AcqRel);
        self.budget.used.fetch_add(bytes, Ordering::AcqRel);
    }

    /// Set the charge of the store, regardless of the charge before.
    pub(crate) fn set(&self, bytes: i64) {
        let before = self.charged.swap(bytes, Ordering::AcqRel);
        self.budget.used.fetch_add(bytes.wrapping_sub(before), Ordering::AcqRel);
    }
}

impl Drop for Account {
    /// The store outlives this; the budget of this process is no longer charged for it.
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
    fn a_store_that_takes_all_it_can_leaves_the_others_their_parts_and_has_those_of_stores_that_go() {
        let budget = Budget::new(Bytes(80));
        let [greedy, one, two, _idle] = std::array::from_fn(|_| Account::new(budget.clone()));
        let take_all = |account: &Account| (0..).take_while(|_| account.try_charge(1)).count();
        // Each of four has a part of 80 / 4 / 4.
        assert_eq!(budget.part(), Bytes(5));
        assert_eq!(take_all(&greedy), 80 - 3 * 5);
        assert_eq!(take_all(&one), 5);
        two.adjust(5);
        one.adjust(-5);
        assert_eq!(take_all(&greedy), 0, "what one gave back is still one's");
        assert_eq!(take_all(&one), 5);
        drop((one, two));
        // Two are left, with parts of 10.
        assert_eq!(take_all(&greedy), 5);
        assert_eq!(budget.used(), Bytes(70));
    }
}
