//! Requests of the API to the governor, to show or change its state.
//!
//! Before: an API thread has a request. After: the governor's state was read, or changed under its lock.
//! Threads: API threads. Units: bytes; milliseconds of the monotonic clock.
//! Promise: a change is checked completely before it is made, and no other thread changes related settings in between.

use anyhow::{Context, bail};
use ballast_api::{DecisionRecord, LeaseStat, PlanRequest, PolicyPatch, PolicyStat};
use ballast_base::Bytes;
use ballast_policy::admission::Admission;
use ballast_policy::{Class, External, HostState, Kind, Plan, Settings, Setup, Snapshot, check_external};
use ballast_pool::Far;
use ballast_sys::lock::Lock;

use super::sample::now_ms;
use super::{Governor, Inner, Lease, far, operator};
use crate::engine::adopted::vm::AdoptedVm;
use crate::engine::host::Host;
use crate::engine::served::Served;

const LEASES_MS: std::ops::RangeInclusive<u64> = 100..=600_000;
const MAX_NAME: usize = 64;

impl Governor {
    pub fn snapshot(&self, host: &Host) -> Snapshot {
        self.inner.locked().snapshot(host)
    }

    pub fn dry_run(&self, host: &Host, kind: Option<Kind>) -> anyhow::Result<Plan> {
        let (snapshot, mut state, setup) = {
            let mut inner = self.inner.locked();
            (inner.snapshot(host), inner.state.clone(), inner.setup)
        };
        let plan = Setup { policy: kind.unwrap_or(setup.policy), ..setup }.decide(&snapshot, &mut state);
        plan.context("the policy is none, which decides nothing; ask what another one would do")
    }

    pub fn put_plan(&self, host: &Host, request: PlanRequest) -> anyhow::Result<Plan> {
        let PlanRequest { policy, lease_ms, limits } = request;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if policy.is_empty() || policy.len() > MAX_NAME || !policy.chars().all(plain) {
            bail!("{policy:?} is no name for a policy: 1 to {MAX_NAME} of letters, digits, '.', '_', '-'");
        }
        if !LEASES_MS.contains(&lease_ms) {
            bail!("a lease of {lease_ms} ms is out of range: 100 ms to 10 minutes");
        }
        let limits = limits.into_iter().map(|limit| (limit.name, limit.limit_bytes)).collect();
        let wanted = External { policy, limits };
        let mut inner = self.inner.locked();
        let snapshot = inner.snapshot(host);
        let plan = check_external(&snapshot, &wanted, &mut inner.state.clone(), true)?;
        let holder = inner.lease.as_ref().map(|lease| lease.wanted.policy.clone());
        if holder.as_ref() != Some(&wanted.policy) {
            let text = format!("the program {} decides from now on, for {lease_ms} ms at a time", wanted.policy);
            host.events.add(None, "policy-lease", text);
        }
        inner.lease = Some(Lease { wanted, length_ms: lease_ms, until_ms: now_ms() + lease_ms });
        self.notify(&mut inner);
        Ok(plan)
    }

    pub fn stat(&self, host: &Host) -> PolicyStat {
        let inner = self.inner.locked();
        let budget = inner.seen(host).host.budget_bytes;
        let Setup { policy, tick_ms, budget_bytes, threshold } = inner.setup;
        let lease = inner.lease.as_ref().map(|lease| LeaseStat {
            holder: lease.wanted.policy.clone(),
            left_ms: lease.until_ms.saturating_sub(now_ms()),
        });
        PolicyStat {
            policy,
            tick_ms,
            budget_bytes,
            effective_budget_bytes: budget,
            threshold,
            state: inner.is_active().then_some(inner.host_state),
            exhaustion_ms: inner.exhaustion_ms.filter(|_| inner.is_active()),
            lease,
            ticks: inner.ticks,
            changed_limits: inner.changed,
        }
    }

    /// Changes the settings, now and for the next engines.
    pub fn set(&self, host: &Host, patch: &PolicyPatch) -> anyhow::Result<()> {
        let mut inner = self.inner.locked();
        let before = inner.setup;
        let setup = Setup {
            policy: patch.policy.unwrap_or(before.policy),
            tick_ms: patch.tick_ms.unwrap_or(before.tick_ms),
            budget_bytes: patch.budget_bytes.unwrap_or(before.budget_bytes),
            threshold: patch.threshold.unwrap_or(before.threshold),
        };
        setup.check()?;
        if setup == before {
            return Ok(());
        }
        if setup.budget_bytes != before.budget_bytes {
            let snapshot = inner.sampler.peek(host, &setup, now_ms());
            if let Some(why) = Admission::of(&snapshot).refusal() {
                bail!(why);
            }
        }
        inner.setup = setup;
        let budget = setup.budget_bytes.map_or("what the host can spare".into(), |budget| Bytes(budget).to_string());
        let text =
            format!("the policy is {} (was {}), every {} ms, for {budget}", setup.policy, before.policy, setup.tick_ms);
        host.events.add(None, "policy", text);
        self.notify(&mut inner);
        drop(inner);
        // Without the lock, because a stopped keeper may delay this.
        (self.keep)(setup);
        Ok(())
    }

    pub fn decisions(&self, id: &str) -> Vec<DecisionRecord> {
        self.inner.locked().log.of(id)
    }

    pub fn brief(&self, host: &Host) -> Brief {
        let inner = self.inner.locked();
        let admission = Admission::of(&inner.seen(host));
        Brief {
            policy: inner.setup.policy,
            state: inner.is_active().then_some(inner.host_state),
            exhaustion_ms: inner.exhaustion_ms.filter(|_| inner.is_active()),
            budget_bytes: admission.budget_bytes,
            schedulable_bytes: admission.schedulable_bytes(),
        }
    }

    /// Changes the operator's settings and the limit of a VM, unless they contradict themselves, other VMs'
    /// reservations, or the pool's promises. For the promises only the settings count; a limit takes no memory from
    /// them.
    pub fn change(&self, host: &Host, served: &Served, settings: Settings, limit: Option<Bytes>) -> anyhow::Result<()> {
        let (size, state) = (served.vm.size().bytes().0, &served.vm.state);
        if let Some(why) = settings.contradiction(size, limit.map(|limit| limit.0)) {
            bail!(why);
        }
        let mut inner = self.inner.locked();
        let with = if state.kept() { far::kept(settings) } else { settings };
        if let Some(why) = far::refusal(host, served, [far::settings_of(&served.vm), with]) {
            bail!(why);
        }
        if !served.vm.is_pinned() {
            let before = (operator::read(state.settings()), state.limit());
            inner.admit(host, &state.id().to_string(), size, before, (settings, limit))?;
        }
        state.set_settings(operator::write(&settings));
        served.vm.set_shares(settings.effective_shares());
        state.set_limit(limit);
        served.vm.notify_reclaim();
        if inner.is_active() {
            self.notify(&mut inner);
        }
        Ok(())
    }

    /// Changes the settings and the limit of an adopted VM, unless they contradict each other or other VMs'
    /// reservations, or could need more swap than there is.
    pub fn admit_adopted(
        &self,
        host: &Host,
        vm: &AdoptedVm,
        settings: Settings,
        limit: Option<Bytes>,
    ) -> anyhow::Result<()> {
        let (size, before) = (vm.vm.size(), vm.terms());
        if let Some(why) = settings.contradiction(size, limit.map(|limit| limit.0)) {
            bail!(why);
        }
        let mut inner = self.inner.locked();
        let is_lower = limit.map_or(size, |limit| limit.0) < before.limit.map_or(size, |limit| limit.0);
        if let Some(why) = is_lower.then(|| host.adopted.refusal(vm, limit)).flatten() {
            bail!(why);
        }
        inner.admit(host, &vm.id, size, (before.settings, before.limit), (settings, limit))?;
        vm.change(|terms| (terms.settings, terms.limit) = (settings, limit));
        if inner.is_active() {
            self.notify(&mut inner);
        }
        drop(inner);
        host.adopted.keep();
        host.adopted.notify();
        Ok(())
    }

    /// Records that all of a VM is kept in memory, unless the pool could then not keep its promises.
    pub fn admit_kept(&self, host: &Host, served: &Served) -> anyhow::Result<()> {
        let _inner = self.inner.locked();
        let before = far::settings_of(&served.vm);
        if let Some(why) = far::refusal(host, served, [before, far::kept(before)]) {
            bail!(why);
        }
        served.vm.state.set_kept(true);
        Ok(())
    }

    /// How much VMs on demand can have far. No operator can change that during the call.
    pub fn far(&self, host: &Host) -> Far {
        let _inner = self.inner.locked();
        far::far(host, None)
    }
}

impl Inner {
    /// Refuses settings and a limit of a VM that reserve more than before, and more than the budget has beside other
    /// VMs' reservations. A change that reserves no more than before is never refused, whatever other VMs reserve.
    fn admit(
        &self,
        host: &Host,
        id: &str,
        size: u64,
        before: (Settings, Option<Bytes>),
        (settings, limit): (Settings, Option<Bytes>),
    ) -> anyhow::Result<()> {
        let reserved = |(settings, limit): (Settings, Option<Bytes>)| {
            settings.effective_reservation(limit.map_or(size, |limit| limit.0.min(size)))
        };
        if reserved((settings, limit)) <= reserved(before) {
            return Ok(());
        }
        let mut snapshot = self.sampler.peek(host, &self.setup, now_ms());
        for vm in snapshot.vms.iter_mut().filter(|vm| vm.id == id) {
            let class = if vm.settings.class == Class::Pinned { Class::Pinned } else { settings.class };
            vm.settings = Settings { class, ..settings };
            vm.limit_bytes = limit.map(|limit| limit.0);
        }
        Admission::of(&snapshot).refusal().map_or(Ok(()), |why| bail!(why))
    }
}

/// The figures of `ballast host`.
#[derive(Clone, Copy, Debug)]
pub struct Brief {
    pub policy: Kind,
    pub state: Option<HostState>,
    pub exhaustion_ms: Option<u64>,
    pub budget_bytes: u64,
    pub schedulable_bytes: u64,
}
