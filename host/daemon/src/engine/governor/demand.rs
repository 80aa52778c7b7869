//! Memory on demand from a pool that has promised more than it has. When little is left for touches, the pool's memory
//! is divided among the VMs on demand, by the policy and the settings that divide the host's memory among all VMs.
//!
//! Each node that has promised too much is divided separately, among the VMs that have all of their memory on demand
//! there: a page for a touch must be of one node, but a limit makes a VM give up pages of any node. So a VM of several
//! nodes gets no limit for the pool, and each of its nodes keeps all memory that it was promised there.
//!
//! Before: a plan for the host, or none. After: the plan has the lower of both limits for these VMs, and the reclaim
//! workers make room.
//! Threads: the governor's; [`far`](super::far) asks for [`sizes`]. Units: bytes.
//! Promise: an operator's limit and reservation hold. While at least twice the reserve for touches is left, no VM is
//! limited for the pool. However much other VMs touch, no VM gets less than a quarter of an equal part of the memory
//! that is not reserved, and all VMs can have their minimum at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use ballast_base::Bytes;
use ballast_pager::vm::stats::Counter;
use ballast_policy::is_left_alone;
use ballast_policy::{Action, Decision, HostSample, Kind, Plan, Reason, Setup, Snapshot, State, VmSample};
use ballast_pool::Overcommitted;
use ballast_sys::memfd::FileId;

use super::guarded::guarded;
use crate::engine::host::Host;
use crate::engine::pool::demand::Promised;
use crate::engine::served::{SMALLEST_LIMIT, Served};

const DEFAULT: Kind = Kind::Maestro;
/// A VM has at least 1/LEAST of an equal part of the divided memory.
const LEAST: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Divisions(BTreeMap<u32, Division>);

#[derive(Debug, Default)]
struct Division {
    state: State,
    limited: BTreeSet<String>,
    divides: bool,
}

struct Part {
    touched_bytes: u64,
    elsewhere_bytes: u64,
    /// Faults for pages that were not far.
    first_touches: u64,
}

#[derive(Default)]
struct Parts {
    alone: BTreeMap<String, Part>,
    /// Memory of this node that was promised to VMs of several nodes and that they have not touched.
    untouched_bytes: u64,
}

impl Parts {
    fn of_node(numa: u32, sizes: &[(Arc<Served>, Ours)], promised: &Promised) -> Self {
        let mut parts = Self::default();
        for (served, ours) in sizes.iter().filter(|(_, ours)| ours.0.contains_key(&numa)) {
            if ours.node() == Some(numa) {
                parts.alone.extend([part(served, ours.bytes(), promised)]);
                continue;
            }
            let touched = served.vm.resident_at_once_in(|file| promised.get(&file).is_some_and(|(of, _)| *of == numa));
            let touched = touched.map_or(0, |pages| pages.bytes().0);
            parts.untouched_bytes += ours.0[&numa].saturating_sub(touched);
        }
        parts
    }
}

impl Divisions {
    pub fn divides(&self) -> bool {
        self.0.values().any(|division| division.divides)
    }

    pub fn limits(&self, id: &str) -> bool {
        self.0.values().any(|division| division.divides && division.limited.contains(id))
    }

    /// Adds the limits for the pool to this plan. Returns messages for operators when a division begins or ends.
    pub fn add(&mut self, plan: &mut Plan, snapshot: &Snapshot, host: &Host, setup: &Setup) -> Vec<String> {
        let mut over = host.pool.demand.overcommitted();
        for numa in over.keys() {
            self.0.entry(*numa).or_default();
        }
        if self.0.is_empty() {
            return Vec::new();
        }
        let promised = host.pool.demand.files();
        let sizes = sizes(host, &promised);
        let add = |(numa, division): (&u32, &mut Division)| {
            let parts = || Parts::of_node(*numa, &sizes, &promised);
            let said = division.add(plan, snapshot, over.remove(numa), parts, setup)?;
            Some(format!("node {numa}: {said}"))
        };
        let said = self.0.iter_mut().filter_map(add).collect();
        self.0.retain(|_, division| division.divides || !division.limited.is_empty());
        said
    }
}

impl Division {
    fn add(
        &mut self,
        plan: &mut Plan,
        snapshot: &Snapshot,
        over: Option<Overcommitted>,
        parts: impl FnOnce() -> Parts,
        setup: &Setup,
    ) -> Option<String> {
        let was = self.divides;
        self.divides = over.is_some_and(|over| over.free() < if was { Bytes(2 * over.high().0) } else { over.low() });
        let Some(over) = over.filter(|_| self.divides) else {
            self.release(plan, snapshot);
            return was.then(|| "VMs on demand are not limited for the pool any more: enough is left".into());
        };
        let parts = parts();
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
                parts.alone.len()
            )
        })
    }

    fn divide(&mut self, parts: &Parts, snapshot: &Snapshot, over: Overcommitted, setup: &Setup) -> Option<Plan> {
        let with = |vm: &VmSample| {
            let part = parts.alone.get(&vm.id)?;
            // A page that was never touched is wanted as a far page is.
            Some(VmSample { restores: vm.restores + part.first_touches, ..vm.clone() })
        };
        let vms: Vec<VmSample> = snapshot.vms.iter().filter_map(with).collect();
        let elsewhere = parts.alone.values().map(|part| part.elsewhere_bytes).sum::<u64>();
        // Pages of files that no VM of this engine has, or of parts outside its regions, cannot be reclaimed.
        let touched = parts.alone.values().map(|part| part.touched_bytes).sum();
        let others = over.touched.0.saturating_sub(touched) + parts.untouched_bytes;
        let ours = over.has.0.saturating_sub(over.high().0).saturating_sub(others);
        let budget_bytes = ours + elsewhere;
        let (alone, limited): (Vec<_>, Vec<_>) = vms.iter().partition(|vm| is_left_alone(vm));
        let reserved = |vm: &VmSample| vm.settings.effective_reservation(vm.most_bytes());
        let taken: u64 = alone.iter().map(|vm| vm.resident_bytes).chain(limited.iter().map(|vm| reserved(vm))).sum();
        let equal = budget_bytes.saturating_sub(taken).min(ours) / limited.len().max(1) as u64;
        let smallest_bytes = (equal / LEAST).max(SMALLEST_LIMIT.0);
        let host = HostSample {
            budget_bytes,
            free_bytes: over.free().0,
            min_free_bytes: over.low().0,
            smallest_bytes,
            ..snapshot.host
        };
        let policy = if setup.policy == Kind::None { DEFAULT } else { setup.policy };
        guarded(&Setup { policy, ..*setup }, &Snapshot { host, vms, ..*snapshot }, &mut self.state)
    }

    fn merge(&mut self, plan: &mut Plan, mut ours: Decision, over: Overcommitted, policy: &str) {
        let Some(theirs) = plan.decisions.iter_mut().find(|decision| decision.id == ours.id) else { return };
        let Some(limit) = ours.limit_bytes.filter(|_| ours.action == Action::Limit) else {
            if ours.action == Action::Leave && theirs.action == Action::Free {
                // The VM is held, perhaps because of its first limit, so it keeps its limit.
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

    /// Ends all limits for the pool: a VM without a decision in the plan must not keep its limit.
    fn release(&mut self, plan: &mut Plan, snapshot: &Snapshot) {
        let limited = std::mem::take(&mut self.limited);
        let all = snapshot.vms.iter().zip(&mut plan.decisions);
        for (vm, decision) in all.filter(|(vm, _)| limited.contains(&vm.id)) {
            match (decision.action, &vm.held) {
                (Action::Leave, Some(_)) => drop(self.limited.insert(vm.id.clone())),
                (Action::Leave, None) => decision.action = Action::Free,
                _ => {}
            }
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Ours(BTreeMap<u32, u64>);

impl Ours {
    pub fn bytes(&self) -> u64 {
        self.0.values().sum()
    }

    pub fn node(&self) -> Option<u32> {
        self.0.keys().next().copied().filter(|_| self.0.len() == 1)
    }
}

/// All VMs, each with its bytes on demand: of each file of the pool, at most the bytes that were promised in it.
pub(super) fn sizes(host: &Host, promised: &Promised) -> Vec<(Arc<Served>, Ours)> {
    let mut left = promised.clone();
    let ours = |served: Arc<Served>| {
        let regions = served.vm.regions().into_iter().filter(|region| !region.is_removed() && !region.is_unplugged());
        let ours = claim(&mut left, regions.flat_map(|region| region.places()));
        (served, ours)
    };
    host.all().into_iter().map(ours).collect()
}

/// Subtracts these places from the promises that are left, and returns the subtracted bytes by node.
fn claim(left: &mut Promised, places: impl Iterator<Item = (FileId, u64, u64)>) -> Ours {
    let mut ours = BTreeMap::<u32, u64>::new();
    for (file, start, end) in places {
        let Some((numa, left)) = left.get_mut(&file) else { continue };
        let bytes = left.0.min(end.saturating_sub(start));
        left.0 -= bytes;
        if bytes > 0 {
            *ours.entry(*numa).or_default() += bytes;
        }
    }
    Ours(ours)
}

fn part(served: &Served, ours: u64, promised: &Promised) -> (String, Part) {
    let vm = &served.vm;
    let [here, elsewhere] = [true, false].map(|here| {
        let pages = vm.resident_at_once_in(|file| promised.contains_key(&file) == here);
        pages.map_or(0, |pages| pages.bytes().0)
    });
    let first_touches = vm.stats().get(Counter::FaultFresh) + vm.stats().get(Counter::FaultZero);
    (vm.state.id().to_string(), Part { touched_bytes: here.min(ours), elsewhere_bytes: elsewhere, first_touches })
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
    fn vms_on_demand_share_the_pools_memory_except_its_reserve_and_none_gets_nothing() {
        let snapshot = Snapshot {
            at_ms: 1000,
            vms: vec![vm("all", 1000 * MIB), vm("none", 0), vm("other", GIB)],
            ..Snapshot::default()
        };
        let part = |touched, first_touches| Part { touched_bytes: touched, elsewhere_bytes: 0, first_touches };
        let alone = BTreeMap::from([("all".to_owned(), part(1000 * MIB, 500)), ("none".to_owned(), part(0, 0))]);
        let parts = Parts { alone, untouched_bytes: 0 };
        for policy in [Kind::None, Kind::Maestro, Kind::Pressure, Kind::Gain] {
            let setup = Setup { policy, ..Setup::default() };
            let plan = Division::default().divide(&parts, &snapshot, OVER, &setup).expect("a plan");
            let limits: Vec<u64> = plan.decisions.iter().map(|decision| decision.limit_bytes.expect("one")).collect();
            let ours = OVER.has.0 - OVER.high().0;
            assert_eq!(plan.decisions.iter().map(|decision| &*decision.id).collect::<Vec<_>>(), ["all", "none"]);
            assert!(limits.iter().sum::<u64>() <= ours, "{policy}: {limits:?}");
            assert!(limits.iter().all(|limit| *limit >= ours / 8), "{policy}: {limits:?}");
        }
    }

    /// The minimum of each VM, and the limits, for VMs whose resident memory is what they have touched.
    fn limits(vms: Vec<VmSample>, over: Overcommitted) -> (u64, Vec<Option<u64>>) {
        limits_beside(vms, over, 0)
    }

    /// Like `limits`, with VMs of several nodes that have not touched `untouched_bytes` of their promised memory.
    fn limits_beside(vms: Vec<VmSample>, over: Overcommitted, untouched_bytes: u64) -> (u64, Vec<Option<u64>>) {
        let part = |vm: &VmSample| Part { touched_bytes: vm.resident_bytes, elsewhere_bytes: 0, first_touches: 0 };
        let parts = Parts { alone: vms.iter().map(|vm| (vm.id.clone(), part(vm))).collect(), untouched_bytes };
        let snapshot = Snapshot { at_ms: 1000, vms, ..Snapshot::default() };
        let plan = Division::default().divide(&parts, &snapshot, over, &Setup::default()).expect("a plan");
        (plan.divided_bytes, plan.decisions.iter().map(|decision| decision.limit_bytes).collect())
    }

    #[test]
    fn memory_touched_by_a_client_that_is_no_vm_here_is_not_divided() {
        let over = Overcommitted { has: Bytes(16 * GIB), promised: Bytes(22 * GIB), touched: Bytes(16 * GIB) };
        let attached = VmSample { size_bytes: 14 * GIB, ..vm("attached", 8 * GIB) };
        let (divided, limits) = limits(vec![attached], over);
        assert!(divided <= 8 * GIB - over.high().0, "{divided}");
        let limit = limits[0].expect("a limit");
        assert!(limit <= divided, "what it has goes far, so that its next touch finds a page: {limit}");
    }

    #[test]
    fn memory_promised_to_a_vm_of_several_nodes_is_left_for_its_touches() {
        let over = Overcommitted { has: Bytes(8 * GIB), promised: Bytes(10 * GIB), touched: Bytes(8 * GIB) };
        // It has touched 1 GiB, and 2 GiB more may follow.
        let alone = VmSample { size_bytes: 7 * GIB, ..vm("alone", 7 * GIB) };
        let (_, limits) = limits_beside(vec![alone], over, 2 * GIB);
        assert!(limits[0].expect("a limit") <= 5 * GIB - over.high().0, "{limits:?}");
    }

    #[test]
    fn the_minimum_of_all_vms_fits_the_pools_memory_whatever_is_reserved() {
        let over = Overcommitted { has: Bytes(8 * GIB), promised: Bytes(9 * GIB), touched: Bytes(8 * GIB) };
        let ours = over.has.0 - over.high().0;
        let other = |resident| VmSample { size_bytes: 2 * GIB, ..vm("other", resident) };
        let large = |settings| VmSample { size_bytes: 7 * GIB, settings, ..vm("large", 7 * GIB) };
        let guaranteed = ballast_policy::Settings { class: ballast_policy::Class::Guaranteed, ..Default::default() };
        let alone = ballast_policy::Settings { shares: Some(0), ..Default::default() };
        let (_, reserved) = limits(vec![other(GIB), large(guaranteed)], over);
        assert_eq!(reserved[1], Some(7 * GIB));
        assert!(reserved.iter().flatten().sum::<u64>() <= ours, "{reserved:?}");
        let (_, left) = limits(vec![other(GIB), large(alone)], over);
        assert!(left[1].is_none() && left[0].expect("a limit") + 7 * GIB <= ours, "{left:?}");
    }

    #[test]
    fn a_file_counts_only_if_the_pool_promised_it_once_and_up_to_the_promise() {
        let file = |ino| FileId { dev: 1, ino };
        let mut left = Promised::from([(file(1), (0, Bytes(8 * MIB))), (file(2), (1, Bytes(4 * MIB)))]);
        let ours = |node, mib| Ours(BTreeMap::from([(node, mib * MIB)]));
        // A file that its VMM made longer, and a file of the VMM's own.
        let places = [(file(1), 0, 6 * MIB), (file(9), 0, GIB), (file(1), 6 * MIB, 100 * MIB)];
        assert_eq!(claim(&mut left, places.into_iter()), ours(0, 8));
        let again = claim(&mut left, [(file(1), 0, 8 * MIB)].into_iter());
        assert_eq!((again.bytes(), again.node()), (0, None), "attached again under another name");
        let other = claim(&mut left, [(file(2), 0, 2 * MIB)].into_iter());
        assert_eq!((other.node(), other), (Some(1), ours(1, 2)));
    }

    #[test]
    fn the_lower_limit_holds_a_held_vm_is_left_alone_and_at_the_end_no_limit_is_left() {
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
        // A program's plan that leaves a VM out leaves it its limit for the pool, which is no higher.
        let mut last = Plan { decisions: ids.map(|id| decision(id, Action::Leave, None)).to_vec(), ..Plan::default() };
        let mut vms = ids.map(|id| vm(id, 0)).to_vec();
        vms[0].held = Some("for a moment".into());
        division.release(&mut last, &Snapshot { vms: vms.clone(), ..Snapshot::default() });
        let (free, left) = ((Action::Free, None), (Action::Leave, None));
        assert_eq!(now(&last), [left, free, free, left, free]);
        vms[0].held = None;
        division.release(&mut last, &Snapshot { vms, ..Snapshot::default() });
        assert_eq!(now(&last), [free, free, free, left, free], "it goes when the VM is not held any more");
        assert!(division.limited.is_empty());
    }
}
