//! The keeper's engine: started, given orders, listened to, replaced when it dies or falls silent.
//!
//! Before: the keeper has VMs to be served. After: an engine has been told of all of them, in an order that makes
//! sense.
//! Threads: the keeper's one. Nothing here waits: what the engine's socket does not take stays in a queue.
//! Promise: the state file of a VM names an engine before that engine can have heard of the VM, and never two engines
//! in turn before the first can do nothing to the VM any more. A VM for which that takes long delays no other.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::wire::{self, VmId};
use ballast_handover::orders::{Begin, Order, Report};
use ballast_handover::sleep::{self, Sleeper};
use ballast_sys::priority::{run_beside, run_first};
use ballast_sys::process::Process;
use ballast_sys::{clock, scm};
use rustix::process::{Signal, pidfd_send_signal};

use crate::client::ClientView;
use crate::closer::SentFd;
use crate::engine::{Beat, spawn};
use crate::fence::{self, Left};
use crate::keeper::{Keeper, SOON};
use crate::regions::{Fenced, VmEntry};
use crate::store_files::Files;
use crate::waiting::{Closing, Making};

/// How long the API of a new engine waits for VMs that dead engines are not done with. They take milliseconds, or as
/// long as the kernel likes.
const SERVE_TIMEOUT: Duration = Duration::from_millis(500);
/// How often to look whether they are done after that.
const LATER: Duration = Duration::from_millis(200);
/// When operators are told that a VM waits.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// Engines that die before they serve, one after the other, are started again ever more slowly, up to this.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Keeper {
    /// Start an engine if there is none and it is time; ping the one there is.
    pub(crate) fn keep_engine(&mut self) {
        self.zombies.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        // What it said while we did something else, or were stopped, counts before its silence does.
        self.hear_engine();
        let Some(engine) = &mut self.engine else {
            let wait = self.died.as_ref().filter(|_| self.young_deaths > 0).map_or(Duration::ZERO, |(died, _)| {
                let pause = Duration::from_millis(10) * (1 << self.young_deaths.min(7));
                pause.min(LONGEST_PAUSE).saturating_sub(died.elapsed())
            });
            if wait.is_zero()
                && let Err(error) = self.start_engine()
            {
                tracing::error!("Starting the engine: {error:#}; trying again");
                self.young_deaths += 1;
                self.died.get_or_insert((Instant::now(), "could not be started".into())).0 = Instant::now();
            }
            return;
        };
        match engine.pulse.beat(Instant::now()) {
            Beat::Rest => {}
            // Its pidfd is silent while the kernel keeps one of its threads. That is in the way of one VM, not of all.
            _ if engine.killed.is_some() || engine.process.is_dying() => return self.reap_engine(),
            // With orders waiting, a ping would only make the queue longer, and answers are missing anyway.
            Beat::Ask if engine.orders.is_empty() => self.order(&Order::Ping, &[]),
            Beat::Ask => {}
            Beat::Dead(how) => {
                // Not waited for here: its pidfd tells, or the next beat.
                tracing::error!(pid = engine.process.pid, "the engine is alive but {how}: ending it");
                let _ = pidfd_send_signal(engine.child.pidfd(), Signal::KILL);
                engine.killed = Some(how);
            }
        }
        if let Some(engine) = self.engine.as_mut().filter(|engine| engine.starved) {
            engine.flush();
        }
    }

    fn start_engine(&mut self) -> anyhow::Result<()> {
        let engine = spawn(&mut self.starter, &self.program)?;
        tracing::info!(pid = engine.process.pid, "engine started");
        self.engine = Some(engine);
        let begin = Begin {
            keeper_pid: std::process::id(),
            restarts: self.restarts,
            since_unix_s: self.since_unix_s,
            settings: self.settings.clone(),
        };
        let api = [self.api.clone()];
        self.order(&Order::Begin(begin), &api);
        let died = self.died.take();
        if let Some((at, how)) = &died {
            let message =
                format!("the engine {how}; its successor took over after {:.1} ms", at.elapsed().as_secs_f64() * 1e3);
            self.order(&Order::Note { vm: None, kind: "engine-replaced".into(), message }, &[]);
        }
        for note in std::mem::take(&mut self.unsaid) {
            self.order(&note, &[]);
        }
        let since = died.map(|(at, _)| clock::monotonic_ns() - at.elapsed().as_nanos() as u64);
        for vm in self.vms.iter().map(|vm| vm.state.id()).collect::<Vec<_>>() {
            self.hand_over(vm, since);
        }
        self.closing.iter_mut().for_each(Closing::take_back);
        for order in self.making.iter().map(Making::order).collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
        self.tend_fences();
        Ok(())
    }

    /// Hand over the VMs whose last engines are done with them by now, and have the engine serve when it has all, or
    /// when that takes long. Returns how soon to look again, if some wait.
    pub(crate) fn tend_fences(&mut self) -> Option<Duration> {
        let fenced = |vm: &VmEntry| vm.fenced.as_ref().map(|fenced| (vm.state.id(), fenced.unserved_since_ns));
        for (vm, since) in self.vms.iter().filter_map(fenced).collect::<Vec<_>>() {
            self.hand_over(vm, since);
        }
        let waited = self.vms.iter().filter_map(|vm| vm.fenced.as_ref()).map(|fenced| fenced.since.elapsed()).min();
        if let Some(engine) = self.engine.as_mut().filter(|engine| !engine.told_to_serve)
            && (waited.is_none() || engine.begun.elapsed() > SERVE_TIMEOUT)
        {
            engine.told_to_serve = true;
            self.order(&Order::Serve, &[]);
        }
        let closing = self.tend_closing().then_some(LATER);
        waited.map(|waited| if waited < SERVE_TIMEOUT { SOON } else { LATER }).or(closing)
    }

    /// Give an order: it is sent now or as soon as the engine takes it. A new engine is told everything anyway.
    pub(crate) fn order(&mut self, order: &Order, fds: &[Arc<SentFd>]) {
        let Some(engine) = &mut self.engine else { return };
        engine.orders.push_back((wire::encode(order), fds.to_vec()));
        if engine.orders.len() == 1 {
            engine.flush();
        }
    }

    /// Something for the event list, which is the engine's; said later if there is none now.
    pub(crate) fn note(&mut self, vm: String, kind: &str, message: String) {
        tracing::warn!(vm, kind, "{message}");
        let note = Order::Note { vm: Some(vm), kind: kind.into(), message };
        if self.engine.is_some() {
            self.order(&note, &[]);
        } else {
            self.unsaid.push(note);
        }
    }

    /// Tell the engine all about a VM, unless some of its regions are still missing, or its last engine is not done
    /// with it.
    pub(crate) fn hand_over(&mut self, id: VmId, unserved_since_ns: Option<u64>) {
        let Some(engine) = self.engine.as_ref().map(|engine| engine.process) else { return };
        let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id && vm.search.is_none()) else { return };
        match fence::end_for(&vm.state, Some(engine)) {
            Ok(Left::Nothing) => vm.fenced = None,
            left => return self.wait_for(id, unserved_since_ns, left),
        }
        let Some(vm) = self.vm(id) else { return };
        let Some((_, order, fds)) = self.open_order(vm) else { return };
        self.order(&order, &fds);
        let orders: Vec<_> = self.views_of(id).map(|(pid, view)| add_view(pid, view, unserved_since_ns)).collect();
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        let asked = self.pending.values().map(|asked| &asked.order).filter(|order| order.vm() == Some(id));
        for order in asked.cloned().collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
    }

    /// The order that has the engine open a VM, whose state file names that engine from now on.
    pub(crate) fn open_order(&self, vm: &VmEntry) -> Option<(VmId, Order, Vec<Arc<SentFd>>)> {
        let engine = self.engine.as_ref()?;
        vm.state.name_engine(engine.process.pid, engine.process.start);
        vm.state.remember();
        let id = vm.state.id();
        let (fds, files) = vm.descriptors();
        let order = Order::OpenVm {
            vm: id,
            vmm: vm.vmm.clone(),
            pinned: vm.pinned.clone(),
            may_pin: vm.may_pin,
            stores: Files::counts(&vm.stores),
            files,
        };
        Some((id, order, fds))
    }

    /// A VM's last engine is not done with it.
    fn wait_for(&mut self, id: VmId, unserved_since_ns: Option<u64>, left: io::Result<Left>) {
        let views: Vec<u32> = self.views_of(id).map(|(pid, _)| pid).collect();
        let now = self.engine.as_ref().map(|engine| engine.process);
        let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) else { return };
        let since = Instant::now();
        let fenced = vm.fenced.get_or_insert(Fenced { since, unserved_since_ns, told: None });
        if fenced.told == now || fenced.since.elapsed() < TELL_AFTER {
            return;
        }
        fenced.told = now;
        let (name, waited_s) = (vm.state.name(), fenced.since.elapsed().as_secs());
        let engine = vm.state.engine().map_or(0, |(pid, _)| pid);
        let why = match left {
            Ok(Left::Threads(threads)) => {
                let sleepers: Vec<_> = threads.iter().filter_map(|thread| Sleeper::find(engine, *thread)).collect();
                sleep::reason(&sleepers, engine, &views)
            }
            Ok(_) => format!("all of engine {engine} must be gone, which did not say who works for which VM"),
            Err(error) => format!("what is left of engine {engine} cannot be found out: {error}"),
        };
        let message = format!(
            "VM {name} has not been served for {waited_s} s, because its last engine, which is dead, is not done with \
             it: {why}"
        );
        self.note(name, sleep::STUCK, message);
    }

    /// Is it our engine that this state file names?
    pub(crate) fn is_ours(&self, process: Process) -> bool {
        self.engine.as_ref().is_some_and(|engine| engine.process == process)
    }

    /// Take all that the engine has said.
    pub(crate) fn hear_engine(&mut self) {
        while let Some(engine) = &mut self.engine {
            let Ok(Some(received)) = scm::receive(&engine.socket) else { return };
            engine.pulse.silent = 0;
            let closer = self.closer.clone();
            match wire::decode::<Report>(&received.bytes) {
                Ok(Report::Pong) => {}
                Ok(Report::Settings(settings)) => self.settings = settings,
                Ok(Report::Serving) => {
                    engine.pulse.starting = None;
                    run_beside();
                    self.young_deaths = 0;
                }
                Ok(Report::Done { seq, result }) => match self.pending.remove(&seq) {
                    Some(asked) => self.answered(&asked, result),
                    None => self.closed(seq),
                },
                Ok(Report::Made { seq, result }) => self.made(seq, move |uid| {
                    let fds: Vec<_> = received.fds.into_iter().map(|fd| SentFd::new(fd, uid, closer.clone())).collect();
                    let two =
                        |fds: Vec<_>| fds.try_into().map_err(|_| "the engine did not send two descriptors".into());
                    result.and_then(|()| two(fds))
                }),
                Err(error) => tracing::error!("The engine sent nonsense: {error}"),
            }
        }
    }

    /// The engine is dead, but for threads that the kernel keeps.
    pub(crate) fn reap_engine(&mut self) {
        let Some(engine) = self.engine.take() else { return };
        let how = engine.killed.unwrap_or("died");
        let status = match engine.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "the kernel keeps threads of it".into(),
            Err(error) => error.to_string(),
        };
        let how = format!("{how} ({status})");
        tracing::error!(pid = engine.child.id(), "the engine {how}: starting another");
        // Until the next engine serves, all guests wait for what this thread does.
        run_first();
        self.restarts += 1;
        self.young_deaths += u32::from(engine.pulse.starting.is_some());
        self.died = Some((Instant::now(), how));
        self.zombies.push(engine.child);
    }
}

/// The order that has a process served, and its descriptors.
pub fn add_view(pid: u32, view: &ClientView, unserved_since_ns: Option<u64>) -> (Order, Vec<Arc<SentFd>>) {
    let order = Order::AddView {
        vm: view.vm,
        pid,
        uffd_features: view.uffd_features,
        spans: view.spans.clone(),
        unserved_since_ns,
    };
    (order, view.uffds.iter().chain([&view.control]).cloned().collect())
}
