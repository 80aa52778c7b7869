//! How much of what VMs on demand were promised they can have far, all at the same time.
//!
//! Before: the pool is asked for memory on demand, or an operator changes a VM that has some. After: the pool promises
//! no more than it has and can be far. Threads: the pool's, without its lock; those of the API, under the governor's
//! lock. Units: bytes.
//! Promise: pages count as if none could be compressed, and stores only with the room that other VMs and the host
//! leave. What others put into a store later is not foreseen.

use ballast_base::Bytes;
use ballast_base::store::{FILE_STORE, RAM_STORE, REMOTE_STORE};
use ballast_pager::vm::{Hold, Vm};
use ballast_policy::Settings;

use super::demand::sizes;
use super::{operator, sample};
use crate::engine::host::Host;
use crate::engine::served::Served;

/// A VM keeps 1/KEEPS of its memory, so that it can go on.
const KEEPS: u64 = 8;

/// A VM in a kind of store.
#[derive(Clone, Copy, Debug, Default)]
struct Use {
    /// How much of its memory on demand can be there; 0 for a VM that has none, or if the store refuses pages now.
    can_go: u64,
    /// What its store takes.
    stored: u64,
    /// Its other memory, which may be what is stored.
    elsewhere: u64,
}

/// What VMs on demand can have in a kind of store: what they have there, and what is free less what the budget leaves
/// to each of the other VMs (`part`), but at most `free`.
fn room(limit: Bytes, used: Bytes, part: Bytes, free: u64, vms: &[Use]) -> u64 {
    let (ours, others): (Vec<Use>, Vec<Use>) = vms.iter().partition(|vm| vm.can_go > 0);
    let has: u64 = ours.iter().map(|vm| vm.stored.saturating_sub(vm.elsewhere)).sum();
    let theirs: u64 = others.iter().map(|vm| part.0.saturating_sub(vm.stored)).sum();
    let left = limit.0.saturating_sub(used.0).saturating_sub(theirs);
    (has + left.min(free)).min(ours.iter().map(|vm| vm.can_go).sum())
}

/// How much of a VM's memory on demand can be far.
fn can_go(vm: &Vm, ours: u64, settings: Settings, limit: Option<Bytes>) -> u64 {
    let holds = [Hold::Pinned, Hold::Kept, Hold::Shared, Hold::HugePages, Hold::NoZap];
    if vm.views().is_empty() || vm.state.kept() || holds.iter().any(|hold| vm.is_held_for(*hold)) {
        return 0;
    }
    let most = limit.map_or(ours, |limit| limit.0.min(ours));
    let keeps = match settings.effective_shares() {
        0 => ours,
        _ => settings.effective_reservation(most).max(ours / KEEPS),
    };
    ours.saturating_sub(keeps)
}

/// What VMs on demand can have far if this VM had these settings and this limit.
pub fn far(host: &Host, with: Option<(&Served, Settings, Option<Bytes>)>) -> Bytes {
    let sizes = sizes(host, &host.pool.demand.files());
    if sizes.is_empty() {
        return Bytes(0);
    }
    let (mut all, mut uses) = (0, [(); 3].map(|()| Vec::new()));
    for served in host.all() {
        let (vm, id) = (&served.vm, served.vm.state.id());
        let ours = sizes.iter().find(|(other, _)| other.vm.state.id() == id).map_or(0, |(_, ours)| *ours);
        let changed = with.filter(|(changed, ..)| changed.vm.state.id() == id);
        let (settings, limit) = changed
            .map_or_else(|| (operator::read(vm.state.settings()), vm.state.limit()), |(_, of, limit)| (of, limit));
        let goes = if ours == 0 { 0 } else { can_go(vm, ours, settings, limit) };
        all += goes;
        let elsewhere = vm.size().bytes().0.saturating_sub(ours);
        for tier in vm.stores.tiers() {
            let at = [RAM_STORE, FILE_STORE, REMOTE_STORE].iter().position(|number| *number == tier.number);
            let can_go = if tier.store.refuses() { 0 } else { goes };
            if let Some(uses) = at.and_then(|at| uses.get_mut(at)) {
                uses.push(Use { can_go, stored: tier.store.usage().bytes, elsewhere });
            }
        }
    }
    let [ram, file, remote] = uses;
    let of = |budget: &ballast_store::Budget, free, vms: &[Use]| {
        room(budget.limit(), budget.used(), budget.part(), free, vms)
    };
    // The budget may say more than the host has beside the pool.
    let ram = of(&host.budget, sample::spare_bytes(), &ram);
    let file = of(&host.file_budget, u64::MAX, &file);
    let cluster = host.remote.as_ref().filter(|remote| remote.cluster.silence().is_none()).map(|remote| &remote.budget);
    let remote = cluster.map_or(0, |budget| room(budget.limit(), budget.used(), Bytes(0), u64::MAX, &remote));
    Bytes(all.min(ram + file + remote))
}

/// Why a VM cannot have these settings and this limit, if the pool could not keep what it promised then.
pub fn refusal(host: &Host, served: &Served, settings: Settings, limit: Option<Bytes>) -> Option<String> {
    let over = host.pool.demand.overcommitted()?;
    let (vm, id) = (&served.vm, served.vm.state.id());
    let sizes = sizes(host, &host.pool.demand.files());
    let ours = sizes.iter().find(|(other, _)| other.vm.state.id() == id).map(|(_, ours)| *ours)?;
    if can_go(vm, ours, settings, limit) >= can_go(vm, ours, operator::read(vm.state.settings()), vm.state.limit()) {
        return None;
    }
    let (before, after) = (far(host, None), far(host, Some((served, settings, limit))));
    let here = over.has.0.saturating_sub(over.high().0);
    let missing = over.promised.0.saturating_sub(here).saturating_sub(after.0);
    (after < before && missing > 0).then(|| {
        format!(
            "the pool has {} for VMs on demand, which were promised {}, and {} are to be left for touches: they could \
             have {after} far at most then, and {} are missing",
            over.has,
            over.promised,
            over.high(),
            Bytes(missing)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Use = Use { can_go: 50, stored: 10, elsewhere: 0 };

    #[test]
    fn a_store_counts_with_the_bytes_that_vms_on_demand_take_there_and_those_that_are_free_for_them() {
        let of = |vms: &[Use]| room(Bytes(80), Bytes(40), Bytes(10), u64::MAX, vms);
        assert_eq!(of(&[OURS]), 50, "10 that they have, 40 that are free");
        assert_eq!(of(&[OURS, Use { stored: 30, ..Use::default() }]), 50, "the other one has had its part");
        assert_eq!(of(&[OURS, Use { stored: 4, ..Use::default() }]), 44, "6 are kept for the other one");
        assert_eq!(of(&[Use { elsewhere: 7, ..OURS }]), 43, "7 may be of its other memory");
        assert_eq!(of(&[Use { can_go: 20, ..OURS }]), 20, "no more than can go");
        assert_eq!(of(&[Use { can_go: 0, ..OURS }]), 0, "a VM that is held, or whose store refuses pages");
    }

    #[test]
    fn a_store_in_ram_has_no_more_room_than_the_host_can_spare_and_one_above_its_limit_has_none() {
        assert_eq!(room(Bytes(80), Bytes(40), Bytes(0), 3, &[OURS]), 13);
        assert_eq!(room(Bytes(20), Bytes(40), Bytes(0), 3, &[OURS]), 10);
    }
}
