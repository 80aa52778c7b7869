//! Requests of reclaim to the spill worker: space in the RAM store.
//!
//! Before: the RAM store refused a page, or soon will. After: the spill worker writes old pages to a slow store.
//! Threads: any. Promise: asking never waits.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::run::pool::Notifier;
use crate::vm::far::stores::Stores;

/// The request of one VM.
#[derive(Debug, Default)]
pub struct SpillRequest {
    wanted: AtomicBool,
    /// The RAM store is short of space; no page was refused yet.
    short: AtomicBool,
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

    /// Reclaim has put pages into the first of these stores. If that is short of space now, notifies the worker, once
    /// until it has taken that up.
    pub(crate) fn check(&self, stores: &Stores) {
        let is_short = !stores.slow().is_empty() && stores.first().store.is_short();
        if is_short && !self.short.load(Ordering::Acquire) && !self.short.swap(true, Ordering::AcqRel) {
            self.notifier.notify();
        }
    }

    /// The worker looks at the RAM store now.
    pub(crate) fn looks(&self) {
        self.short.store(false, Ordering::Release);
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
