//! What any worker of a VM may ask or do about the others: whether to end, whom to notify, what a panic costs.
//!
//! Before: workers run (`assemble`). After: a panic of one has been reported, and faults that it had read are raised
//! again. Threads: any. Promise: a VM that no worker can serve is stopped.

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

/// The worker that carries out discards of clients.
pub(crate) const DISCARD: &str = "discard";

/// Panics of a worker after which it stays down.
const MOST_PANICS: u32 = 3;

impl Vm {
    /// Does this engine serve the VM without another one, so that all of its workers were started?
    pub fn is_alone(&self) -> bool {
        self.life.is_alone()
    }

    /// The group of its tasks; its descriptors are served in turns of the same group.
    pub(crate) fn group(&self) -> GroupId {
        self.life.pool().1
    }

    /// Stops serving faults of this view, and listening to its client, if the process is gone. Waits for no fault that
    /// is being served.
    pub(crate) fn forget_gone(&self) {
        self.life.forget_faults(View::is_closed);
        self.life.forget_clients(View::is_closed);
    }

    /// A worker panicked, for the `times`th time. A panic is a bug of ours that must not cost a guest its bytes: faults
    /// that the worker had read and not served are raised again. Returns whether it is to start again. If that does not
    /// help, the VM goes without reclaim; a VM that no worker can serve is stopped.
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
        // A discard that nobody carries out keeps the VMM's thread that asked, and all others that want its locks.
        if !matches!(serves, Serves::Nobody) || kind == DISCARD {
            self.fail_stop(&reason);
        }
        false
    }

    /// Is the VM to be left alone from now on?
    pub fn is_stopping(&self) -> bool {
        self.life.is_stopping()
    }

    /// Are its faults to be served no more?
    pub(crate) fn is_over(&self) -> bool {
        self.life.is_over()
    }

    /// Faults of this view that were read here and not served are raised again, for the engine or worker that serves
    /// this memory next.
    pub(crate) fn raise_again(&self, view: &View) {
        // An address space that is gone has no threads that wait.
        if let Err(error) = view.wake_all() {
            tracing::debug!(vm = self.state.name(), pid = view.pid, "Waking what was not served: {error}");
        }
    }

    /// Has the reclaim worker check the limit: it changed, or the VM grew over it.
    pub fn notify_reclaim(&self) {
        self.mail.reclaim.notify();
    }

    /// Has its reclaim worker nothing to do until the VM holds more or less? For tests.
    pub fn rests(&self) -> bool {
        self.mail.rested_at().is_some()
    }

    /// Does its coalesce worker rest until a page becomes resident? For tests.
    pub fn coalesce_rests(&self) -> bool {
        self.mail.does_coalesce_rest()
    }
}
