//! Mailboxes: messages between the workers of one VM.
//! Threads: any.
//! Promise: a sender never waits for the receiver.

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

/// Value of `rests_at` while the reclaim worker does not rest; otherwise the value is the number of bytes plus one.
const AWAKE: u64 = 0;

/// | Mailbox | From | To |
/// |---|---|---|
/// | `touches` | fault workers | tracking worker |
/// | `slow` | fault workers | slow workers |
/// | `refaults` | fault and slow workers | reclaim worker |
/// | `throttle` | reclaim worker | fault workers |
/// | `over_limit` | reclaim worker | readahead |
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
    /// Whether the VM was above its limit at the reclaim worker's last check.
    pub over_limit: AtomicBool,
    /// Other VMs wait for memory that this VM has above its limit.
    pub others_wait: AtomicBool,
    pub spill: SpillRequest,
    /// Resident bytes of the VM when the reclaim worker came to rest, plus one, or [`AWAKE`] while it does not rest. A
    /// worker that restores a page notifies the reclaim worker, as does `growth` when the number is another.
    rests_at: AtomicU64,
    /// The coalesce worker rests: a page that becomes resident notifies it.
    coalesce_rests: AtomicBool,
    pub reclaim: Notifier,
    pub coalesce: Notifier,
    pub track: Notifier,
    pub discards: Discards,
    pub agent: Arc<Told>,
}

impl Mailboxes {
    /// Charges pages that came in to the throttle, and ends the reclaim worker's rest.
    pub fn charge(&self, pages: u64) {
        self.throttle.charge(pages);
        if self.rests_at.load(Ordering::Relaxed) != AWAKE {
            self.wake_from_rest();
        }
    }

    /// A page became resident, or a unit is no longer tracked, so a unit may be whole now.
    pub fn became_resident(&self) {
        if self.coalesce_rests.load(Ordering::Relaxed) && self.coalesce_rests.swap(false, Ordering::Relaxed) {
            self.coalesce.notify();
        }
    }

    pub fn does_coalesce_rest(&self) -> bool {
        self.coalesce_rests.load(Ordering::Relaxed)
    }

    pub fn rest_coalesce(&self, rests: bool) {
        self.coalesce_rests.store(rests, Ordering::Relaxed);
    }

    /// Records that the reclaim worker rests while this number of bytes is resident; `None`: it does not rest.
    pub fn rest_at(&self, held: Option<u64>) {
        self.rests_at.store(held.map_or(AWAKE, |held| held + 1), Ordering::Relaxed);
    }

    /// Bytes that were resident when the reclaim worker came to rest; `None` if it does not rest.
    pub fn rested_at(&self) -> Option<u64> {
        self.rests_at.load(Ordering::Relaxed).checked_sub(1)
    }

    pub fn wake_from_rest(&self) {
        if self.rests_at.swap(AWAKE, Ordering::Relaxed) != AWAKE {
            self.reclaim.notify();
        }
    }
}
