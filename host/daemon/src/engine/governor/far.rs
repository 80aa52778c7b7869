//! How much of their promised memory VMs on demand can have far: all VMs together, and those of each node.
//!
//! Before: the pool gets a request for memory on demand, or an operator changes a VM that has some. After: the pool
//! promises no more than the memory that it has plus the memory that can be far.
//! Threads: the pool's, without its lock; those of the API, which change settings. Both hold the governor's lock, so
//! that a promise and a simultaneous change see each other. Units: bytes.
//! Promise: pages count as incompressible, and of the stores only the space counts that other VMs and the host leave.
//! It is not foreseen that others fill a store later.

use std::collections::BTreeMap;

use ballast_base::Bytes;
use ballast_base::store::{FILE_STORE, RAM_STORE, REMOTE_STORE, SlowStore};
use ballast_pager::vm::{Hold, Vm};
use ballast_policy::Settings;
use ballast_pool::{Far, Overcommitted};

use super::demand::sizes;
use super::{operator, sample};
use crate::engine::host::Host;
use crate::engine::pool::demand::Over;
use crate::engine::served::Served;

/// A VM keeps 1/KEEPS of its memory, so that it can run.
const KEEPS: u64 = 8;

#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// How much of its memory on demand can be in the store; 0 without such memory, or if the store refuses pages now.
    can_go: u64,
    stored: u64,
    /// Its other memory, which may be the part that is stored.
    elsewhere: u64,
}

/// How much VMs on demand can have in a kind of store: the bytes that they have there, plus the free bytes less those
/// that the budget reserves for each of the other VMs (`part`), but at most `free` more.
fn room(limit: Bytes, used: Bytes, part: Bytes, free: u64, vms: &[Use]) -> u64 {
    let (ours, others): (Vec<Use>, Vec<Use>) = vms.iter().partition(|vm| vm.can_go > 0);
    let has: u64 = ours.iter().map(|vm| vm.stored.saturating_sub(vm.elsewhere)).sum();
    let theirs: u64 = others.iter().map(|vm| part.0.saturating_sub(vm.stored)).sum();
    let left = limit.0.saturating_sub(used.0).saturating_sub(theirs);
    (has + left.min(free)).min(ours.iter().map(|vm| vm.can_go).sum())
}

pub fn settings_of(vm: &Vm) -> Settings {
    let settings = operator::read(vm.state.settings());
    if vm.state.kept() { kept(settings) } else { settings }
}

pub fn kept(settings: Settings) -> Settings {
    Settings { shares: Some(0), ..settings }
}

/// How much of a VM's memory on demand can be far, regardless of its limit: memory above a limit must be able to go.
fn can_go(vm: &Vm, ours: u64, settings: Settings) -> u64 {
    let holds = [Hold::Pinned, Hold::Kept, Hold::Shared, Hold::HugePages];
    if vm.views().is_empty() || holds.iter().any(|hold| vm.is_held_for(*hold)) {
        return 0;
    }
    let keeps = match settings.effective_shares() {
        0 => ours,
        _ => settings.effective_reservation(ours).max(ours / KEEPS),
    };
    ours.saturating_sub(keeps)
}

/// How much VMs on demand could have far, if the VM of `with` had those settings. A VM of several nodes does not count,
/// because its far pages are not counted by node.
pub fn far(host: &Host, with: Option<(&Served, Settings)>) -> Far {
    let sizes = sizes(host, &host.pool.demand.files());
    let (mut nodes, mut uses) = (BTreeMap::<u32, Bytes>::new(), [(); 3].map(|()| Vec::new()));
    if sizes.iter().all(|(_, ours)| ours.bytes() == 0) {
        return Far::default();
    }
    for (served, ours) in &sizes {
        let (vm, id, node, ours) = (&served.vm, served.vm.state.id(), ours.node(), ours.bytes());
        let changed = with.filter(|(changed, ..)| changed.vm.state.id() == id);
        let settings = changed.map_or_else(|| settings_of(vm), |(_, settings)| settings);
        let goes = node.map_or(0, |_| can_go(vm, ours, settings));
        if let Some(node) = node {
            nodes.entry(node).or_default().0 += goes;
        }
        let elsewhere = vm.size().bytes().0.saturating_sub(ours);
        for tier in vm.stores.tiers() {
            let at = [RAM_STORE, FILE_STORE, REMOTE_STORE].iter().position(|number| *number == tier.number);
            let can_go = if tier.slow.is_some_and(SlowStore::refuses) { 0 } else { goes };
            if let Some(uses) = at.and_then(|at| uses.get_mut(at)) {
                uses.push(Use { can_go, stored: tier.store.usage().bytes, elsewhere });
            }
        }
    }
    let [ram, file, remote] = uses;
    let of = |budget: &ballast_store::Budget, free, vms: &[Use]| {
        room(budget.limit(), budget.used(), budget.part(), free, vms)
    };
    // The budget may exceed the memory that the host has beside the pool.
    let ram = of(&host.budget, sample::spare_bytes(), &ram);
    let file = of(&host.file_budget, u64::MAX, &file);
    let cluster = host.remote.as_ref().filter(|remote| remote.cluster.silence().is_none()).map(|remote| &remote.budget);
    let remote = cluster.map_or(0, |budget| room(budget.limit(), budget.used(), Bytes(0), u64::MAX, &remote));
    let all = nodes.values().map(|far| far.0).sum::<u64>();
    Far { all: Bytes(all.min(ram + file + remote)), nodes }
}

/// The first node that has promised more than it has and its VMs can have far, or `None` for all nodes together; how
/// much the VMs can have far; and how much is missing.
fn lack(over: &Over, far: &Far) -> Option<(Option<u32>, Bytes, Bytes)> {
    let here = |over: &Overcommitted| over.has.0.saturating_sub(over.high().0);
    let needs = |over: &Overcommitted| over.promised.0.saturating_sub(here(over));
    let lack = |node, far: Bytes, needs: u64| (needs > far.0).then(|| (node, far, Bytes(needs - far.0)));
    let one = over
        .iter()
        .find_map(|(numa, over)| lack(Some(*numa), far.nodes.get(numa).copied().unwrap_or_default(), needs(over)));
    one.or_else(|| lack(None, far.all, over.values().map(needs).sum()))
}

/// Why a VM cannot change from the first to the second settings: the pool could then not keep its promises, or does not
/// know its promises yet. The caller holds the governor's lock until the settings are changed.
pub fn refusal(host: &Host, served: &Served, [before, after]: [Settings; 2]) -> Option<String> {
    let (vm, id, all) = (&served.vm, served.vm.state.id(), served.vm.size().bytes().0);
    if can_go(vm, all, after) >= can_go(vm, all, before) || !vm.regions().iter().any(|region| region.is_on_demand()) {
        return None;
    }
    if !host.pool.demand.is_known() {
        return Some("this engine does not know yet what its pool has promised: try again in a moment".into());
    }
    let over = host.pool.demand.overcommitted();
    let sizes = sizes(host, &host.pool.demand.files());
    let (_, ours) = sizes.iter().find(|(other, _)| other.vm.state.id() == id)?;
    let (node, ours) = (ours.node()?, ours.bytes());
    if over.is_empty() || can_go(vm, ours, after) >= can_go(vm, ours, before) {
        return None;
    }
    let [before, after] = [before, after].map(|settings| far(host, Some((served, settings))));
    let (at, far, missing) = lack(&over, &after)?;
    let is_less = match at {
        Some(at) => at == node,
        None => after.all < before.all,
    };
    let over = || over.iter().filter(|(numa, _)| at.is_none_or(|at| at == **numa)).map(|(_, over)| over);
    let sum = |of: fn(&Overcommitted) -> Bytes| Bytes(over().map(|over| of(over).0).sum());
    is_less.then(|| {
        format!(
            "the pool has {} for VMs on demand{}, which were promised {}, and {} are to be left for touches: they \
             could have {far} far at most then, and {missing} are missing",
            sum(|over| over.has),
            at.map_or(String::new(), |at| format!(" of node {at}")),
            sum(|over| over.promised),
            sum(Overcommitted::high),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::GIB;

    const OURS: Use = Use { can_go: 50, stored: 10, elsewhere: 0 };

    #[test]
    fn a_store_counts_with_what_vms_on_demand_have_there_and_what_is_free_for_them() {
        let of = |vms: &[Use]| room(Bytes(80), Bytes(40), Bytes(10), u64::MAX, vms);
        assert_eq!(of(&[OURS]), 50, "10 that they have, 40 that are free");
        assert_eq!(of(&[OURS, Use { stored: 30, ..Use::default() }]), 50, "the other one has had its part");
        assert_eq!(of(&[OURS, Use { stored: 4, ..Use::default() }]), 44, "6 are kept for the other one");
        assert_eq!(of(&[Use { elsewhere: 7, ..OURS }]), 43, "7 may be of its other memory");
        assert_eq!(of(&[Use { can_go: 20, ..OURS }]), 20, "no more than can go");
        assert_eq!(of(&[Use { can_go: 0, ..OURS }]), 0, "a VM that is held, or whose store refuses pages");
    }

    #[test]
    fn a_node_lacks_what_its_vms_cannot_have_far_and_all_vms_what_they_cannot() {
        let over =
            |has, promised| Overcommitted { has: Bytes(has * GIB), promised: Bytes(promised), touched: Bytes(0) };
        let high = over(8, 0).high().0;
        let nodes = Over::from([(0, over(8, 9 * GIB)), (2, over(8, 10 * GIB))]);
        let far =
            |all, one, other| Far { all: Bytes(all), nodes: BTreeMap::from([(0, Bytes(one)), (2, Bytes(other))]) };
        let lack = |all, one, other| lack(&nodes, &far(all, one, other));
        assert_eq!(lack(3 * GIB + 2 * high, 2 * GIB, 4 * GIB), None);
        assert_eq!(lack(9 * GIB, GIB, 4 * GIB), Some((Some(0), Bytes(GIB), Bytes(high))));
        assert_eq!(lack(9 * GIB, 2 * GIB, 2 * GIB), Some((Some(2), Bytes(2 * GIB), Bytes(high))));
        assert_eq!(lack(3 * GIB, 2 * GIB, 4 * GIB), Some((None, Bytes(3 * GIB), Bytes(2 * high))));
    }

    #[test]
    fn a_store_in_ram_has_at_most_the_hosts_spare_memory_and_none_above_its_limit() {
        assert_eq!(room(Bytes(80), Bytes(40), Bytes(0), 3, &[OURS]), 13);
        assert_eq!(room(Bytes(20), Bytes(40), Bytes(0), 3, &[OURS]), 10);
    }
}
