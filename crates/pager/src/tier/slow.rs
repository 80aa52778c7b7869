//! The slow workers: serve faults on pages whose bytes are on a disk.
//!
//! Before: a fault worker met a page of a slow store (`slow_queue`). After: the same `fault::serve` is called here,
//! where it may wait.
//! Threads: [`WORKERS`](super::slow_queue::WORKERS) tasks per VM that has a slow store; each waits for the disk for up
//! to a tenth of a second at a time. Promise: no fault on any other page waits for the disk. A fault taken here is
//! served or, if the worker panics or the engine dies, raised again by a wake.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::fault::resolve::{resolve, target};
use crate::fault::stages::Times;
use crate::fault::stall::PendingFault;
use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::stats::Counter;
use crate::vm::view::View;
use ballast_page::outcome::Served;

/// Pause after a page that is not available yet: its store is busy, or another thread has it.
const RETRY: Duration = Duration::from_micros(200);

/// Counts a fault as waiting until it is dropped, also by a panic.
struct Waits<'a>(&'a Vm, &'a View);

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.1.stall.update(self.0.stats(), |waiters| waiters.slow = waiters.slow.saturating_sub(1));
    }
}

/// One of the slow workers of a VM.
pub(crate) struct SlowWorker {
    vm: Arc<Vm>,
    number: usize,
}

impl SlowWorker {
    /// The worker of this number of this VM.
    pub fn new(vm: Arc<Vm>, number: usize) -> Self {
        Self { vm, number }
    }

    /// Serves one such fault; returns when to look for another.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_over() {
            return Next::Done;
        }
        let Some((view, pending)) = vm.mail.slow.pop(self.number) else { return Next::Idle };
        let waits = Waits(vm, &view);
        if view.is_closed() {
            // No other worker has this fault: it is raised again, for the thread that serves that memory next.
            let _ = view.wake_all();
            return Next::Again;
        }
        if blocking(|| serve_one(vm, &view, &pending)) {
            return Next::Again;
        }
        std::mem::forget(waits);
        vm.mail.slow.push(view, pending);
        Next::At(now + RETRY)
    }
}

/// Serves one fault; returns false if it must be tried again.
fn serve_one(vm: &Vm, view: &View, pending: &PendingFault) -> bool {
    // The disk takes much longer than reading the clock, so each restore is timed.
    let times = Times::start();
    let _serving = view.serving_from_disk();
    let Some((region, page, memory)) = target(vm, view, pending) else { return true };
    let was_slow = region.is_slow(page);
    let resolved = resolve(vm, &region, page, pending, &memory, &vm.stores, &times);
    if was_slow && matches!(resolved, Some((Served::Restored | Served::Filled { .. }, _))) {
        vm.stats().add(Counter::FaultFile, 1);
    }
    resolved.is_some()
}
