//! The workers of a VM: its threads, started, restarted after a panic, notified, ended.
//!
//! Before: the VM is open. After: its workers run; after [`Vm::stop`] none does.
//! Threads: any may call; [`Vm::stop`] waits for all workers but the one that calls it. Promise: a panic of a worker
//! costs no byte: faults that it had read and not served are raised anew, and a VM that no worker can serve is stopped.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::Vm;
use crate::fault::prefetch;
use crate::reclaim::worker as reclaim;
use crate::scan::coalesce;
use crate::scan::worker as track;
use crate::tier::{slow, spill};
use crate::vm::view::View;

/// Nice value of fault workers. A guest thread waits for one, and it runs for microseconds: it goes before all that
/// computes. No worker is made nicer than default: each holds page locks now and then that a fault may want. Not -20:
/// the kernel spreads threads over CPUs by their weights, takes a worker that runs a tenth of the time at -20 for nine
/// guests, and leaves its CPU to it and one of them. At -8 it is half of one.
const DEMAND_NICE: i32 = -8;

/// Whose faults a worker serves.
#[derive(Clone, Copy)]
pub(super) enum Serves<'a> {
    Nobody,
    View(&'a View),
    All,
}

impl Vm {
    /// Start the workers of the VM. Each view that is added later starts its own.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let own = [("reclaim", reclaim::run as fn(&Vm)), ("prefetch", prefetch::run)];
        for (kind, body) in own.into_iter().chain([("coalesce", coalesce::run as fn(&Vm)), ("track", track::run)]) {
            let vm = self.clone();
            self.start_worker(kind, move || vm.run_worker(kind, Serves::Nobody, || body(&vm)))?;
        }
        if self.stores.file.is_none() {
            return Ok(());
        }
        for _ in 0..slow::WORKERS {
            let vm = self.clone();
            self.start_worker("slow", move || vm.run_worker("slow", Serves::All, || slow::run(&vm)))?;
        }
        let vm = self.clone();
        self.start_worker("spill", move || vm.run_worker("spill", Serves::Nobody, || spill::run(&vm)))
    }

    pub(super) fn start_worker(&self, kind: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let name = format!("{kind}/{}", self.state.name());
        let nice = if matches!(kind, "fault" | "slow") { DEMAND_NICE } else { 0 };
        let body = move || {
            // Of this thread alone, as Linux has it. Not permitted to: then it waits its turn like others.
            let _ = rustix::process::setpriority_process(None, nice);
            body();
        };
        let worker = std::thread::Builder::new().name(short(&name)).spawn(body)?;
        self.life.add(worker);
        Ok(())
    }

    /// Run a worker until it ends. A panic in it is a bug of ours that must not cost a guest its bytes: the worker
    /// starts again, and faults that it had read and not served are raised anew. If that does not help, the VM goes
    /// without reclaim; a VM that no worker can serve is stopped.
    pub(super) fn run_worker(&self, kind: &str, serves: Serves<'_>, body: impl Fn()) {
        const MOST_PANICS: u32 = 3;
        let _listed = self.state.list_thread();
        for _ in 0..MOST_PANICS {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(&body)).is_ok() {
                return;
            }
            self.report("worker-panic", format!("the {kind} worker panicked; it starts again"));
            let woken = match serves {
                Serves::Nobody => Ok(()),
                Serves::View(view) => view.wake_all(),
                Serves::All => self.views().iter().try_for_each(|view| view.wake_all()),
            };
            if let Err(error) = woken {
                tracing::error!(vm = self.state.name(), "Waking a view: {error}");
            }
        }
        let reason = format!("the {kind} worker panicked {MOST_PANICS} times; it stays down");
        self.report("worker-panic", reason.clone());
        if !matches!(serves, Serves::Nobody) {
            self.fail_stop(&reason);
        }
    }

    /// Is the VM to be left alone from now on?
    pub fn is_stopping(&self) -> bool {
        self.life.is_stopping()
    }

    /// End the workers. Blocks until they are gone; pages stay where they are.
    pub fn stop(&self) {
        self.life.stop();
        self.notify_reclaim();
        self.mail.prefetch.end();
        self.mail.slow.notify();
        self.mail.spill.notify();
        for worker in self.life.take() {
            if worker.thread().id() != std::thread::current().id() && worker.join().is_err() {
                self.report("worker-panic", "a worker of this VM panicked".into());
            }
        }
    }

    /// Have the reclaim worker check the limit: it changed, or the VM grew over it.
    pub fn notify_reclaim(&self) {
        self.mail.reclaim.give();
    }

    /// Sleep this long, or until the VM is stopped; returns whether it goes on.
    pub(crate) fn sleep(&self, time: Duration) -> bool {
        self.life.sleep(time)
    }
}

/// Thread names are cut to 15 bytes by the kernel; cut them at a character.
fn short(name: &str) -> String {
    name.chars().take(15).collect()
}
