//! What reclaim asks of the spill worker: room in the RAM store.
//!
//! Before: the RAM store refused a page. After: the spill worker writes old pages to the file store.
//! Threads: any. Promise: asking never waits.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// See above.
#[derive(Debug, Default)]
pub struct SpillRequest {
    wanted: Mutex<bool>,
    changed: Condvar,
    /// The worker runs, and the last time it was asked for room it made some.
    helps: AtomicBool,
}

impl SpillRequest {
    /// The RAM store is full: make room. Returns whether that is likely to help.
    pub(crate) fn make_room(&self) -> bool {
        *self.wanted.lock().expect("no panic while held") = true;
        self.changed.notify_one();
        self.helps.load(Ordering::Acquire)
    }

    /// Say whether asking helps.
    pub(crate) fn set_helps(&self, helps: bool) {
        self.helps.store(helps, Ordering::Release);
    }

    /// The VM is being stopped: let the worker see it.
    pub(crate) fn notify(&self) {
        // With the lock, so that the worker is not between its check and its wait.
        let _wanted = self.wanted.lock().expect("no panic while held");
        self.changed.notify_one();
    }

    /// Is there something more urgent than the pass under way?
    pub(crate) fn is_wanted(&self) -> bool {
        *self.wanted.lock().expect("no panic while held")
    }

    /// Wait, at most this long; true if room is wanted.
    pub(crate) fn wait(&self, is_stopping: impl Fn() -> bool, at_most: Duration) -> bool {
        let wanted = self.wanted.lock().expect("no panic while held");
        let waited = self.changed.wait_timeout_while(wanted, at_most, |wanted| !*wanted && !is_stopping());
        std::mem::take(&mut *waited.expect("no panic while held").0)
    }
}
