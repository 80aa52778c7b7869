//! VMs for which the engine lacked a resource that may be free later: the engine is given the VM again.
//!
//! Before: the engine has reported that it lacked descriptors, memory or a thread for a VM: one of its processes is not
//! served, or the VM is not open. After: the engine has closed the VM and has all orders for it once more.
//! Threads: the keeper's one.
//! Promise: the keeper repeats this until the engine serves all of the VM, so no process waits for a fault for ever;
//! other VMs are not delayed.

use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_handover::orders::Order;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::waiting::UNASKED;

const CHECK_EVERY: Duration = Duration::from_millis(200);

impl Keeper {
    /// This engine has reported that it lacked a resource for this VM.
    pub(crate) fn lost(&mut self, who: Who, vm: VmId) {
        // The engine reports it for each of the VM's orders.
        if self.vms.get_mut(vm).is_some_and(|vm| vm.place.lacks(who, Instant::now())) {
            tracing::warn!(%vm, "the engine lacks something for this VM, and is given it again");
        }
    }

    /// Makes each of those VMs due at once: the keeper will become another program, which does not know what the engine
    /// lacks.
    pub(crate) fn try_lost_now(&mut self) {
        self.vms.iter_mut().for_each(|vm| vm.place.try_now());
    }

    /// Has the engine open again the VMs that are due. Returns how soon to check again, if others are waiting.
    pub(crate) fn tend_lost(&mut self) -> Option<Duration> {
        let now = Instant::now();
        let due: Vec<_> = self.vms.iter_mut().filter_map(|vm| Some((vm.place.try_again(now)?, vm.id()))).collect();
        for (since, vm) in due {
            self.ask_again(vm);
            self.order(&Order::HandOver { seq: UNASKED, vm }, &[]);
            self.hand_over(vm, Some(since));
        }
        self.vms.iter().any(|vm| vm.place.is_lost()).then_some(CHECK_EVERY)
    }
}
