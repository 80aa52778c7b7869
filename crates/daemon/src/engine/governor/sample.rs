//! Sampling: the counters of all VMs as a [`Snapshot`].
//!
//! Before: the governor's tick, or an API request. After: a policy decides on it.
//! Threads: the governor's, or an API thread, under the governor's lock; nothing here waits for a worker.
//! Promise: a VM that may not be reclaimed from now is included, with the reason. A kernel that does not tell how much
//! memory there is (this process has too many descriptors open) does not look like a host without memory.

use std::collections::{HashMap, VecDeque};

use ballast_base::wire::VmId;
use ballast_base::{GIB, KIB, PAGE_SIZE, PageCount};
use ballast_pager::vm::Vm;
use ballast_pager::vm::stats::Counter;
use ballast_policy::{Class, HostSample, Setup, Snapshot, VmSample, WorkingSet};
use ballast_sys::{clock, meminfo};

use super::{kernel_stall, operator};
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
    vms: HashMap<VmId, Seen>,
}

#[derive(Clone, Debug, Default)]
struct Seen {
    stall_ns: u64,
    kernel_us: Option<u64>,
    /// Restores at times within one window.
    restores: VecDeque<(u64, u64)>,
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

    fn snapshot(&self, host: &Host, setup: &Setup, at_ms: u64, memory: Memory) -> (Snapshot, HashMap<VmId, Seen>) {
        let elapsed_ms = at_ms.saturating_sub(self.at_ms);
        let mut seen = HashMap::new();
        let mut vms = Vec::new();
        for served in host.all() {
            let id = served.vm.state.id();
            let before = self.vms.get(&id);
            let (vm, now) = sample(&served, before, setup, at_ms, elapsed_ms);
            vms.push(vm);
            seen.insert(id, now);
        }
        (Snapshot { at_ms, host: host_sample(host, setup, memory, &vms), vms }, seen)
    }
}

fn host_sample(host: &Host, setup: &Setup, memory: Memory, vms: &[VmSample]) -> HostSample {
    let sum = |of: fn(&VmSample) -> u64| vms.iter().map(of).fold(0, u64::saturating_add);
    let resident = sum(|vm| vm.resident_bytes);
    let available = memory.available;
    let min_free_bytes = memory.min_free();
    // The kernel's *available* also counts memory that other programs would give up. A configured budget is there to be
    // used up: when nothing of it is left, the host is not short of memory.
    let budget_bytes = setup.budget_bytes.unwrap_or((resident + available).saturating_sub(min_free_bytes));
    let free_bytes = available;
    let far_in_ram = sum(|vm| vm.far_bytes);
    let (used, room) = (host.budget.used().0, host.budget.limit().0);
    let ratio = if used == 0 { 1.0 } else { (far_in_ram as f64 / used as f64).clamp(1.0, BEST_RATIO) };
    let remote = host.remote.as_ref().map_or(0, |remote| remote.budget.limit().0);
    let far_capacity_bytes =
        ((room as f64 * ratio) as u64).saturating_add(host.file_budget.limit().0).saturating_add(remote);
    HostSample { budget_bytes, free_bytes, min_free_bytes, far_capacity_bytes, smallest_bytes: SMALLEST_LIMIT.0 }
}

fn sample(served: &Served, before: Option<&Seen>, setup: &Setup, at_ms: u64, elapsed_ms: u64) -> (VmSample, Seen) {
    let vm = &served.vm;
    let stats = vm.stats();
    let memory = vm.memory_breakdown();
    let (size_bytes, resident_bytes) = (memory.size.0, memory.resident.0);
    let views = vm.views();
    let pids: Vec<u32> = views.iter().map(|view| view.pid).collect();

    // Readahead saves a guest the faults, not the memory: pages that it reads in order come back nearly without faults.
    let restores = stats.get(Counter::FaultRestore) + stats.get(Counter::Prefetched);
    let mut now =
        Seen { stall_ns: stats.get(Counter::StallSomeNs), kernel_us: kernel_stall::some_us(&pids), ..Seen::default() };
    let share = |more: u64, per_ms: u64| {
        if elapsed_ms == 0 { 0.0 } else { (more as f64 / (per_ms * elapsed_ms) as f64).clamp(0.0, 1.0) }
    };
    let stall = before.map_or(0.0, |seen| share(now.stall_ns.saturating_sub(seen.stall_ns), 1_000_000));
    let kernel_stall = now.kernel_us.zip(before.and_then(|seen| seen.kernel_us));
    let kernel_stall = kernel_stall.map(|(now, then)| share(now.saturating_sub(then), 1_000));

    now.restores = before.map(|seen| seen.restores.clone()).unwrap_or_default();
    now.restores.push_back((at_ms, restores));
    while now.restores.len() > 1 && now.restores[0].0 + setup.params.window_ms < at_ms {
        now.restores.pop_front();
    }
    let came_back = restores.saturating_sub(now.restores[0].1);
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
