//! Requests to the governor: what the API shows and changes of it.
//!
//! Before: an API thread has a request. After: the governor's state is read, or changed under its lock.
//! Threads: API threads. Units: bytes; milliseconds of the monotonic clock.
//! Promise: a change is checked as a whole before it is made, and no other thread changes such settings in between.

use ballast_api::{DecisionRecord, LeaseStat, PlanRequest, PolicyPatch, PolicyStat};
use ballast_base::Bytes;
use ballast_policy::admission::Admission;
use ballast_policy::{Class, External, HostState, Kind, Params, Plan, Settings, Setup, Snapshot, check_external};
use ballast_pool::Far;

use super::sample::now_ms;
use super::{Governor, Lease, far, operator};
use crate::engine::host::Host;
use crate::engine::served::Served;

/// Range of lease lengths.
const LEASES_MS: std::ops::RangeInclusive<u64> = 100..=600_000;
/// Longest name of a program that decides.
const MAX_NAME: usize = 64;

impl Governor {
    /// The snapshot that policies read.
    pub fn snapshot(&self, host: &Host) -> Snapshot {
        self.lock().snapshot(host)
    }

    /// The plan that a policy, or the one in force, would make now.
    pub fn dry_run(&self, host: &Host, kind: Option<Kind>) -> Result<Plan, String> {
        let (snapshot, mut state, setup) = {
            let mut inner = self.lock();
            (inner.snapshot(host), inner.state.clone(), inner.setup)
        };
        let policy = kind.unwrap_or(setup.policy).policy(setup.params);
        let policy = policy.ok_or("the policy is none, which decides nothing; ask what another one would do")?;
        Ok(policy.decide(&snapshot, &mut state))
    }

    /// Let another program decide for a while.
    pub fn put_plan(&self, host: &Host, request: PlanRequest) -> Result<Plan, String> {
        let PlanRequest { policy, lease_ms, limits } = request;
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if policy.is_empty() || policy.len() > MAX_NAME || !policy.chars().all(plain) {
            return Err(format!(
                "{policy:?} is no name for a policy: 1 to {MAX_NAME} of letters, digits, '.', '_', '-'"
            ));
        }
        if !LEASES_MS.contains(&lease_ms) {
            return Err(format!("a lease of {lease_ms} ms is out of range: 100 ms to 10 minutes"));
        }
        let limits = limits.into_iter().map(|limit| (limit.name, limit.limit_bytes)).collect();
        let wanted = External { policy, limits };
        let mut inner = self.lock();
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

    /// The state of the governor.
    pub fn stat(&self, host: &Host) -> PolicyStat {
        let inner = self.lock();
        let budget = inner.seen(host).host.budget_bytes;
        let Setup { policy, tick_ms, budget_bytes, params } = inner.setup;
        let Params { window_ms, threshold, watermark_bytes } = params;
        let lease = inner.lease.as_ref().map(|lease| LeaseStat {
            holder: lease.wanted.policy.clone(),
            left_ms: lease.until_ms.saturating_sub(now_ms()),
        });
        PolicyStat {
            policy,
            tick_ms,
            budget_bytes,
            effective_budget_bytes: budget,
            window_ms,
            threshold,
            watermark_bytes,
            state: inner.is_active().then_some(inner.host_state),
            exhaustion_ms: inner.exhaustion_ms.filter(|_| inner.is_active()),
            lease,
            ticks: inner.ticks,
            changed_limits: inner.changed,
        }
    }

    /// Change it, now and for the next engines.
    pub fn set(&self, host: &Host, patch: &PolicyPatch) -> Result<(), String> {
        let mut inner = self.lock();
        let before = inner.setup;
        let setup = Setup {
            policy: patch.policy.unwrap_or(before.policy),
            tick_ms: patch.tick_ms.unwrap_or(before.tick_ms),
            budget_bytes: patch.budget_bytes.unwrap_or(before.budget_bytes),
            params: Params {
                window_ms: patch.window_ms.unwrap_or(before.params.window_ms),
                threshold: patch.threshold.unwrap_or(before.params.threshold),
                watermark_bytes: patch.watermark_bytes.unwrap_or(before.params.watermark_bytes),
            },
        };
        setup.check()?;
        if setup == before {
            return Ok(());
        }
        if setup.budget_bytes != before.budget_bytes {
            let snapshot = inner.sampler.peek(host, &setup, now_ms());
            if let Some(why) = Admission::of(&snapshot).refusal() {
                return Err(why);
            }
        }
        inner.setup = setup;
        let budget = setup.budget_bytes.map_or("what the host can spare".into(), |budget| Bytes(budget).to_string());
        let text =
            format!("the policy is {} (was {}), every {} ms, for {budget}", setup.policy, before.policy, setup.tick_ms);
        host.events.add(None, "policy", text);
        self.notify(&mut inner);
        drop(inner);
        // Without the lock: a stopped keeper may delay this.
        (self.keep)(setup);
        Ok(())
    }

    /// The last decisions about a VM.
    pub fn decisions(&self, id: &str) -> Vec<DecisionRecord> {
        self.lock().log.of(id)
    }

    /// The figures of `ballast host`: policy, host state, time to exhaustion, budget, and memory that may be reserved.
    pub fn brief(&self, host: &Host) -> Brief {
        let inner = self.lock();
        let admission = Admission::of(&inner.seen(host));
        Brief {
            policy: inner.setup.policy,
            state: inner.is_active().then_some(inner.host_state),
            exhaustion_ms: inner.exhaustion_ms.filter(|_| inner.is_active()),
            budget_bytes: admission.budget_bytes,
            schedulable_bytes: admission.schedulable_bytes(),
        }
    }

    /// Change the operator's settings and the limit of a VM, unless they contradict themselves, other VMs'
    /// reservations, or what the pool has promised. Only what settings take from the pool's promises is judged; a
    /// limit takes nothing.
    pub fn change(&self, host: &Host, served: &Served, settings: Settings, limit: Option<Bytes>) -> Result<(), String> {
        let (size, state) = (served.vm.size().bytes().0, &served.vm.state);
        if let Some(why) = settings.contradiction(size, limit.map(|limit| limit.0)) {
            return Err(why);
        }
        let mut inner = self.lock();
        let with = if state.kept() { far::kept(settings) } else { settings };
        far::refusal(host, served, [far::settings_of(&served.vm), with]).map_or(Ok(()), Err)?;
        // A change that takes no more is never refused, even if too much had been promised; then other VMs do not
        // matter.
        if reserved(served, settings, limit) > reserved(served, operator::read(state.settings()), state.limit()) {
            let mut snapshot = inner.sampler.peek(host, &inner.setup, now_ms());
            let id = state.id().to_string();
            for vm in snapshot.vms.iter_mut().filter(|vm| vm.id == id) {
                let class = if served.vm.is_pinned() { vm.settings.class } else { settings.class };
                vm.settings = Settings { class, ..settings };
                vm.limit_bytes = limit.map(|limit| limit.0);
            }
            if let Some(why) = Admission::of(&snapshot).refusal() {
                return Err(why);
            }
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

    /// Say that all of a VM is kept in memory, unless the pool could not keep what it promised then.
    pub fn admit_kept(&self, host: &Host, served: &Served) -> Result<(), String> {
        let _inner = self.lock();
        let before = far::settings_of(&served.vm);
        far::refusal(host, served, [before, far::kept(before)]).map_or(Ok(()), Err)?;
        served.vm.state.set_kept(true);
        Ok(())
    }

    /// What VMs on demand can have far, while no operator changes that.
    pub fn far(&self, host: &Host) -> Far {
        let _inner = self.lock();
        far::far(host, None)
    }
}

/// The reservation of a VM with these settings and this limit.
fn reserved(served: &Served, settings: Settings, limit: Option<Bytes>) -> u64 {
    let size = served.vm.size().bytes();
    if served.vm.is_pinned() || settings.class == Class::Pinned {
        return size.0;
    }
    settings.effective_reservation(limit.map_or(size, |limit| limit.min(size)).0)
}

/// See [`Governor::brief`].
#[derive(Clone, Copy, Debug)]
pub struct Brief {
    /// The policy.
    pub policy: Kind,
    /// The host's state, while a policy or a program decides.
    pub state: Option<HostState>,
    /// The time to exhaustion.
    pub exhaustion_ms: Option<u64>,
    /// DRAM for all guests.
    pub budget_bytes: u64,
    /// The part of it that is not reserved.
    pub schedulable_bytes: u64,
}
