//! The fault throttle: in a VM at its limit, pages come in no faster than pages go out.
//!
//! Before: the reclaim worker measured the VM's resident pages. After: fault workers bring pages in while there are
//! credits. Below the *ceiling*, a margin above the limit, there are credits for as many pages as fit, and each page
//! that goes out adds one. Above the ceiling, two pages must go out for one credit. Quarantine hits need no credits,
//! nor does a fault that has waited for [`MOST_WAIT`], nor any fault where reclaim cannot work.
//! Threads: the reclaim worker sets credits and adds pages that went out; fault workers check credits and subtract
//! pages that came in. Relaxed atomics suffice: a race makes a harmless error until credits are set again. Units:
//! pages.
//! Promise: no fault waits here for longer than [`MOST_WAIT`], even if the reclaim worker dies; a userfaultfd whose
//! faults all wait for credits is not visited until pages have gone out.
//!
//! Without the throttle, a guest restores its pages as fast as reclaim evicts them, and a limit has no effect. The
//! kernel is harsher: a thread that needs a page in a full memory cgroup swaps out others itself.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering, fence};
use std::sync::{Arc, RwLock};
use std::time::Duration;

/// Longest wait of a fault for credits.
pub const MOST_WAIT: Duration = Duration::from_millis(100);

/// Above the ceiling, pages that must go out for each that comes in: with 1, a VM would never come down.
pub(crate) const PRICE: i64 = 2;

/// The throttle of one VM; open at first.
#[derive(Debug, Default)]
pub struct Throttle {
    is_limited: AtomicBool,
    is_over: AtomicBool,
    /// Pages that may come in, times [`PRICE`].
    credits: AtomicI64,
    was_short: AtomicBool,
    /// Userfaultfds whose faults may wait.
    waiters: RwLock<Vec<Arc<Waiter>>>,
    is_waited_for: AtomicBool,
}

/// A userfaultfd. While all of its faults wait for credits, no worker visits it: when workers looked every 50 us, two
/// hundred of them took the CPUs from the reclaim that they waited for.
pub struct Waiter {
    notify: Box<dyn Fn() + Send + Sync>,
    waits: AtomicBool,
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").field("waits", &self.waits).finish_non_exhaustive()
    }
}

impl Waiter {
    /// Ends the wait: the userfaultfd is visited again.
    pub fn ends(&self) {
        self.waits.store(false, Ordering::Release);
    }
}

impl Throttle {
    /// Admits all faults.
    pub fn open(&self) {
        self.is_limited.store(false, Ordering::Release);
        self.wake();
    }

    /// Registers a waiter, which stays while the caller keeps it. `notify` is called from any thread; it must not wait.
    pub fn waiter(&self, notify: impl Fn() + Send + Sync + 'static) -> Arc<Waiter> {
        let waiter = Arc::new(Waiter { notify: Box::new(notify), waits: AtomicBool::new(false) });
        let mut waiters = self.waiters.write().expect("no panic while held");
        // Drops the waiters of processes that have ended: only this list has them.
        waiters.retain(|waiter| Arc::strong_count(waiter) > 1);
        waiters.push(waiter.clone());
        waiter
    }

    /// Has this waiter notified when there are credits. Returns false if `pages` are admitted already.
    pub fn begin_wait(&self, waiter: &Waiter, pages: u64) -> bool {
        waiter.waits.store(true, Ordering::SeqCst);
        self.is_waited_for.store(true, Ordering::SeqCst);
        // This thread sets the flag and then reads credits; a thread that adds credits does both in the opposite order.
        // So one of the two sees the other (store buffering).
        fence(Ordering::SeqCst);
        self.credits().is_some_and(|credits| credits < pages)
    }

    fn wake(&self) {
        fence(Ordering::SeqCst);
        if !self.is_waited_for.load(Ordering::SeqCst) || !self.is_waited_for.swap(false, Ordering::SeqCst) {
            return;
        }
        for waiter in self.waiters.read().expect("no panic while held").iter() {
            if waiter.waits.swap(false, Ordering::SeqCst) {
                (waiter.notify)();
            }
        }
    }

    /// Sets credits: `resident` pages are in memory now, and the ceiling is `margin` above the limit.
    pub fn set(&self, resident: u64, limit: u64, margin: u64) {
        let ceiling = limit + margin;
        self.is_over.store(resident > ceiling, Ordering::Relaxed);
        self.credits.store(PRICE * ceiling.saturating_sub(resident) as i64, Ordering::Relaxed);
        self.is_limited.store(true, Ordering::Release);
        self.wake();
    }

    /// Adds the credits of pages that went out.
    pub fn evicted(&self, pages: u64) {
        let worth = if self.is_over.load(Ordering::Relaxed) { 1 } else { PRICE };
        self.credits.fetch_add(worth * pages as i64, Ordering::Relaxed);
        if pages > 0 {
            self.wake();
        }
    }

    /// Subtracts pages that came in.
    pub fn charge(&self, pages: u64) {
        self.credits.fetch_sub(PRICE * pages as i64, Ordering::Relaxed);
    }

    /// Returns whether a fault that has waited this long may bring this many pages in.
    pub fn admits(&self, pages: u64, waited: impl FnOnce() -> Duration) -> bool {
        let admits = self.credits().is_none_or(|credits| credits >= pages) || waited() >= MOST_WAIT;
        if !admits {
            self.was_short.store(true, Ordering::Relaxed);
        }
        admits
    }

    /// Pages that faults may bring in now. `None` if the VM has no limit that faults feel.
    pub fn credits(&self) -> Option<u64> {
        let credits = || (self.credits.load(Ordering::Relaxed) / PRICE).max(0) as u64;
        self.is_limited.load(Ordering::Acquire).then(credits)
    }

    /// Returns whether a fault was delayed since the last call.
    pub fn was_short(&self) -> bool {
        self.was_short.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Duration {
        Duration::ZERO
    }

    #[test]
    fn below_the_ceiling_pages_come_in_by_credits_and_then_one_for_each_eviction() {
        let throttle = Throttle::default();
        assert!(throttle.admits(512, now), "open at first");
        assert_eq!(throttle.credits(), None);
        throttle.set(90, 96, 4);
        assert!(throttle.admits(10, now) && !throttle.was_short() && throttle.credits() == Some(10));
        assert!(!throttle.admits(11, now) && throttle.was_short() && !throttle.was_short());
        throttle.charge(10);
        assert!(!throttle.admits(1, now));
        throttle.evicted(1);
        assert!(throttle.admits(1, now) && !throttle.admits(2, now));
        throttle.set(95, 96, 4);
        assert!(throttle.admits(5, now) && !throttle.admits(6, now), "credits are set again");
        throttle.open();
        assert!(throttle.admits(512, now));
    }

    #[test]
    fn a_waiter_is_notified_when_there_are_credits_and_does_not_wait_if_there_are_some() {
        let throttle = Throttle::default();
        let (say, hear) = std::sync::mpsc::channel();
        let waiter = throttle.waiter(move || say.send(()).expect("heard"));
        let is_told = || hear.try_recv().is_ok();
        assert!(!throttle.begin_wait(&waiter, 1), "it is open");
        waiter.ends();
        throttle.set(100, 90, 10);
        assert!(!is_told() && throttle.begin_wait(&waiter, 1) && !is_told());
        throttle.evicted(1);
        assert!(is_told());
        throttle.evicted(1);
        assert!(!is_told(), "once is enough");
        assert!(!throttle.begin_wait(&waiter, 1) && throttle.begin_wait(&waiter, 512));
        throttle.open();
        assert!(is_told());
        throttle.set(200, 90, 10);
        assert!(throttle.begin_wait(&waiter, 1));
        waiter.ends();
        throttle.evicted(1);
        assert!(!is_told(), "it waits no more");
        drop(throttle.waiter(|| ()));
        assert_eq!(throttle.waiters.read().expect("lock").len(), 2);
        drop(throttle.waiter(|| ()));
        assert_eq!(throttle.waiters.read().expect("lock").len(), 2, "those that nobody keeps are forgotten");
    }

    #[test]
    fn above_the_ceiling_a_page_comes_in_for_two_evictions_or_after_a_long_wait() {
        let throttle = Throttle::default();
        throttle.set(0, 900, 100);
        throttle.set(200, 90, 10);
        assert!(!throttle.admits(1, now), "what was free before does not count");
        throttle.evicted(1);
        assert!(!throttle.admits(1, now));
        throttle.evicted(1);
        assert!(throttle.admits(1, now) && !throttle.admits(2, now));
        throttle.charge(1);
        assert!(!throttle.admits(1, now));
        assert!(throttle.admits(512, || MOST_WAIT), "no fault waits for ever");
    }
}
