//! The keeper's engine: started, given orders, read, and replaced when it dies or does not reply.
//!
//! Before: the keeper has VMs that need an engine. After: an engine has the orders for all of them, in a useful
//! sequence.
//! Threads: the keeper's one. Nothing here waits: orders that the engine's socket does not take stay in a queue.
//! Promise: a VM's state file names an engine before that engine can have heard of the VM, and names a second engine
//! only after the first can do nothing to the VM any more. A VM for which that takes long delays no other VM.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::Hva;
use ballast_base::wire::{self, Span, VmId};
use ballast_handover::failure::Failure;
use ballast_handover::orders::{Order, Report};
use ballast_handover::sleep::{self, Sleeper};
use ballast_sys::priority::run_beside;
use sd_notify::NotifyState;

use crate::client::ClientView;
use crate::engine::{Health, SERVE_TIMEOUT, Who};
use crate::fence::Left;
use crate::keeper::{Keeper, SOON};
use crate::place::At;
use crate::vms::{Closing, Vm};
use crate::waiting::Making;
use ballast_sys::slow_fd::SlowFd;

/// Time between checks of VMs that have waited for longer than [`SERVE_TIMEOUT`].
const LATER: Duration = Duration::from_millis(200);
/// Most messages that are read from one engine in a row: more than its socket holds, so that all messages of a dead
/// engine are read, and an engine that never stops sending delays nothing else.
const MOST_HEARD: u32 = 1024;

impl Keeper {
    /// Starts an engine if there is none and it is time; pings the engines that there are.
    pub(crate) fn keep_engines(&mut self) {
        self.engines.reap();
        // Messages that arrived while the keeper was busy, or stopped, count before the silence does.
        self.hear(Who::Engine);
        self.hear(Who::Next);
        match self.engines.health(Who::Next) {
            Some(Health::Dead) => self.next_died(),
            Some(Health::Silent(how)) => self.upgrade_fails(&format!("it {how}")),
            Some(Health::Alive) | None => {}
        }
        match self.engines.health(Who::Engine) {
            Some(Health::Dead) => self.reap_engine(),
            Some(Health::Silent(how)) => self.engines.kill(how),
            Some(Health::Alive) => {}
            None => self.start_engine(),
        }
    }

    fn start_engine(&mut self) {
        if !self.engines.start() {
            return;
        }
        let since = self.engines.unserved_since_ns();
        self.engines.catch_up("its successor");
        self.engines.give(Who::Engine, &self.upgrades.show(), &[]);
        for vm in self.vms.which(|_| true) {
            self.hand_over(vm, since);
        }
        self.vms.closing_mut().for_each(Closing::take_back);
        for order in self.making.iter().map(Making::order).collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
        self.tend_fences();
    }

    /// Hands over the VMs that no thread of a dead engine uses any more, and tells the engine to serve when it has all
    /// of them, or after [`SERVE_TIMEOUT`]. Returns how soon to check again, if some VMs wait.
    pub(crate) fn tend_fences(&mut self) -> Option<Duration> {
        let fenced = |vm: &Vm| Some((vm.id(), vm.place.fenced()?.1));
        for (vm, since) in self.vms.iter().filter_map(fenced).collect::<Vec<_>>() {
            self.hand_over(vm, since);
        }
        let waited = self.vms.iter().filter_map(|vm| Some(vm.place.fenced()?.0.elapsed())).min();
        self.engines.begin_to_serve(Who::Engine, waited.is_none());
        let closing = self.tend_closing().then_some(LATER).into_iter().chain(self.tend_lost()).min();
        waited.map(|waited| if waited < SERVE_TIMEOUT { SOON } else { LATER }).or(closing)
    }

    /// Gives an order to the engine: an order about a VM goes to the engine that has the VM. Without an engine the
    /// order is dropped, because a new engine is told everything anyway.
    pub(crate) fn order(&mut self, order: &Order, fds: &[Arc<SlowFd>]) {
        let who = order.vm().map_or(Who::Engine, |vm| self.who_has(vm));
        self.engines.give(who, order, fds);
    }

    fn who_has(&self, id: VmId) -> Who {
        // Without an upgrade there is one engine, and there may be many VMs to look through.
        let is_nexts = |vm: &Vm| vm.place.who() == Who::Next && vm.id() == id;
        if self.upgrades.stage().is_some() && self.vms.all().any(is_nexts) { Who::Next } else { Who::Engine }
    }

    /// Adds an event to the engine's event list; without an engine, to the next one's.
    pub(crate) fn note(&mut self, vm: String, kind: &str, message: String) {
        tracing::warn!(vm, kind, "{message}");
        let note = Order::Note { vm: Some(vm), kind: kind.into(), message };
        if self.tells_next() {
            self.engines.give(Who::Next, &note, &[]);
        }
        self.engines.note(note);
    }

    /// Gives the engine all orders for a VM, unless some of its regions are still missing, or a thread of its last
    /// engine still uses it.
    pub(crate) fn hand_over(&mut self, id: VmId, unserved_since_ns: Option<u64>) {
        let ours = self.engines.ours();
        let Some(vm) = self.vms.get_mut(id).filter(|vm| !vm.place.is_searched()) else { return };
        let Some(engine) = self.engines.process(vm.place.who()) else { return };
        let orders = match vm.open(engine, &ours) {
            Ok(orders) => orders,
            Err(left) => return self.wait_for(id, unserved_since_ns, left),
        };
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        let unplugs = self.unplugs_of(id);
        let of = |(pid, view)| add_view(pid, view, &unplugs, unserved_since_ns);
        let orders: Vec<_> = self.clients.views_of(id).map(of).collect();
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        self.order_pending(id);
    }

    /// RAM of this VM that processes are about to unplug: process, address, number. They may already have unmapped it,
    /// and mapped something else there.
    pub(crate) fn unplugs_of(&self, id: VmId) -> Vec<(u32, Hva, u32)> {
        let of = |order: &Order| match order {
            Order::RemoveRegion { pid, hva, region, .. } => Some((*pid, *hva, (*region)?)),
            _ => None,
        };
        self.clients.orders_of(id).filter_map(of).collect()
    }

    /// Gives the engine that has this VM the orders for which clients wait, unless two engines serve the VM: the other
    /// one would not know of them.
    pub(crate) fn order_pending(&mut self, id: VmId) {
        if self.vms.get(id).is_some_and(|vm| vm.place.at() == At::Both) {
            return;
        }
        for order in self.clients.orders_of(id).cloned().collect::<Vec<_>>() {
            self.order(&order, &[]);
        }
    }

    /// Notes that a thread of a VM's last engine still uses the VM.
    fn wait_for(&mut self, id: VmId, unserved_since_ns: Option<u64>, left: io::Result<Left>) {
        let views: Vec<u32> = self.clients.views_of(id).map(|(pid, _)| pid).collect();
        let now = self.engines.process(Who::Engine);
        let Some(vm) = self.vms.get_mut(id) else { return };
        let Some(waited) = vm.place.wait_for_end(unserved_since_ns, now) else { return };
        let (name, waited_s) = (vm.name(), waited.as_secs());
        let engine = vm.held.state().engine().map_or(0, |(pid, _)| pid);
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

    pub(crate) fn hear(&mut self, who: Who) {
        for _ in 0..MOST_HEARD {
            let Some(received) = self.engines.hear(who) else { return };
            match wire::decode::<Report>(&received.bytes) {
                Ok(Report::Pong) => {}
                Ok(Report::Settings(settings)) => self.engines.set_settings(settings),
                Ok(Report::Serving) if who == Who::Next => self.next_serves(),
                Ok(Report::Serving) => {
                    self.engines.has_started(who);
                    run_beside();
                    tell_systemd();
                }
                Ok(Report::Refused(why)) if who == Who::Next => self.upgrade_fails(&why),
                Ok(Report::Refused(why)) => tracing::error!("the engine will not begin: {why}"),
                Ok(Report::Past(events)) if who == Who::Engine => {
                    self.engines.give(Who::Next, &Order::Past(events), &[]);
                }
                Ok(Report::Past(_)) => {}
                Ok(Report::Upgrade { ask, program }) => self.asked_to_upgrade(who, ask, program),
                Ok(Report::Lost(vm)) => self.lost(who, vm),
                Ok(Report::Done { seq, result }) => {
                    if !self.answered_upgrade(seq, &result) {
                        self.done(seq, result);
                    }
                }
                // The new engine never gets the order to make a store.
                Ok(Report::Made { .. }) if who == Who::Next => {}
                Ok(Report::Made { seq, result }) => {
                    let fds: Vec<SlowFd> = received.fds.into_iter().map(SlowFd::from).collect();
                    let two =
                        |fds: Vec<_>| fds.try_into().map_err(|_| "the engine did not send two descriptors".into());
                    self.made(seq, result.and_then(|()| two(fds)));
                }
                Err(error) => tracing::error!("The engine sent nonsense: {error}"),
            }
        }
    }

    /// An order is carried out for which a client or the keeper waits.
    fn done(&mut self, seq: u64, result: Result<(), Failure>) {
        let asked = self.clients.waits_for(seq).and_then(|(_, order, _)| order.vm());
        let is_opening = |vm| self.upgrades.opening().any(|opening| opening == vm);
        let is_moving = |id: VmId| self.vms.get(id).is_some_and(|vm| vm.place.is_moving()) || is_opening(id);
        if result.is_err() && asked.is_some_and(is_moving) {
            // It failed because the VM moves, or the next engine has not opened it. The engine that has the VM in the
            // end gets the order again.
            return;
        }
        match asked {
            Some(_) => self.answered(seq, result),
            None => self.closed(seq, result),
        }
    }

    /// Buries the engine, which is dead except for threads that the kernel keeps.
    pub(crate) fn reap_engine(&mut self) {
        let Some(is_back) = self.engines.bury() else { return };
        if is_back && self.replacing.is_some() {
            self.stays("engines of it do not come to serve");
        }
        if self.old_engine_died() {
            self.engines.catch_up("the one that was to follow");
        }
    }
}

/// The order to serve a process where it maps RAM that it has not unplugged, and the descriptors.
pub fn add_view(
    pid: u32,
    view: &ClientView,
    unplugged: &[(u32, Hva, u32)],
    unserved_since_ns: Option<u64>,
) -> (Order, Vec<Arc<SlowFd>>) {
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

/// Tells systemd, if it started this process, that the service answers. On a thread, because systemd may not listen for
/// a long time.
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
