//! Memory on demand, of a pool that has promised more than it has: when little is left for touches, what it has is
//! divided among these VMs as the host's memory is among all of them, by the same policy and the same settings.
//!
//! Before: a plan for the host, or none. After: the plan says the lower of both limits for these VMs, and the reclaim
//! workers make room. Threads: the governor's; the pool and the API ask for [`far`]. Units: bytes.
//! Promise: an operator's limit and reservation hold. While twice what is to be left is left, no VM is limited for the
//! pool. A VM is never asked to have less than a quarter of an equal part, however much others touch.

use std::collections::{BTreeMap, BTreeSet};

use ballast_base::store::{FILE_STORE, REMOTE_STORE};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_pager::vm::stats::Counter;
use ballast_pager::vm::{Hold, Vm};
use ballast_policy::{Action, Decision, HostSample, Kind, Plan, Reason, Settings, Setup, Snapshot, State, VmSample};
use ballast_reserve::Overcommitted;

use super::guarded::guarded;
use super::operator;
use crate::engine::host::Host;
use crate::engine::served::{SMALLEST_LIMIT, Served};

/// The policy where the operator chose none.
const DEFAULT: Kind = Kind::Maestro;
/// A VM keeps 1/KEEPS of its memory, so that it can go on.
const KEEPS: u64 = 8;
/// A VM has at least 1/LEAST of an equal part of what is divided.
const LEAST: u64 = 4;

/// What the governor remembers of it.
#[derive(Debug, Default)]
pub(super) struct Division {
    state: State,
    /// The VMs that are limited for the pool; empty while none need be.
    limited: BTreeSet<String>,
    divides: bool,
}

/// A VM on demand, beyond its sample.
struct Part {
    /// Memory that is not the pool's.
    elsewhere_bytes: u64,
    /// Faults that wanted a page which was not far.
    first_touches: u64,
}

impl Division {
    /// Is anything divided now?
    pub fn divides(&self) -> bool {
        self.divides
    }

    /// Adds the limits for the pool to this plan. Returns a message for operators when it begins or ends.
    pub fn add(&mut self, plan: &mut Plan, snapshot: &Snapshot, host: &Host, setup: &Setup) -> Option<String> {
        let was = self.divides;
        let over = host.pool.demand.overcommitted();
        self.divides = over.is_some_and(|over| over.free() < if was { Bytes(2 * over.high().0) } else { over.low() });
        let Some(over) = over.filter(|_| self.divides) else {
            self.release(plan, snapshot);
            return was.then(|| "VMs on demand are not limited for the pool any more: enough is left".into());
        };
        let parts: BTreeMap<String, Part> = host.all().iter().filter_map(|vm| part(vm)).collect();
        let divided = self.divide(&parts, snapshot, over, setup)?;
        let policy = divided.policy.clone();
        for decision in divided.decisions {
            self.merge(plan, decision, over, &policy);
        }
        let (free, promised) = (over.free(), over.promised);
        (!was).then(|| {
            format!(
                "of the {} that the pool has for VMs on demand, {free} are left for touches, and {promised} were \
                 promised: {policy} divides it among {} VMs",
                over.has,
                parts.len()
            )
        })
    }

    /// The plan for what the pool has.
    fn divide(
        &mut self,
        parts: &BTreeMap<String, Part>,
        snapshot: &Snapshot,
        over: Overcommitted,
        setup: &Setup,
    ) -> Option<Plan> {
        let with = |vm: &VmSample| {
            let part = parts.get(&vm.id)?;
            // A page that was never touched is wanted as one that is far is.
            Some(VmSample { restores: vm.restores + part.first_touches, ..vm.clone() })
        };
        let vms: Vec<VmSample> = snapshot.vms.iter().filter_map(with).collect();
        let elsewhere = parts.values().map(|part| part.elsewhere_bytes).sum::<u64>();
        let ours = over.has.0.saturating_sub(over.high().0);
        let smallest_bytes = (ours / LEAST / vms.len().max(1) as u64).max(SMALLEST_LIMIT.0);
        let host = HostSample {
            budget_bytes: ours + elsewhere,
            free_bytes: over.free().0,
            min_free_bytes: over.low().0,
            smallest_bytes,
            ..snapshot.host
        };
        let kind = if setup.policy == Kind::None { DEFAULT } else { setup.policy };
        let policy = kind.policy(setup.params)?;
        guarded(&*policy, &Snapshot { host, vms, ..*snapshot }, &mut self.state)
    }

    /// The lower of both limits is the VM's.
    fn merge(&mut self, plan: &mut Plan, mut ours: Decision, over: Overcommitted, policy: &str) {
        let Some(theirs) = plan.decisions.iter_mut().find(|decision| decision.id == ours.id) else { return };
        let Some(limit) = ours.limit_bytes.filter(|_| ours.action == Action::Limit) else {
            if ours.action == Action::Leave && theirs.action == Action::Free {
                // It is held, perhaps because of its first limit: that stays.
                *theirs = ours;
            }
            return;
        };
        self.limited.insert(ours.id.clone());
        if theirs.action == Action::Limit && theirs.limit_bytes.is_some_and(|other| other <= limit) {
            return;
        }
        let (has_bytes, promised_bytes, free_bytes) = (over.has.0, over.promised.0, over.free().0);
        ours.reasons.insert(0, Reason::Pool { policy: policy.into(), has_bytes, promised_bytes, free_bytes });
        *theirs = ours;
    }

    /// No VM is limited for the pool: one of which the plan says nothing keeps no limit of that kind.
    fn release(&mut self, plan: &mut Plan, snapshot: &Snapshot) {
        let limited = std::mem::take(&mut self.limited);
        let all = snapshot.vms.iter().zip(&mut plan.decisions);
        for (_, decision) in all.filter(|(vm, _)| vm.held.is_none() && limited.contains(&vm.id)) {
            if decision.action == Action::Leave {
                decision.action = Action::Free;
            }
        }
    }
}

/// Bytes of a VM that come on demand.
fn size(vm: &Vm) -> u64 {
    let regions = vm.regions().into_iter().filter(|region| !region.is_removed() && region.is_on_demand());
    regions.map(|region| region.pages().bytes().0).sum()
}

fn part(served: &Served) -> Option<(String, Part)> {
    let (vm, ours) = (&served.vm, size(&served.vm));
    if ours == 0 {
        return None;
    }
    let regions = vm.regions().into_iter().filter(|region| !region.is_removed() && !region.is_on_demand());
    let elsewhere = regions.map(|region| region.resident().map_or(0, |pages| pages.bytes().0)).sum();
    let touched = vm.stats().get(Counter::FaultFresh) + vm.stats().get(Counter::FaultZero);
    Some((vm.state.id().to_string(), Part { elsewhere_bytes: elsewhere, first_touches: touched }))
}

/// How much of what VMs on demand were promised they can have far, all of them at the same time, if this VM had these
/// settings and this limit. Pages are counted as if none could be compressed, and what others put into a store later is
/// not foreseen.
pub fn far(host: &Host, with: Option<(&Served, Settings, Option<Bytes>)>) -> Bytes {
    let (mut all, mut to_files, mut to_others, mut far) = (0, 0, 0, 0u64);
    for served in host.all() {
        let (vm, ours) = (&served.vm, size(&served.vm));
        let holds = [Hold::Pinned, Hold::Kept, Hold::Shared, Hold::NoZap];
        if ours == 0 || vm.views().is_empty() || holds.iter().any(|hold| vm.is_held_for(*hold)) {
            continue;
        }
        let changed = with.filter(|(changed, ..)| changed.vm.state.id() == vm.state.id());
        let (settings, limit) = changed
            .map_or_else(|| (operator::read(vm.state.settings()), vm.state.limit()), |(_, of, limit)| (of, limit));
        let most = limit.map_or(ours, |limit| limit.0.min(ours));
        let keeps = match settings.effective_shares() {
            0 => ours,
            _ => settings.effective_reservation(most).max(ours / KEEPS),
        };
        let can_go = ours.saturating_sub(keeps);
        let has = |number| vm.stores.tiers().iter().any(|tier| tier.number == number);
        all += can_go;
        to_files += if has(FILE_STORE) { can_go } else { 0 };
        to_others += if has(REMOTE_STORE) { can_go } else { 0 };
        far += vm.stats().get(Counter::Far) * PAGE_SIZE as u64;
    }
    let left = |limit: Bytes, used: Bytes| limit.0.saturating_sub(used.0);
    let files = left(host.file_budget.limit(), host.file_budget.used()).min(to_files);
    let others = host.remote.as_ref().map_or(0, |remote| left(remote.budget.limit(), remote.budget.used()));
    let room = far + left(host.budget.limit(), host.budget.used()) + files + others.min(to_others);
    Bytes(all.min(room))
}

/// Why a VM cannot have these settings and this limit, if the pool could not keep what it promised then.
pub fn refusal(host: &Host, served: &Served, settings: Settings, limit: Option<Bytes>) -> Option<String> {
    let over = host.pool.demand.overcommitted().filter(|_| size(&served.vm) > 0)?;
    let (before, after) = (far(host, None), far(host, Some((served, settings, limit))));
    let missing = over.promised.0.saturating_sub(over.has.0).saturating_sub(after.0);
    (after < before && missing > 0).then(|| {
        format!(
            "the pool has {} for VMs on demand, which were promised {}: they could have {after} far at most then, and \
             {} are missing",
            over.has,
            over.promised,
            Bytes(missing)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::MIB;

    const OVER: Overcommitted = Overcommitted { has: Bytes(GIB), promised: Bytes(2 * GIB), touched: Bytes(1000 * MIB) };
    const GIB: u64 = ballast_base::GIB;

    fn vm(id: &str, resident: u64) -> VmSample {
        VmSample {
            id: id.into(),
            size_bytes: GIB,
            resident_bytes: resident,
            page_bytes: 2 * MIB,
            ..VmSample::default()
        }
    }

    fn decision(id: &str, action: Action, limit_bytes: Option<u64>) -> Decision {
        Decision { id: id.into(), action, limit_bytes, ..Decision::default() }
    }

    #[test]
    fn vms_on_demand_alone_share_what_the_pool_has_less_what_is_to_be_left_and_none_is_left_with_nothing() {
        let snapshot = Snapshot {
            at_ms: 1000,
            vms: vec![vm("all", 1000 * MIB), vm("none", 0), vm("other", GIB)],
            ..Snapshot::default()
        };
        let part = |first_touches| Part { elsewhere_bytes: 0, first_touches };
        let parts = BTreeMap::from([("all".to_owned(), part(500)), ("none".to_owned(), part(0))]);
        for policy in Kind::ALL {
            let setup = Setup { policy, ..Setup::default() };
            let plan = Division::default().divide(&parts, &snapshot, OVER, &setup).expect("a plan");
            let limits: Vec<u64> = plan.decisions.iter().map(|decision| decision.limit_bytes.expect("one")).collect();
            let ours = OVER.has.0 - OVER.high().0;
            assert_eq!(plan.decisions.iter().map(|decision| &*decision.id).collect::<Vec<_>>(), ["all", "none"]);
            assert!(limits.iter().sum::<u64>() <= ours, "{policy}: {limits:?}");
            assert!(limits.iter().all(|limit| *limit >= ours / 8), "{policy}: {limits:?}");
        }
    }

    #[test]
    fn the_lower_limit_holds_a_vm_that_is_held_is_left_alone_and_in_the_end_no_limit_of_the_pool_is_left() {
        let mut division = Division::default();
        let ids = ["free", "lower", "higher", "held", "silent"];
        let theirs = [
            (Action::Free, None),
            (Action::Limit, Some(MIB)),
            (Action::Limit, Some(GIB)),
            (Action::Free, None),
            (Action::Leave, None),
        ];
        let decisions = ids.iter().zip(theirs).map(|(id, (action, limit))| decision(id, action, limit)).collect();
        let mut plan = Plan { decisions, ..Plan::default() };
        for id in ids {
            let ours = match id {
                "held" => decision(id, Action::Leave, None),
                _ => decision(id, Action::Limit, Some(2 * MIB)),
            };
            division.merge(&mut plan, ours, OVER, "maestro");
        }
        let now = |plan: &Plan| plan.decisions.iter().map(|now| (now.action, now.limit_bytes)).collect::<Vec<_>>();
        let ours = (Action::Limit, Some(2 * MIB));
        assert_eq!(now(&plan), [ours, (Action::Limit, Some(MIB)), ours, (Action::Leave, None), ours]);
        let why = plan.decisions[0].reasons[0].to_string();
        assert!(why.contains("has 1 GiB for VMs on demand, which were promised 2 GiB, and 24 MiB are left"), "{why}");
        // A program that says nothing of a VM leaves it what the pool gave it, which is no more.
        let mut last = Plan { decisions: ids.map(|id| decision(id, Action::Leave, None)).to_vec(), ..Plan::default() };
        division.release(&mut last, &Snapshot { vms: ids.map(|id| vm(id, 0)).to_vec(), ..Snapshot::default() });
        let (free, left) = ((Action::Free, None), (Action::Leave, None));
        assert_eq!(now(&last), [free, free, free, left, free]);
        assert!(division.limited.is_empty());
    }
}
