//! Tests of the locks between members and sweeps of a group.

use super::*;
use crate::{Attach, Budget, DurableStore, GroupMember};
use ballast_base::Bytes;
use ballast_testkit::pages;

fn group() -> (OwnedFd, Arc<Group>) {
    let arena = ballast_handover::arena::create().expect("memfd");
    let group = Group::open(&arena, RamOptions::new(Budget::new(Bytes(64 << 20)))).expect("a group");
    (arena, group)
}

fn join(group: &Arc<Group>, arena: &OwnedFd, vm: VmId, new: bool) -> GroupMember {
    let opening = memfd::reopen(arena.as_fd(), true).expect("an opening");
    ballast_handover::arena::announce(&opening, vm).expect("announce");
    group.join(vm, opening, new).expect("room for a member")
}

#[test]
fn a_member_that_moves_while_others_are_missing_waits_for_no_put_and_blocks_none() {
    let (arena, group) = group();
    let [moves, missing] = [1, 2].map(|vm| join(&group, &arena, VmId([vm; 16]), false));
    // A put of another member is going on.
    let put = group.using();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            moves.attach_shared(&mut std::iter::empty());
            moves.attach_exclusive(&mut std::iter::empty());
            moves.recover(&mut std::iter::empty()).expect("recovered");
        });
    });
    drop(put);
    assert_eq!(group.usage().missing, 1);
    drop(missing);
}

#[test]
fn a_sweep_gets_the_exclusive_lock_while_a_member_with_many_pages_joins() {
    let (arena, group) = group();
    let member = join(&group, &arena, VmId([1; 16]), false);
    let region = RegionKey { vm: VmId([1; 16]), number: 0 };
    let PutOutcome::Stored(handle) = group.put(&pages::incompressible(1)) else { panic!("there is room") };
    let turns = std::cell::Cell::new(0);
    let live = || {
        let has_turn = || turns.set(turns.get() + u32::from(group.using.try_write().is_ok()));
        (0..3 * PIECE as u64).map(|page| (region.page(PageIdx(page)), handle)).inspect(move |_| has_turn())
    };
    member.attach_shared(&mut live());
    assert_eq!(turns.replace(0), 3);
    member.recover(&mut live()).expect("recovered");
    assert_eq!(turns.get(), 3);
}

#[test]
fn while_a_sweep_runs_no_thread_punches_slabs_and_afterwards_they_are_returned() {
    let arena = ballast_handover::arena::create().expect("memfd");
    let group = Group::open(&arena, RamOptions::new(Budget::new(Bytes(64 << 20)))).expect("a group");
    let slabs = || group.usage().bytes / crate::SLAB_BYTES as u64;
    let handles: Vec<Handle> = (0..256)
        .map(|page| match group.put(&pages::incompressible(page)) {
            PutOutcome::Stored(handle) => handle,
            other => panic!("a put came to {other:?}"),
        })
        .collect();
    let full = slabs();
    handles.into_iter().for_each(|handle| group.drop_reference(handle));
    assert_eq!(slabs(), full, "emptied slabs wait");
    let sweep = group.using.write().expect("no panic");
    group.tidy();
    assert_eq!(slabs(), full, "the sweep has them");
    drop(sweep);
    group.tidy();
    assert!(slabs() < full, "{} of {full} slabs are left", slabs());
}
