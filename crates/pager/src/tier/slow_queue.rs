//! The queue of faults that wait for a disk.
//!
//! Before: a fault worker met a page of the file store. After: a slow worker takes the fault.
//! Threads: any. Promise: a push never waits for a worker. A fault counts as pending until it is served.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::fault::stall::PendingFault;
use crate::vm::stats::Stats;
use crate::vm::view::View;

/// How long a worker sleeps at most before it checks whether the VM is being stopped.
const NAP: Duration = Duration::from_millis(100);

/// Faults that wait for a disk.
#[derive(Debug, Default)]
pub struct SlowQueue {
    faults: Mutex<VecDeque<(Arc<View>, PendingFault)>>,
    changed: Condvar,
}

impl SlowQueue {
    /// Take a fault over from its view's fault worker.
    pub(crate) fn take(&self, stats: Stats<'_>, view: &Arc<View>, pending: PendingFault) {
        view.stall.update(stats, |waiters| waiters.slow += 1);
        self.push(view.clone(), pending);
    }

    /// Add a fault that counts as pending already.
    pub(crate) fn push(&self, view: Arc<View>, pending: PendingFault) {
        self.faults.lock().expect("no panic while held").push_back((view, pending));
        self.changed.notify_one();
    }

    /// The VM is being stopped: let the workers see it.
    pub(crate) fn notify(&self) {
        // With the lock, so that no worker is between its check and its wait.
        let _faults = self.faults.lock().expect("no panic while held");
        self.changed.notify_all();
    }

    /// The oldest fault; `None` if there was none for a while, or the VM is being stopped.
    pub(crate) fn next(&self, is_stopping: impl Fn() -> bool) -> Option<(Arc<View>, PendingFault)> {
        let faults = self.faults.lock().expect("no panic while held");
        let waited = self.changed.wait_timeout_while(faults, NAP, |faults| faults.is_empty() && !is_stopping());
        waited.expect("no panic while held").0.pop_front()
    }
}
