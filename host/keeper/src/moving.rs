//! Moving: VMs go from the serving engine to its successor, and back if that fails.
//!
//! Before: the new engine can serve all VMs, and the old one decides nothing any more (`upgrade`). After: the new
//! engine has all VMs, or the old one has them again. The steps of a VM are in `stage`.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: a VM's state file names every engine that may have it, before that engine can have heard of it.

use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::orders::Order;
use ballast_sys::clock;

use crate::keeper::Keeper;
use crate::regions::{At, VmEntry};
use crate::stage::Stage;
use crate::upgrading::Asked;
use crate::waiting::UNASKED;

/// VMs that move at once. Few, because each waits for the others of its group; more than one, because one may wait for
/// its VMM.
const AT_ONCE: usize = 4;

impl Keeper {
    /// Have the old engine release some more VMs, so that they can move; when none is left, the new engine serves.
    pub(crate) fn move_some(&mut self) {
        let Some(upgrade) = &self.upgrade else { return };
        let moving = |vm: &&VmEntry| matches!(vm.at, At::Resting(_) | At::Both | At::Parting(..));
        let closing = self.closing.iter().filter(|closing| closing.entry.state.leaving().is_some()).count();
        let busy = upgrade.opening.len() + self.vms.iter().filter(moving).count() + closing;
        let stay = self.vms.iter().filter(|vm| vm.at == At::Engine && vm.is_handed_over()).map(|vm| vm.state.id());
        let next: Vec<_> = stay.take(AT_ONCE.saturating_sub(busy)).collect();
        if next.is_empty() && busy == 0 && (upgrade.stage == Stage::Moving || upgrade.serves) {
            return self.upgrade_goes_on();
        }
        for vm in next {
            let seq = self.ask(Asked::ServeFaults(vm));
            if let Some(entry) = self.entry(vm) {
                entry.at = At::Resting(seq);
            }
            self.order(&Order::ServeFaults { seq, vm }, &[]);
        }
    }

    /// Have the old engine close this VM before the new one opens it.
    fn part(&mut self, vm: VmId) {
        let seq = self.ask(Asked::Part(vm));
        if let Some(entry) = self.entry(vm) {
            entry.at = At::Parting(Instant::now(), seq);
        }
        self.order(&Order::HandOver { seq, vm }, &[]);
    }

    /// The old engine has closed this VM: the new one gets it.
    pub(crate) fn move_on(&mut self, vm: VmId, seq: u64) {
        let Some(entry) = self.entry(vm) else { return };
        // The VM may have gone and come back meanwhile.
        let since = match entry.at {
            At::Parting(since, by) if by == seq => since,
            _ => return,
        };
        entry.at = At::Next;
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.opening.insert(vm, since);
        }
        self.give_to_next(vm, Some(since));
    }

    /// Have the new engine open a VM that is on its way to it. `since`: when the old one closed it.
    fn give_to_next(&mut self, vm: VmId, since: Option<Instant>) {
        self.hand_over(vm, since.map(clock::monotonic_ns_at));
        let seq = self.ask(Asked::Opened(vm));
        if let Some(entry) = self.entry(vm) {
            entry.question = Some(seq);
        }
        self.order_next(&Order::Tell { seq, vm }, &[]);
    }

    /// The old engine only serves this VM's faults now, so the new one does so, too; or the old one cannot.
    pub(crate) fn faults_only(&mut self, vm: VmId, seq: u64, result: &Result<(), String>) {
        // The VM may have gone and come back meanwhile.
        let Some(entry) = self.entry(vm).filter(|entry| entry.at == At::Resting(seq)) else { return };
        if let Err(why) = result {
            tracing::info!("VM {} is served by no engine while it moves: {why}", entry.state.name());
            entry.at = At::Engine;
            return self.part(vm);
        }
        entry.at = At::Both;
        tracing::debug!(%vm, "two engines are to serve it");
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.both.insert(vm, Instant::now());
        }
        self.give_to_next(vm, None);
    }

    /// The new engine has opened this VM, or could not.
    pub(crate) fn opened_by_next(&mut self, vm: VmId, seq: u64, result: &Result<(), String>) {
        let entry = self.vms.iter().find(|entry| entry.state.id() == vm);
        let name = self.called(vm);
        let Some(upgrade) = &mut self.upgrade else { return };
        let since = upgrade.opening.remove(&vm);
        // A VM that is gone was closed in turn. One that has returned was closed and is opened again: the reply is
        // about the first opening.
        let Some(entry) = entry.filter(|entry| entry.question == Some(seq)) else { return };
        let is_complete = !upgrade.incomplete.contains(&vm);
        match result {
            Err(why) if is_complete => return self.upgrade_fails(&format!("it could not serve {name}: {why}")),
            // Its report is not the only evidence.
            Ok(()) if !entry.is_opened_since_named() => {
                return self.upgrade_fails(&format!("it said that it serves {name}, and has not opened it"));
            }
            _ => {}
        }
        if entry.at == At::Both {
            tracing::debug!(%vm, "two engines serve it");
            return self.leave_to_next(vm);
        }
        upgrade.shown.moved += 1;
        let gap = since.map_or(0, |since| since.elapsed().as_micros() as u64);
        upgrade.shown.longest_gap_us = upgrade.shown.longest_gap_us.max(gap);
        self.show_upgrade();
        // Those that failed meanwhile.
        self.order_pending(vm);
    }

    /// The new engine serves this VM as well: the old one closes it.
    pub(crate) fn leave_to_next(&mut self, vm: VmId) {
        let seq = self.ask(Asked::Leave(vm));
        if let Some(engine) = &mut self.engine {
            engine.give(&Order::HandOver { seq, vm }, &[]);
        }
    }

    /// The old engine has closed a VM that the new one serves.
    pub(crate) fn left_to_next(&mut self, vm: VmId) {
        if let Some(closing) = self.closing.iter().find(|closing| closing.entry.state.id() == vm) {
            closing.entry.state.has_left();
            self.tend_closing();
        }
        let Some(entry) = self.entry(vm).filter(|entry| entry.at == At::Both) else { return };
        entry.at = At::Next;
        entry.state.has_left();
        tracing::debug!(%vm, "the one that left has closed it");
        self.order_next(&Order::Alone { vm }, &[]);
        self.order_pending(vm);
        if let Some(upgrade) = &mut self.upgrade {
            upgrade.shown.moved += 1;
            let took_us = upgrade.both.remove(&vm).map_or(0, |since| since.elapsed().as_micros() as u64);
            upgrade.shown.longest_switch_us = upgrade.shown.longest_switch_us.max(took_us);
        }
        self.show_upgrade();
    }

    /// The old engine gets back the VMs of the new one, and those it was about to release.
    pub(crate) fn take_back(&mut self) {
        let (mut back, mut open) = (Vec::new(), Vec::new());
        for entry in &mut self.vms {
            let since = match entry.at {
                At::Engine => continue,
                At::Parting(since, _) => since,
                // VMs that both have are served by the old one until it can open them again (`hand_over`).
                At::Both | At::Next => Instant::now(),
                At::Resting(_) => {
                    open.push(entry.state.id());
                    Instant::now()
                }
            };
            entry.at = At::Engine;
            back.push((entry.state.id(), since));
        }
        for (vm, _) in &back {
            self.ask_again(*vm);
        }
        for closing in self.closing.iter_mut().filter(|closing| closing.entry.at == At::Next) {
            closing.entry.at = At::Engine;
            closing.take_back();
        }
        for vm in open {
            // The old engine only serves its faults, and cannot go back to more: it closes the VM and opens it again.
            self.order(&Order::HandOver { seq: UNASKED, vm }, &[]);
        }
        for (vm, since) in back {
            self.hand_over(vm, Some(clock::monotonic_ns_at(since)));
        }
        self.tend_fences();
    }

    /// Orders that clients of this VM wait for get new numbers, because an engine may still report the old ones as
    /// aborted.
    pub(crate) fn ask_again(&mut self, vm: VmId) {
        let asked = self.pending.iter().filter(|(_, asked)| asked.order.vm() == Some(vm));
        for seq in asked.map(|(seq, _)| *seq).collect::<Vec<_>>() {
            let Some(mut asked) = self.pending.remove(&seq) else { continue };
            let seq = self.seq();
            asked.order.number(seq);
            self.pending.insert(seq, asked);
        }
    }

    fn entry(&mut self, vm: VmId) -> Option<&mut VmEntry> {
        self.vms.iter_mut().find(|entry| entry.state.id() == vm)
    }
}
