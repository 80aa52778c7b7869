//! One VM as the API's JSON types: where its memory is, its events in numbers, and their durations.
//!
//! Before: [`super`] was asked for a VM. After: numbers read from counters, words and files.
//! Threads: any; nothing here waits for a worker. Units: bytes and microseconds, in the field names.
//! Promise: `size = resident + far + zero + untouched + poisoned`, because untouched is the remainder.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_api::{
    AgentStat, AgentState, EngineTime, FaultCounts, GuestRange, HostTierStat, Latency, NodeStat, PickedStat, Psi,
    ReclaimCounts, RegionStat, RestoreStages, Stall, TierStat, TieringStat, TieringState, VmClass, VmKind, VmStat,
    VmStatus,
};
use ballast_base::PAGE_SIZE;
use ballast_base::store::{FILE_STORE, REMOTE_STORE};
use ballast_pager::vm::guest::told;
use ballast_pager::vm::region::Region;
use ballast_pager::vm::stats::{self, Averages, Counter, Stats};
use ballast_pager::vm::tuning::HostTiers;
use ballast_pager::vm::{MemoryBreakdown, Vm};

use crate::engine::governor::operator;
use crate::engine::served::Served;
use crate::http::Histogram;

pub(super) fn stat(served: &Served) -> VmStat {
    let vm = &served.vm;
    let stats = vm.stats();
    let memory = vm.memory_breakdown();
    let usage = |number| vm.stores.get(number).map(|tier| tier.store.usage()).unwrap_or_default();
    let (file, remote) = (usage(FILE_STORE), usage(REMOTE_STORE));
    vm.pressure.sample(vm.stats(), Instant::now());
    let averages = vm.pressure.averages();
    let settings = operator::read(vm.state.settings());
    let limit_bytes = vm.state.limit().map(|limit| limit.0);
    VmStat {
        name: vm.state.name(),
        id: vm.state.id().to_string(),
        uuid: vm.state.uuid().map(|uuid| uuid.to_string()),
        pid: vm.views().first().map_or(0, |view| view.pid),
        vmm: served.vmm.clone(),
        kind: VmKind::Paged,
        class: if vm.is_pinned() { VmClass::Pinned } else { settings.class },
        status: status(vm),
        status_reason: vm.halted().map(str::to_owned).or_else(|| vm.held()),
        size_bytes: memory.size.0,
        unmanaged_bytes: vm.state.unmanaged().0,
        limit_bytes,
        target_bytes: vm.state.target().map(|target| target.0),
        settings,
        warnings: settings.warnings(memory.size.0, limit_bytes),
        resident_bytes: memory.resident.0,
        quarantine_bytes: bytes(stats.get(Counter::Quarantined)).min(memory.resident.0),
        pinned_pages: vm.pinned.pages().0,
        pinned_long_pages: vm.pinned.long().0,
        far_bytes: memory.far.0,
        // A page in transit has a copy that does not yet count as far.
        far_file_bytes: bytes(file.pages).min(memory.far.0),
        far_remote_bytes: bytes(remote.pages).min(memory.far.0),
        zero_bytes: memory.zero.0,
        untouched_bytes: memory.untouched.0,
        poisoned_bytes: memory.poisoned.0,
        registered_bytes: stats.get(Counter::RegisteredBytes),
        store_bytes: served.store_bytes(),
        file_bytes: file.bytes,
        faults: faults(&stats),
        reclaim: reclaim(&stats, served.store.usage_detail().same_filled_puts),
        restore_latency: latency(&stats.histogram(stats::Latency::Restore)),
        restore_stages: restore_stages(&stats),
        fault_latency: latency(&stats.fault_histogram()),
        stall: Stall {
            some: psi(averages[0], stats.get(Counter::StallSomeNs)),
            full: psi(averages[1], stats.get(Counter::StallFullNs)),
        },
        engine_time: EngineTime {
            faults_us: stats.get(Counter::FaultWorkNs) / 1000,
            tasks_us: stats.get(Counter::TaskCpuNs) / 1000,
        },
        regions: regions(vm, memory),
        agent: agent(vm.agent().shown(), &vm.agent().balloon()),
        host_tiers: vm.tuning.tiers.map(|tiers| host_tiers(&stats, tiers, memory)),
        // `Shown::stat` adds these two.
        sources: Vec::new(),
        why: None,
        adopted: None,
    }
}

fn status(vm: &Vm) -> VmStatus {
    if vm.halted().is_some() {
        VmStatus::Halted
    } else if vm.views().is_empty() {
        VmStatus::Recovering
    } else if vm.held().is_some() && !vm.is_pinned() {
        VmStatus::Blocked
    } else {
        VmStatus::Running
    }
}

fn faults(stats: &Stats<'_>) -> FaultCounts {
    FaultCounts {
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
    }
}

fn reclaim(stats: &Stats<'_>, same_filled_pages: u64) -> ReclaimCounts {
    ReclaimCounts {
        zapped_pages: stats.get(Counter::Zapped),
        evicted_pages: stats.get(Counter::Evicted),
        evicted_zero_pages: stats.get(Counter::EvictedZero),
        same_filled_pages,
        quarantine_hit_pages: stats.get(Counter::QuarantineHits),
        aborted_pages: stats.get(Counter::Aborted),
        discarded_pages: stats.get(Counter::Discarded),
        store_full_events: stats.get(Counter::StoreFull),
        failed_pages: stats.get(Counter::Failed),
        prefetched_pages: stats.get(Counter::Prefetched),
        restored_soon_pages: stats.get(Counter::RestoredSoon),
        spilled_pages: stats.get(Counter::Spilled),
        coalesced_units: stats.get(Counter::Coalesced),
        coalesce_refused: stats.get(Counter::CoalesceRefused),
    }
}

fn restore_stages(stats: &Stats<'_>) -> RestoreStages {
    RestoreStages {
        queue: latency(&stats.stage(stats::Stage::Queue)),
        lookup: latency(&stats.stage(stats::Stage::Lookup)),
        read: latency(&stats.stage(stats::Stage::Read)),
        install: latency(&stats.stage(stats::Stage::Install)),
    }
}

fn host_tiers(stats: &Stats<'_>, tiers: HostTiers, memory: MemoryBreakdown) -> HostTierStat {
    HostTierStat {
        fast_node: tiers.fast_node,
        slow_node: tiers.slow_node,
        fast_limit_bytes: memory.size.0 * u64::from(tiers.fast_percent) / 100,
        slow_bytes: bytes(stats.get(Counter::SlowNode)).min(memory.resident.0),
        to_slow_bytes: bytes(stats.get(Counter::MovedDown)),
        to_fast_bytes: bytes(stats.get(Counter::MovedUp)),
        stayed_bytes: bytes(stats.get(Counter::MoveFailed)),
        split_units: stats.get(Counter::Split),
        split_refused: stats.get(Counter::SplitFailed),
        joined_units: stats.get(Counter::Joined),
    }
}

fn bytes(pages: u64) -> u64 {
    pages.saturating_mul(PAGE_SIZE as u64)
}

/// The state of the guest's agent, if the VMM has a port for one.
fn agent(shown: told::Shown, balloon: &BTreeMap<u32, u64>) -> Option<AgentStat> {
    let state = match shown.state {
        told::State::NoPort => return None,
        told::State::Silent => AgentState::Silent,
        told::State::Idle => AgentState::Idle,
        told::State::Reporting => AgentState::Reporting,
        told::State::Ignored => AgentState::Ignored,
    };
    let picked = |picked: told::Picked| PickedStat { judged_pages: picked.judged, wrong_pages: picked.wrong };
    let node = |node: &told::Node| NodeStat {
        node: node.node,
        size_bytes: bytes(node.pages),
        free_bytes: bytes(node.free),
        balloon_bytes: bytes(node.ballooned),
        balloon_wanted_bytes: bytes(balloon.get(&node.node).copied().unwrap_or(0)),
    };
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
        service_restored_pages: shown.tick.service_restores,
        services_tuned: shown.tick.tuned,
        collapsed_huge_pages: shown.tick.collapsed,
        compacted_pages: shown.tick.compacted,
        pieces: shown.pieces.0,
        pieces_proved: shown.pieces.1,
        guest_total_bytes: bytes(shown.tick.total),
        guest_available_bytes: bytes(shown.tick.available),
        guest_stall_us: shown.tick.stall_some_us,
        cpu_us: shown.tick.cpu_us,
        nodes: shown.tick.nodes.iter().map(node).collect(),
        note: shown.tick.note,
        tiering: tiering(shown.tick.tiering),
        by_agent: picked(shown.by_agent),
        by_host: picked(shown.by_host),
    })
}

fn tiering(said: told::Tiering) -> Option<TieringStat> {
    let state = match said.state {
        told::TieringState::Off => return None,
        told::TieringState::Unable => TieringState::Unable,
        told::TieringState::Aside => TieringState::Aside,
        told::TieringState::Working => TieringState::Working,
    };
    let tier = |tier: &told::TierUse| TierStat {
        node: tier.node,
        size_bytes: bytes(tier.pages),
        free_bytes: bytes(tier.free),
        latency_ns: (tier.latency_ns > 0).then_some(tier.latency_ns),
    };
    Some(TieringStat {
        state,
        tiers: said.tiers.iter().map(tier).collect(),
        programs: said.programs,
        managed_bytes: bytes(said.managed),
        managed_fast_bytes: bytes(said.managed_fast),
        fast_hits_bp: said.hits.map(|share| share.min(10_000)),
        samples: said.samples,
        ranges: said.ranges,
        promoted_bytes: bytes(said.promoted),
        demoted_bytes: bytes(said.demoted),
        stayed_pages: said.stayed,
        cpu_us: said.cpu_us,
        note: said.note,
    })
}

/// The figures of each region. A single region has the VM's figures; several are counted from their words.
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

/// One bound for each power of four between these nanoseconds, which keeps the page small; the finer buckets are for
/// percentiles.
pub(super) fn bounds(histogram: &stats::Histogram, between: std::ops::Range<u64>) -> Histogram {
    let mut below = 0;
    let mut buckets = Vec::new();
    for (bucket, count) in histogram.counts.iter().enumerate() {
        below += count;
        if bucket % 32 == 31 && between.contains(&stats::upper_edge(bucket)) {
            buckets.push(((stats::upper_edge(bucket) + 1) as f64 / 1e9, below));
        }
    }
    Histogram { buckets, count: histogram.count(), sum_s: histogram.sum_ns as f64 / 1e9 }
}
