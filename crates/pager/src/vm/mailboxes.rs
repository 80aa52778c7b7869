//! What the workers of one VM tell each other.
//!
//! Before: a worker has something for another. After: that one finds it, or is notified.
//! Threads: any. Promise: leaving a message never waits for its receiver.

use std::sync::atomic::AtomicBool;
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use crate::fault::prefetch_queue::PrefetchQueue;
use crate::fault::throttle::Throttle;
use crate::reclaim::refault::Refaults;
use crate::scan::touches::Touches;
use crate::tier::slow_queue::SlowQueue;
use crate::tier::spill_request::SpillRequest;

/// | Mailbox | From | To |
/// |---|---|---|
/// | `touches` | fault workers | tracking worker |
/// | `prefetch` | fault workers | prefetch worker |
/// | `slow` | fault workers | slow workers |
/// | `refaults` | fault, slow and prefetch workers | reclaim worker |
/// | `throttle` | reclaim worker | fault workers |
/// | `over_limit` | reclaim worker | tracking, readahead |
/// | `spill` | reclaim worker | spill worker |
/// | `reclaim` | all, and the daemon | reclaim worker |
#[derive(Debug, Default)]
pub(crate) struct Mailboxes {
    pub touches: Touches,
    pub prefetch: PrefetchQueue,
    pub slow: SlowQueue,
    pub refaults: Refaults,
    pub throttle: Throttle,
    /// Was the VM above its limit when the reclaim worker last checked?
    pub over_limit: AtomicBool,
    pub spill: SpillRequest,
    pub reclaim: Notice,
}

/// Something to do.
#[derive(Debug, Default)]
pub(crate) struct Notice {
    given: Mutex<bool>,
    changed: Condvar,
}

impl Notice {
    /// Notify the thread that waits, or that waits next.
    pub fn give(&self) {
        *self.given.lock().expect("no panic while held") = true;
        self.changed.notify_all();
    }

    /// Wait until a notice is given, at most this long, and take it.
    pub fn wait(&self, at_most: Duration) {
        let given = self.given.lock().expect("no panic while held");
        let waited = self.changed.wait_timeout_while(given, at_most, |given| !*given);
        *waited.expect("no panic while held").0 = false;
    }
}
