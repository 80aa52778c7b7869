//! Requests of reclaim to the spill worker for space in the RAM store.
//!
//! Before: the RAM store refused a page, or soon will. After: the spill worker moves old pages to a slow store.
//! Threads: any.
//! Promise: asking never waits.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::run::pool::Notifier;
use crate::vm::far::stores::Stores;

#[derive(Debug, Default)]
pub struct SpillRequest {
    wanted: AtomicBool,
    /// The RAM store is short of space, but no page was refused yet.
    short: AtomicBool,
    pub(crate) notifier: Notifier,
    /// The worker runs, and its last pass on request freed space.
    helps: AtomicBool,
}

impl SpillRequest {
    /// Asks for space because the RAM store is full. Returns whether that is likely to help.
    pub(crate) fn make_room(&self) -> bool {
        self.wanted.store(true, Ordering::Release);
        self.notifier.notify();
        self.helps.load(Ordering::Acquire)
    }

    /// Reclaim has put pages into the RAM store. If it is short of space now, notifies the worker, once until it looks.
    pub(crate) fn check(&self, stores: &Stores) {
        let is_short = !stores.slow().is_empty() && stores.first().store.is_short();
        if is_short && !self.short.load(Ordering::Acquire) && !self.short.swap(true, Ordering::AcqRel) {
            self.notifier.notify();
        }
    }

    /// The worker is about to look at the RAM store.
    pub(crate) fn looks(&self) {
        self.short.store(false, Ordering::Release);
    }

    pub(crate) fn set_helps(&self, helps: bool) {
        self.helps.store(helps, Ordering::Release);
    }

    /// Returns whether space is wanted, which goes before the pass under way.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Acquire)
    }

    /// Returns whether space is wanted, and clears the request: the worker then frees space.
    pub(crate) fn take(&self) -> bool {
        self.wanted.swap(false, Ordering::AcqRel)
    }
}
