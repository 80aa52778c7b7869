//! Resolve: serves one pending fault and accounts for it.
//!
//! Before: a fault worker, or a slow worker, took a fault. After: its page is mapped and counted, or the fault must be
//! tried again. Threads: fault workers and slow workers. Units: pages of a region.
//! Promise: a fault whose view or region is gone ends in a wake; one that cannot be resolved stops the VM and gives the
//! reason.

use std::sync::Arc;
use std::time::Duration;

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

/// The granule of a fault. It stays where it is while the caller holds [`View::serving`].
pub(crate) struct Target<'a> {
    pub region: Arc<Region>,
    /// Its first page.
    pub page: PageIdx,
    /// The region, as the process of the fault maps it.
    pub memory: RegionView<'a>,
}

/// Serve a fault with these stores, and book it: see [`settle`].
pub(crate) fn resolve(
    vm: &Vm,
    target: &Target<'_>,
    pending: &PendingFault,
    stores: &impl StoreOf,
    times: &Times,
) -> Option<(Served, Duration)> {
    let Target { region, page, memory } = target;
    let (memory, stores) = (times.memory(memory), times.stores(stores));
    let (granule, key) = (region.granule(*page), region.key(*page));
    let outcome = serve(granule, key, pending.fault.kind, &memory, &**region, &stores, ballast_heat::touched);
    if matches!(outcome.served, Ok(Served::Gone)) {
        // The process is gone, or the mapping there is not ours any more: the VMM returned it to the kernel or mapped
        // something over it. Neither wakes a thread that waits there already.
        let _ = memory.wake(*page);
    }
    if matches!(outcome.served, Ok(Served::Restored)) {
        times.restored(vm.stats(), pending.since);
    }
    settle(vm, target, pending, outcome)
}

/// The granule of a fault. `None` if it was unplugged while the fault was under way; then its thread has been woken and
/// faults on whatever is there now.
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

/// Books the result of a fault. Returns it, and the refault interval of a page that was restored; `None` if the fault
/// must be tried again.
pub(crate) fn settle(
    vm: &Vm,
    target: &Target<'_>,
    pending: &PendingFault,
    outcome: Outcome,
) -> Option<(Served, Duration)> {
    let Target { region, page, .. } = target;
    let interval = vm.ledger().fault(region, *page, &outcome, pending.since);
    match outcome.served {
        Ok(Served::Later) => None,
        Ok(served) => Some((served, interval)),
        Err(error) => {
            // No byte was lost, but without this the thread would wait for ever without a report.
            let reason = format!("Resolving a fault on page {page} of region {}: {error}", region.number);
            vm.report("fault-failed", reason.clone());
            vm.fail_stop(&reason);
            Some((Served::Gone, Duration::ZERO))
        }
    }
}
