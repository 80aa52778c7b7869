//! The keeper's engine: started, given orders, read, replaced when it dies or does not reply.
//!
//! Before: the keeper has VMs to be served. After: an engine has been told of all of them, in a sensible order.
//! Threads: the keeper's one. Nothing here waits: orders that the engine's socket does not take stay in a queue.
//! Promise: the state file of a VM names an engine before that engine can have heard of the VM, and a second engine
//! only after the first can do nothing to the VM any more. A VM for which that takes long delays no other.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::Hva;
use ballast_base::wire::{self, Span, VmId};
use ballast_handover::orders::{Begin, Order, Report};
use ballast_handover::sleep::{self, Sleeper};
use ballast_sys::priority::{run_beside, run_first};
use ballast_sys::process::Process;
use ballast_sys::{clock, scm};
use rustix::process::{Signal, pidfd_send_signal};
use sd_notify::NotifyState;

use crate::client::ClientView;
use crate::closer::SentFd;
use crate::engine::{Beat, Who, spawn};
use crate::fence::{self, Left};
use crate::keeper::{Keeper, SOON};
use crate::regions::{At, Fenced, VmEntry};
use crate::store_files::Files;
use crate::waiting::{Asked, Closing, Making, UNASKED};

/// How long the API of a new engine waits for VMs that threads of dead engines still use. They take milliseconds, or as
/// long as the kernel takes.
const SERVE_TIMEOUT: Duration = Duration::from_millis(500);
/// Time between checks after that.
const LATER: Duration = Duration::from_millis(200);
/// When operators are told that a VM waits.
const TELL_AFTER: Duration = Duration::from_secs(2);
/// Messages that are read from one engine in a row: more than its socket holds, so that all messages of a dead engine
/// are read, and one that never stops sending delays nothing else.
const MOST_HEARD: u32 = 1024;
/// Engines that die in a row before they serve are started again ever more slowly, up to this pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

impl Keeper {
    /// Start an engine if there is none and it is time; ping the one there is.
    pub(crate) fn keep_engine(&mut self) {
        self.zombies.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
        self.tend_leaving();
        // Messages that arrived while the keeper did something else, or was stopped, count before the silence does.
        self.hear(Who::Engine);
        self.hear(Who::Next);
        self.keep_next();
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
            // Its pidfd is not readable while the kernel keeps one of its threads. That delays one VM, not all.
            _ if engine.killed.is_some() || engine.process.is_dying() => return self.reap_engine(),
            // With orders waiting, a ping would only make the queue longer, and replies are missing anyway.
            Beat::Ask if engine.orders.is_empty() => self.order(&Order::Ping, &[]),
            Beat::Ask => {}
            Beat::Dead(how) => {
                // The keeper does not wait for it here: its pidfd tells, or the next round.
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
        let started = spawn(&mut self.starter, &self.program);
        let engine = started.or_else(|error| {
            // A program of an upgrade may have become one that cannot be run. Guests wait.
            if self.program.is_file_of(&self.own_program) {
                return Err(error);
            }
            tracing::error!("Starting the engine: {error:#}; starting {} instead", self.own_program.path().display());
            spawn(&mut self.starter, &self.own_program)
        })?;
        tracing::info!(pid = engine.process.pid, "engine started");
        self.engine = Some(engine);
        let (begin, api) = self.begin();
        self.order(&begin, &api);
        let died = self.died.take();
        if let Some((at, how)) = &died {
            let message =
                format!("the engine {how}; its successor took over after {:.1} ms", at.elapsed().as_secs_f64() * 1e3);
            self.order(&Order::Note { vm: None, kind: "engine-replaced".into(), message }, &[]);
        }
        for note in std::mem::take(&mut self.unsaid) {
            self.order(&note, &[]);
        }
        self.order(&Order::Upgrading(self.last_upgrade.clone()), &[]);
        let since = died.map(|(at, _)| clock::monotonic_ns_at(at));
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

    /// An engine's first order, and the listening socket of the API that goes with it.
    pub(crate) fn begin(&self) -> (Order, [Arc<SentFd>; 1]) {
        let begin = Begin {
            keeper_pid: std::process::id(),
            restarts: self.restarts,
            since_unix_s: self.since_unix_s,
            settings: self.settings.clone(),
        };
        (Order::Begin(begin), [self.api.clone()])
    }

    /// Hand over the VMs that no thread of a dead engine uses any more, and have the engine serve when it has all, or
    /// when that takes long. Returns how soon to check again, if some wait.
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
        let closing = self.tend_closing().then_some(LATER).into_iter().chain(self.tend_lost()).min();
        waited.map(|waited| if waited < SERVE_TIMEOUT { SOON } else { LATER }).or(closing)
    }

    /// Give an order: it is sent now or as soon as the engine takes it. A new engine is told everything anyway. An
    /// order about a VM goes to the engine that has the VM.
    pub(crate) fn order(&mut self, order: &Order, fds: &[Arc<SentFd>]) {
        if order.vm().is_some_and(|vm| self.is_with_next(vm)) {
            return self.order_next(order, fds);
        }
        if let Some(engine) = &mut self.engine {
            engine.give(order, fds);
        }
    }

    fn is_with_next(&self, id: VmId) -> bool {
        if self.upgrade.is_none() {
            return false;
        }
        let closing = self.closing.iter().map(|closing| &closing.entry);
        self.vms.iter().chain(closing).any(|entry| matches!(entry.at, At::Both | At::Next) && entry.state.id() == id)
    }

    /// The engine that has, or is to get, this VM.
    pub(crate) fn engine_for(&self, vm: &VmEntry) -> Option<Process> {
        match (vm.at, &self.upgrade) {
            (At::Both | At::Next, Some(upgrade)) => Some(upgrade.next.process),
            _ => self.engine.as_ref().map(|engine| engine.process),
        }
    }

    /// Our engines that live.
    pub(crate) fn ours(&self) -> Vec<Process> {
        let next = self.upgrade.as_ref().filter(|upgrade| !upgrade.is_dead()).map(|upgrade| upgrade.next.process);
        self.engine.iter().map(|engine| engine.process).chain(next).collect()
    }

    /// An event for the event list, which is the engine's; sent later if there is none now.
    pub(crate) fn note(&mut self, vm: String, kind: &str, message: String) {
        tracing::warn!(vm, kind, "{message}");
        let note = Order::Note { vm: Some(vm), kind: kind.into(), message };
        if self.engine.is_some() {
            self.order(&note, &[]);
            if self.tells_next() {
                self.order_next(&note, &[]);
            }
        } else {
            self.unsaid.push(note);
        }
    }

    /// Tell the engine all about a VM, unless some of its regions are still missing, or a thread of its last engine
    /// still uses it.
    pub(crate) fn hand_over(&mut self, id: VmId, unserved_since_ns: Option<u64>) {
        let ours = self.ours();
        let Some(engine) = self.vm(id).filter(|vm| vm.search.is_none()).and_then(|vm| self.engine_for(vm)) else {
            return;
        };
        let Some(vm) = self.vms.iter_mut().find(|vm| vm.state.id() == id) else { return };
        match fence::end_for(&vm.state, ours) {
            Ok(Left::Nothing) => (vm.fenced, vm.lost) = (None, None),
            left => return self.wait_for(id, unserved_since_ns, left),
        }
        // One of the two engines that had it is dead. The other one, which this is if it is ours, has served its faults
        // so far.
        let had_two = vm.at != At::Both && vm.state.leaving().is_some();
        let (order, fds) = open_order(vm, engine);
        if had_two {
            self.order(&Order::HandOver { seq: UNASKED, vm: id }, &[]);
        }
        self.order(&order, &fds);
        let unplugs = self.unplugs_of(id);
        let of = |(pid, view)| add_view(pid, view, &unplugs, unserved_since_ns);
        let orders: Vec<_> = self.views_of(id).map(of).collect();
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        self.order_pending(id);
    }

    /// RAM of this VM that processes wait to unplug: process, address, number. They may have unmapped it, and mapped
    /// something else there.
    pub(crate) fn unplugs_of(&self, id: VmId) -> Vec<(u32, Hva, u32)> {
        let of = |asked: &Asked| match asked.order {
            Order::RemoveRegion { vm, pid, hva, region, .. } if vm == id => Some((pid, hva, region?)),
            _ => None,
        };
        self.pending.values().filter_map(of).collect()
    }

    /// Give the engine that has this VM the orders that clients wait for, unless another one serves the VM as well: the
    /// other one would not know of them.
    pub(crate) fn order_pending(&mut self, id: VmId) {
        if self.vm(id).is_some_and(|vm| vm.at == At::Both) {
            return;
        }
        let asked = self.pending.values().map(|asked| &asked.order).filter(|order| order.vm() == Some(id));
        for order in asked.cloned().collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
    }

    /// A thread of a VM's last engine still uses it.
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

    /// Read all messages of an engine.
    pub(crate) fn hear(&mut self, who: Who) {
        for _ in 0..MOST_HEARD {
            let sets = self.sets(who);
            let next = self.upgrade.as_mut().filter(|upgrade| !upgrade.is_dead()).map(|upgrade| &mut upgrade.next);
            let engine = match who {
                Who::Engine => self.engine.as_mut(),
                Who::Next => next,
            };
            let Some(engine) = engine else { return };
            let Ok(Some(received)) = scm::receive(&engine.socket) else { return };
            engine.pulse.silent = 0;
            let closer = self.closer.clone();
            match wire::decode::<Report>(&received.bytes) {
                Ok(Report::Pong) => {}
                Ok(Report::Settings(settings)) if sets => self.settings = settings,
                Ok(Report::Settings(_)) => {}
                Ok(Report::Serving) if who == Who::Next => self.next_serves(),
                Ok(Report::Serving) => {
                    engine.pulse.starting = None;
                    run_beside();
                    self.young_deaths = 0;
                    self.last_program = None;
                    tell_systemd();
                }
                Ok(Report::Refused(why)) if who == Who::Next => self.upgrade_fails(&why),
                Ok(Report::Refused(why)) => tracing::error!("the engine will not begin: {why}"),
                Ok(Report::Past(events)) if who == Who::Engine => self.order_next(&Order::Past(events), &[]),
                Ok(Report::Past(_)) => {}
                Ok(Report::Upgrade { ask, program }) => self.asked_to_upgrade(who, ask, program),
                Ok(Report::Lost(vm)) => self.lost(who, vm),
                Ok(Report::Done { seq, result }) => {
                    if !self.answered_upgrade(who, seq, &result) {
                        self.done(who, seq, result);
                    }
                }
                // The new engine is never asked for one.
                Ok(Report::Made { .. }) if who == Who::Next => {}
                Ok(Report::Made { seq, result }) => self.made(seq, move |uid| {
                    let ours = |fd| SentFd::new(fd, uid, closer.clone()).checked();
                    let fds: Vec<_> = received.fds.into_iter().map(ours).collect();
                    let two =
                        |fds: Vec<_>| fds.try_into().map_err(|_| "the engine did not send two descriptors".into());
                    result.and_then(|()| two(fds))
                }),
                Err(error) => tracing::error!("The engine sent nonsense: {error}"),
            }
        }
    }

    /// Give an engine the orders that it takes now.
    pub(crate) fn flush(&mut self, who: Who) {
        let next = self.upgrade.as_mut().filter(|upgrade| !upgrade.is_dead()).map(|upgrade| &mut upgrade.next);
        let engine = match who {
            Who::Engine => self.engine.as_mut(),
            Who::Next => next,
        };
        if let Some(engine) = engine {
            engine.flush();
        }
    }

    /// An order is carried out that a client or the keeper waits for.
    fn done(&mut self, who: Who, seq: u64, result: Result<(), String>) {
        let asked = self.pending.get(&seq).and_then(|asked| asked.order.vm());
        let closing = self.closing.iter().find(|closing| closing.seq == seq).map(|closing| closing.entry.state.id());
        // The old engine may still reply to what it was asked before the VM moved.
        if who == Who::Next && asked.or(closing).is_some_and(|vm| !self.is_with_next(vm)) {
            return self.answers_for_another(who);
        }
        let Some(asked) = self.pending.remove(&seq) else { return self.closed(seq, result) };
        let is_opening = |vm| self.upgrade.as_ref().is_some_and(|upgrade| upgrade.opening.contains_key(&vm));
        let is_moving = |id: VmId| {
            let moves = |vm: &VmEntry| matches!(vm.at, At::Resting(_) | At::Both | At::Parting(..));
            self.vm(id).is_some_and(moves) || is_opening(id)
        };
        if result.is_err() && asked.order.vm().is_some_and(is_moving) {
            // It failed because the VM moves, or the next engine has not opened it: the one that has it in the end is
            // asked again.
            self.pending.insert(seq, asked);
            return;
        }
        self.answered(seq, &asked, result);
    }

    /// The engine is dead, except threads that the kernel keeps.
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
        // Until the next engine serves, all guests wait for this thread.
        run_first();
        self.restarts += 1;
        let is_young = engine.pulse.starting.is_some();
        self.young_deaths += u32::from(is_young);
        if let Some(last) = self.last_program.take().filter(|_| is_young) {
            tracing::error!(
                "engines of {} do not come to serve: back to {}",
                self.program.path().display(),
                last.path().display()
            );
            self.program = last;
            if self.replacing.is_some() {
                self.stays("engines of it do not come to serve");
            }
        }
        self.died = Some((Instant::now(), how));
        self.zombies.push(engine.child);
        if self.old_engine_died()
            && let Some((at, how)) = self.died.take()
        {
            let took = at.elapsed().as_secs_f64() * 1e3;
            let message = format!("the engine {how}; the one that was to follow took over after {took:.1} ms");
            self.order(&Order::Note { vm: None, kind: "engine-replaced".into(), message }, &[]);
        }
    }
}

/// The order that has this engine open a VM, whose state file names that engine from now on.
pub fn open_order(vm: &mut VmEntry, engine: Process) -> (Order, Vec<Arc<SentFd>>) {
    vm.name_engine(engine);
    let (fds, files, regions) = vm.descriptors();
    let order = Order::OpenVm {
        vm: vm.state.id(),
        vmm: vm.vmm.clone(),
        pinned: vm.pinned.clone(),
        may_pin: vm.may_pin,
        stores: Files::counts(&vm.stores),
        files,
        beside: vm.at == At::Both,
        regions,
    };
    (order, fds)
}

/// The order that has a process served where it maps RAM that it has not unplugged, and its descriptors.
pub fn add_view(
    pid: u32,
    view: &ClientView,
    unplugged: &[(u32, Hva, u32)],
    unserved_since_ns: Option<u64>,
) -> (Order, Vec<Arc<SentFd>>) {
    let is_there = |(span, number): &&(Span, u32)| !unplugged.contains(&(pid, span.hva, *number));
    let order = Order::AddView {
        vm: view.vm,
        pid,
        uffd_features: view.uffd_features,
        spans: view.spans.iter().filter(is_there).copied().collect(),
        unserved_since_ns,
    };
    (order, view.uffds.iter().chain([&view.control]).cloned().collect())
}

/// Tell systemd, if it started this process, that the service answers. It may not listen for long, so a thread waits.
fn tell_systemd() {
    let tell = || {
        if let Err(error) = sd_notify::notify(&[NotifyState::Ready]) {
            tracing::warn!("Telling systemd that the service is ready: {error}");
        }
    };
    if let Err(error) = std::thread::Builder::new().name("notify".into()).spawn(tell) {
        tracing::warn!("Starting a thread that tells systemd: {error}");
    }
}
