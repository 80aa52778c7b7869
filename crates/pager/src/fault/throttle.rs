//! The gate: a VM's limit as its faults feel it. Pages come in as fast as there is room, or room is made.
//!
//! Before: the reclaim lane looked how much the VM holds. After: fault lanes let missing pages in while there is room below
//! the *ceiling*, a margin above the limit; then one for each that goes, and one for two while the VM holds more than that.
//! Pages that are in memory (rescues) pass. So does everything where reclaim cannot work, and whatever has waited for
//! [`PATIENCE`].
//! Threads: the reclaim lane looks and counts what goes, fault lanes ask and count what comes; plain atomics, because being
//! off by what several threads do at once harms nobody and ends with the next look. Units: pages.
//! Promise: no fault waits here for longer than [`PATIENCE`], whatever becomes of the reclaim lane.
//!
//! Without it a guest brings its pages back as fast as reclaim takes them, and a limit decides nothing. The kernel's own
//! way is harsher: who needs a page in a full memory cgroup first goes and finds others to swap out.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

/// How long a fault waits at most for its turn.
pub const PATIENCE: Duration = Duration::from_millis(100);

/// Pages that must go for each that comes, above the ceiling.
const PRICE: i64 = 2;

/// A VM's gate; open at first.
#[derive(Debug, Default)]
pub struct Gate {
    is_limited: AtomicBool,
    is_over: AtomicBool,
    /// Pages that may come in, times [`PRICE`].
    room: AtomicI64,
    /// The margin: how far the ceiling is above the limit.
    margin: AtomicI64,
    /// Some fault was not let in.
    is_wanted: AtomicBool,
}

impl Gate {
    /// Let everything in.
    pub fn open(&self) {
        self.is_limited.store(false, Ordering::Release);
    }

    /// The VM holds so many pages now; its limit, and how far above that the ceiling is.
    pub fn look(&self, resident: u64, limit: u64, margin: u64) {
        let ceiling = limit + margin;
        self.margin.store(margin as i64, Ordering::Relaxed);
        let was_over = self.is_limited.load(Ordering::Relaxed) && self.is_over.load(Ordering::Relaxed);
        let is_over = resident > ceiling;
        self.is_over.store(is_over, Ordering::Relaxed);
        // Above the ceiling, what was earned since the last look stays.
        if !(is_over && was_over) {
            self.room.store(PRICE * ceiling.saturating_sub(resident) as i64, Ordering::Relaxed);
        }
        self.is_limited.store(true, Ordering::Release);
    }

    /// So many pages went out.
    pub fn went(&self, pages: u64) {
        let worth = if self.is_over.load(Ordering::Relaxed) { 1 } else { PRICE };
        self.room.fetch_add(worth * pages as i64, Ordering::Relaxed);
    }

    /// So many pages came in.
    pub fn came(&self, pages: u64) {
        self.room.fetch_sub(PRICE * pages as i64, Ordering::Relaxed);
    }

    /// May so many pages come in for a fault that has waited this long?
    pub fn admits(&self, pages: u64, waited: impl FnOnce() -> Duration) -> bool {
        let admits = self.room().is_none_or(|room| room >= pages) || waited() >= PATIENCE;
        if !admits {
            self.is_wanted.store(true, Ordering::Relaxed);
        }
        admits
    }

    /// How many pages faults may bring in now. `None` if the VM has no limit that faults feel.
    pub fn room(&self) -> Option<u64> {
        let room = || (self.room.load(Ordering::Relaxed) / PRICE).max(0) as u64;
        self.is_limited.load(Ordering::Acquire).then(room)
    }

    /// How many pages may come in that nobody asked for: up to the limit. `None` if the VM has no limit that faults feel.
    pub fn spare(&self) -> Option<i64> {
        let spare = || self.room.load(Ordering::Relaxed) / PRICE - self.margin.load(Ordering::Relaxed);
        self.is_limited.load(Ordering::Acquire).then(spare)
    }

    /// Is the VM near its limit, so that what comes in drives out something else?
    pub fn is_tight(&self) -> bool {
        let near = || self.room.load(Ordering::Relaxed) < 2 * PRICE * self.margin.load(Ordering::Relaxed);
        self.is_limited.load(Ordering::Acquire) && near()
    }

    /// Was any fault not let in since this was asked last?
    pub fn was_wanted(&self) -> bool {
        self.is_wanted.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Duration {
        Duration::ZERO
    }

    #[test]
    fn below_the_ceiling_pages_come_in_until_there_is_no_room_and_then_one_for_each_that_goes() {
        let gate = Gate::default();
        assert!(gate.admits(512, now) && gate.spare().is_none() && !gate.is_tight(), "open at first");
        assert_eq!(gate.room(), None);
        gate.look(91, 96, 4);
        assert!(!gate.is_tight());
        gate.look(93, 96, 4);
        assert!(gate.is_tight(), "less than the margin below the limit");
        gate.look(90, 96, 4);
        assert!(gate.admits(10, now) && !gate.was_wanted() && gate.room() == Some(10));
        assert_eq!(gate.spare(), Some(6), "nobody asked: not above the limit");
        assert!(!gate.admits(11, now) && gate.was_wanted() && !gate.was_wanted());
        gate.came(10);
        assert!(!gate.admits(1, now));
        gate.went(1);
        assert!(gate.admits(1, now) && !gate.admits(2, now));
        gate.look(95, 96, 4);
        assert!(gate.admits(5, now) && !gate.admits(6, now), "a look counts anew");
        gate.open();
        assert!(gate.admits(512, now));
    }

    #[test]
    fn above_the_ceiling_a_page_comes_in_for_two_that_went_or_after_a_long_wait() {
        let gate = Gate::default();
        gate.look(0, 900, 100);
        gate.look(200, 90, 10);
        assert!(!gate.admits(1, now), "what was free before does not count");
        gate.went(1);
        gate.look(199, 90, 10);
        assert!(!gate.admits(1, now));
        gate.went(1);
        assert!(gate.admits(1, now) && !gate.admits(2, now), "what was earned does");
        gate.came(1);
        assert!(!gate.admits(1, now));
        assert!(gate.admits(512, || PATIENCE), "nobody waits for ever");
    }
}
