//! Sampling: the counters of all VMs as a [`Snapshot`].
//!
//! Before: the governor's tick, or an API request. After: a policy decides on it.
//! Threads: the governor's, or an API thread, under the governor's lock; nothing here waits for a worker.
//! Promise: a VM that may not be reclaimed from now is included, with the reason. A kernel that does not tell how much
//! memory there is (this process has too many descriptors open) does not look like a host without memory.

use std::collections::HashMap;

use ballast_adopt::swap::Swap;
use ballast_base::{GIB, KIB, PAGE_SIZE, PageCount};
use ballast_pager::vm::Vm;
use ballast_pager::vm::stats::Counter;
use ballast_policy::{Class, HostSample, Setup, Snapshot, VmSample, WorkingSet};
use ballast_sys::{clock, meminfo};

use super::rates::{Rates, Seen, Sums};
use super::{kernel_stall, operator};
use crate::engine::adopted::sample;
use crate::engine::host::Host;
use crate::engine::served::{SMALLEST_LIMIT, Served};

/// 1/N of the host's memory is kept free, and this much at most.
const FREE_PART: u64 = 64;
const MOST_FREE: u64 = GIB;
/// The best compression ratio assumed for far memory before any is measured.
const BEST_RATIO: f64 = 8.0;

/// The last sample, for rates.
#[derive(Debug, Default)]
pub struct Sampler {
    at_ms: u64,
    memory: Memory,
    /// By id.
    vms: HashMap<String, Seen>,
}

/// Memory of the host, in bytes.
#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    total: u64,
    available: u64,
}

impl Memory {
    /// `None`: the kernel does not tell now.
    fn read() -> Option<Self> {
        Self::of(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn of(text: &str) -> Option<Self> {
        let bytes = |key| meminfo::number_in(text, key).map(|kib| kib * KIB);
        Some(Self { total: bytes("MemTotal")?, available: bytes("MemAvailable")? })
    }

    /// What is to be left free.
    fn min_free(self) -> u64 {
        (self.total / FREE_PART).min(MOST_FREE)
    }
}

/// What the host can spare; nothing if the kernel does not tell.
pub fn spare_bytes() -> u64 {
    Memory::read().map_or(0, |memory| memory.available.saturating_sub(memory.min_free()))
}

impl Sampler {
    /// Sample everything. Rates are since the last `take`. `None`: nobody can tell how much memory the host has, so
    /// nothing may be decided now.
    pub fn take(&mut self, host: &Host, setup: &Setup, at_ms: u64) -> Option<Snapshot> {
        let memory = Memory::read()?;
        let (snapshot, vms) = self.snapshot(host, setup, at_ms, memory);
        *self = Self { at_ms, memory, vms };
        Some(snapshot)
    }

    /// The same without beginning new rates; at worst with the memory that the host had before.
    pub fn peek(&self, host: &Host, setup: &Setup, at_ms: u64) -> Snapshot {
        self.snapshot(host, setup, at_ms, Memory::read().unwrap_or(self.memory)).0
    }

    fn snapshot(&self, host: &Host, setup: &Setup, at_ms: u64, memory: Memory) -> (Snapshot, HashMap<String, Seen>) {
        let elapsed_ms = at_ms.saturating_sub(self.at_ms);
        let mut seen = HashMap::new();
        let mut vms = Vec::new();
        for served in host.all() {
            let id = served.vm.state.id().to_string();
            let before = self.vms.get(&id);
            let (vm, now) = of_paged(&served, before, setup, at_ms, elapsed_ms);
            vms.push(vm);
            seen.insert(id, now);
        }
        let paged = vms.len();
        let adopted = host.adopted.all();
        let swap = if adopted.is_empty() { Swap::default() } else { Swap::now() };
        for vm in adopted {
            let Some((vm, sums)) = sample::of(&vm, host.adopted.restore_us(), &swap) else { continue };
            let now = Seen::new(self.vms.get(&vm.id), sums, setup, at_ms);
            let rates = now.rates(self.vms.get(&vm.id), elapsed_ms);
            let estimated = estimate(vm.resident_bytes, rates.came_back * vm.page_bytes, vm.size_bytes);
            seen.insert(vm.id.clone(), now);
            let Rates { stall, kernel_stall, .. } = rates;
            vms.push(VmSample { working_set: Some(estimated), stall, kernel_stall, ..vm });
        }
        (Snapshot { at_ms, host: host_sample(host, setup, (memory, swap.total), &vms, paged), vms }, seen)
    }
}

/// The first `paged` of the VMs attached; the others are adopted.
fn host_sample(
    host: &Host,
    setup: &Setup,
    (memory, swap): (Memory, u64),
    vms: &[VmSample],
    paged: usize,
) -> HostSample {
    let sum = |vms: &[VmSample], of: fn(&VmSample) -> u64| vms.iter().map(of).fold(0, u64::saturating_add);
    let resident = sum(vms, |vm| vm.resident_bytes);
    let available = memory.available;
    let min_free_bytes = memory.min_free();
    // The kernel's *available* also counts memory that other programs would give up. A configured budget is there to be
    // used up: when nothing of it is left, the host is not short of memory.
    let budget_bytes = setup.budget_bytes.unwrap_or((resident + available).saturating_sub(min_free_bytes));
    let free_bytes = available;
    let far_in_ram = sum(&vms[..paged], |vm| vm.far_bytes);
    let (used, room) = (host.budget.used().0, host.budget.limit().0);
    let ratio = if used == 0 { 1.0 } else { (far_in_ram as f64 / used as f64).clamp(1.0, BEST_RATIO) };
    let remote = host.remote.as_ref().map_or(0, |remote| remote.budget.limit().0);
    let stores = ((room as f64 * ratio) as u64).saturating_add(host.file_budget.limit().0).saturating_add(remote);
    let far_capacity_bytes = stores.saturating_add(swap);
    HostSample { budget_bytes, free_bytes, min_free_bytes, far_capacity_bytes, smallest_bytes: SMALLEST_LIMIT.0 }
}

fn of_paged(served: &Served, before: Option<&Seen>, setup: &Setup, at_ms: u64, elapsed_ms: u64) -> (VmSample, Seen) {
    let vm = &served.vm;
    let stats = vm.stats();
    let memory = vm.memory_breakdown();
    let (size_bytes, resident_bytes) = (memory.size.0, memory.resident.0);
    let views = vm.views();
    let pids: Vec<u32> = views.iter().map(|view| view.pid).collect();

    // Readahead saves a guest the faults, not the memory: pages that it reads in order come back nearly without faults.
    let restores = stats.get(Counter::FaultRestore) + stats.get(Counter::Prefetched);
    let sums = Sums { stall_ns: stats.get(Counter::StallSomeNs), kernel_us: kernel_stall::some_us(&pids), restores };
    let now = Seen::new(before, sums, setup, at_ms);
    let Rates { stall, kernel_stall, came_back } = now.rates(before, elapsed_ms);
    let granule = vm.regions().iter().filter(|region| !region.is_removed()).map(|region| region.granule_pages()).max();
    let page_bytes = PageCount(granule.unwrap_or(1)).bytes().0.max(PAGE_SIZE as u64);

    let mut settings = operator::read(vm.state.settings());
    if vm.is_pinned() {
        settings.class = Class::Pinned;
    }
    let no_process = || views.is_empty().then(|| "no process of it is connected".to_owned());
    let sample = VmSample {
        name: vm.state.name(),
        id: vm.state.id().to_string(),
        size_bytes,
        resident_bytes,
        far_bytes: memory.far.0,
        zero_bytes: memory.zero.0,
        untouched_bytes: memory.untouched.0,
        limit_bytes: vm.state.limit().map(|limit| limit.0),
        target_bytes: vm.state.target().map(|target| target.0),
        settings,
        held: vm.held().or_else(no_process),
        working_set: measured(vm, page_bytes)
            .or_else(|| Some(estimate(resident_bytes, came_back.saturating_mul(page_bytes), size_bytes))),
        page_bytes,
        restores,
        refault_page_ms: stats.get(Counter::RefaultMs),
        refault_milli_hz: stats.get(Counter::RefaultMilliHz),
        stall,
        kernel_stall,
    };
    (sample, now)
}

/// The working set as tracking measured it, if it did: in whole huge pages if the VM is paged so.
fn measured(vm: &Vm, page_bytes: u64) -> Option<WorkingSet> {
    vm.heat.source()?;
    let heat = vm.heat.heat(1);
    let bytes = if page_bytes > PAGE_SIZE as u64 { heat.wss_huge_bytes } else { heat.wss_bytes };
    (heat.cycles > 0).then_some(WorkingSet { bytes, estimated: false })
}

/// The estimated working set of a VM without tracking: its resident memory, and the pages restored in the window.
fn estimate(resident: u64, came_back: u64, size: u64) -> WorkingSet {
    WorkingSet { bytes: resident.saturating_add(came_back).min(size), estimated: true }
}

/// Milliseconds of the clock that all engines of a boot share.
pub fn now_ms() -> u64 {
    clock::monotonic_ns() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_the_kernel_does_not_tell_is_not_none() {
        let memory = Memory::of("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  2 kB\n").expect("both are there");
        assert_eq!((memory.total, memory.available), (8 << 10, 2 << 10));
        for text in ["", "MemTotal:  8 kB\n", "MemTotal:  8 kB\nMemAvailable:  x kB\n", "MemAvailable:  2 kB\n"] {
            assert!(Memory::of(text).is_none(), "{text:?}");
        }
        assert!(Memory::read().is_some(), "this kernel tells");
    }
}
