//! Requests of reclaim to the spill worker: space in the RAM store.
//!
//! Before: the RAM store refused a page. After: the spill worker writes old pages to the file store.
//! Threads: any. Promise: asking never waits.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::run::pool::Notifier;

/// The request of one VM.
#[derive(Debug, Default)]
pub struct SpillRequest {
    wanted: AtomicBool,
    /// Notifies the spill worker.
    pub(crate) notifier: Notifier,
    /// The worker runs, and the last time it was asked for space it freed some.
    helps: AtomicBool,
}

impl SpillRequest {
    /// The RAM store is full: asks for space. Returns whether that is likely to help.
    pub(crate) fn make_room(&self) -> bool {
        self.wanted.store(true, Ordering::Release);
        self.notifier.notify();
        self.helps.load(Ordering::Acquire)
    }

    /// Sets whether asking helps.
    pub(crate) fn set_helps(&self, helps: bool) {
        self.helps.store(helps, Ordering::Release);
    }

    /// Is there something more urgent than the pass under way?
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// Returns whether space is wanted. The worker then frees some.
    pub(crate) fn take(&self) -> bool {
        self.wanted.swap(false, Ordering::AcqRel)
    }
}
