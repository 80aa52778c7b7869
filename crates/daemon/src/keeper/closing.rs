//! VMs whose processes are gone while their memory may still be on its way back into RAM files that others can reach.
//!
//! Before: the last process of a VM is gone. After: the engine says that it is done with the VM; its descriptors are closed.
//! Threads: the keeper's one.
//! Promise: an engine that dies over it has a successor that goes on. Nobody else gets such a file as RAM of a new VM
//! meanwhile: a client that brings it is told to come again.

use ballast_base::wire::VmId;
use ballast_sys::memfd::FileId;

use super::Keeper;
use super::fence::{self, Left};
use super::regions::VmEntry;
use crate::orders::Order;

/// VMs kept at most. Of one more only the engine knows, which should not die over it then.
const MOST: usize = 256;

/// A VM without processes.
pub struct Closing {
    seq: u64,
    entry: VmEntry,
    /// The engine has it.
    given: bool,
}

impl Closing {
    /// Its engine is dead.
    pub fn take_back(&mut self) {
        self.given = false;
    }
}

impl Keeper {
    /// No process of the VM is left.
    pub(super) fn close_vm(&mut self, id: VmId) {
        let Some(at) = self.vms.iter().position(|vm| vm.state.id() == id) else { return };
        let entry = self.vms.remove(at);
        let seq = self.next_seq;
        self.next_seq += 1;
        let given = entry.is_handed_over();
        if given {
            self.order(&Order::CloseVm { seq, vm: id }, &[]);
        }
        // One that waits for regions no engine has.
        if entry.search.is_none() && self.closing.len() < MOST {
            self.closing.push(Closing { seq, entry, given });
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

    /// Have a new engine finish what the last one had begun, when nothing of that is left. Returns whether some must wait.
    pub(super) fn tend_closing(&mut self) -> bool {
        let Some(engine) = self.engine.as_ref().map(|engine| engine.process) else { return false };
        let is_free = |entry: &VmEntry| matches!(fence::end_for(&entry.state, Some(engine)), Ok(Left::Nothing));
        let mut orders = Vec::new();
        for at in 0..self.closing.len() {
            let closing = &self.closing[at];
            if !closing.given
                && is_free(&closing.entry)
                && let Some((vm, order, fds)) = self.open_order(&closing.entry)
            {
                orders.push((order, fds));
                orders.push((Order::CloseVm { seq: closing.seq, vm }, Vec::new()));
                self.closing[at].given = true;
            }
        }
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        self.closing.iter().any(|closing| !closing.given)
    }
}
