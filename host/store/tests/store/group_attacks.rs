//! A group whose members break their promises: words that name the blobs of others, frees of pages that were never put,
//! members that join and end while others read, and damage in each part of a blob that several words name.
//!
//! Before: `group` passed. After: the words of each honest member always named their bytes, and nothing was left when
//! all had ended.
//! Threads: the test's, or several. Units: pages; a content is a number.

use std::collections::HashSet;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_handover::arena;
use ballast_store::{
    Budget, DurableStore, GetOutcome, Group, GroupMember, Handle, IoContext, NearStore, PageBytes, PageKey, RamOptions,
    Store,
};
use ballast_sys::memfd;
use ballast_testkit::pages;
use proptest::prelude::*;

use crate::common::stored;
use crate::group::{SLABS, join, key};

const HONEST: VmId = VmId([1; 16]);
const HOSTILE: VmId = VmId([2; 16]);
/// Bytes of a slot for a page that does not compress: its header and the page.
const SLOT: u64 = 16 + PAGE_SIZE as u64;

fn group() -> (OwnedFd, Arc<Group>) {
    let arena = arena::create().expect("memfd");
    let options = RamOptions { max_slabs: SLABS, ..RamOptions::new(Budget::new(Bytes(16 << 20))) };
    let group = Group::open(&arena, options).expect("a group");
    (arena, group)
}

fn put(store: &GroupMember, vm: VmId, contents: u64) -> Vec<Handle> {
    (0..contents).map(|content| stored(store.put(key(vm, content), &bytes(content)))).collect()
}

fn bytes(content: u64) -> PageBytes {
    if content.is_multiple_of(2) { pages::incompressible(content) } else { pages::half_compressible(content) }
}

/// Reads a page; if it is found, checks that it has this content.
fn get(store: &GroupMember, key: PageKey, handle: Handle, content: u64) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key, handle, &mut out, IoContext::GUEST);
    assert!(outcome != GetOutcome::Found || out == bytes(content), "{key:?} has other bytes than {content}");
    outcome
}

fn all_is_there(store: &GroupMember, handles: &[Handle]) {
    for (page, handle) in (0..).zip(handles) {
        assert_eq!(get(store, key(HONEST, page), *handle, page), GetOutcome::Found, "page {page}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn whatever_a_member_claims_to_name_and_frees_other_members_keep_their_pages(
        claims in prop::collection::vec((0usize..12, 0u64..4, prop_oneof![Just(0u64), any::<u64>()]), 1..40),
        comes_first in any::<bool>(),
    ) {
        let (arena, group) = group();
        let honest = join(&group, &arena, HONEST, true);
        let handles = put(&honest, HONEST, 12);
        // Words of the hostile member: handles of the honest one, some with changed bits.
        let forged = |bits: u64| Handle::new(bits & (Handle::MAX - 1));
        let claims: Vec<(PageKey, Handle)> = claims.into_iter()
            .filter_map(|(at, page, flips)| Some((key(HOSTILE, page), forged(handles[at].bits() ^ flips)?))).collect();
        let hostile = join(&group, &arena, HOSTILE, false);
        if comes_first {
            hostile.recover(&mut claims.iter().copied()).expect("no device");
        }
        for (claimed, handle) in &claims {
            // Each page is freed twice, and under the honest member's key.
            let foreign = key(HONEST, claimed.page.0);
            [*claimed, *claimed, foreign].iter().for_each(|key| hostile.free(*key, *handle));
            hostile.get(foreign, *handle, &mut [0; PAGE_SIZE], IoContext::GUEST);
            hostile.get(*claimed, *handle, &mut [0; PAGE_SIZE], IoContext::GUEST);
            hostile.tidy();
        }
        all_is_there(&honest, &handles);
        // The claims once more, and puts by the hostile member of half of the honest member's contents.
        hostile.recover(&mut claims.iter().copied()).expect("no device");
        let again = put(&hostile, HOSTILE, 6);
        claims.iter().for_each(|(key, handle)| hostile.free(*key, *handle));
        all_is_there(&honest, &handles);
        again.iter().zip(0..).for_each(|(handle, page)| hostile.free(key(HONEST, page), *handle));
        hostile.end();
        all_is_there(&honest, &handles);
        group.validate().expect("consistent");
        honest.end();
        prop_assert_eq!((group.usage().references, group.usage().blobs, group.usage().missing), (0, 0, 0));
    }
}

#[test]
fn members_that_come_and_end_while_another_reads_their_pages_cost_it_nothing() {
    const CONTENTS: u64 = 16;
    let (arena, group) = group();
    let honest = join(&group, &arena, HONEST, true);
    let handles = put(&honest, HONEST, CONTENTS);
    let ends = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let leavers: Vec<_> = (0..2)
            .map(|thread| {
                let (group, arena, handles) = (&group, &arena, &handles);
                scope.spawn(move || {
                    for round in 0..60 {
                        let vm = VmId([10 + 100 * thread + round; 16]);
                        let member = join(group, arena, vm, true);
                        let own = put(&member, vm, CONTENTS);
                        assert_eq!(&own, handles, "the same blobs");
                        // Some are freed one by one, the others with their member.
                        let freed = own.iter().zip(0..).take(usize::from(round) % 8);
                        freed.for_each(|(handle, page)| member.free(key(vm, page), *handle));
                        member.end();
                        // The VM is no longer a member, and has no pages.
                        assert_eq!(get(&member, key(vm, 9), own[9], 9), GetOutcome::Absent);
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            while !ends.load(Ordering::Relaxed) {
                all_is_there(&honest, &handles);
                honest.tidy();
            }
        });
        let ended: Vec<_> = leavers.into_iter().map(|leaver| leaver.join()).collect();
        ends.store(true, Ordering::Relaxed);
        assert!(ended.iter().all(Result::is_ok));
    });
    all_is_there(&honest, &handles);
    group.validate().expect("consistent");
    honest.end();
    assert_eq!((group.usage().references, group.usage().blobs), (0, 0));
}

#[test]
fn a_flipped_bit_in_a_shared_blob_never_gives_other_bytes_and_costs_no_other_blob() {
    let (arena, group) = group();
    let [one, other] = [HONEST, HOSTILE].map(|vm| join(&group, &arena, vm, true));
    let (handles, twins) = (put(&one, HONEST, 3), put(&other, HOSTILE, 3));
    assert_eq!(handles, twins);
    let file = std::fs::File::from(memfd::reopen(arena.as_fd(), true).expect("reopen"));
    // Content 0 is in the first slot of the first slab.
    let start = arena::GROUP.slabs_start(SLABS) as u64;
    let mut seen = HashSet::new();
    for at in (0..SLOT).filter(|at| *at < 64 || at.is_multiple_of(61) || *at > SLOT - 16) {
        let mut byte = [0];
        file.read_exact_at(&mut byte, start + at).expect("read");
        for bit in [1, 0x80] {
            file.write_all_at(&[byte[0] ^ bit], start + at).expect("write");
            let outcomes = [(&one, HONEST), (&other, HOSTILE)].map(|(store, vm)| get(store, key(vm, 0), handles[0], 0));
            assert_eq!(outcomes[0], outcomes[1], "byte {at}");
            seen.insert(format!("{:?}", outcomes[0]));
            assert!(outcomes[0] != GetOutcome::Found, "byte {at} is checked by nothing");
            (1..3).for_each(|page| {
                assert_eq!(get(&one, key(HONEST, page), handles[page as usize], page), GetOutcome::Found);
            });
            // A put of equal bytes stores a new blob.
            let again = stored(one.put(key(HONEST, 9), &bytes(0)));
            assert_eq!(get(&one, key(HONEST, 9), again, 0), GetOutcome::Found, "byte {at}");
            one.free(key(HONEST, 9), again);
        }
        file.write_all_at(&byte, start + at).expect("write");
        assert_eq!(get(&other, key(HOSTILE, 0), twins[0], 0), GetOutcome::Found, "byte {at} is as it was");
    }
    assert!(seen.contains("Corrupt"), "{seen:?}");
}

#[test]
fn two_engines_that_find_the_arena_new_format_it_once() {
    let options = || RamOptions { max_slabs: SLABS, ..RamOptions::new(Budget::new(Bytes(16 << 20))) };
    for round in 0..500 {
        let arena = arena::create().expect("memfd");
        let together = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            let engines = [HONEST, HOSTILE].map(|vm| {
                let (arena, together) = (&arena, &together);
                scope.spawn(move || {
                    together.wait();
                    let group = Group::open(arena, options()).expect("a group");
                    let member = join(&group, arena, vm, true);
                    let content = u64::from(vm.0[0]);
                    let handle = stored(member.put(key(vm, 0), &bytes(content)));
                    (group, member, vm, handle)
                })
            });
            let opened = engines.map(|engine| engine.join().expect("no panic"));
            for (_, member, vm, handle) in &opened {
                let mut page = bytes(0);
                let got = member.get(key(*vm, 0), *handle, &mut page, IoContext::GUEST);
                assert!(matches!(got, GetOutcome::Found), "round {round}: {got:?}");
                assert!(page == bytes(u64::from(vm.0[0])), "round {round}: wrong bytes");
            }
        });
    }
}

#[test]
fn a_member_gets_no_blob_that_its_page_does_not_name() {
    let (arena, group) = group();
    let [honest, hostile] = [HONEST, HOSTILE].map(|vm| join(&group, &arena, vm, true));
    let handle = put(&honest, HONEST, 1)[0];
    let (mut out, mut blob) = ([0; PAGE_SIZE], Vec::new());
    for (store, vm, page) in [(&hostile, HOSTILE, 0), (&hostile, HONEST, 0), (&honest, HONEST, 1)] {
        assert_eq!(store.get_blob(key(vm, page), handle, &mut out, &mut blob), GetOutcome::Absent);
        assert!(!store.still_has(key(vm, page), handle, &bytes(0), &blob));
    }
    assert_eq!(honest.get_blob(key(HONEST, 0), handle, &mut out, &mut blob), GetOutcome::Found);
    assert!(out == bytes(0) && honest.still_has(key(HONEST, 0), handle, &out, &blob));
}
