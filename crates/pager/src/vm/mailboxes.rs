//! What the workers of one VM tell each other.
//!
//! Before: a worker has something for another. After: that one finds it, or is notified.
//! Threads: any. Promise: leaving a message never waits for its receiver.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::fault::prefetch_queue::PrefetchQueue;
use crate::fault::throttle::Throttle;
use crate::reclaim::refault::Refaults;
use crate::run::pool::Notifier;
use crate::scan::touches::Touches;
use crate::tier::slow_queue::SlowQueue;
use crate::tier::spill_request::SpillRequest;
use crate::vm::discards::Discards;

/// | Mailbox | From | To |
/// |---|---|---|
/// | `touches` | fault workers | tracking worker |
/// | `prefetch` | fault workers | prefetch worker |
/// | `slow` | fault workers | slow workers |
/// | `refaults` | fault, slow and prefetch workers | reclaim worker |
/// | `throttle` | reclaim worker | fault workers |
/// | `over_limit` | reclaim worker | tracking, readahead |
/// | `spill` | reclaim worker | spill worker |
/// | `is_quiet` | reclaim worker | fault workers |
/// | `reclaim` | all, and the daemon | reclaim worker |
/// | `track` | all, and the daemon | tracking worker |
/// | `discards` | clients | discard worker |
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
    /// The reclaim worker looks rarely now: who brings a page in notifies it.
    pub is_quiet: AtomicBool,
    pub reclaim: Notifier,
    pub track: Notifier,
    pub discards: Discards,
}

impl Mailboxes {
    /// A page came in.
    pub fn came(&self, pages: u64) {
        self.throttle.came(pages);
        if self.is_quiet.load(Ordering::Relaxed) && self.is_quiet.swap(false, Ordering::Relaxed) {
            self.reclaim.notify();
        }
    }
}
