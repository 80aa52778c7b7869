//! Resolve: serve one pending fault, and account for it.
//!
//! Before: a fault worker, or a slow worker, took a fault up. After: its page is mapped and counted, or the fault must be
//! tried again. Threads: fault workers and slow workers. Units: pages of a region.
//! Promise: a fault that no view or region claims any more ends in a wake; one that cannot be resolved stops the VM and
//! says why.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::{PAGE_SIZE, PageIdx};

use super::stages::Times;
use super::stall::PendingFault;
use crate::memory::Mapped;
use crate::page::fault::{Served, serve};
use crate::region::Region;
use crate::stats::Latency;
use crate::stores::StoreOf;
use crate::view::{RegionView, View};
use crate::vm::Vm;

/// Serve a fault on a granule of this region with these stores, and account for it. Returns what became of it, and for how
/// long the page had been away; `None` if it must be tried again.
pub(crate) fn resolve(
    vm: &Vm,
    region: &Region,
    page: PageIdx,
    pending: &PendingFault,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    times: &Times,
) -> Option<(Served, Duration)> {
    let granule = region.granule(page);
    let since = granule.cell().load().age();
    let (memory, stores) = (times.memory(memory), times.stores(stores));
    let (rescued, served) =
        serve(granule, region.key(page), pending.fault.kind, &memory, region, &stores, ballast_heat::touched);
    vm.count_rescued(rescued, granule.pages());
    if matches!(served, Ok(Served::Gone)) {
        // The process is gone, or what is mapped there is not ours any more: given back to the kernel, or the VMM put something
        // else in its place. Neither wakes a thread that waits there already.
        let _ = memory.wake(page);
    }
    let served = settle(vm, region, page, pending, served)?;
    if served != Served::Restored {
        return Some((served, Duration::ZERO));
    }
    times.restored(vm.stats(), pending.since);
    let away_ms = vm.came_back(region, page, granule.pages(), std::iter::once(since));
    Some((served, Duration::from_millis(away_ms)))
}

/// The granule of a fault, by its first page, which stays where it is while the caller holds [`View::serving`]. `None` if
/// it was unplugged while the fault was under way; then its thread has been woken and faults on whatever is there now.
pub(crate) fn target<'a>(
    vm: &Vm,
    view: &'a View,
    pending: &PendingFault,
) -> Option<(Arc<Region>, PageIdx, RegionView<'a>)> {
    let addr = pending.fault.addr;
    let target = view.find(addr).and_then(|(number, page)| {
        let region = vm.region(number).filter(|region| !region.is_removed())?;
        let memory = view.of_region(&region)?;
        Some((region.first_of(page), memory, region))
    });
    let Some((page, memory, region)) = target else {
        let _ = view.wake(addr, PAGE_SIZE as u64);
        return None;
    };
    Some((region, page, memory))
}

/// Count what became of a fault, and report what operators should know. `None` if it must be tried again.
pub(crate) fn settle(
    vm: &Vm,
    region: &Region,
    page: PageIdx,
    pending: &PendingFault,
    served: io::Result<Served>,
) -> Option<Served> {
    match served {
        Ok(Served::Later) => {
            vm.count(Served::Later, 1);
            None
        }
        Ok(served) => {
            vm.count(served, region.granule_pages());
            let took = pending.since.elapsed();
            vm.stats().record(Latency::Fault, took);
            if matches!(served, Served::Restored | Served::Filled { .. } | Served::Zeroed | Served::Fresh) {
                vm.gate.came(region.granule_pages());
            }
            if matches!(served, Served::Restored | Served::Filled { .. }) {
                vm.stats().record(Latency::Restore, took);
            }
            vm.tell(served, region.number, page);
            Some(served)
        }
        Err(error) => {
            // Nothing was lost, but the thread would wait for ever and nobody would know why.
            let reason = format!("Resolving a fault on page {page} of region {}: {error}", region.number);
            vm.report("fault-failed", reason.clone());
            vm.fail_stop(&reason);
            Some(Served::Gone)
        }
    }
}
