//! VMs for which the engine had no room for descriptors: it is given them again.
//!
//! Before: the engine has reported that an order came without its descriptors, because it has too many open: a process
//! is not served, or the VM is not open. After: the engine has closed the VM and is told all about it once more.
//! Threads: the keeper's one.
//! Promise: this goes on until the engine has all of them, so no process waits for a fault for ever; other VMs are not
//! delayed.

use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_handover::orders::Order;
use ballast_sys::clock;

use crate::keeper::Keeper;
use crate::regions::{At, Lost};
use crate::waiting::UNASKED;

/// Time until the engine, which may have room by then, is given a VM again. While the VM is opened, none of its faults
/// is served, so this is not done all the time.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Time between checks.
const CHECK_EVERY: Duration = Duration::from_millis(200);

impl Keeper {
    /// The engine had no room for descriptors of this VM.
    pub(crate) fn lost(&mut self, vm: VmId) {
        if let Some(entry) = self.vms.iter_mut().find(|entry| entry.state.id() == vm) {
            tracing::warn!(%vm, "the engine has too many descriptors open, and is given this VM again");
            let lost = || Lost { since: Instant::now(), unserved_since_ns: clock::monotonic_ns() };
            entry.lost.get_or_insert_with(lost);
        }
    }

    /// Have the engine open those VMs again for which it lost descriptors a while ago; it may have room by now. Returns
    /// how soon to check again, if there are others.
    pub(crate) fn tend_lost(&mut self) -> Option<Duration> {
        for entry in self.vms.iter_mut().filter(|entry| entry.at != At::Engine) {
            // It moves: an engine that does not serve it whole does not get it, or opens it anyway.
            entry.lost = None;
        }
        let is_due = |lost: &Lost| lost.since.elapsed() >= AGAIN_AFTER;
        let mut due = Vec::new();
        for entry in self.vms.iter_mut().filter(|entry| entry.lost.as_ref().is_some_and(is_due)) {
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
