//! Moving: VMs go from the serving engine to its successor, and back if that fails.
//!
//! Before: the new engine can serve all VMs, and the old one makes no more decisions (`upgrade`). After: the new engine
//! has all VMs, or the old one has them again. The steps of a VM are in `stage`.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: a VM's state file names every engine that may have it, before that engine can have heard of it.

use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;
use ballast_sys::clock;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::place::At;
use crate::stage::Stage;
use crate::upgrading::Asked;
use crate::vms::Vm;
use crate::waiting::UNASKED;

/// Most VMs that move at once. Few, because each waits for the others of its group; more than one, because a VM may
/// wait for its VMM.
const AT_ONCE: usize = 4;

impl Keeper {
    /// Has the old engine release some more VMs, so that they can move. When it has none left, the new engine serves.
    pub(crate) fn move_some(&mut self) {
        let Some(stage) = self.upgrades.stage() else { return };
        let moving = self.vms.iter().filter(|vm| vm.place.is_moving()).count();
        let closing = self.vms.closing().filter(|closing| closing.vm.leaving().is_some()).count();
        let busy = self.upgrades.opening().count() + moving + closing;
        let stay = self.vms.iter().filter(|vm| vm.place.at() == At::Engine && vm.place.is_handed_over()).map(Vm::id);
        let has_started = self.engines.get(Who::Next).is_some_and(|next| !next.is_starting());
        let next: Vec<_> = stay.take(AT_ONCE.saturating_sub(busy)).collect();
        if next.is_empty() && busy == 0 && (stage == Stage::Moving || has_started) {
            return self.upgrade_goes_on();
        }
        for vm in next {
            let seq = self.ask(Asked::ServeFaults(vm));
            if let Some(vm) = self.vms.get_mut(vm) {
                vm.place.rest(seq);
            }
            self.order(&Order::ServeFaults { seq, vm }, &[]);
        }
    }

    fn part(&mut self, vm: VmId) {
        let seq = self.ask(Asked::Part(vm));
        if let Some(vm) = self.vms.get_mut(vm) {
            vm.place.part(seq);
        }
        self.order(&Order::HandOver { seq, vm }, &[]);
    }

    /// The old engine has closed this VM: the new one gets it.
    pub(crate) fn move_on(&mut self, vm: VmId, seq: u64) {
        let Some(since) = self.vms.get_mut(vm).and_then(|vm| vm.place.parted(seq)) else { return };
        self.upgrades.opens(vm, since);
        self.give_to_next(vm, Some(since));
    }

    /// Has the new engine open a VM. `since`: when the old engine closed it.
    fn give_to_next(&mut self, vm: VmId, since: Option<Instant>) {
        self.hand_over(vm, since.map(clock::monotonic_ns_at));
        let seq = self.ask(Asked::Opened(vm));
        if let Some(vm) = self.vms.get_mut(vm) {
            vm.place.ask(seq);
        }
        self.engines.give(Who::Next, &Order::Tell { seq, vm }, &[]);
    }

    /// The old engine now only serves this VM's faults, so the new one serves them, too; or the old one reports that it
    /// cannot.
    pub(crate) fn faults_only(&mut self, vm: VmId, seq: u64, result: &Result<(), Failure>) {
        let Some(entry) = self.vms.get_mut(vm).filter(|vm| vm.place.at() == At::Resting(seq)) else { return };
        if let Err(why) = result {
            tracing::info!("VM {} is served by no engine while it moves: {why}", entry.name());
            return self.part(vm);
        }
        entry.place.share();
        tracing::debug!(%vm, "two engines are to serve it");
        self.upgrades.shares(vm);
        self.give_to_next(vm, None);
    }

    /// The new engine has opened this VM, or could not.
    pub(crate) fn opened_by_next(&mut self, vm: VmId, seq: u64, result: &Result<(), Failure>) {
        let name = self.called(vm);
        let since = self.upgrades.opened(vm);
        // A VM that is gone was closed in turn. A VM that went and came back was closed and is opened again: the reply
        // is about the first opening.
        let Some(entry) = self.vms.get(vm).filter(|vm| vm.place.is_asked(seq)) else { return };
        if let Err(why) = result
            && self.upgrades.is_whole(vm)
        {
            return self.upgrade_fails(&format!("it could not serve {name}: {why}"));
        }
        if entry.place.at() == At::Both {
            tracing::debug!(%vm, "two engines serve it");
            return self.leave_to_next(vm);
        }
        self.upgrades.moved(since);
        self.show_upgrade();
        // Requests that failed while the VM was opened.
        self.order_pending(vm);
    }

    /// The new engine serves this VM as well: the old one closes it.
    pub(crate) fn leave_to_next(&mut self, vm: VmId) {
        let seq = self.ask(Asked::Leave(vm));
        self.engines.give(Who::Engine, &Order::HandOver { seq, vm }, &[]);
    }

    pub(crate) fn left_to_next(&mut self, vm: VmId) {
        let closing = self.vms.closing().find(|closing| closing.vm.id() == vm);
        if closing.map(|closing| closing.vm.held.state().has_left()).is_some() {
            self.tend_closing();
        }
        let Some(entry) = self.vms.get_mut(vm) else { return };
        if !entry.place.left() {
            return;
        }
        entry.held.state().has_left();
        tracing::debug!(%vm, "the one that left has closed it");
        self.engines.give(Who::Next, &Order::Alone { vm }, &[]);
        self.order_pending(vm);
        self.upgrades.left(vm);
        self.show_upgrade();
    }

    /// Gives the old engine the VMs of the new one, and those that it was about to release.
    pub(crate) fn take_back(&mut self) {
        let (mut back, mut open) = (Vec::new(), Vec::new());
        for vm in self.vms.iter_mut() {
            let since = match vm.place.go_back() {
                At::Engine => continue,
                At::Parting(since, _) => since,
                // The old engine serves a VM of both until it can open it again (`hand_over`).
                At::Both | At::Next => Instant::now(),
                At::Resting(_) => {
                    open.push(vm.id());
                    Instant::now()
                }
            };
            back.push((vm.id(), since));
        }
        for (vm, _) in &back {
            self.ask_again(*vm);
        }
        for closing in self.vms.closing_mut().filter(|closing| closing.vm.place.who() == Who::Next) {
            closing.vm.place.go_back();
            closing.take_back();
        }
        for vm in open {
            // The old engine only serves the faults of this VM, and cannot do more again without a new opening.
            self.order(&Order::HandOver { seq: UNASKED, vm }, &[]);
        }
        for (vm, since) in back {
            self.hand_over(vm, Some(clock::monotonic_ns_at(since)));
        }
        self.tend_fences();
    }

    /// Gives new numbers to the orders for which this VM's clients wait, because an engine may still report the old
    /// ones as aborted.
    pub(crate) fn ask_again(&mut self, vm: VmId) {
        self.clients.number_again(vm, || self.engines.number());
    }
}
