//! The API's view of the engine: figures of the host and of each VM (`vm_stat`), and operators' changes.
//!
//! Before: `http` gets a request. After: numbers read from counters, words and files; or a change in a VM's state file.
//! Threads: those of the API. Only two calls take long: to restore all pages of a VM, and the scan before its first
//! limit.
//! Promise: a change is checked completely before any part of it is made, and is in the event list.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use ballast_adopt::swap::Swap;
use ballast_api::{
    AdoptRequest, AdoptResult, DEFAULT_CELLS, DecisionRecord, Event, History, HostStat, KeptVm, LendRequest,
    NodeBalloon, PlanRequest, PolicyPatch, PolicyStat, PoolRequest, PoolStat, RemoteFinding, RemoteNode, RemoteStat,
    UpgradeStat, VmHeat, VmKind, VmPatch, VmStat,
};
use ballast_base::{Bytes, PAGE_SIZE, wire};
use ballast_pager::vm::Hold;
use ballast_pager::vm::guest::told;
use ballast_pager::vm::stats;
use ballast_policy::{Kind, Plan, Snapshot};
use ballast_remote::check::Finding;
use ballast_remote::{Addr, NodeFigures};
use ballast_sys::{meminfo, scm};
use tokio::sync::watch;

use crate::engine::adopted::vm::AdoptedVm;
use crate::engine::governor::{Governor, operator};
use crate::engine::host::Host;
use crate::engine::huge_pages::HugePages;
use crate::engine::remote::Remote;
use crate::engine::served::{KEPT, SMALLEST_LIMIT, Served};
use crate::engine::vm_settings;
use crate::http::{Backend, ChangeError, Histogram};
use crate::rules::{Sources, Wanted};

mod adopted;
mod said;
mod vm_stat;
mod why;

use vm_stat::{bounds, stat};
use why::Facts;

#[derive(Debug)]
pub struct Shown {
    pub host: Arc<Host>,
    pub governor: Arc<Governor>,
    /// The socket to the keeper, which starts engines.
    pub keeper: Arc<OwnedFd>,
}

impl Shown {
    fn check_limit(&self, served: &Arc<Served>, limit: Option<Bytes>) -> anyhow::Result<()> {
        let Some(limit) = limit else { return Ok(()) };
        let vm = &served.vm;
        if limit < SMALLEST_LIMIT {
            bail!("a limit of {limit} is below the smallest one, {SMALLEST_LIMIT}");
        }
        if limit < vm.size().bytes() {
            if let Some(reason) = vm.held().filter(|_| vm.is_pinned()) {
                bail!("the VM is pinned: {reason}");
            }
            if let Some(reason) = HugePages::now().danger(served) {
                bail!(reason);
            }
        }
        Ok(())
    }

    /// Scans for other processes that map a VM's RAM, before the first page of the VM may be evicted: the regular scan
    /// leaves out VMs without a limit.
    fn scan_before_first_limit(&self, served: &Arc<Served>, limit: Option<Bytes>) -> anyhow::Result<()> {
        let vm = &served.vm;
        if vm.effective_limit().is_some() || limit.is_none_or(|limit| limit >= vm.size().bytes()) {
            return Ok(());
        }
        self.governor.request_scan(served)
    }

    /// Changes a VM. If the VM is unknown, waits for it until then.
    fn patch_within(&self, name: &str, patch: &VmPatch, until: Instant, facts: &Facts) -> Result<VmStat, ChangeError> {
        if let Some(vm) = self.adopted(name) {
            let stat = adopted::patch(&self.host, &self.governor, &vm, patch)?;
            return Ok(VmStat { why: why::of_vm(&stat, facts), ..stat });
        }
        let served = self.host.attached(name, until).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        if let Some(limit) = patch.limit_bytes {
            self.check_limit(&served, limit.map(Bytes))?;
        }
        if patch.balloon.is_some() && vm.agent().shown().state == told::State::NoPort {
            let why = format!("{name} has no port for an agent, which holds the memory (ballast run --agent)");
            return Err(ChangeError::Invalid(why));
        }
        let limit = patch.limit_bytes.map_or(vm.state.limit(), |limit| limit.map(Bytes));
        let sources = Sources::of_word(vm.state.sources()).unwrap_or_default().after(&patch.into());
        let before = operator::read(vm.state.settings());
        let after = patch.settings_after(before);
        self.scan_before_first_limit(&served, limit)?;
        self.governor.change(&self.host, &served, after, limit)?;
        vm.state.set_sources(sources.to_word());
        said::change(&self.host, name, patch.limit_bytes.map(|_| limit), (before, after));
        if let Some(NodeBalloon { node, bytes }) = patch.balloon {
            vm.agent().set_balloon(node, bytes / PAGE_SIZE as u64);
            let text = format!("the agent of {name} is to hold {} of node {node}", Bytes(bytes));
            self.host.events.add(Some(name.to_owned()), "settings", text);
        }
        Ok(self.stat_with(&served, facts))
    }

    fn stat(&self, served: &Arc<Served>) -> VmStat {
        self.stat_with(served, &self.facts())
    }

    fn stat_with(&self, served: &Arc<Served>, facts: &Facts) -> VmStat {
        let stat = VmStat { sources: vm_settings::sources(&self.host, &served.vm.state), ..stat(served) };
        VmStat { why: why::of_vm(&stat, facts), ..stat }
    }

    fn adopted_stat(&self, vm: &AdoptedVm, facts: &Facts, swap: &Swap) -> Option<VmStat> {
        let stat = adopted::stat(vm, &self.host.adopted, swap)?;
        Some(VmStat { why: why::of_vm(&stat, facts), ..stat })
    }

    fn facts(&self) -> Facts {
        let brief = self.governor.brief(&self.host);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64);
        Facts {
            policy: brief.policy,
            state: brief.state,
            budget_bytes: brief.budget_bytes,
            store_bytes: self.host.budget.used().0,
            store_budget_bytes: self.host.budget.limit().0,
            troubles: self.host.events.read(|events| why::troubles(events, now)),
        }
    }

    /// Stores a change of these VMs for the next time that they attach. A change that cannot be stored holds until the
    /// VMs end, and a warning in their states says so.
    fn keep_change(&self, names: &[&str], patch: &VmPatch) -> Option<String> {
        if !Wanted::from(patch).says().contains(&true) {
            return None;
        }
        let states = names.iter().filter_map(|name| Some(self.host.by_name(name)?.vm.state.share()));
        let vms: Vec<_> = states.map(|state| vm_settings::identity(&state)).collect();
        let why = match self.host.kept.keep(&vms, patch) {
            Ok(true) => return None,
            Ok(false) => "a VM without a name or UUID of its own is another VM the next time".to_owned(),
            Err(error) => {
                let text = format!("the changes of {} are not stored on disk: {error}", names.join(", "));
                self.host.events.add(None, "settings-not-kept", text);
                error.to_string()
            }
        };
        Some(format!("{}: {why}", VmStat::NOT_KEPT))
    }

    /// The host's figures. `vms` must be all VMs.
    pub fn host_of(&self, vms: &[VmStat]) -> HostStat {
        let sum = |field: fn(&VmStat) -> u64| vms.iter().map(field).sum::<u64>();
        let paged =
            |field: fn(&VmStat) -> u64| vms.iter().filter(|vm| vm.kind == VmKind::Paged).map(field).sum::<u64>();
        let (far, zero) = (sum(|vm| vm.far_bytes), paged(|vm| vm.zero_bytes));
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let brief = self.governor.brief(&self.host);
        let host = HostStat {
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
            zero_bytes: sum(|vm| vm.zero_bytes),
            saved_bytes: (paged(|vm| vm.far_bytes) + zero).saturating_sub(self.host.budget.used().0),
            policy: brief.policy,
            state: brief.state,
            exhaustion_ms: brief.exhaustion_ms,
            guest_budget_bytes: brief.budget_bytes,
            schedulable_bytes: brief.schedulable_bytes,
            pin_check_missing: self.host.pins.missing(),
            warnings: Vec::new(),
        };
        HostStat { warnings: why::of_host(&host, vms), ..host }
    }

    fn adopted(&self, name: &str) -> Option<Arc<AdoptedVm>> {
        self.host.adopted.by_name(name).filter(|_| self.host.by_name(name).is_none())
    }
}

impl Backend for Shown {
    fn vms(&self) -> Vec<VmStat> {
        let facts = self.facts();
        let mut vms: Vec<VmStat> = self.host.all().iter().map(|served| self.stat_with(served, &facts)).collect();
        let swap = self.host.adopted.swap();
        vms.extend(self.host.adopted.all().iter().filter_map(|vm| self.adopted_stat(vm, &facts, &swap)));
        vms
    }

    fn vm(&self, name: &str) -> Option<VmStat> {
        let attached = self.host.by_name(name).map(|served| self.stat(&served));
        attached.or_else(|| self.adopted_stat(&*self.adopted(name)?, &self.facts(), &Swap::now()))
    }

    fn heat(&self, name: &str, cells: usize) -> Option<VmHeat> {
        let Some(served) = self.host.by_name(name) else {
            // The kernel does not report how old its pages are.
            return self.adopted(name).map(|_| VmHeat { name: name.to_owned(), ..VmHeat::default() });
        };
        let (vm, heat) = (&served.vm, &served.vm.heat);
        Some(VmHeat::new(name.to_owned(), vm.track(), heat.is_tracked(), &heat.heat(cells)))
    }

    fn set_track(&self, name: &str, track: bool) -> Option<VmHeat> {
        self.host.by_name(name)?.vm.set_track(track);
        let text = format!("{name} is {}", if track { "tracked" } else { "not tracked" });
        self.host.events.add(Some(name.to_owned()), "track", text);
        self.heat(name, DEFAULT_CELLS)
    }

    fn patch_vm(&self, name: &str, patch: &VmPatch) -> Result<VmStat, ChangeError> {
        let mut vm = self.patch_within(name, patch, Host::opens_until(), &self.facts())?;
        vm.warnings.extend(self.keep_change(&[name], patch));
        Ok(vm)
    }

    fn patch_vms(&self, names: &[String], patch: &VmPatch) -> Vec<Result<VmStat, ChangeError>> {
        let (until, facts) = (Host::opens_until(), self.facts());
        let mut changed: Vec<_> = names.iter().map(|name| self.patch_within(name, patch, until, &facts)).collect();
        let done = changed.iter().zip(names).filter(|(vm, _)| vm.is_ok()).map(|(_, name)| name.as_str());
        let warning = self.keep_change(&done.collect::<Vec<_>>(), patch);
        changed.iter_mut().flatten().for_each(|vm| vm.warnings.extend(warning.clone()));
        changed
    }

    fn keep(&self, name: &str, kept: bool) -> Result<VmStat, ChangeError> {
        if self.adopted(name).is_some() {
            let why = format!("{name} is adopted: ballast vm limit {name} none lets all of its memory come back");
            return Err(ChangeError::Invalid(why));
        }
        let served = self.host.attached(name, Host::opens_until()).ok_or(ChangeError::NotFound)?;
        let vm = &served.vm;
        let was = vm.state.kept();
        if kept {
            self.governor.admit_kept(&self.host, &served)?;
            served.restore(Hold::Kept, KEPT.into(), |_| ()).map_err(|error| ChangeError::Invalid(error.to_string()))?;
        } else {
            vm.state.set_kept(false);
            vm.hold(Hold::Kept, None);
        }
        if was != kept {
            let text = if kept { "all of it comes back and stays in memory" } else { "its limit counts again" };
            self.host.events.add(Some(name.to_owned()), "restore", format!("{name}: {text}"));
        }
        Ok(self.stat(&served))
    }

    fn kept(&self) -> anyhow::Result<Vec<KeptVm>> {
        self.host.kept.all().context("reading what is kept of VMs")
    }

    fn forget(&self, vm: &str) -> anyhow::Result<Vec<KeptVm>> {
        // It may have had another name when it was last changed.
        let uuid = self.host.by_name(vm).and_then(|served| served.vm.state.uuid());
        let forgotten = self.host.kept.forget(vm, uuid).with_context(|| format!("forgetting VM {vm}"))?;
        if !forgotten.is_empty() {
            let text = format!("what operators changed of {vm} is forgotten; it holds until the VM ends");
            self.host.events.add(Some(vm.to_owned()), "settings", text);
        }
        Ok(forgotten)
    }

    fn host(&self) -> HostStat {
        self.host_of(&self.vms())
    }

    fn events(&self, after: u64, decisions: bool) -> Vec<Event> {
        self.host.events.after(after, decisions)
    }

    fn event_watch(&self) -> watch::Receiver<u64> {
        self.host.events.watch()
    }

    fn event_counts(&self) -> BTreeMap<String, u64> {
        self.host.events.counts()
    }

    fn host_history(&self, minutes: u64) -> History {
        self.host.past.of_host(minutes)
    }

    fn vm_history(&self, name: &str, minutes: u64) -> Option<History> {
        let attached = self.host.by_name(name).map(|served| served.vm.state.id().to_string());
        let id = attached.or_else(|| self.adopted(name).map(|vm| vm.id.clone()))?;
        Some(self.host.past.of_vm(&id, minutes))
    }

    fn fault_histogram(&self, name: &str) -> Option<Histogram> {
        let histogram = self.host.by_name(name)?.vm.stats().fault_histogram();
        Some(fault_bounds(&histogram))
    }

    fn stage_histograms(&self) -> Vec<(&'static str, Histogram)> {
        let vms = self.host.all();
        let of_all = |stage: stats::Stage| {
            let each = vms.iter().map(|served| bounds(&served.vm.stats().stage(stage), 30..600_000_000));
            (stage.name(), each.reduce(Histogram::and).unwrap_or_default())
        };
        stats::Stage::ALL.map(of_all).into()
    }

    fn snapshot(&self) -> Snapshot {
        self.governor.snapshot(&self.host)
    }

    fn plan(&self, policy: Option<Kind>) -> anyhow::Result<Plan> {
        self.governor.dry_run(&self.host, policy)
    }

    fn put_plan(&self, request: PlanRequest) -> anyhow::Result<Plan> {
        self.governor.put_plan(&self.host, request)
    }

    fn policy(&self) -> PolicyStat {
        self.governor.stat(&self.host)
    }

    fn patch_policy(&self, patch: &PolicyPatch) -> anyhow::Result<PolicyStat> {
        self.governor.set(&self.host, patch)?;
        Ok(self.governor.stat(&self.host))
    }

    fn decisions(&self, name: &str) -> Option<Vec<DecisionRecord>> {
        let attached = self.host.by_name(name).map(|served| served.vm.state.id().to_string());
        let id = attached.or_else(|| self.adopted(name).map(|vm| vm.id.clone()))?;
        Some(self.governor.decisions(&id))
    }

    fn adopt(&self, request: &AdoptRequest) -> anyhow::Result<AdoptResult> {
        adopted::adopt(&self.host, request)
    }

    fn release(&self, name: &str, bring_back: bool) -> Result<VmStat, ChangeError> {
        adopted::release(&self.host, name, bring_back)
    }

    fn upgrade(&self) -> UpgradeStat {
        self.host.upgrades.stat()
    }

    fn begin_upgrade(&self, program: Option<String>) -> anyhow::Result<UpgradeStat> {
        self.host
            .upgrades
            .begin(program, |report| scm::send(&*self.keeper, &wire::encode(report), &[]).context("Asking the keeper"))
    }

    fn pool(&self) -> PoolStat {
        self.host.pool.stat()
    }

    fn reserve_pool(&self, request: &PoolRequest) -> anyhow::Result<PoolStat> {
        self.host.pool.reserve(request)
    }

    fn lend_pool(&self, request: &LendRequest) -> anyhow::Result<PoolStat> {
        self.host.pool.lend(request)
    }
}

pub(crate) fn fault_bounds(histogram: &stats::Histogram) -> Histogram {
    bounds(histogram, 1_000..17_000_000_000)
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
