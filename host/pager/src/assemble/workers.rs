//! The workers of a VM: starts, restarts after a panic, notifies, and ends its tasks.
//!
//! Before: the VM is open. After: its workers run; after [`Vm::stop`] none does. In a hand-over two engines serve a VM,
//! but only its faults and discards: the leaving one from [`Vm::serve_faults_only`] on, the next one until
//! [`Vm::start`].
//! Threads: any may call; [`Vm::stop`] waits for all workers but the calling one.
//! Promise: a worker's panic costs no byte: faults that it had read and not served are raised again, and a VM that no
//! worker can serve is stopped.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use ballast_sys::clock::cpu_time;

use super::listened::{DiscardWorker, Listened};
use crate::agent::worker::AgentWorker;
use crate::reclaim::growth;
use crate::reclaim::worker::ReclaimWorker;
use crate::run::pool::{Notifier, Task};
use crate::run::queue::Next;
use crate::run::serve::Serve;
use crate::run::servers::Servers;
use crate::run::servers::stuck::Stuck;
use crate::scan::coalesce::CoalesceWorker;
use crate::scan::worker::TrackWorker;
use crate::tier::slow::SlowWorker;
use crate::tier::spill::SpillWorker;
use crate::vm::Vm;
use crate::vm::running::{DISCARD, Serves};
use crate::vm::stats::Counter;
use crate::vm::view::View;

/// A task that runs by its VM's shares, and whose CPU time counts as the VM's.
struct VmTask<F> {
    vm: Arc<Vm>,
    run: F,
}

impl<F: FnMut(Instant) -> Next + Send> Task for VmTask<F> {
    fn run(&mut self, now: Instant) -> Next {
        let before = cpu_time();
        let next = (self.run)(now);
        let spent = cpu_time().saturating_sub(before);
        self.vm.stats().add(Counter::TaskCpuNs, spent.as_nanos() as u64);
        next
    }

    fn shares(&self) -> u32 {
        self.vm.shares()
    }
}

impl Vm {
    /// Starts the workers of the VM, also for views that are added later.
    ///
    /// # Errors
    /// The kernel gives no thread or descriptor.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let mail = &self.mail;
        self.life.set_alone();
        self.add_task("reclaim", Some(&mail.reclaim), ReclaimWorker::new, ReclaimWorker::run)?;
        growth::watch(self)?;
        self.add_task("coalesce", Some(&mail.coalesce), CoalesceWorker::new, CoalesceWorker::run)?;
        self.add_task("track", Some(&mail.track), TrackWorker::new, TrackWorker::run)?;
        self.add_task("agent", Some(&mail.agent.notifier), AgentWorker::new, AgentWorker::run)?;
        self.start_discards()?;
        self.start_slow()?;
        for view in self.views() {
            // Another engine served the VM, too, when the view was added. If it died, its unserved faults are raised
            // again.
            view.peer().on_answer().connect_to(&mail.reclaim);
            view.wake_all()?;
        }
        if self.stores.slow().is_empty() {
            return Ok(());
        }
        let run = |worker: &mut Option<SpillWorker>, now| worker.as_mut().map_or(Next::Done, |worker| worker.run(now));
        self.add_task("spill", Some(&mail.spill.notifier), SpillWorker::new, run)
    }

    /// Starts only the workers that serve the VM while another engine does so, too: for faults and discards.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start_beside(self: &Arc<Self>) -> io::Result<()> {
        self.start_discards()?;
        self.start_slow()
    }

    fn start_slow(self: &Arc<Self>) -> io::Result<()> {
        if self.stores.slow().is_empty() || !self.life.begins_slow() {
            return Ok(());
        }
        for (number, notifier) in self.mail.slow.notifiers.iter().enumerate() {
            self.add_task("slow", Some(notifier), move |vm| SlowWorker::new(vm, number), SlowWorker::run)?;
        }
        Ok(())
    }

    fn start_discards(self: &Arc<Self>) -> io::Result<()> {
        if self.life.begins_discards() {
            self.add_task(DISCARD, Some(&self.mail.discards.notifier), DiscardWorker::new, DiscardWorker::run)?;
        }
        Ok(())
    }

    /// Adds a task that runs a worker, which is created again after a panic.
    fn add_task<W: Send + 'static>(
        self: &Arc<Self>,
        kind: &'static str,
        notifier: Option<&Notifier>,
        make: impl Fn(Arc<Self>) -> W + Send + 'static,
        run: impl Fn(&mut W, Instant) -> Next + Send + 'static,
    ) -> io::Result<()> {
        let vm = self.clone();
        let (mut worker, mut panics) = (None, 0);
        let run = move |now: Instant| {
            let _listed = vm.state.list_thread();
            let piece = || {
                let next = run(worker.get_or_insert_with(|| make(vm.clone())), now);
                if next == Next::Done {
                    worker = None;
                }
                next
            };
            if let Ok(next) = catch_unwind(AssertUnwindSafe(piece)) {
                return next;
            }
            panics += 1;
            // Dropping the worker may panic as well.
            let _ = catch_unwind(AssertUnwindSafe(|| worker = None));
            let serves = if kind == "slow" { Serves::All } else { Serves::Nobody };
            if vm.panicked(kind, serves, panics) { Next::Again } else { Next::Done }
        };
        let (pool, group) = if kind == "slow" { self.life.serving_pool() } else { self.life.pool() };
        let handle = pool.add(group, &format!("{kind}/{}", self.state.name()), VmTask { vm: self.clone(), run })?;
        if let Some(notifier) = notifier {
            notifier.connect(handle);
        }
        Ok(())
    }

    /// Reads messages of a view's peer, unless they are read already.
    pub(super) fn listen(self: &Arc<Self>, view: &Arc<View>) -> io::Result<()> {
        if self.life.has_client(view) {
            return Ok(());
        }
        if let Some(user) = view.user().filter(|user| Stuck::of_process().is_full(*user)) {
            let why = format!("ended processes of user {user} still block threads of ballastd with their messages");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        view.peer().on_answer().connect_to(&self.mail.reclaim);
        view.peer().take_zaps();
        let listened = |notify| -> Box<dyn Serve> { Box::new(Listened::new(self, view, notify)) };
        self.life.add_client(view.clone(), Servers::of_process()?.add(self.group(), view.peer().clone(), listened)?);
        Ok(())
    }

    /// Ends the workers, and waits until they have ended; pages stay where they are. Faults are served until no other
    /// work is left, because that may wait for a disk or a cluster. Faults that were read here and not served are
    /// raised again, for the engine that serves the VM now or next. Slow workers give up their reads.
    pub fn stop(&self) {
        self.serve_faults_only();
        self.life.end_faults();
        // The fault servers end first: they pass faults to the slow workers. Each raises its pending faults again.
        self.life.wait_for_faults();
        let (pool, serving) = self.life.serving_pool();
        pool.join(serving);
        self.mail.slow.leave(self.stats()).iter().for_each(|view| self.raise_again(view));
    }

    /// Permanently ends all work for the VM but the serving of faults: another engine is about to serve it, too.
    /// Returns when no page is on its way to a store any more.
    pub fn serve_faults_only(&self) {
        self.life.stop_tasks();
        self.life.forget_clients(|_| true);
        self.views().iter().for_each(|view| view.peer().give_up_zaps());
        let (pool, group) = self.life.pool();
        pool.join(group);
    }
}
