//! Discards that clients asked for, until they are carried out.
//!
//! Before: a client asked, and waits. After: the discard worker has carried it out, and replied.
//! Threads: any. Promise: a client has one under way at a time: no more is read from it meanwhile.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use ballast_base::wire;

use crate::run::pool::Notifier;
use crate::run::set::Notify;
use crate::vm::view::View;

/// One of them.
#[derive(Debug)]
pub(crate) struct Asked {
    pub view: Arc<View>,
    pub seq: u64,
    pub ranges: Vec<wire::Range>,
    /// Lets the client ask again.
    pub then: Rearm,
}

/// When this is dropped, the client's next message is read.
#[derive(Debug)]
pub(crate) struct Rearm(pub Arc<AtomicBool>, pub Notify);

impl Drop for Rearm {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
        self.1.notify();
    }
}

/// The discards of one VM.
#[derive(Debug, Default)]
pub(crate) struct Discards {
    asked: Mutex<VecDeque<Asked>>,
    /// Notifies the discard worker.
    pub notifier: Notifier,
}

impl Discards {
    /// Has this one carried out.
    pub fn push(&self, asked: Asked) {
        self.asked.lock().expect("no panic while held").push_back(asked);
        self.notifier.notify();
    }

    /// Has this one carried out before the others, later.
    pub fn put_back(&self, asked: Asked) {
        self.asked.lock().expect("no panic while held").push_front(asked);
    }

    /// The oldest.
    pub fn pop(&self) -> Option<Asked> {
        self.asked.lock().expect("no panic while held").pop_front()
    }
}
