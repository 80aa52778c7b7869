//! VMs whose processes are gone, but whose pages may still be on their way back into RAM files that other processes can
//! reach.
//!
//! Before: the last process of a VM is gone. After: the engine has closed the VM, and the keeper its descriptors.
//! Threads: the keeper's one.
//! Promise: if an engine dies while it closes a VM, its successor continues.

use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::place::At;
use crate::vms::Closing;
use crate::waiting::UNASKED;

impl Keeper {
    pub(crate) fn close_vm(&mut self, id: VmId) {
        let seq = self.engines.number();
        let Some((was, given)) = self.vms.close(id, seq) else { return };
        let close = Order::HandOver { seq: UNASKED, vm: id };
        match was {
            At::Engine | At::Next | At::Parting(..) => {}
            At::Resting(_) => self.engines.give(Who::Engine, &close, &[]),
            At::Both => {
                self.leave_to_next(id);
                self.engines.give(Who::Next, &close, &[]);
            }
        }
        if given {
            self.order(&Order::CloseVm { seq, vm: id }, &[]);
        }
    }

    pub(crate) fn closed(&mut self, seq: u64, result: Result<(), Failure>) {
        if let Err(why) = result {
            let Some(closing) = self.vms.closing_by(seq) else { return };
            let (name, was_open) = (closing.vm.name(), closing.vm.held.state().epoch() > 0);
            if closing.try_again(Instant::now()) {
                tracing::warn!(vm = name, "closing it: {why}; trying again");
                return;
            }
            if was_open {
                let message = format!("VM {name} could not be closed, and what was far of it is lost: {why}");
                self.note(name, "region-lost", message);
            }
        }
        self.vms.closed(seq);
    }

    /// Has the serving engine close the VMs that its predecessor was closing, once nothing of that one is left. Returns
    /// whether some must wait.
    pub(crate) fn tend_closing(&mut self) -> bool {
        let searched = self.vms.closing_mut().filter_map(|closing| {
            let lost = closing.vm.end_search()??;
            Some((closing.vm.name(), lost))
        });
        for (name, lost) in searched.collect::<Vec<_>>() {
            self.note(name, "region-lost", lost);
        }
        let ours = self.engines.ours();
        let mut orders = Vec::new();
        for closing in self.vms.closing_mut() {
            if let Some(engine) = self.engines.process(closing.vm.place.who()) {
                orders.extend(closing.give(engine, &ours));
            }
        }
        for (order, fds) in orders {
            self.order(&order, &fds);
        }
        !self.vms.closing().all(Closing::is_given)
    }
}
