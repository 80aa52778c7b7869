//! Messages of the peer of a view: replies to zaps, discards, its end.
//!
//! Before: [`Vm::add_view`] has the listener watch the peer's input. After: the peer or the engine is gone.
//! Threads: the listener takes messages; a task of the VM carries out discards. Units: ranges of the process's
//! addresses.
//! Promise: an invalid message is reported and costs the VM nothing: its faults are still served.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Vm;
use super::discards::Asked;
use super::peer::Heard;
use crate::run::listener::{Rearm, Source};
use crate::run::queue::Next;
use crate::vm::view::View;

/// Pause before a discard is tried again that met a locked page.
const LOCKED_PAUSE: Duration = Duration::from_millis(10);

/// A peer that is listened to.
pub(super) struct Listened {
    vm: Arc<Vm>,
    view: Arc<View>,
    invalid: AtomicU64,
}

impl Listened {
    /// The peer of this view.
    pub fn new(vm: Arc<Vm>, view: Arc<View>) -> Self {
        Self { vm, view, invalid: AtomicU64::new(0) }
    }

    /// Nothing more will come from it.
    fn gone(&self, then: Rearm) {
        then.forget();
        self.view.peer().disconnect();
    }
}

impl Source for Listened {
    fn fd(&self) -> BorrowedFd<'_> {
        self.view.peer().input()
    }

    fn ready(&self, then: Rearm) {
        let (vm, view) = (&self.vm, &self.view);
        match view.peer().hear() {
            Ok(Heard::Nothing) => {}
            Ok(Heard::Discard { seq, ranges }) => {
                vm.mail.discards.push(Asked { view: view.clone(), seq, ranges, then });
            }
            Ok(Heard::Nonsense(what)) => {
                // Reported at the 1st, 2nd, 4th, 8th ... time.
                let invalid = self.invalid.fetch_add(1, Ordering::Relaxed) + 1;
                if invalid.is_power_of_two() {
                    vm.report("client-error", format!("The client in process {} sent nonsense: {what}", view.pid));
                }
            }
            Ok(Heard::Gone) => self.gone(then),
            Err(error) => {
                vm.report("client-error", format!("Receiving from the client in process {}: {error}", view.pid));
                self.gone(then);
            }
        }
    }
}

/// Carries out the discards of a VM.
pub(super) struct DiscardWorker {
    vm: Arc<Vm>,
    failed: u64,
}

impl DiscardWorker {
    /// The worker of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failed: 0 }
    }

    /// Carries out one; returns when to look for another.
    pub fn run(&mut self, _now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_stopping() {
            // Not answered: the client asks again, and the next engine carries it out.
            while vm.mail.discards.pop().is_some() {}
            return Next::Done;
        }
        let Some(Asked { view, seq, ranges, then }) = vm.mail.discards.pop() else { return Next::Idle };
        let discarded = vm.discard(&view, &ranges);
        if vm.is_stopping() && discarded.is_err() {
            return Next::Again;
        }
        if discarded.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            // Orders that wait for it are carried out meanwhile.
            vm.mail.discards.put_back(Asked { view, seq, ranges, then });
            return Next::At(Instant::now() + LOCKED_PAUSE);
        }
        let error = discarded.err().map(|error| error.to_string());
        self.failed += u64::from(error.is_some());
        // Reported at the 1st, 2nd, 4th, 8th ... time: a client that goes on must not push other events out.
        if let Some(error) = &error
            && self.failed.is_power_of_two()
        {
            vm.report("discard-failed", format!("Discarding memory for process {}: {error}", view.pid));
        }
        // A client that does not read its replies repeats its question and gets another reply.
        if let Err(error) = view.peer().discarded(seq, error) {
            tracing::warn!(vm = vm.state.name(), "Answering a discard of process {}: {error}", view.pid);
        }
        drop(then);
        Next::Again
    }
}
