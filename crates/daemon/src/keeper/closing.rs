//! VMs whose processes are gone while their memory may still be on its way back into RAM files that others can reach.
//!
//! Before: the last process of a VM is gone. After: the engine says that it is done with the VM; its descriptors are closed.
//! Threads: the keeper's one.
//! Promise: an engine that dies over it has a successor that goes on. Nobody else gets such a file as RAM of a new VM
//! meanwhile: a client that brings it is told to come again.

use ballast_base::wire::VmId;
use ballast_sys::memfd::FileId;

use super::Keeper;
use super::regions::VmEntry;
use crate::orders::Order;

/// VMs kept at most. Of one more only the engine knows, which should not die over it then.
const MOST: usize = 256;

/// A VM without processes.
pub struct Closing {
    seq: u64,
    entry: VmEntry,
}

impl Keeper {
    /// No process of the VM is left.
    pub(super) fn close_vm(&mut self, id: VmId) {
        let Some(at) = self.vms.iter().position(|vm| vm.state.id() == id) else { return };
        let entry = self.vms.remove(at);
        let seq = self.next_seq;
        self.next_seq += 1;
        self.order(&Order::CloseVm { seq, vm: id }, &[]);
        // One that waits for regions no engine has.
        if entry.search.is_none() && self.closing.len() < MOST {
            self.closing.push(Closing { seq, entry });
        }
    }

    /// The engine is done with a VM.
    pub(super) fn closed(&mut self, seq: u64) {
        self.closing.retain(|closing| closing.seq != seq);
    }

    /// The VM comes back: its attach socket had been cut.
    pub(super) fn reopened(&mut self, id: VmId) {
        self.closing.retain(|closing| closing.entry.state.id() != id);
    }

    /// The VM that one of these files was RAM of until now.
    pub(super) fn closing_of(&self, mut files: impl Iterator<Item = FileId>) -> Option<(VmId, String)> {
        files.find_map(|file| {
            let of = self.closing.iter().find(|closing| closing.entry.has_any([file].into_iter()))?;
            Some((of.entry.state.id(), of.entry.state.name()))
        })
    }

    /// Have a new engine finish what the last one had begun.
    pub(super) fn hand_over_closing(&mut self) {
        let orders: Vec<_> =
            self.closing.iter().map(|closing| (closing.seq, self.open_order(&closing.entry))).collect();
        for (seq, opening) in orders {
            let Some((vm, order, fds)) = opening else { continue };
            self.order(&order, &fds);
            self.order(&Order::CloseVm { seq, vm }, &[]);
        }
    }
}
