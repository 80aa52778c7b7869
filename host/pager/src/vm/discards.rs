//! The queue of discards that clients have asked for.
//!
//! Before: a client asks, and waits. After: the discard worker has carried the discard out, and replied.
//! Threads: any.
//! Promise: a client has at most one discard under way, because its next message is not read before.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ballast_base::wire;

use crate::run::pool::Notifier;
use crate::run::set::Notify;
use crate::vm::view::View;

#[derive(Debug)]
pub(crate) struct Asked {
    pub view: Arc<View>,
    pub seq: u64,
    pub ranges: Vec<wire::Range>,
    /// Dropped when the client may ask again.
    pub then: Rearm,
}

/// Dropping it has the client's next message read.
#[derive(Debug)]
pub(crate) struct Rearm(pub Arc<AtomicBool>, pub Notify);

impl Drop for Rearm {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
        self.1.notify();
    }
}

#[derive(Debug, Default)]
pub(crate) struct Discards {
    asked: Mutex<VecDeque<Asked>>,
    pub notifier: Notifier,
}

impl Discards {
    pub fn push(&self, asked: Asked) {
        self.asked.lock().expect("no panic while held").push_back(asked);
        self.notifier.notify();
    }

    /// Puts a discard back at the head of the queue, to be retried later.
    pub fn put_back(&self, asked: Asked) {
        self.asked.lock().expect("no panic while held").push_front(asked);
    }

    pub fn pop(&self) -> Option<Asked> {
        self.asked.lock().expect("no panic while held").pop_front()
    }
}
