//! The table of all metrics: of the host, of the pool, of each VM and of its heat.
//!
//! Before: the API's JSON types. After: the page has a line for each sample; `docs/metrics.md` describes each metric.
//! Threads: any. Units: base units only (bytes, seconds).
//! Promise: labels are bounded (names of VMs and nodes, and fixed words), and a test compares the names with the
//! documentation.

use ballast_api::{
    AgentStat, AgentState, HostStat, HostTierStat, NodeStat, PoolNode, RemoteNode, TieringStat, VmHeat, VmStat,
    VmStatus,
};
use ballast_base::PAGE_SIZE;
use ballast_policy::HostState;

use super::metric::{Kind, Metric, Sample, Samples, metric};

fn one(value: u64) -> Vec<Sample> {
    vec![(Vec::new(), value as f64)]
}

fn by(label: &'static str, values: &[(&str, u64)]) -> Vec<Sample> {
    values.iter().map(|(word, value)| (vec![(label, (*word).to_owned())], *value as f64)).collect()
}

fn by_node(host: &HostStat, value: fn(&RemoteNode) -> f64) -> Vec<Sample> {
    let nodes = host.remote.iter().flat_map(|remote| &remote.nodes);
    nodes.map(|node| (vec![("node", node.addr.clone())], value(node))).collect()
}

fn pages(count: u64) -> u64 {
    count.saturating_mul(PAGE_SIZE as u64)
}

fn of_agent(vm: &VmStat, samples: impl Fn(&AgentStat) -> Vec<Sample>) -> Vec<Sample> {
    vm.agent.iter().flat_map(samples).collect()
}

fn of_tiering(vm: &VmStat, samples: impl Fn(&TieringStat) -> Vec<Sample>) -> Vec<Sample> {
    vm.agent.iter().flat_map(|agent| &agent.tiering).flat_map(samples).collect()
}

fn of_host_tiers(vm: &VmStat, samples: impl Fn(&HostTierStat) -> Vec<Sample>) -> Vec<Sample> {
    vm.host_tiers.iter().flat_map(samples).collect()
}

const AGES: [u64; 5] = [1, 10, 60, 600, 3600];

fn moved(from: &str, to: &str, cause: &str, count: u64) -> Sample {
    let labels = vec![("from", from.to_owned()), ("to", to.to_owned()), ("cause", cause.to_owned())];
    (labels, pages(count) as f64)
}

pub(crate) const HOST: &[Metric<Samples<HostStat>>] = &[
    metric("ballast_build_info", Kind::Gauge, "Always 1; the label names the engine's version.", |host| {
        vec![(vec![("version", host.version.clone())], 1.0)]
    }),
    metric("ballast_uptime_seconds", Kind::Gauge, "Time since the keeper started.", |host| one(host.uptime_s)),
    metric(
        "ballast_engine_epoch",
        Kind::Gauge,
        "Number of the engine that answers; changes when it is replaced.",
        |host| one(host.engine_epoch),
    ),
    metric("ballast_engine_restarts_total", Kind::Counter, "Engines replaced because they died.", |host| {
        one(host.engine_restarts)
    }),
    metric("ballast_host_memory_bytes", Kind::Gauge, "Host DRAM, total and available to new work.", |host| {
        by("state", &[("total", host.mem_total_bytes), ("available", host.mem_available_bytes)])
    }),
    metric("ballast_host_saved_bytes", Kind::Gauge, "Host memory reclaim has freed, net of the stores.", |host| {
        one(host.saved_bytes)
    }),
    metric("ballast_store_used_bytes", Kind::Gauge, "What far pages occupy in RAM.", |host| one(host.store_bytes)),
    metric("ballast_store_budget_bytes", Kind::Gauge, "Most they may occupy there.", |host| {
        one(host.store_budget_bytes)
    }),
    metric("ballast_file_used_bytes", Kind::Gauge, "What far pages occupy on disk.", |host| one(host.file_bytes)),
    metric("ballast_file_budget_bytes", Kind::Gauge, "Most they may occupy there.", |host| one(host.file_budget_bytes)),
    metric("ballast_remote_used_bytes", Kind::Gauge, "What far pages occupy on other machines.", |host| {
        host.remote.iter().map(|remote| (Vec::new(), remote.used_bytes as f64)).collect()
    }),
    metric("ballast_remote_budget_bytes", Kind::Gauge, "Most they may occupy there.", |host| {
        host.remote.iter().map(|remote| (Vec::new(), remote.budget_bytes as f64)).collect()
    }),
    metric("ballast_remote_requests_total", Kind::Counter, "Requests to a node that it answered.", |host| {
        by_node(host, |node| node.requests as f64)
    }),
    metric("ballast_remote_errors_total", Kind::Counter, "Requests to a node that came to nothing.", |host| {
        by_node(host, |node| node.errors as f64)
    }),
    metric("ballast_vms", Kind::Gauge, "VMs attached.", |host| one(u64::from(host.vms))),
    metric("ballast_policy_info", Kind::Gauge, "Always 1; the label names the policy in force.", |host| {
        vec![(vec![("policy", host.policy.to_string())], 1.0)]
    }),
    metric("ballast_host_state", Kind::Gauge, "1 for the state the host is in; none while nobody decides.", |host| {
        let is =
            |state: HostState| (vec![("state", state.to_string())], f64::from(u8::from(host.state == Some(state))));
        HostState::ALL.map(is).into()
    }),
    metric("ballast_host_exhaustion_seconds", Kind::Gauge, "When no memory is free any more, at this rate.", |host| {
        host.exhaustion_ms.map(|ms| vec![(Vec::new(), ms as f64 / 1e3)]).unwrap_or_default()
    }),
    metric("ballast_host_pin_check", Kind::Gauge, "1 if it can be known who holds a page.", |host| {
        one(u64::from(host.pin_check_missing.is_none()))
    }),
    metric("ballast_host_guest_budget_bytes", Kind::Gauge, "DRAM that all guests together may use.", |host| {
        one(host.guest_budget_bytes)
    }),
    metric("ballast_host_schedulable_bytes", Kind::Gauge, "The part of it that may still be reserved.", |host| {
        one(host.schedulable_bytes)
    }),
];

pub(crate) const POOL: &[Metric<Samples<PoolNode>>] = &[
    metric("ballast_pool_reserved_bytes", Kind::Gauge, "Memory of the pool.", |node| one(node.reserved_bytes)),
    metric("ballast_pool_memory_bytes", Kind::Gauge, "The pool by what can be done with it.", |node| {
        let states = [
            ("ready", node.ready_bytes),
            ("used", node.used_bytes),
            ("fenced", node.fenced_bytes),
            ("dirty", node.dirty_bytes),
            ("lent", node.lent_bytes),
            ("failed", node.failed_bytes),
        ];
        by("state", &states)
    }),
    metric("ballast_pool_ready_gib_bytes", Kind::Gauge, "Part of what is ready: in whole aligned GiB.", |node| {
        one(node.ready_gib_bytes)
    }),
];

pub(crate) const VM: &[Metric<Samples<VmStat>>] = &[
    metric("ballast_vm_info", Kind::Gauge, "Always 1; the labels describe the VM.", |vm| {
        let (uuid, kind, class) = (vm.uuid.clone().unwrap_or_default(), vm.kind.to_string(), vm.class.to_string());
        let names = vec![("id", vm.id.clone()), ("uuid", uuid), ("vmm", vm.vmm.clone())];
        vec![([names, vec![("kind", kind), ("class", class)]].concat(), 1.0)]
    }),
    metric("ballast_vm_status", Kind::Gauge, "1 for the status the VM has, 0 for the others.", |vm| {
        use VmStatus::{Blocked, Halted, Recovering, Running};
        let is = |status: VmStatus| (vec![("status", status.to_string())], f64::from(u8::from(vm.status == status)));
        [Running, Blocked, Recovering, Halted].map(is).into()
    }),
    metric("ballast_vm_size_bytes", Kind::Gauge, "All guest RAM.", |vm| one(vm.size_bytes)),
    metric("ballast_vm_unmanaged_bytes", Kind::Gauge, "Guest RAM that is not managed, and not part of size.", |vm| {
        one(vm.unmanaged_bytes)
    }),
    metric("ballast_vm_memory_bytes", Kind::Gauge, "Guest RAM by where it is; sums to the size.", |vm| {
        let tiers = [
            ("resident", vm.resident_bytes),
            ("far", vm.far_bytes),
            ("zero", vm.zero_bytes),
            ("untouched", vm.untouched_bytes),
            ("poisoned", vm.poisoned_bytes),
        ];
        by("tier", &tiers)
    }),
    metric("ballast_vm_quarantine_bytes", Kind::Gauge, "Part of resident: zapped, proving it is cold.", |vm| {
        one(vm.quarantine_bytes)
    }),
    metric("ballast_vm_pinned_bytes", Kind::Gauge, "Part of resident: held, so that it cannot go.", |vm| {
        one(pages(vm.pinned_pages))
    }),
    metric("ballast_vm_limit_bytes", Kind::Gauge, "DRAM cap; absent when there is none.", |vm| {
        vm.limit_bytes.map(one).unwrap_or_default()
    }),
    metric("ballast_vm_target_bytes", Kind::Gauge, "What the policy allows; absent without one.", |vm| {
        vm.target_bytes.map(one).unwrap_or_default()
    }),
    metric("ballast_vm_reservation_bytes", Kind::Gauge, "DRAM that is never taken.", |vm| {
        one(vm.settings.effective_reservation(vm.limit_bytes.map_or(vm.size_bytes, |limit| limit.min(vm.size_bytes))))
    }),
    metric("ballast_vm_protect_bytes", Kind::Gauge, "DRAM that is taken only when all VMs have their part.", |vm| {
        one(vm.settings.protect_bytes)
    }),
    metric("ballast_vm_shares", Kind::Gauge, "Weight when memory is short; 0: hands off.", |vm| {
        one(vm.settings.effective_shares().into())
    }),
    metric("ballast_vm_store_bytes", Kind::Gauge, "What the VM's far pages occupy in RAM.", |vm| one(vm.store_bytes)),
    metric("ballast_vm_far_file_bytes", Kind::Gauge, "Part of far: on disk.", |vm| one(vm.far_file_bytes)),
    metric(
        "ballast_vm_far_remote_bytes",
        Kind::Gauge,
        "Part of far: on other machines.",
        |vm| one(vm.far_remote_bytes),
    ),
    metric("ballast_vm_file_bytes", Kind::Gauge, "What the VM's far pages occupy on disk.", |vm| one(vm.file_bytes)),
    metric("ballast_vm_file_faults_total", Kind::Counter, "Part of the restore faults: read from disk.", |vm| {
        one(vm.faults.file)
    }),
    metric("ballast_vm_spilled_bytes_total", Kind::Counter, "Far guest RAM moved from RAM to disk.", |vm| {
        one(pages(vm.reclaim.spilled_pages))
    }),
    metric("ballast_vm_coalesced_bytes_total", Kind::Counter, "Guest RAM mapped huge again.", |vm| {
        one(vm.reclaim.coalesced_units * ballast_base::HUGE_SIZE as u64)
    }),
    metric("ballast_vm_throttled_faults_total", Kind::Counter, "Faults that waited for room.", |vm| {
        one(vm.faults.throttled)
    }),
    metric("ballast_vm_throttled_seconds_total", Kind::Counter, "How long they waited for it.", |vm| {
        vec![(Vec::new(), vm.faults.throttled_us as f64 / 1e6)]
    }),
    metric(
        "ballast_vm_engine_seconds_total",
        Kind::Counter,
        "Time of the engine's threads on the VM, by work.",
        |vm| {
            let seconds = |kind: &str, micros: u64| (vec![("kind", kind.to_owned())], micros as f64 / 1e6);
            vec![seconds("faults", vm.engine_time.faults_us), seconds("tasks", vm.engine_time.tasks_us)]
        },
    ),
    metric("ballast_vm_faults_total", Kind::Counter, "Faults served, by what the page was.", |vm| {
        let faults = &vm.faults;
        let kinds =
            [("minor", faults.minor), ("restore", faults.restore), ("zero", faults.zero), ("fresh", faults.fresh)];
        by("kind", &kinds)
    }),
    metric("ballast_vm_moved_bytes_total", Kind::Counter, "Guest RAM moved between tiers.", |vm| {
        vec![
            moved("resident", "far", "reclaim", vm.reclaim.evicted_pages),
            moved("resident", "zero", "reclaim", vm.reclaim.evicted_zero_pages),
            moved("far", "resident", "fault", vm.faults.restored_pages),
            moved("far", "resident", "prefetch", vm.reclaim.prefetched_pages),
            moved("zero", "resident", "fault", vm.faults.zeroed_pages),
        ]
    }),
    metric(
        "ballast_vm_restored_soon_bytes_total",
        Kind::Counter,
        "Restored within 10 s of eviction: wrong choices.",
        |vm| one(pages(vm.reclaim.restored_soon_pages)),
    ),
    metric(
        "ballast_vm_reclaim_kept_bytes_total",
        Kind::Counter,
        "Guest RAM picked for reclaim and kept, by reason.",
        |vm| {
            let reclaim = &vm.reclaim;
            let reasons = [
                ("quarantine_hit", pages(reclaim.quarantine_hit_pages)),
                ("aborted", pages(reclaim.aborted_pages)),
                ("failed", pages(reclaim.failed_pages)),
            ];
            by("reason", &reasons)
        },
    ),
    metric(
        "ballast_vm_discarded_bytes_total",
        Kind::Counter,
        "Guest RAM given back by the guest, of what was watched before.",
        |vm| one(pages(vm.reclaim.discarded_pages)),
    ),
    metric("ballast_vm_store_full_total", Kind::Counter, "Times reclaim stopped because the store was full.", |vm| {
        one(vm.reclaim.store_full_events)
    }),
    metric(
        "ballast_vm_stall_seconds_total",
        Kind::Counter,
        "Time the VM waited for Ballast, as Linux PSI counts.",
        |vm| {
            let seconds = |kind: &str, micros: u64| (vec![("kind", kind.to_owned())], micros as f64 / 1e6);
            vec![seconds("some", vm.stall.some.total_us), seconds("full", vm.stall.full.total_us)]
        },
    ),
    metric(
        "ballast_vm_agent_reporting",
        Kind::Gauge,
        "1 while the guest's agent reports; absent without a port.",
        |vm| of_agent(vm, |agent| one((agent.state == AgentState::Reporting).into())),
    ),
    metric("ballast_vm_agent_rejected_total", Kind::Counter, "Messages and pages that were not heeded.", |vm| {
        of_agent(vm, |agent| one(agent.rejected_messages + agent.rejected_pages + agent.garbage_bytes))
    }),
    metric(
        "ballast_vm_service_restored_bytes_total",
        Kind::Counter,
        "Restored for the guest's kernel services.",
        |vm| of_agent(vm, |agent| one(pages(agent.service_restored_pages))),
    ),
    metric("ballast_vm_agent_cold_bytes", Kind::Gauge, "What its last report calls cold, and of it, free.", |vm| {
        of_agent(vm, |agent| {
            let used = agent.cold_bytes.saturating_sub(agent.free_bytes);
            by("kind", &[("free", agent.free_bytes), ("used", used)])
        })
    }),
    metric("ballast_vm_node_bytes", Kind::Gauge, "Memory of the guest's nodes, as its agent says.", |vm| {
        of_agent(vm, |agent| {
            let of = |node: &NodeStat| {
                let used = node.size_bytes.saturating_sub(node.free_bytes).saturating_sub(node.balloon_bytes);
                let sample = |(state, bytes): (&str, u64)| {
                    (vec![("node", node.node.to_string()), ("state", state.to_owned())], bytes as f64)
                };
                [("used", used), ("free", node.free_bytes), ("held", node.balloon_bytes)].map(sample)
            };
            agent.nodes.iter().flat_map(of).collect()
        })
    }),
    metric("ballast_vm_tier_hit_ratio", Kind::Gauge, "Share of sampled accesses that fast memory served.", |vm| {
        of_tiering(vm, |tiering| {
            tiering.fast_hits_bp.map(|share| (Vec::new(), f64::from(share) / 10_000.0)).into_iter().collect()
        })
    }),
    metric("ballast_vm_tier_moved_bytes_total", Kind::Counter, "Memory that the guest moved between tiers.", |vm| {
        of_tiering(vm, |tiering| by("to", &[("fast", tiering.promoted_bytes), ("slow", tiering.demoted_bytes)]))
    }),
    metric("ballast_vm_host_tier_bytes", Kind::Gauge, "Part of resident, by the host's node, when last seen.", |vm| {
        of_host_tiers(vm, |tiers| {
            by("tier", &[("fast", vm.resident_bytes.saturating_sub(tiers.slow_bytes)), ("slow", tiers.slow_bytes)])
        })
    }),
    metric("ballast_vm_host_tier_moves_bytes_total", Kind::Counter, "Moves between the host's nodes.", |vm| {
        of_host_tiers(vm, |tiers| by("to", &[("fast", tiers.to_fast_bytes), ("slow", tiers.to_slow_bytes)]))
    }),
];

pub(crate) const HEAT: &[Metric<Samples<VmHeat>>] = &[
    metric("ballast_vm_wss_bytes", Kind::Gauge, "Working set: touched within the last three cycles.", |heat| {
        one(heat.wss_bytes)
    }),
    metric("ballast_vm_age_bytes", Kind::Gauge, "Guest RAM in DRAM by the time since its last touch.", |heat| {
        let (mut samples, mut bytes) = (Vec::new(), 0);
        for bucket in &heat.ages {
            bytes += bucket.bytes;
            if bucket.up_to_s.is_none_or(|end| AGES.contains(&end)) {
                let end = bucket.up_to_s.map_or("older".to_owned(), |end| end.to_string());
                samples.push((vec![("up_to_seconds", end)], std::mem::take(&mut bytes) as f64));
            }
        }
        samples
    }),
    metric("ballast_vm_bloat_bytes", Kind::Gauge, "Cold part of hot huge pages with hardly anything hot.", |heat| {
        one(heat.bloat_bytes)
    }),
    metric("ballast_vm_heat_cost_ratio", Kind::Gauge, "What tracking takes, as a share of time.", |heat| {
        let share = |of: &str, percent: f64| (vec![("of", of.to_owned())], percent / 100.0);
        vec![share("cpu", heat.cpu_percent), share("guest", heat.guest_percent)]
    }),
];

pub(crate) const FAULT_DURATION: Metric<()> =
    metric("ballast_vm_fault_duration_seconds", Kind::Histogram, "Time to serve a fault: read to guest woken.", ());

pub(crate) const RESTORE_STAGE: Metric<()> = metric(
    "ballast_restore_stage_seconds",
    Kind::Histogram,
    "Stages of restores of all VMs, one restore in eight from RAM and all from disk.",
    (),
);

pub(crate) const EVENTS: Metric<()> = metric("ballast_events_total", Kind::Counter, "Events, by kind.", ());
