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
use ballast_sys::clock;

use crate::engine::Who;
use crate::keeper::Keeper;
use crate::regions::{At, Lost, VmEntry};
use crate::waiting::UNASKED;

/// Time between checks.
const CHECK_EVERY: Duration = Duration::from_millis(200);

impl Keeper {
    /// This engine lacked something for this VM.
    pub(crate) fn lost(&mut self, who: Who, vm: VmId) {
        let at = if who == Who::Engine { At::Engine } else { At::Next };
        // While VMs move, one goes back to the engine that can serve it.
        let lost_it = |entry: &&mut VmEntry| entry.state.id() == vm && entry.at == at;
        // It says so for each of the VM's orders.
        if let Some(entry) = self.vms.iter_mut().find(lost_it).filter(|entry| entry.lost.is_none()) {
            tracing::warn!(%vm, "the engine lacks something for this VM, and is given it again");
            let now = Instant::now();
            let again_at = now + entry.losses.again_after(now);
            entry.lost = Some(Lost { again_at, unserved_since_ns: clock::monotonic_ns() });
        }
    }

    /// Have each of those VMs tried at once: the keeper is to become another program, which knows nothing of what the
    /// engine lacks.
    pub(crate) fn try_lost_now(&mut self) {
        let now = Instant::now();
        self.vms.iter_mut().filter_map(|entry| entry.lost.as_mut()).for_each(|lost| lost.again_at = now);
    }

    /// Have the engine open those VMs again that it could not serve whole a while ago. Returns how soon to check again,
    /// if there are others.
    pub(crate) fn tend_lost(&mut self) -> Option<Duration> {
        for entry in self.vms.iter_mut().filter(|entry| !matches!(entry.at, At::Engine | At::Next)) {
            // It moves: an engine that does not serve it whole does not get it, or opens it anyway.
            entry.lost = None;
        }
        let now = Instant::now();
        let is_due = |lost: &Lost| lost.again_at <= now;
        let mut due = Vec::new();
        // Those of the next engine have their turn when it is the keeper's.
        for entry in
            self.vms.iter_mut().filter(|entry| entry.at == At::Engine && entry.lost.as_ref().is_some_and(is_due))
        {
            due.extend(entry.lost.take().map(|lost| (entry.state.id(), lost.unserved_since_ns)));
        }
        for (vm, since) in due {
            self.ask_again(vm);
            self.order(&Order::HandOver { seq: UNASKED, vm }, &[]);
            self.hand_over(vm, Some(since));
        }
        self.vms.iter().any(|entry| entry.lost.is_some()).then_some(CHECK_EVERY)
    }
}
