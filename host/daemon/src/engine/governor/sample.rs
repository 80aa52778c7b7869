//! Sampling: the counters of all VMs as a [`Snapshot`].
//!
//! Before: the governor's tick, or an API request. After: a policy decides on the snapshot.
//! Threads: the governor's, or an API thread, under the governor's lock; nothing here waits for a worker.
//! Promise: a VM that may not be reclaimed now is included, with the reason. If the kernel does not report the size of
//! memory (no descriptors left), the host does not appear to have none.

use std::collections::HashMap;

use ballast_adopt::cgroup;
use ballast_base::{KIB, PAGE_SIZE, PageCount};
use ballast_pager::vm::Vm;
use ballast_pager::vm::stats::Counter;
use ballast_policy::{Class, HostSample, Setup, Snapshot, VmSample};
use ballast_sys::{clock, meminfo};

use super::operator;
use super::rates::Sums;
use crate::engine::adopted::sample;
use crate::engine::host::Host;
use crate::engine::served::{SMALLEST_LIMIT, Served};

/// The compression ratio that far memory is assumed to have before one is measured, at most.
const BEST_RATIO: f64 = 8.0;

#[derive(Debug, Default)]
pub struct Sampler {
    at_ms: u64,
    memory: Memory,
    /// Sums at the last sample, by VM id.
    vms: HashMap<String, Sums>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Memory {
    total: u64,
    available: u64,
}

impl Memory {
    /// `None` if the kernel does not report it now.
    fn read() -> Option<Self> {
        Self::of(&std::fs::read_to_string("/proc/meminfo").ok()?)
    }

    fn of(text: &str) -> Option<Self> {
        let bytes = |key| meminfo::number_in(text, key).map(|kib| kib * KIB);
        Some(Self { total: bytes("MemTotal")?, available: bytes("MemAvailable")? })
    }
}

/// Memory that the host can spare; 0 if the kernel does not report it.
pub fn spare_bytes() -> u64 {
    Memory::read().map_or(0, |memory| memory.available.saturating_sub(HostSample::min_free(memory.total)))
}

impl Sampler {
    /// Samples everything. Rates are since the last `take`. `None` if the host's memory is unknown: then nothing may be
    /// decided.
    pub fn take(&mut self, host: &Host, setup: &Setup, at_ms: u64) -> Option<Snapshot> {
        let memory = Memory::read()?;
        let (snapshot, vms) = self.snapshot(host, setup, at_ms, memory);
        *self = Self { at_ms, memory, vms };
        Some(snapshot)
    }

    /// Like [`Self::take`], but begins no new rates. If the host's memory is unknown, uses the last known.
    pub fn peek(&self, host: &Host, setup: &Setup, at_ms: u64) -> Snapshot {
        self.snapshot(host, setup, at_ms, Memory::read().unwrap_or(self.memory)).0
    }

    fn snapshot(&self, host: &Host, setup: &Setup, at_ms: u64, memory: Memory) -> (Snapshot, HashMap<String, Sums>) {
        let elapsed_ms = at_ms.saturating_sub(self.at_ms);
        let mut all = HashMap::new();
        let mut vms = Vec::new();
        for served in host.all() {
            let id = served.vm.state.id().to_string();
            let (vm, sums) = of_paged(&served, self.vms.get(&id), elapsed_ms);
            vms.push(vm);
            all.insert(id, sums);
        }
        let paged = vms.len();
        let swap = host.adopted.swap();
        for vm in host.adopted.all() {
            let Some((vm, sums)) = sample::of(&vm, host.adopted.restore_us(), &swap) else { continue };
            let (stall, kernel_stall) = sums.stalls(self.vms.get(&vm.id), elapsed_ms);
            all.insert(vm.id.clone(), sums);
            vms.push(VmSample { stall, kernel_stall, ..vm });
        }
        (Snapshot { at_ms, host: host_sample(host, setup, (memory, swap.total), &vms, paged), vms }, all)
    }
}

/// The first `paged` VMs have attached; the others are adopted.
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
    let min_free_bytes = HostSample::min_free(memory.total);
    // The kernel's *available* also counts memory that other programs would give up. A configured budget may be used up
    // completely: if nothing of it is left, the host is not short of memory.
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

fn of_paged(served: &Served, before: Option<&Sums>, elapsed_ms: u64) -> (VmSample, Sums) {
    let vm = &served.vm;
    let stats = vm.stats();
    let memory = vm.memory_breakdown();
    let (size_bytes, resident_bytes) = (memory.size.0, memory.resident.0);
    let views = vm.views();
    let pids: Vec<u32> = views.iter().map(|view| view.pid).collect();

    // Readahead saves a guest the faults, not the memory: sequential pages are restored nearly without faults.
    let restores = stats.get(Counter::FaultRestore) + stats.get(Counter::Prefetched);
    // The kernel does not see stall by Ballast, but it sees, for example, stall by a cgroup's limit below the VM's.
    let kernel_us = pids.first().and_then(|pid| cgroup::stall_us(&cgroup::cgroups(*pid), &pids));
    let sums = Sums { stall_ns: stats.get(Counter::StallSomeNs), kernel_us };
    let (stall, kernel_stall) = sums.stalls(before, elapsed_ms);
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
        working_set_bytes: measured(vm, page_bytes),
        page_bytes,
        restores,
        refault_page_ms: stats.get(Counter::RefaultMs),
        refault_milli_hz: stats.get(Counter::RefaultMilliHz),
        stall,
        kernel_stall,
    };
    (sample, sums)
}

/// The working set as tracking measured it, if it did; in whole huge pages if the VM's memory consists of them.
fn measured(vm: &Vm, page_bytes: u64) -> Option<u64> {
    let heat = vm.heat.is_tracked().then(|| vm.heat.heat(1)).filter(|heat| heat.cycles > 0)?;
    Some(if page_bytes > PAGE_SIZE as u64 { heat.wss_huge_bytes } else { heat.wss_bytes })
}

/// Milliseconds of the clock that all engines of a boot share.
pub fn now_ms() -> u64 {
    clock::monotonic_ns() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_memory_is_not_zero_memory() {
        let memory = Memory::of("MemTotal:  8 kB\nMemFree:  1 kB\nMemAvailable:  2 kB\n").expect("both are there");
        assert_eq!((memory.total, memory.available), (8 << 10, 2 << 10));
        for text in ["", "MemTotal:  8 kB\n", "MemTotal:  8 kB\nMemAvailable:  x kB\n", "MemAvailable:  2 kB\n"] {
            assert!(Memory::of(text).is_none(), "{text:?}");
        }
        assert!(Memory::read().is_some(), "this kernel tells");
    }
}
