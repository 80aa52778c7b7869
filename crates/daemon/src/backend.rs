//! The engine's VMs as the API's JSON types.
//!
//! Before: `http` asks. After: numbers read from counters, words and files; nothing here waits for a worker.
//! Promise: `size = resident + far + zero + untouched + poisoned`, because untouched is the remainder.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use ballast_api::{
    AgentStat, AgentState, DEFAULT_CELLS, DecisionRecord, EngineTime, Event, FaultCounts, GuestRange, HostStat,
    Latency, LendRequest, PickedStat, PlanRequest, PolicyPatch, PolicyStat, PoolRequest, PoolStat, Psi, ReclaimCounts,
    RegionStat, RemoteFinding, RemoteNode, RemoteStat, RestoreStages, Stall, Track, UpgradeStat, VmClass, VmHeat,
    VmPatch, VmStat, VmStatus,
};
use ballast_base::store::{FILE_STORE, REMOTE_STORE};
use ballast_base::wire;
use ballast_base::{Bytes, PageCount};
use ballast_pager::agent::told;
use ballast_pager::vm::region::Region;
use ballast_pager::vm::stats::{self, Averages, Counter};
use ballast_pager::vm::{Hold, MemoryBreakdown, Vm};
use ballast_policy::{Kind, Plan, Snapshot};
use ballast_remote::check::Finding;
use ballast_remote::{Addr, NodeFigures};
use ballast_sys::{meminfo, scm};

use crate::engine::governor::{Governor, operator};
use crate::engine::host::Host;
use crate::engine::huge_pages::HugePages;
use crate::engine::remote::Remote;
use crate::engine::served::{KEPT, SMALLEST_LIMIT, Served};
use crate::http::{self, Backend, ChangeError, Histogram};
use crate::tracking;

/// The engine as the API sees it.
#[derive(Debug)]
pub struct Shown {
    /// The VMs.
    pub host: Arc<Host>,
    /// Decides how much memory each VM may have.
    pub governor: Arc<Governor>,
    /// Starts engines.
    pub keeper: Arc<OwnedFd>,
}

impl Shown {
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

    /// Before the first page of a VM may be evicted, somebody must look for other processes that map its RAM: nobody
    /// does while no page may.
    fn look_before_first_limit(&self, served: &Arc<Served>, limit: Option<Bytes>) -> Result<(), String> {
        let vm = &served.vm;
        if vm.effective_limit().is_some() || limit.is_none_or(|limit| limit >= vm.size().bytes()) {
            return Ok(());
        }
        self.governor.look(served)
    }
}

impl http::Governing for Shown {
    fn snapshot(&self) -> Snapshot {
        self.governor.snapshot(&self.host)
    }

    fn plan(&self, policy: Option<Kind>) -> Result<Plan, String> {
        self.governor.dry_run(&self.host, policy)
    }

    fn put_plan(&self, request: PlanRequest) -> Result<Plan, String> {
        self.governor.put_plan(&self.host, request)
    }

    fn policy(&self) -> PolicyStat {
        self.governor.stat(&self.host)
    }

    fn patch_policy(&self, patch: &PolicyPatch) -> Result<PolicyStat, String> {
        self.governor.set(&self.host, patch)?;
        Ok(self.governor.stat(&self.host))
    }

    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        let served = self.host.by_name(name)?;
        Some(self.governor.decisions(&served.vm.state.id().to_string()))
    }
}

impl http::Upgrades for Shown {
    fn upgrade(&self) -> UpgradeStat {
        self.host.upgrades.stat()
    }

    fn begin_upgrade(&self, program: Option<String>) -> Result<UpgradeStat, String> {
        self.host
            .upgrades
            .begin(program, |report| scm::send(&*self.keeper, &wire::encode(report), &[]).context("Asking the keeper"))
    }
}

impl http::Pooling for Shown {
    fn pool(&self) -> PoolStat {
        self.host.pool.stat()
    }

    fn reserve_pool(&self, request: &PoolRequest) -> Result<PoolStat, String> {
        self.host.pool.reserve(request)
    }

    fn lend_pool(&self, request: &LendRequest) -> Result<PoolStat, String> {
        self.host.pool.lend(request)
    }
}

impl Backend for Shown {
    fn vms(&self) -> Vec<VmStat> {
        self.host.all().iter().map(|served| stat(served)).collect()
    }

    fn vm(&self, name: &str) -> Option<VmStat> {
        self.host.by_name(name).map(|served| stat(&served))
    }

    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat> {
        let served = self.host.by_name(name)?;
        let (vm, heat) = (&served.vm, &served.vm.heat);
        Some(VmHeat::new(name.to_owned(), tracking::from_pager(vm.track()), heat.source(), &heat.heat(cells)))
    }

    fn set_track(&self, name: &str, track: Track) -> Option<VmHeat> {
        self.host.by_name(name)?.vm.set_track(tracking::to_pager(track));
        self.host.events.add(Some(name.to_owned()), "track", format!("{name} is tracked: {track}"));
        self.heat(name, DEFAULT_CELLS)
    }

    fn heat_cycles(&self, name: &str, after: u64) -> Option<Vec<u8>> {
        Some(self.host.by_name(name)?.vm.heat.cycles_after(after))
    }

    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError> {
        let served = self.host.by_name(name).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        if let Some(limit) = patch.limit_bytes {
            self.check_limit(&served, limit.map(Bytes)).map_err(ChangeError::Invalid)?;
        }
        let limit = patch.limit_bytes.map_or(vm.state.limit(), |limit| limit.map(Bytes));
        let before = operator::read(vm.state.settings());
        let after = patch.settings_after(before);
        let mut looks = Ok(());
        let change = || {
            looks = self.look_before_first_limit(&served, limit);
            if looks.is_err() {
                return;
            }
            vm.state.set_settings(operator::write(&after));
            vm.set_shares(after.effective_shares());
            vm.state.set_limit(limit);
            vm.notify_reclaim();
        };
        self.governor.admit(&self.host, &served, after, limit, change).map_err(ChangeError::Invalid)?;
        looks.map_err(ChangeError::Invalid)?;
        if patch.limit_bytes.is_some() {
            let text = limit.map_or("removed".into(), |limit| limit.to_string());
            self.host.events.add(Some(name.to_owned()), "limit", format!("the limit of {name} is {text}"));
        }
        if after != before {
            let (reservation, protect) = (Bytes(after.reservation_bytes), Bytes(after.protect_bytes));
            let text = format!(
                "{name} is {}, with {} shares, a reservation of {reservation}, {protect} protected and {} % headroom",
                after.class,
                after.effective_shares(),
                after.headroom_percent
            );
            self.host.events.add(Some(name.to_owned()), "settings", text);
        }
        Ok(stat(&served))
    }

    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError> {
        let served = self.host.by_name(name).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        // The word first: an engine that takes over now continues with it.
        let was = vm.state.kept();
        vm.state.set_kept(kept);
        if kept {
            served.restore(Hold::Kept, KEPT.into(), |_| ()).map_err(|error| ChangeError::Invalid(error.to_string()))?;
        } else {
            vm.hold(Hold::Kept, None);
        }
        if was != kept {
            let text = if kept { "all of it comes back and stays in memory" } else { "its limit counts again" };
            self.host.events.add(Some(name.to_owned()), "restore", format!("{name}: {text}"));
        }
        Ok(stat(&served))
    }

    fn host(&self) -> HostStat {
        let vms = self.vms();
        let sum = |field: fn(&VmStat) -> u64| vms.iter().map(field).sum::<u64>();
        let (far, zero) = (sum(|vm| vm.far_bytes), sum(|vm| vm.zero_bytes));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let brief = self.governor.brief(&self.host);
        HostStat {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            engine_pid: std::process::id(),
            keeper_pid: self.host.begin.keeper_pid,
            engine_epoch: self.host.begin.restarts + 1,
            engine_restarts: self.host.begin.restarts,
            uptime_s: now.saturating_sub(self.host.begin.since_unix_s),
            mem_total_bytes: meminfo::bytes("MemTotal").unwrap_or(0),
            mem_available_bytes: meminfo::bytes("MemAvailable").unwrap_or(0),
            store_bytes: self.host.budget.used().0,
            store_budget_bytes: self.host.budget.limit().0,
            file_bytes: self.host.file_budget.used().0,
            file_budget_bytes: self.host.file_budget.limit().0,
            vms: vms.len() as u32,
            size_bytes: sum(|vm| vm.size_bytes),
            resident_bytes: sum(|vm| vm.resident_bytes),
            far_bytes: far,
            far_file_bytes: sum(|vm| vm.far_file_bytes),
            remote: self.host.remote.as_ref().map(|remote| remote_stat(remote, sum(|vm| vm.far_remote_bytes))),
            zero_bytes: zero,
            saved_bytes: (far + zero).saturating_sub(self.host.budget.used().0),
            policy: brief.policy,
            state: brief.state,
            exhaustion_ms: brief.exhaustion_ms,
            guest_budget_bytes: brief.budget_bytes,
            schedulable_bytes: brief.schedulable_bytes,
            pin_check_missing: self.host.pins.missing(),
        }
    }

    fn events(&self) -> Vec<Event> {
        self.host.events.list()
    }

    fn fault_histogram(&self, name: &str) -> Option<Histogram> {
        let histogram = self.host.by_name(name)?.vm.stats().histogram(stats::Latency::Fault);
        Some(bounds(&histogram, 1_000..17_000_000_000))
    }

    fn stage_histograms(&self, name: &str) -> Vec<(&'static str, Histogram)> {
        let Some(served) = self.host.by_name(name) else { return Vec::new() };
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

fn remote_stat(remote: &Remote, far_bytes: u64) -> RemoteStat {
    let node = |(addr, figures): (Addr, NodeFigures)| {
        let NodeFigures { requests, errors, p50_us, p99_us } = figures;
        RemoteNode { addr: addr.to_string(), requests, errors, p50_us, p99_us }
    };
    let finding = |Finding { serious, text }| RemoteFinding { serious, text };
    RemoteStat {
        used_bytes: remote.budget.used().0,
        budget_bytes: remote.budget.limit().0,
        far_bytes,
        nodes: remote.cluster.figures().into_iter().map(node).collect(),
        findings: remote.findings().into_iter().map(finding).collect(),
    }
}

fn stat(served: &Served) -> VmStat {
    let vm = &served.vm;
    let stats = vm.stats();
    let bytes = |counter| PageCount(stats.get(counter)).bytes().0;
    let memory = vm.memory_breakdown();
    let detail = served.store.usage_detail();
    let usage = |number| vm.stores.get(number).map(|tier| tier.store.usage()).unwrap_or_default();
    let (file, remote) = (usage(FILE_STORE), usage(REMOTE_STORE));
    vm.pressure.sample(vm.stats(), Instant::now());
    let averages = vm.pressure.averages();
    let settings = operator::read(vm.state.settings());
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
        far_remote_bytes: PageCount(remote.pages).bytes().0.min(memory.far.0),
        zero_bytes: memory.zero.0,
        untouched_bytes: memory.untouched.0,
        poisoned_bytes: memory.poisoned.0,
        registered_bytes: stats.get(Counter::RegisteredBytes),
        store_bytes: served.store_bytes(),
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
        engine_time: EngineTime {
            faults_us: stats.get(Counter::FaultWorkNs) / 1000,
            tasks_us: stats.get(Counter::TaskCpuNs) / 1000,
        },
        regions: regions(vm, memory),
        agent: agent(vm.agent().shown()),
    }
}

/// What its guest's agent says, if its VMM shows the port of one.
fn agent(shown: told::Shown) -> Option<AgentStat> {
    let state = match shown.state {
        told::State::NoPort => return None,
        told::State::Silent => AgentState::Silent,
        told::State::Idle => AgentState::Idle,
        told::State::Reporting => AgentState::Reporting,
        told::State::Ignored => AgentState::Ignored,
    };
    let picked = |picked: told::Picked| PickedStat { judged_pages: picked.judged, wrong_pages: picked.wrong };
    let bytes = |pages: u64| pages.saturating_mul(ballast_base::PAGE_SIZE as u64);
    let ignored = shown.ignored_until.map(|until| until.saturating_duration_since(Instant::now()).as_secs());
    Some(AgentStat {
        state,
        ignored_s: ignored.filter(|_| state == AgentState::Ignored),
        times_ignored: shown.times_ignored,
        version: shown.version,
        kernel: shown.kernel,
        reports: shown.reports,
        messages: shown.messages,
        rejected_messages: shown.rejected_messages,
        garbage_bytes: shown.garbage_bytes,
        rejected_pages: shown.rejected_pages,
        cold_bytes: bytes(shown.cold_pages),
        free_bytes: bytes(shown.free_pages),
        restored_pages: shown.restored_pages,
        pieces: shown.pieces.0,
        pieces_proved: shown.pieces.1,
        guest_total_bytes: bytes(shown.tick.total),
        guest_available_bytes: bytes(shown.tick.available),
        guest_stall_us: shown.tick.stall_some_us,
        cpu_us: shown.tick.cpu_us,
        note: shown.tick.note,
        by_agent: picked(shown.by_agent),
        by_host: picked(shown.by_host),
    })
}

/// The figures of each region. Those of an only region are the VM's; those of several are counted by their words.
fn regions(vm: &Vm, whole: MemoryBreakdown) -> Vec<RegionStat> {
    let regions: Vec<_> = vm.regions().into_iter().filter(|region| !region.is_removed()).collect();
    let (only, records) = (regions.len() == 1, vm.state.regions());
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
            guest_ranges: records.get(region.number as usize).map_or_else(Vec::new, |record| {
                vm.state.guest_ranges(region.number, record).into_iter().map(guest_range).collect()
            }),
        }
    };
    regions.iter().map(stat_of).collect()
}

fn guest_range(range: ballast_base::guest::GuestRange) -> GuestRange {
    GuestRange { guest_address: range.address, offset_bytes: range.offset.0, size_bytes: range.len.0 }
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
