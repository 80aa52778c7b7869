//! Slow: faults on pages whose bytes are on a disk, served beside the fault lanes.
//!
//! Before: a fault lane met a page of the file store. After: the same `fault::serve`, here, where it may wait.
//! Threads: [`LANES`] per VM that has a file store; each waits for the disk for up to a tenth of a second at a time.
//! Promise: no fault on any other page waits for the disk. A fault taken here is served or, if the lane panics or the
//! engine dies, raised again by a wake.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::fault::Served;
use crate::lane::{Waiting, resolve, target};
use crate::stages::Times;
use crate::stats::Counter;
use crate::view::View;
use crate::vm::Vm;

/// Reads of one VM that are under way at a time.
pub const LANES: usize = 4;
/// How long a lane sleeps at most before it looks whether the VM is being stopped.
const NAP: Duration = Duration::from_millis(100);
/// Pause after a page that cannot be had yet: its store is busy, or another lane has it.
const RETRY: Duration = Duration::from_micros(200);

/// Faults that wait for a disk.
#[derive(Debug, Default)]
pub struct Slow {
    queue: Mutex<VecDeque<(Arc<View>, Waiting)>>,
    bell: Condvar,
}

impl Slow {
    /// Take a fault over from its view's fault lane.
    pub(crate) fn take(&self, vm: &Vm, view: &Arc<View>, waiting: Waiting) {
        view.stall.update(vm, |waiters| waiters.slow += 1);
        self.push(view.clone(), waiting);
    }

    fn push(&self, view: Arc<View>, waiting: Waiting) {
        self.queue.lock().expect("no panic while held").push_back((view, waiting));
        self.bell.notify_one();
    }

    /// Let the lanes see that they are to stop.
    pub(crate) fn ring(&self) {
        // With the lock, so that nobody is between looking and waiting.
        let _queue = self.queue.lock().expect("no panic while held");
        self.bell.notify_all();
    }

    fn next(&self, vm: &Vm) -> Option<(Arc<View>, Waiting)> {
        let queue = self.queue.lock().expect("no panic while held");
        let waited = self.bell.wait_timeout_while(queue, NAP, |queue| queue.is_empty() && !vm.is_stopping());
        waited.expect("no panic while held").0.pop_front()
    }
}

/// Counts a fault as waiting until it is dropped, be it by a panic.
struct Waits<'a>(&'a Vm, &'a View);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.1.stall.update(self.0, |waiters| waiters.slow = waiters.slow.saturating_sub(1));
    }
}

/// Serve such faults until the VM is stopped.
pub fn run(vm: &Vm) {
    while !vm.is_stopping() {
        let Some((view, waiting)) = vm.slow.next(vm) else { continue };
        let waits = Waits(vm, &view);
        if view.is_closed() {
            // Nobody else has this fault: it is raised anew, for whoever serves that memory next.
            let _ = view.wake_all();
            continue;
        }
        if serve_one(vm, &view, &waiting) {
            continue;
        }
        std::mem::forget(waits);
        vm.slow.push(view, waiting);
        std::thread::sleep(RETRY);
    }
}

/// Serve one fault; false if it must be tried again.
fn serve_one(vm: &Vm, view: &View, waiting: &Waiting) -> bool {
    // The disk takes so much longer than the clock that each is watched.
    let times = Times::start();
    let _serving = view.serving_from_disk();
    let Some((region, page, memory)) = target(vm, view, waiting) else { return true };
    let from_file = region.granule(page).is_in_file();
    let resolved = resolve(vm, &region, page, waiting, &memory, &vm.stores, &times);
    if from_file && matches!(resolved, Some((Served::Restored | Served::Filled { .. }, _))) {
        vm.stats().add(Counter::FaultFile, 1);
    }
    resolved.is_some()
}
