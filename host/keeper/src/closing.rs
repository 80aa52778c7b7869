//! VMs whose processes are gone while their memory may still be on its way back into RAM files that other processes can
//! reach.
//!
//! Before: the last process of a VM is gone. After: the engine has closed the VM, and the keeper its descriptors.
//! Threads: the keeper's one.
//! Promise: if an engine dies meanwhile, its successor goes on. No other VM gets such a file as RAM meanwhile: a client
//! that brings it, with its attach or later, is told to retry.

use std::time::Instant;

use ballast_base::Bytes;
use ballast_base::wire::VmId;
use ballast_handover::orders::Order;
use ballast_sys::process::Process;

use crate::admit::Ram;
use crate::engine_child::open_order;
use crate::fence::{self, Left};
use crate::keeper::Keeper;
use crate::regions::{At, Kin, VmEntry};
use crate::resume::end_search;
use crate::waiting::{Closing, UNASKED};

/// Most VMs of one user who is not root that may be closing when another one of that user attaches. Each costs the
/// engine a thread and its descriptors, for as long as there is no memory for its far pages: permanently, if the RAM is
/// in a full tmpfs.
const MOST_OF_A_USER: usize = 64;
/// Tries to open a VM only to close it: within about a minute. Then its memory is more use to others.
const MOST_TRIES: u32 = 10;

impl Keeper {
    /// No process of the VM is left.
    pub(crate) fn close_vm(&mut self, id: VmId) {
        let Some(at) = self.vms.iter().position(|vm| vm.state.id() == id) else { return };
        let mut entry = self.vms.remove(at);
        entry.lost = None;
        let seq = self.seq();
        let given = entry.is_handed_over() && entry.at != At::Both;
        match entry.at {
            // Its engine closes it as if it moved; then the same engine opens it again to end it.
            At::Parting(..) => entry.at = At::Engine,
            At::Resting(_) => {
                entry.at = At::Engine;
                self.order(&Order::HandOver { seq: UNASKED, vm: id }, &[]);
            }
            // Both close it; then the next engine opens it again to end it.
            At::Both => {
                entry.at = At::Next;
                self.leave_to_next(id);
                self.order_next(&Order::HandOver { seq: UNASKED, vm: id }, &[]);
            }
            At::Engine | At::Next => {}
        }
        // One that waits for regions is with no engine: it is given to one when the search is over.
        self.closing.push(Closing::new(seq, entry, given));
        if given {
            self.order(&Order::CloseVm { seq, vm: id }, &[]);
        }
    }

    /// The engine has closed a VM, or could not open it before.
    pub(crate) fn closed(&mut self, seq: u64, result: Result<(), String>) {
        match result {
            Ok(()) => self.closing.retain(|closing| closing.seq != seq),
            Err(why) => {
                let Some(at) = self.closing.iter().position(|closing| closing.seq == seq) else { return };
                let (closing, now) = (&mut self.closing[at], Instant::now());
                let (name, was_open) = (closing.entry.state.name(), closing.entry.state.epoch() > 0);
                // What no engine ever had open has nothing far. Its RAM may be what the host lacks.
                if !was_open || closing.losses.are(MOST_TRIES) {
                    self.closing.remove(at);
                    if was_open {
                        let message = format!("VM {name} could not be closed, and what was far of it is lost: {why}");
                        self.note(name, "region-lost", message);
                    }
                    return;
                }
                tracing::warn!(vm = name, "closing it: {why}; trying again");
                (closing.given, closing.again_at) = (false, Some(now + closing.losses.again_after(now)));
            }
        }
    }

    /// The VM comes back: its attach socket had been cut.
    pub(crate) fn reopened(&mut self, id: VmId) {
        self.closing.retain(|closing| closing.entry.state.id() != id);
    }

    /// Why a process of this VM must wait with this RAM, if it must: far pages of another VM are still written back
    /// into these files, or another VM is about to return with them.
    pub(crate) fn must_wait(&self, vm: Option<VmId>, ram: &[Ram]) -> Option<String> {
        let is_it = |closing: &&Closing| Some(closing.entry.state.id()) == vm;
        let (own, others): (Vec<_>, Vec<_>) = self.closing.iter().partition(is_it);
        if let Some(closing) = own.iter().find(|closing| closing.entry.state.leaving().is_some()) {
            return Some(format!("two engines have VM {:?} at this moment", closing.entry.state.name()));
        }
        // Another file with the same numbers is in nobody's way.
        let shares = |entry: &VmEntry| matches!(entry.kin(ram), Kin::Same | Kin::Unknown);
        if let Some(of) = others.iter().find(|closing| shares(&closing.entry)) {
            let name = of.entry.state.name();
            return Some(format!("what was far of VM {name:?} is on its way back into its RAM file"));
        }
        let missing = |entry: &&VmEntry| Some(entry.state.id()) != vm && entry.kin(ram) == Kin::Unknown;
        if let Some(entry) = self.vms.iter().find(missing) {
            let name = entry.state.name();
            return Some(format!("it may be RAM of VM {name:?}, a process of which has not returned"));
        }
        let (now, ranges) = (Instant::now(), Ram::ranges(ram));
        let mut others = self.returning.iter().filter(|other| Some(other.vm) != vm && other.until > now);
        others
            .any(|other| other.ram.overlap(&ranges).is_some())
            .then(|| "a VM that has this RAM is about to return".into())
    }

    /// Why a process of this user must wait, if it must: too many of the user's VMs are closing. A process of such a VM
    /// need not wait.
    pub(crate) fn must_wait_for_others(&self, uid: u32, resume: Option<VmId>) -> Option<String> {
        let own = self.closing.iter().filter(|closing| closing.entry.uid == uid);
        let is_back = self.closing.iter().any(|closing| Some(closing.entry.state.id()) == resume);
        let many = uid != 0 && !is_back && own.count() >= MOST_OF_A_USER;
        many.then(|| {
            format!("what was far of {MOST_OF_A_USER} other VMs of this user is on its way back into their RAM files")
        })
    }

    /// RAM of this user's VMs that are closing.
    pub(crate) fn closing_ram(&self, uid: u32) -> Bytes {
        let own = self.closing.iter().filter(|closing| closing.entry.uid == uid);
        let regions = own.flat_map(|closing| closing.entry.state.regions()).filter(|record| !record.removed);
        Bytes(regions.map(|record| record.pages().bytes().0).fold(0, u64::saturating_add))
    }

    /// Have a new engine close the VMs that the last one was closing, when the last one is gone. Returns whether some
    /// must wait.
    pub(crate) fn tend_closing(&mut self) -> bool {
        let searched = self.closing.iter_mut().filter_map(|closing| {
            let lost = end_search(&mut closing.entry)??;
            Some((closing.entry.state.name(), lost))
        });
        for (name, lost) in searched.collect::<Vec<_>>() {
            self.note(name, "region-lost", lost);
        }
        let ours = self.ours();
        let is_free = |entry: &VmEntry, engine: Process| {
            // Another one of ours is to close it before this one opens it.
            let leaving = entry.state.leaving().map(|(pid, start)| Process { pid, start });
            leaving.is_none_or(|leaving| leaving == engine || !ours.contains(&leaving))
                && matches!(fence::end_for(&entry.state, ours.iter().copied()), Ok(Left::Nothing))
        };
        let mut orders = Vec::new();
        for at in 0..self.closing.len() {
            let Some(engine) = self.engine_for(&self.closing[at].entry) else { return false };
            let closing = &mut self.closing[at];
            let is_due = closing.entry.search.is_none() && closing.again_at.is_none_or(|at| at <= Instant::now());
            if !closing.given && is_due && is_free(&closing.entry, engine) {
                if closing.entry.state.leaving().is_some() {
                    // One of its two engines is dead. The other one, if it is this one, still serves its faults.
                    orders.push((Order::HandOver { seq: UNASKED, vm: closing.entry.state.id() }, Vec::new()));
                }
                orders.push(open_order(&mut closing.entry, engine));
                orders.push((Order::CloseVm { seq: closing.seq, vm: closing.entry.state.id() }, Vec::new()));
                closing.given = true;
            }
        }
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        self.closing.iter().any(|closing| !closing.given)
    }
}
