//! Running: a worker's dealings with its VM's other workers: whether to end, whom to notify, how to react to a panic.
//!
//! Before: workers run (`assemble`). After: a panic was reported, and the worker's unserved faults are raised again.
//! Threads: any.
//! Promise: a VM that no worker can serve is stopped.

use super::Vm;
use crate::run::queue::GroupId;
use crate::vm::view::View;

/// The faults that a worker serves: none, those of one process, or all.
#[derive(Clone, Copy)]
pub(crate) enum Serves<'a> {
    Nobody,
    View(&'a View),
    All,
}

pub(crate) const DISCARD: &str = "discard";

/// After this many panics a worker is not started again.
const MOST_PANICS: u32 = 3;

impl Vm {
    /// Returns whether no other engine serves the VM, so that all of its workers were started.
    pub fn is_alone(&self) -> bool {
        self.life.is_alone()
    }

    pub(crate) fn group(&self) -> GroupId {
        self.life.pool().1
    }

    /// Stops serving faults of views whose process has ended, and listening to their clients. Waits for no fault.
    pub(crate) fn forget_gone(&self) {
        self.life.forget_faults(View::is_closed);
        self.life.forget_clients(View::is_closed);
    }

    /// A worker has panicked for the `times`th time. Faults that it had read and not served are raised again: a bug of
    /// ours must not cost a guest its bytes. Returns whether the worker is to start again. If it is not, the VM runs on
    /// without that worker, unless the worker serves faults or discards: then the VM is stopped.
    pub(crate) fn panicked(&self, kind: &str, serves: Serves<'_>, times: u32) -> bool {
        self.report("worker-panic", format!("the {kind} worker panicked; it starts again"));
        let woken = match serves {
            Serves::Nobody => Ok(()),
            Serves::View(view) => view.wake_all(),
            Serves::All => self.views().iter().try_for_each(|view| view.wake_all()),
        };
        if let Err(error) = woken {
            tracing::error!(vm = self.state.name(), "Waking a view: {error}");
        }
        if times < MOST_PANICS {
            return true;
        }
        let reason = format!("the {kind} worker panicked {MOST_PANICS} times; it stays down");
        self.report("worker-panic", reason.clone());
        // A discard that nobody carries out blocks the VMM's thread that asked, and all threads that want its locks.
        if !matches!(serves, Serves::Nobody) || kind == DISCARD {
            self.fail_stop(&reason);
        }
        false
    }

    /// Returns whether its tasks must end.
    pub fn is_stopping(&self) -> bool {
        self.life.is_stopping()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.life.is_over()
    }

    /// Raises the faults of this view again that were read and not served, for the engine or worker that serves next.
    pub(crate) fn raise_again(&self, view: &View) {
        // If the address space is gone, no thread waits in it.
        if let Err(error) = view.wake_all() {
            tracing::debug!(vm = self.state.name(), pid = view.pid, "Waking what was not served: {error}");
        }
    }

    /// Notifies the reclaim worker: the limit changed, or the VM exceeds it.
    pub fn notify_reclaim(&self) {
        self.mail.reclaim.notify();
    }

    /// Returns whether its reclaim worker rests until the VM holds more or less. For tests.
    pub fn rests(&self) -> bool {
        self.mail.rested_at().is_some()
    }

    /// Returns whether its coalesce worker rests until a page becomes resident. For tests.
    pub fn coalesce_rests(&self) -> bool {
        self.mail.does_coalesce_rest()
    }
}
