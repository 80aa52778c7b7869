//! The workers of a VM: its tasks and threads, started, restarted after a panic, notified, ended.
//!
//! Before: the VM is open. After: its workers run; after [`Vm::stop`] none does. While two engines serve a VM for a
//! moment, each of them serves faults and does nothing else: the leaving one from [`Vm::serve_faults_only`] on, the
//! following one until [`Vm::start`].
//! Threads: any may call; [`Vm::stop`] waits for all workers but the calling one. Promise: a panic of a worker costs no
//! byte: faults that it had read and not served are raised again, and a VM that no worker can serve is stopped.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use ballast_store::held::Holding;
use ballast_sys::clock::cpu_time;

use super::Vm;
use super::listened::{DiscardWorker, Input, Listened};
use crate::agent::worker::AgentWorker;
use crate::reclaim::growth;
use crate::reclaim::worker::ReclaimWorker;
use crate::run::pool::{Notifier, Task};
use crate::run::queue::{GroupId, Next};
use crate::run::serve::Serve;
use crate::run::servers::Servers;
use crate::run::servers::stuck::Stuck;
use crate::scan::coalesce::CoalesceWorker;
use crate::scan::worker::TrackWorker;
use crate::tier::slow::SlowWorker;
use crate::tier::spill::SpillWorker;
use crate::vm::stats::Counter;
use crate::vm::view::View;

/// The faults that a worker serves: none, those of one process, or all.
#[derive(Clone, Copy)]
pub(crate) enum Serves<'a> {
    Nobody,
    View(&'a View),
    All,
}

/// A task whose CPU time is the VM's, and which runs by its shares.
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

/// The worker that carries out discards of clients.
const DISCARD: &str = "discard";

/// Panics of a worker after which it stays down.
const MOST_PANICS: u32 = 3;

impl Vm {
    /// Does this engine serve the VM without another one, so that all of its workers were started?
    pub fn is_alone(&self) -> bool {
        self.life.is_alone()
    }

    /// Starts the workers of the VM. Each view that is added later starts its own.
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
            // They were added while another engine served the VM as well. If it died, it has left faults that it had
            // read: they are raised again.
            view.peer().on_answer().connect_to(&mail.reclaim);
            view.wake_all()?;
        }
        if !self.stores.has_slow() {
            return Ok(());
        }
        let run = |worker: &mut Option<SpillWorker>, now| worker.as_mut().map_or(Next::Done, |worker| worker.run(now));
        self.add_task("spill", Some(&mail.spill.notifier), SpillWorker::new, run)
    }

    /// Starts the workers that serve the VM while another engine does so as well: for faults and for discards of
    /// clients.
    ///
    /// # Errors
    /// The kernel gives no thread.
    pub fn start_beside(self: &Arc<Self>) -> io::Result<()> {
        self.start_discards()?;
        self.start_slow()
    }

    /// Serves faults on pages of slow stores, unless that is done already.
    fn start_slow(self: &Arc<Self>) -> io::Result<()> {
        if !self.stores.has_slow() || !self.life.begins_slow() {
            return Ok(());
        }
        for (number, notifier) in self.mail.slow.notifiers.iter().enumerate() {
            self.add_task("slow", Some(notifier), move |vm| SlowWorker::new(vm, number), SlowWorker::run)?;
        }
        Ok(())
    }

    /// Carries out discards of clients, unless that is done already. The clients wait for it.
    fn start_discards(self: &Arc<Self>) -> io::Result<()> {
        if self.life.begins_discards() {
            self.add_task(DISCARD, Some(&self.mail.discards.notifier), DiscardWorker::new, DiscardWorker::run)?;
        }
        Ok(())
    }

    /// Has a task of the pool do the work of a worker, which is created again after a panic.
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
            // Dropping it may panic as well.
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

    /// The group of its tasks; its descriptors are served in turns of the same group.
    pub(crate) fn group(&self) -> GroupId {
        self.life.pool().1
    }

    /// Listens to the peer of a view, unless that is done already.
    pub(super) fn listen(self: &Arc<Self>, view: &Arc<View>) -> io::Result<()> {
        if self.life.has_client(view) {
            return Ok(());
        }
        if let Some(user) = view.user().filter(|user| Stuck::of_process().is_full(*user)) {
            let why = format!("processes of user {user} that are gone keep threads of ballastd, by messages to it");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, why));
        }
        view.peer().on_answer().connect_to(&self.mail.reclaim);
        view.peer().take_zaps();
        let listened = |notify| -> Box<dyn Serve> { Box::new(Listened::new(self, view, notify)) };
        let input = Arc::new(Input(view.peer().clone()));
        self.life.add_client(view.clone(), Servers::of_process()?.add(self.group(), input, listened)?);
        Ok(())
    }

    /// Stops serving faults of this view, and listening to its client, if the process is gone. Waits for no fault that
    /// is being served.
    pub(super) fn forget_gone(&self) {
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

    /// A slow worker has this while it reads.
    pub(crate) fn holding_slow(&self) -> Holding {
        self.life.holding_slow()
    }

    /// Ends the workers. Blocks until they are gone; pages stay where they are. Faults that were read here and not
    /// served are raised again, for the engine that serves the VM now or next. They are served until no other work is
    /// left, because that may be waiting for a disk or a cluster. Slow workers give up what they wait for.
    pub fn stop(&self) {
        self.serve_faults_only();
        self.life.end_faults();
        // The fault servers end first: they hand faults to the slow workers. Each raises those that it has kept.
        self.life.wait_for_faults();
        let (pool, serving) = self.life.serving_pool();
        pool.join(serving);
        self.mail.slow.leave(self.stats()).iter().for_each(|view| self.raise_again(view));
    }

    /// Faults of this view that were read here and not served are raised again, for the engine or worker that serves
    /// this memory next.
    pub(crate) fn raise_again(&self, view: &View) {
        // An address space that is gone has no threads that wait.
        if let Err(error) = view.wake_all() {
            tracing::debug!(vm = self.state.name(), pid = view.pid, "Waking what was not served: {error}");
        }
    }

    /// Ends all work for the VM but the serving of faults, permanently: another engine is to do the same beside this
    /// one. Blocks until no page is on its way out of memory any more, nor on to a slow store.
    pub fn serve_faults_only(&self) {
        self.life.stop_tasks();
        self.life.forget_clients(|_| true);
        // No thread reads their replies from now on.
        self.views().iter().for_each(|view| view.peer().give_up_zaps());
        let (pool, group) = self.life.pool();
        pool.join(group);
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
