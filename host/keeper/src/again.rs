//! VMs for which the engine had too little of something that may be there later: it is given them again.
//!
//! Before: the engine has reported that it lacked descriptors, memory or a thread for a VM: a process is not served, or
//! the VM is not open. After: the engine has closed the VM and is told all about it once more.
//! Threads: the keeper's one.
//! Promise: this goes on until the engine has all of the VM, so no process waits for a fault for ever; other VMs are
//! not delayed.

use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_handover::orders::Order;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::waiting::UNASKED;

const CHECK_EVERY: Duration = Duration::from_millis(200);

impl Keeper {
    /// This engine lacked something for this VM.
    pub(crate) fn lost(&mut self, who: Who, vm: VmId) {
        // It says so for each of the VM's orders.
        if self.vms.get_mut(vm).is_some_and(|vm| vm.place.lacks(who, Instant::now())) {
            tracing::warn!(%vm, "the engine lacks something for this VM, and is given it again");
        }
    }

    /// Have each of those VMs tried at once: the keeper is to become another program, which knows nothing of what the
    /// engine lacks.
    pub(crate) fn try_lost_now(&mut self) {
        self.vms.iter_mut().for_each(|vm| vm.place.try_now());
    }

    /// Have the engine open those VMs again that it could not serve whole a while ago. Returns how soon to check again,
    /// if there are others.
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
