//! Resolve: serves one pending fault and books it.
//!
//! Before: a fault worker or slow worker took a fault. After: its page is mapped and counted, or it must be retried.
//! Threads: fault workers and slow workers. Units: pages of a region.
//! Promise: a fault whose view or region is gone ends in a wake; one that cannot be resolved stops the VM.

use std::sync::Arc;

use ballast_base::{PAGE_SIZE, PageIdx};

use super::stages::Times;
use super::stall::PendingFault;
use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::{RegionView, View};
use ballast_page::copies::StoreOf;
use ballast_page::fault::serve;
use ballast_page::memory::Mapped;
use ballast_page::outcome::{Outcome, Served};

/// The granule of a fault. Its place does not change while the caller holds [`View::serving`].
pub(crate) struct Target<'a> {
    pub region: Arc<Region>,
    /// First page of the granule.
    pub page: PageIdx,
    /// The region in the mapping of the fault's process.
    pub memory: RegionView<'a>,
}

/// Serves a fault with these stores, and books it with [`settle`].
pub(crate) fn resolve(
    vm: &Vm,
    target: &Target<'_>,
    pending: &PendingFault,
    stores: &impl StoreOf,
    times: &Times,
) -> Option<Served> {
    let Target { region, page, memory } = target;
    let (memory, stores) = (times.memory(memory), times.stores(stores));
    let (granule, key) = (region.granule(*page), region.key(*page));
    let outcome = serve(granule, key, pending.fault.kind, &memory, &**region, &stores, ballast_heat::touched);
    if matches!(outcome.served, Ok(Served::Gone)) {
        // The process has ended, or the VMM has unregistered or mapped over the range: neither wakes the waiting
        // threads.
        let _ = memory.wake(*page);
    }
    if matches!(outcome.served, Ok(Served::Restored)) {
        times.restored(vm.stats(), pending.since);
    }
    settle(vm, target, pending, outcome)
}

/// The granule of a fault. `None` if its region was unplugged: the thread was woken, and faults again on what is there.
pub(crate) fn target<'a>(vm: &Vm, view: &'a View, pending: &PendingFault) -> Option<Target<'a>> {
    let addr = pending.fault.addr;
    let target = view.find_mapped(addr).and_then(|(number, page, base)| {
        let region = vm.region(number).filter(|region| !region.is_removed())?;
        let memory = view.at(&region, base);
        Some(Target { page: region.first_of(page), memory, region })
    });
    if target.is_none() {
        let _ = view.wake(addr, PAGE_SIZE as u64);
    }
    target
}

/// Books the result of a fault. Returns it; `None` if the fault must be retried.
pub(crate) fn settle(vm: &Vm, target: &Target<'_>, pending: &PendingFault, outcome: Outcome) -> Option<Served> {
    let Target { region, page, .. } = target;
    vm.ledger().fault(region, *page, &outcome, pending.since);
    match outcome.served {
        Ok(Served::Later) => None,
        Ok(served) => Some(served),
        Err(error) => {
            // No byte is lost, but the thread waits: the report is the only sign of it.
            let reason = format!("Resolving a fault on page {page} of region {}: {error}", region.number);
            vm.report("fault-failed", reason.clone());
            vm.fail_stop(&reason);
            Some(Served::Gone)
        }
    }
}
