//! Mailboxes: messages between the workers of one VM.
//!
//! Before: a worker has a message for another. After: that worker finds it, or is notified.
//! Threads: any. Promise: leaving a message never waits for its receiver.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::run::pool::Notifier;
use crate::vm::discards::Discards;
use crate::vm::far::slow_queue::SlowQueue;
use crate::vm::far::spill_request::SpillRequest;
use crate::vm::guest::told::Told;
use crate::vm::refault::Refaults;
use crate::vm::serve::throttle::Throttle;
use crate::vm::touches::Touches;

/// The value while the reclaim worker does not rest; else it is one more than the bytes.
const AWAKE: u64 = 0;

/// | Mailbox | From | To |
/// |---|---|---|
/// | `touches` | fault workers | tracking worker |
/// | `slow` | fault workers | slow workers |
/// | `refaults` | fault and slow workers | reclaim worker |
/// | `throttle` | reclaim worker | fault workers |
/// | `over_limit` | reclaim worker | tracking, readahead |
/// | `spill` | reclaim worker | spill worker |
/// | `rests_at` | reclaim worker | fault workers, growth |
/// | `coalesce_rests` | coalesce worker | all that make pages resident |
/// | `reclaim` | all, and the daemon | reclaim worker |
/// | `coalesce` | all that make pages resident | coalesce worker |
/// | `track` | all, and the daemon | tracking worker |
/// | `discards` | clients | discard worker |
/// | `agent` | agent's worker, reclaim worker | each other, the API |
#[derive(Debug, Default)]
pub(crate) struct Mailboxes {
    pub touches: Arc<Touches>,
    pub slow: SlowQueue,
    pub refaults: Refaults,
    pub throttle: Throttle,
    /// Was the VM above its limit when the reclaim worker last checked?
    pub over_limit: AtomicBool,
    /// Others wait for what it has to give up.
    pub others_wait: AtomicBool,
    pub spill: SpillRequest,
    /// While the reclaim worker looks rarely: a worker that brings a page in notifies it, and so does `growth` when the
    /// VM no longer holds this many bytes. [`AWAKE`] while it looks often.
    rests_at: AtomicU64,
    /// While the coalesce worker looks rarely: a page that becomes resident notifies it.
    coalesce_rests: AtomicBool,
    pub reclaim: Notifier,
    pub coalesce: Notifier,
    pub track: Notifier,
    pub discards: Discards,
    pub agent: Arc<Told>,
}

impl Mailboxes {
    /// Pages came in.
    pub fn charge(&self, pages: u64) {
        self.throttle.charge(pages);
        if self.rests_at.load(Ordering::Relaxed) != AWAKE {
            self.wake_from_rest();
        }
    }

    /// A page is resident that was not, or a unit is not tracked any more: a unit may be whole now.
    pub fn became_resident(&self) {
        if self.coalesce_rests.load(Ordering::Relaxed) && self.coalesce_rests.swap(false, Ordering::Relaxed) {
            self.coalesce.notify();
        }
    }

    /// Does the coalesce worker rest?
    pub fn does_coalesce_rest(&self) -> bool {
        self.coalesce_rests.load(Ordering::Relaxed)
    }

    /// Does the coalesce worker rest from now on?
    pub fn rest_coalesce(&self, rests: bool) {
        self.coalesce_rests.store(rests, Ordering::Relaxed);
    }

    /// The reclaim worker found nothing to do while the VM held this many bytes, or (`None`) it has something to do.
    pub fn rest_at(&self, held: Option<u64>) {
        self.rests_at.store(held.map_or(AWAKE, |held| held + 1), Ordering::Relaxed);
    }

    /// What the VM held when its reclaim worker came to rest, if it rests.
    pub fn rested_at(&self) -> Option<u64> {
        self.rests_at.load(Ordering::Relaxed).checked_sub(1)
    }

    /// Makes the reclaim worker look now, if it rests.
    pub fn wake_from_rest(&self) {
        if self.rests_at.swap(AWAKE, Ordering::Relaxed) != AWAKE {
            self.reclaim.notify();
        }
    }
}
