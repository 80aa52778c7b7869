//! The queue of faults that wait for a disk.
//!
//! Before: a fault worker met a page of a slow store. After: a slow worker takes the fault.
//! Threads: any. Promise: a push never waits for a worker, and notifies one as long as one is idle. A fault counts as
//! pending until it is served.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use crate::fault::stall::PendingFault;
use crate::run::pool::Notifier;
use crate::vm::stats::Stats;
use crate::vm::view::View;

/// Most reads of one VM that are under way at a time.
pub const WORKERS: usize = 4;

/// Faults that wait for a disk.
#[derive(Debug, Default)]
pub struct SlowQueue {
    queue: Mutex<Queue>,
    /// Notify the slow workers.
    pub(crate) notifiers: [Notifier; WORKERS],
}

#[derive(Debug, Default)]
struct Queue {
    faults: VecDeque<(Arc<View>, PendingFault)>,
    /// Workers that found nothing.
    idle: Vec<usize>,
}

impl SlowQueue {
    /// Takes a fault over from its view's fault worker.
    pub(crate) fn take(&self, stats: Stats<'_>, view: &Arc<View>, pending: PendingFault) {
        view.stall.update(stats, |waiters| waiters.slow += 1);
        self.push(view.clone(), pending);
    }

    /// Adds a fault that counts as pending already.
    pub(crate) fn push(&self, view: Arc<View>, pending: PendingFault) {
        let idle = {
            let mut queue = self.queue.lock().expect("no panic while held");
            queue.faults.push_back((view, pending));
            queue.idle.pop()
        };
        if let Some(idle) = idle {
            self.notifiers[idle].notify();
        }
    }

    /// The oldest fault, for this worker; if there is none, the worker is notified of the next.
    pub(crate) fn pop(&self, worker: usize) -> Option<(Arc<View>, PendingFault)> {
        let mut queue = self.queue.lock().expect("no panic while held");
        let oldest = queue.faults.pop_front();
        if oldest.is_none() && !queue.idle.contains(&worker) {
            queue.idle.push(worker);
        }
        oldest
    }
}
