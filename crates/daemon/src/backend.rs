//! What the API shows: the engine's VMs as JSON types.
//!
//! Before: `http` asks. After: numbers read from counters, words and files; nothing here waits for a worker.
//! Promise: `size = resident + far + zero + untouched + poisoned`, because untouched is what the others leave.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ballast_api::{
    DEFAULT_CELLS, DecisionRecord, Event, FaultCounts, HostStat, Latency, PlanRequest, PolicyPatch, PolicyStat, Psi,
    ReclaimCounts, RegionStat, RestoreStages, Stall, Track, VmClass, VmHeat, VmPatch, VmStat, VmStatus,
};
use ballast_base::store::FILE_STORE;
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PageCount};
use ballast_pager::reclaim::pinned::Pins;
use ballast_pager::vm::region::Region;
use ballast_pager::vm::stats::{self, Averages, Counter};
use ballast_pager::vm::{Hold, MemoryBreakdown, Vm};
use ballast_policy::{Kind, Plan, Snapshot};
use ballast_store::{Budget, RamStore, Store};

use crate::engine::control::{Control, words};
use crate::engine::huge_pages::HugePages;
use crate::engine::late;
use crate::engine::workers::Jobs;
use crate::events::Events;
use crate::http::{self, Backend, ChangeError, Histogram};
use crate::orders::Begin;
use crate::tracking;

/// The smallest limit that makes sense: below it a guest cannot even keep its kernel resident.
pub const SMALLEST_LIMIT: Bytes = Bytes(ballast_base::MIB);

/// Why a VM is held that an operator had restored.
pub const KEPT: &str = "an operator wants all of it in memory (`ballast vm restore NAME --end` ends that)";

/// A VM the engine serves.
#[derive(Debug)]
pub struct Served {
    /// The VM.
    pub vm: Arc<Vm>,
    /// Its store, for what only this kind knows.
    pub store: Arc<RamStore>,
    /// Its file store, as far as it is open.
    pub file: late::File,
    /// The VMM program.
    pub vmm: String,
    /// What is going on beside its orders and workers.
    pub jobs: Jobs,
    /// Its processes, those included that are about to be served.
    pids: Mutex<HashSet<u32>>,
    /// Its processes that are not served wherever they map its RAM, and why.
    unserved: Mutex<HashMap<u32, String>>,
    /// How often a look for foreign mappers was asked for: the hold ends with a look that began after the last time.
    looks_asked: Mutex<u64>,
}

impl Served {
    /// A VM without processes yet.
    pub fn new(vm: Arc<Vm>, store: Arc<RamStore>, file: late::File, vmm: String) -> Self {
        let (pids, unserved, looks_asked) = Default::default();
        Self { vm, store, file, vmm, jobs: Jobs::default(), pids, unserved, looks_asked }
    }

    fn looks_asked(&self) -> std::sync::MutexGuard<'_, u64> {
        self.looks_asked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hold reclaim until somebody has looked who else maps its RAM. Whoever says so then asks the watch for a look.
    pub fn hold_unchecked(&self) {
        let mut asked = self.looks_asked();
        *asked += 1;
        self.vm.hold(Hold::Unchecked, Some(VmStat::NOT_LOOKED_AT.into()));
    }

    /// How often a look was asked for by now.
    pub fn asked(&self) -> u64 {
        *self.looks_asked()
    }

    /// A look is over; `asked` had been asked for when it began.
    pub fn checked(&self, asked: u64) {
        let now = self.looks_asked();
        if *now == asked {
            self.vm.hold(Hold::Unchecked, None);
        }
    }

    /// Hold reclaim at once, and bring every page back on a thread of its own, which then says how it went.
    pub fn restore(
        &self,
        kind: Hold,
        reason: String,
        then: impl FnOnce(io::Result<()>) + Send + 'static,
    ) -> io::Result<()> {
        self.vm.hold(kind, Some(reason));
        let vm = self.vm.clone();
        self.jobs.begin("restore", move || {
            let _listed = vm.state.list_thread();
            let result = vm.restore();
            if let Err(error) = &result {
                vm.report("restore-failed", format!("Bringing its pages back: {error}"));
            }
            then(result);
        })
    }

    /// Its processes.
    pub fn pids(&self) -> Vec<u32> {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect()
    }

    /// This process is one of them.
    pub fn add_pid(&self, pid: u32) {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).insert(pid);
    }

    fn all_unserved(&self) -> std::sync::MutexGuard<'_, HashMap<u32, String>> {
        self.unserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why a process that has attached counts as one that has not, if there is one.
    pub fn unserved(&self) -> Option<String> {
        self.all_unserved().values().next().cloned()
    }

    /// Why this process counts as one that has not attached, if it does.
    pub fn unserved_of(&self, pid: u32) -> Option<String> {
        self.all_unserved().get(&pid).cloned()
    }

    /// This process is not served wherever it maps the RAM.
    pub fn set_unserved(&self, pid: u32, reason: String) {
        self.all_unserved().insert(pid, reason);
    }

    /// Take over what is known of the processes of the same VM.
    pub fn take_after(&self, last: &Self) {
        *self.all_unserved() = last.all_unserved().clone();
        let pids = last.pids().into_iter().collect();
        *self.pids.lock().unwrap_or_else(PoisonError::into_inner) = pids;
    }

    /// This process is gone.
    pub fn forget_pid(&self, pid: u32) {
        self.pids.lock().unwrap_or_else(PoisonError::into_inner).remove(&pid);
        self.all_unserved().remove(&pid);
    }
}

/// The engine as the API sees it.
#[derive(Debug)]
pub struct Host {
    /// What the keeper said.
    pub begin: Begin,
    /// The VMs, in the order of their attach.
    pub vms: RwLock<Vec<Arc<Served>>>,
    /// What happened.
    pub events: Arc<Events>,
    /// Who pays for far pages.
    pub budget: Arc<Budget>,
    /// Who pays for those on disk.
    pub file_budget: Arc<Budget>,
    /// Who decides how much each VM may have.
    pub control: Control,
    /// Whether it can be known who holds a page.
    pub pins: Arc<Pins>,
}

impl Host {
    /// The VMs now.
    pub fn all(&self) -> Vec<Arc<Served>> {
        self.vms.read().expect("no panic while held").clone()
    }

    /// The VM of this id.
    pub fn by_id(&self, id: VmId) -> Option<Arc<Served>> {
        self.all().into_iter().find(|served| served.vm.state.id() == id)
    }

    fn by_name(&self, name: &str) -> Option<Arc<Served>> {
        self.all().into_iter().find(|served| served.vm.state.name() == name)
    }

    /// May this VM have this limit, as far as the VM itself is concerned?
    fn check_limit(&self, served: &Arc<Served>, limit: Option<Bytes>) -> Result<(), String> {
        let Some(limit) = limit else { return Ok(()) };
        let vm = &served.vm;
        if limit < SMALLEST_LIMIT {
            return Err(format!("a limit of {limit} is below the smallest one, {SMALLEST_LIMIT}"));
        }
        if limit < vm.size().bytes() {
            if let Some(reason) = vm.held().filter(|_| vm.is_pinned()) {
                return Err(format!("the VM is pinned: {reason}"));
            }
            if let Some(reason) = HugePages::now().danger(served) {
                return Err(reason);
            }
        }
        Ok(())
    }

    /// Before the first page of a VM may go, somebody looks who else maps its RAM: nobody does while no page may.
    fn look_before_first_limit(&self, served: &Arc<Served>, limit: Option<Bytes>) -> Result<(), String> {
        let vm = &served.vm;
        if vm.effective_limit().is_some() || limit.is_none_or(|limit| limit >= vm.size().bytes()) {
            return Ok(());
        }
        self.control.look(served)
    }
}

impl http::Control for Host {
    fn snapshot(&self) -> Snapshot {
        self.control.snapshot(self)
    }

    fn plan(&self, policy: Option<Kind>) -> Result<Plan, String> {
        self.control.dry_run(self, policy)
    }

    fn put_plan(&self, request: PlanRequest) -> Result<Plan, String> {
        self.control.put_plan(self, request)
    }

    fn policy(&self) -> PolicyStat {
        self.control.stat(self)
    }

    fn patch_policy(&self, patch: &PolicyPatch) -> Result<PolicyStat, String> {
        self.control.set(self, patch)?;
        Ok(self.control.stat(self))
    }

    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        let served = self.by_name(name)?;
        Some(self.control.decisions(&served.vm.state.id().to_string()))
    }
}

impl Backend for Host {
    fn vms(&self) -> Vec<VmStat> {
        self.all().iter().map(|served| stat(served)).collect()
    }

    fn vm(&self, name: &str) -> Option<VmStat> {
        self.by_name(name).map(|served| stat(&served))
    }

    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat> {
        let served = self.by_name(name)?;
        let (vm, heat) = (&served.vm, &served.vm.heat);
        Some(VmHeat::new(name.to_owned(), tracking::from_pager(vm.track()), heat.source(), &heat.heat(cells)))
    }

    fn set_track(&self, name: &str, track: Track) -> Option<VmHeat> {
        self.by_name(name)?.vm.set_track(tracking::to_pager(track));
        self.events.add(Some(name.to_owned()), "track", format!("{name} is tracked: {track}"));
        self.heat(name, DEFAULT_CELLS)
    }

    fn heat_cycles(&self, name: &str, after: u64) -> Option<Vec<u8>> {
        Some(self.by_name(name)?.vm.heat.cycles_after(after))
    }

    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError> {
        let served = self.by_name(name).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        if let Some(limit) = patch.limit_bytes {
            self.check_limit(&served, limit.map(Bytes)).map_err(ChangeError::Invalid)?;
        }
        let limit = patch.limit_bytes.map_or(vm.state.limit(), |limit| limit.map(Bytes));
        let before = words::read(vm.state.settings());
        let after = patch.settings_after(before);
        let mut looks = Ok(());
        let change = || {
            looks = self.look_before_first_limit(&served, limit);
            if looks.is_err() {
                return;
            }
            vm.state.set_settings(words::write(&after));
            vm.state.set_limit(limit);
            vm.notify_reclaim();
        };
        self.control.admit(self, &served, after, limit, change).map_err(ChangeError::Invalid)?;
        looks.map_err(ChangeError::Invalid)?;
        if patch.limit_bytes.is_some() {
            let text = limit.map_or("removed".into(), |limit| limit.to_string());
            self.events.add(Some(name.to_owned()), "limit", format!("the limit of {name} is {text}"));
        }
        if after != before {
            let (reservation, protect) = (Bytes(after.reservation_bytes), Bytes(after.protect_bytes));
            let text = format!(
                "{name} is {}, with {} shares, a reservation of {reservation}, {protect} protected and {} % headroom",
                after.class,
                after.effective_shares(),
                after.headroom_percent
            );
            self.events.add(Some(name.to_owned()), "settings", text);
        }
        Ok(stat(&served))
    }

    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError> {
        let served = self.by_name(name).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        // The word first: an engine that takes over now goes on with it.
        let was = vm.state.kept();
        vm.state.set_kept(kept);
        if kept {
            served.restore(Hold::Kept, KEPT.into(), |_| ()).map_err(|error| ChangeError::Invalid(error.to_string()))?;
        } else {
            vm.hold(Hold::Kept, None);
        }
        if was != kept {
            let text = if kept { "all of it comes back and stays in memory" } else { "its limit counts again" };
            self.events.add(Some(name.to_owned()), "restore", format!("{name}: {text}"));
        }
        Ok(stat(&served))
    }

    fn host(&self) -> HostStat {
        let vms = self.vms();
        let sum = |field: fn(&VmStat) -> u64| vms.iter().map(field).sum::<u64>();
        let (far, zero) = (sum(|vm| vm.far_bytes), sum(|vm| vm.zero_bytes));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let brief = self.control.brief(self);
        HostStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engine_pid: std::process::id(),
            keeper_pid: self.begin.keeper_pid,
            engine_epoch: self.begin.restarts + 1,
            engine_restarts: self.begin.restarts,
            uptime_s: now.saturating_sub(self.begin.since_unix_s),
            mem_total_bytes: meminfo("MemTotal").unwrap_or(0),
            mem_available_bytes: meminfo("MemAvailable").unwrap_or(0),
            store_bytes: self.budget.used().0,
            store_budget_bytes: self.budget.limit().0,
            file_bytes: self.file_budget.used().0,
            file_budget_bytes: self.file_budget.limit().0,
            vms: vms.len() as u32,
            size_bytes: sum(|vm| vm.size_bytes),
            resident_bytes: sum(|vm| vm.resident_bytes),
            far_bytes: far,
            far_file_bytes: sum(|vm| vm.far_file_bytes),
            zero_bytes: zero,
            saved_bytes: (far + zero).saturating_sub(self.budget.used().0),
            policy: brief.policy,
            state: brief.state,
            exhaustion_ms: brief.exhaustion_ms,
            guest_budget_bytes: brief.budget_bytes,
            schedulable_bytes: brief.schedulable_bytes,
            pin_check_missing: self.pins.missing(),
        }
    }

    fn events(&self) -> Vec<Event> {
        self.events.list()
    }

    fn fault_histogram(&self, name: &str) -> Option<Histogram> {
        let histogram = self.by_name(name)?.vm.stats().histogram(stats::Latency::Fault);
        Some(bounds(&histogram, 1_000..17_000_000_000))
    }

    fn stage_histograms(&self, name: &str) -> Vec<(&'static str, Histogram)> {
        let Some(served) = self.by_name(name) else { return Vec::new() };
        let stats = served.vm.stats();
        stats::Stage::ALL.map(|stage| (stage.name(), bounds(&stats.stage(stage), 30..600_000_000))).into()
    }
}

/// One bound per power of two, between these nanoseconds, keeps the page small; the finer buckets are for percentiles.
fn bounds(histogram: &stats::Histogram, between: std::ops::Range<u64>) -> Histogram {
    let mut below = 0;
    let mut buckets = Vec::new();
    for (bucket, count) in histogram.counts.iter().enumerate() {
        below += count;
        if bucket % 16 == 15 && between.contains(&stats::upper_edge(bucket)) {
            buckets.push(((stats::upper_edge(bucket) + 1) as f64 / 1e9, below));
        }
    }
    Histogram { buckets, count: histogram.count(), sum_s: histogram.sum_ns as f64 / 1e9 }
}

fn stat(served: &Served) -> VmStat {
    let vm = &served.vm;
    let stats = vm.stats();
    let bytes = |counter| PageCount(stats.get(counter)).bytes().0;
    let memory = vm.memory_breakdown();
    let detail = served.store.usage_detail();
    let file = vm.stores.get(FILE_STORE).map(|file| file.store.usage()).unwrap_or_default();
    vm.pressure.sample(vm.stats(), Instant::now());
    let averages = vm.pressure.averages();
    let settings = words::read(vm.state.settings());
    let limit_bytes = vm.state.limit().map(|limit| limit.0);
    VmStat {
        name: vm.state.name(),
        id: vm.state.id().to_string(),
        pid: vm.views().first().map_or(0, |view| view.pid),
        vmm: served.vmm.clone(),
        class: if vm.is_pinned() { VmClass::Pinned } else { settings.class },
        status: if vm.halted().is_some() {
            VmStatus::Halted
        } else if vm.views().is_empty() {
            VmStatus::Recovering
        } else if vm.held().is_some() && !vm.is_pinned() {
            VmStatus::Blocked
        } else {
            VmStatus::Running
        },
        status_reason: vm.halted().map(str::to_owned).or_else(|| vm.held()),
        size_bytes: memory.size.0,
        limit_bytes,
        target_bytes: vm.state.target().map(|target| target.0),
        settings,
        warnings: settings.warnings(memory.size.0, limit_bytes),
        resident_bytes: memory.resident.0,
        quarantine_bytes: bytes(Counter::Quarantined).min(memory.resident.0),
        pinned_pages: vm.pinned.pages().0,
        pinned_long_pages: vm.pinned.long().0,
        far_bytes: memory.far.0,
        // A page on its way has a copy that does not count yet.
        far_file_bytes: PageCount(file.pages).bytes().0.min(memory.far.0),
        zero_bytes: memory.zero.0,
        untouched_bytes: memory.untouched.0,
        poisoned_bytes: memory.poisoned.0,
        registered_bytes: stats.get(Counter::RegisteredBytes),
        store_bytes: served.store.usage().bytes,
        file_bytes: file.bytes,
        faults: FaultCounts {
            minor: stats.get(Counter::FaultMinor),
            restore: stats.get(Counter::FaultRestore),
            restored_pages: stats.get(Counter::RestoredPages),
            file: stats.get(Counter::FaultFile),
            zero: stats.get(Counter::FaultZero),
            zeroed_pages: stats.get(Counter::ZeroedPages),
            fresh: stats.get(Counter::FaultFresh),
            deferred: stats.get(Counter::FaultDeferred),
            throttled: stats.get(Counter::Throttled),
            throttled_us: stats.get(Counter::ThrottledNs) / 1000,
        },
        reclaim: ReclaimCounts {
            zapped_pages: stats.get(Counter::Zapped),
            evicted_pages: stats.get(Counter::Evicted),
            evicted_zero_pages: stats.get(Counter::EvictedZero),
            same_filled_pages: detail.same_filled_puts,
            quarantine_hit_pages: stats.get(Counter::QuarantineHits),
            aborted_pages: stats.get(Counter::Aborted),
            discarded_pages: stats.get(Counter::Discarded),
            store_full_events: stats.get(Counter::StoreFull),
            failed_pages: stats.get(Counter::Failed),
            prefetched_pages: stats.get(Counter::Prefetched),
            spilled_pages: stats.get(Counter::Spilled),
            coalesced_units: stats.get(Counter::Coalesced),
            coalesce_refused: stats.get(Counter::CoalesceRefused),
        },
        restore_latency: latency(&stats.histogram(stats::Latency::Restore)),
        restore_stages: RestoreStages {
            queue: latency(&stats.stage(stats::Stage::Queue)),
            lookup: latency(&stats.stage(stats::Stage::Lookup)),
            read: latency(&stats.stage(stats::Stage::Read)),
            install: latency(&stats.stage(stats::Stage::Install)),
        },
        fault_latency: latency(&stats.histogram(stats::Latency::Fault)),
        stall: Stall {
            some: psi(averages[0], stats.get(Counter::StallSomeNs)),
            full: psi(averages[1], stats.get(Counter::StallFullNs)),
        },
        regions: regions(vm, memory),
    }
}

/// The same per region. The figures of an only region are the VM's; those of several are counted by their words.
fn regions(vm: &Vm, whole: MemoryBreakdown) -> Vec<RegionStat> {
    let regions: Vec<_> = vm.regions().into_iter().filter(|region| !region.is_removed()).collect();
    let only = regions.len() == 1;
    let stat_of = |region: &Arc<Region>| {
        let counted = || vm.memory_breakdown_of(region).unwrap_or(MemoryBreakdown::uncounted(region.pages()));
        let memory = if only { whole } else { counted() };
        RegionStat {
            index: region.number,
            size_bytes: memory.size.0,
            resident_bytes: memory.resident.0,
            far_bytes: memory.far.0,
            zero_bytes: memory.zero.0,
            untouched_bytes: memory.untouched.0,
            poisoned_bytes: memory.poisoned.0,
        }
    };
    regions.iter().map(stat_of).collect()
}

fn latency(histogram: &stats::Histogram) -> Latency {
    let us = |ns: u64| Duration::from_nanos(ns).as_secs_f64() * 1e6;
    Latency {
        count: histogram.count(),
        p50_us: us(histogram.percentile_ns(50.0)),
        p90_us: us(histogram.percentile_ns(90.0)),
        p99_us: us(histogram.percentile_ns(99.0)),
        max_us: us(histogram.max_ns),
    }
}

fn psi(averages: Averages, total_ns: u64) -> Psi {
    let Averages { avg10, avg60, avg300 } = averages;
    Psi { avg10, avg60, avg300, total_us: total_ns / 1000 }
}

/// A line of `/proc/meminfo`, in bytes.
pub fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':')))?;
    line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * ballast_base::KIB)
}
