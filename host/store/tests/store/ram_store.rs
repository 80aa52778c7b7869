//! The RAM store's promises, through its public interface and its arena file.
//!
//! Before: a store on a small arena. After: contents, counts, charge and the host's memory are right.
//! Threads: some tests use several stores on one arena, like several processes. Units: bytes, pages, slabs of 64 KiB.
//! Promise: no sleeps, no timing.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_store::{
    Budget, Codec, GetOutcome, Handle, NearStore, PutOutcome, RamOptions, RamStore, SLAB_BYTES, Store,
};
use ballast_sys::memfd;
use ballast_testkit::{conformance, pages};
use proptest::prelude::*;

use crate::common::{MIB, get, key, must_hold, put};

fn options(budget: &Arc<Budget>, codec: Codec) -> RamOptions {
    RamOptions { codec, max_slabs: 1024, ..RamOptions::new(Arc::clone(budget)) }
}

fn arena_bytes(slabs: u32) -> u64 {
    u64::from(slabs) * SLAB_BYTES as u64
}

fn small_store(limit: u64) -> (RamStore, OwnedFd, Arc<Budget>) {
    let budget = Budget::new(Bytes(limit));
    let (store, fd) = RamStore::create(options(&budget, Codec::Lz4)).expect("create");
    (store, fd, budget)
}

fn reopen(fd: &OwnedFd, budget: &Arc<Budget>) -> RamStore {
    RamStore::open(fd.try_clone().expect("dup"), options(budget, Codec::Lz4)).expect("open")
}

#[test]
fn the_ram_store_passes_the_conformance_kit_with_every_codec() {
    for codec in [Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zstd { level: -1 }] {
        conformance::run_near(&|| {
            let budget = Budget::new(Bytes(2 * MIB));
            Box::new(RamStore::create(options(&budget, codec)).expect("create").0)
        });
    }
}

#[test]
fn memory_that_waits_for_tidy_is_charged_and_reused_first_and_returned_by_tidy() {
    let budget = Budget::new(Bytes(64 * MIB));
    let (store, fd) = RamStore::create(options(&budget, Codec::Lz4)).expect("create");
    let churn = |pages: u64| {
        let handles: Vec<_> = (0..pages).map(|page| put(&store, page, &pages::incompressible(page))).collect();
        let full = budget.used();
        for (page, handle) in (0u64..).zip(&handles) {
            must_hold(&store, page, *handle, &pages::incompressible(page));
            store.free(key(page), *handle);
        }
        full
    };
    let full = churn(300);
    assert_eq!(budget.used(), full, "nothing went back yet");
    assert!(memfd::resident(&fd).expect("stat").bytes() >= full);
    assert_eq!(churn(300), full, "what waits is used again");
    store.tidy();
    assert_eq!(budget.used().0, 0);
    assert!(memfd::resident(&fd).expect("stat").bytes().0 <= 64 * 1024);
    store.validate().expect("valid");
    // All emptied memory may wait for its punch while others have budget ...
    let full = churn(8192);
    assert_eq!(budget.used(), full);
    store.tidy();
    assert_eq!(budget.used().0, 0);
    // ... and at most 16 MiB while the budget is short.
    budget.set_limit(full);
    churn(8192);
    assert!(budget.used().0 <= full.0 - full.0 / 16, "{} of {full} wait", budget.used());
    budget.set_limit(Bytes(64 * MIB));
    // A dropped store changes nothing: the next one, which may already be open, recovers.
    let waits = budget.used();
    drop(store);
    assert!(memfd::resident(&fd).expect("stat").bytes() >= waits);
    let store = RamStore::open(fd.try_clone().expect("dup"), options(&budget, Codec::Lz4)).expect("open");
    store.sweep(std::iter::empty());
    assert_eq!((store.usage().bytes, budget.used().0), (0, 0));
    store.validate().expect("valid");
}

#[test]
fn memory_that_waits_for_tidy_is_returned_if_the_budget_is_too_small_to_reuse_it() {
    let budget = Budget::new(Bytes(64 * MIB));
    let (store, fd) = RamStore::create(options(&budget, Codec::Lz4)).expect("create");
    let handles: Vec<_> = (0..300).map(|page| put(&store, page, &pages::incompressible(page))).collect();
    handles.iter().enumerate().for_each(|(page, handle)| store.free(key(page as u64), *handle));
    budget.set_limit(Bytes(0));
    let header = memfd::resident(&fd).expect("stat").bytes().0 - budget.used().0;
    while budget.used().0 > 0 {
        let refused = store.put(key(0), &pages::incompressible(0));
        assert!(matches!(refused, PutOutcome::Full), "{refused:?}");
        assert_eq!(memfd::resident(&fd).expect("stat").bytes().0, budget.used().0 + header);
    }
    store.validate().expect("valid");
}

#[test]
fn the_arenas_of_a_thousand_vms_fit_into_one_process() {
    // A process has 128 TiB of addresses, and an index of a file store takes half of the smallest arena's.
    let slabs = RamOptions::slabs_for(Bytes(1 << 30));
    assert!(1000 * (arena_bytes(slabs) + (32 << 30)) < 128 << 40);
    let budget = Budget::new(Bytes(1 << 30));
    let options = RamOptions { max_slabs: slabs, ..RamOptions::new(budget) };
    let stores: Vec<_> = (0..1000).map(|_| RamStore::create(options.clone()).expect("create").0).collect();
    for (number, store) in (0..).zip(&stores) {
        let bytes = pages::incompressible(number);
        must_hold(store, number, put(store, number, &bytes), &bytes);
    }
}

#[test]
fn an_arena_has_space_for_four_times_the_ram_of_its_vm() {
    let gib = |gib: u64| arena_bytes(RamOptions::slabs_for(Bytes(gib << 30))) >> 30;
    assert_eq!([0, 1, 16, 17, 64, 1 << 20].map(gib), [64, 64, 64, 68, 256, 256]);
}

#[test]
fn same_filled_pages_cost_nothing_even_with_no_budget() {
    let (store, fd, _) = small_store(0);
    let before = memfd::resident(&fd).expect("stat");
    let handles: Vec<_> = (0..1000).map(|page| put(&store, page, &pages::filled(page << 32 | page))).collect();
    assert_eq!(memfd::resident(&fd).expect("stat"), before);
    assert_eq!((store.usage().pages, store.usage().bytes), (1000, 0));
    assert_eq!(store.put(key(0), &pages::filled(1 << 32)), PutOutcome::Full, "a 64-bit pattern needs a small blob");
    for (page, handle) in (0u64..).zip(&handles) {
        must_hold(&store, page, *handle, &pages::filled(page << 32 | page));
    }
}

#[test]
fn the_compression_ratio_can_be_read_from_the_counters() {
    let (store, _fd, _) = small_store(64 * MIB);
    put(&store, 0, &[0; PAGE_SIZE]);
    put(&store, 1, &pages::incompressible(1));
    put(&store, 2, &pages::half_compressible(1));
    let usage = store.usage_detail();
    assert_eq!((usage.same_filled_puts, usage.raw_puts, usage.compressed_puts), (1, 1, 1));
    assert_eq!((usage.same_filled_pages, usage.blob_pages, usage.slabs), (1, 2, 2));
    assert!((1900..2500).contains(&usage.compressed_out_bytes), "{usage:?}");
}

#[test]
fn stores_share_a_budget_and_a_live_change_of_the_limit_counts_at_once() {
    let (first, _fd, budget) = small_store(2 * SLAB_BYTES as u64);
    let (second, _fd2) = RamStore::create(options(&budget, Codec::Lz4)).expect("create");
    let a = put(&first, 0, &pages::incompressible(0));
    put(&second, 0, &pages::incompressible(0));
    assert_eq!(second.put(key(1), &pages::half_compressible(1)), PutOutcome::Full, "another class needs another slab");
    budget.set_limit(Bytes(3 * SLAB_BYTES as u64));
    put(&second, 1, &pages::half_compressible(1));
    first.free(key(0), a);
    first.tidy();
    assert_eq!(budget.used().0, 2 * SLAB_BYTES as u64);
    drop(second);
    assert_eq!(budget.used().0, 0, "a store that is closed is no longer paid for");
}

#[test]
fn opening_an_arena_above_the_limit_is_no_error_and_puts_return_full() {
    let (store, fd, _) = small_store(64 * MIB);
    let handles: Vec<_> = (0..100).map(|page| put(&store, page, &pages::incompressible(page))).collect();
    let held = store.usage().bytes;
    drop(store);
    let tight = Budget::new(Bytes(SLAB_BYTES as u64));
    let store = reopen(&fd, &tight);
    assert_eq!(tight.used().0, held);
    assert_eq!(store.put(key(500), &pages::half_compressible(0)), PutOutcome::Full);
    for (page, handle) in (0u64..).zip(&handles) {
        must_hold(&store, page, *handle, &pages::incompressible(page));
        store.free(key(page), *handle);
    }
    store.tidy();
    put(&store, 500, &pages::half_compressible(0));
    assert_eq!(tight.used().0, SLAB_BYTES as u64);
}

#[test]
fn a_file_that_was_never_formatted_becomes_an_empty_store_even_after_a_death() {
    let budget = Budget::new(Bytes(MIB));
    // An engine that died left the file empty, or died after it set the size.
    for size in [0, 4096] {
        let fd = memfd::create("ballast-test", Bytes(size)).expect("memfd");
        let store = reopen(&fd, &budget);
        assert_eq!(store.sweep(std::iter::empty()), ballast_store::Recovered::default());
        let handle = put(&store, 1, &pages::incompressible(1));
        drop(store);
        must_hold(&reopen(&fd, &budget), 1, handle, &pages::incompressible(1));
    }
}

#[test]
fn recover_keeps_live_pages_and_frees_leaked_ones() {
    let (store, fd, budget) = small_store(64 * MIB);
    let handles: Vec<_> = (0..2000).map(|page| put(&store, page, &pages::mixed(page))).collect();
    // The owner "dies": of every third page, it put the bytes but did not write down the handle.
    drop(store);
    let store = reopen(&fd, &budget);
    let is_live = |page: &u64| !page.is_multiple_of(3);
    let nothing = Handle::new(1023 << 10 | 5 | 1 << 32).expect("handle");
    let live = || (0u64..).zip(&handles).filter(|(page, _)| is_live(page)).map(|(_, handle)| *handle);
    let report = store.sweep(live().chain([nothing]));
    store.validate().expect("valid");
    assert_eq!((report.kept_blobs + report.same_filled, report.missing), (live().count() as u64, 1));
    assert!(report.freed_slots > 300, "{report:?}");
    assert_eq!(store.usage().pages, live().count() as u64);
    assert_eq!(get(&store, 0, nothing).0, GetOutcome::Absent);
    for (page, handle) in (0u64..).zip(&handles).filter(|(page, _)| is_live(page)) {
        must_hold(&store, page, *handle, &pages::mixed(page));
        store.free(key(page), *handle);
    }
    store.tidy();
    assert_eq!((store.usage().pages, store.usage().bytes, budget.used().0), (0, 0, 0));
    assert_eq!(store.sweep(std::iter::empty()).freed_slots, 0, "nothing is left to free");
    store.validate().expect("valid");
}

#[test]
fn two_stores_on_one_arena_share_it_without_losing_a_page() {
    let (first, fd, budget) = small_store(64 * MIB);
    let second_budget = Budget::new(Bytes(64 * MIB));
    let second = reopen(&fd, &second_budget);
    std::thread::scope(|scope| {
        for thread in 0..4u64 {
            let (mine, other) = if thread % 2 == 0 { (&first, &second) } else { (&second, &first) };
            scope.spawn(move || {
                for round in 0..30 {
                    let page = |n: u64| thread << 20 | round << 10 | n;
                    let handles: Vec<_> = (0..50).map(|n| put(mine, page(n), &pages::mixed(page(n)))).collect();
                    // The other store reads and frees: one engine may put a page, and the next one restores it.
                    for (n, handle) in (0u64..).zip(handles) {
                        must_hold(other, page(n), handle, &pages::mixed(page(n)));
                        other.free(key(page(n)), handle);
                    }
                }
            });
        }
    });
    [&first, &second].into_iter().for_each(|store| store.tidy());
    for (store, budget) in [(&first, &budget), (&second, &second_budget)] {
        assert_eq!((store.usage().pages, store.usage().bytes), (0, 0));
        assert_eq!(budget.used().0, 0, "usage() tells the budget what the other process did");
        store.validate().expect("valid");
    }
}

#[test]
fn a_damaged_blob_is_not_passed_to_another_store_and_differs_from_its_copy() {
    let (store, fd, _budget) = small_store(MIB);
    let (bytes, mut out, mut blob) = (pages::incompressible(1), [0; PAGE_SIZE], Vec::new());
    let handle = put(&store, 1, &bytes);
    assert_eq!(store.get_blob(key(1), handle, &mut out, &mut blob), GetOutcome::Found);
    assert!(out == bytes && store.still_has(key(1), handle, &bytes, &blob));
    let (file, mut arena) = (File::from(memfd::reopen(fd.as_fd(), true).expect("reopen")), vec![0; 4 << 20]);
    let len = file.read_at(&mut arena, 0).expect("read");
    let start = arena[..len].windows(blob.len()).position(|window| window == blob).expect("the blob is in the arena");
    for at in (0..blob.len()).step_by(7) {
        file.write_all_at(&[blob[at] ^ 1], (start + at) as u64).expect("write");
        assert_ne!(store.get_blob(key(1), handle, &mut out, &mut Vec::new()), GetOutcome::Found, "byte {at}");
        assert!(!store.still_has(key(1), handle, &bytes, &blob), "byte {at}");
        file.write_all_at(&blob[at..=at], (start + at) as u64).expect("write");
    }
    assert!(store.still_has(key(1), handle, &bytes, &blob));
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64),
    Free(prop::sample::Index),
    Reopen,
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        60 => any::<u64>().prop_map(Step::Put),
        40 => any::<prop::sample::Index>().prop_map(Step::Free),
        1 => Just(Step::Reopen),
        1 => Just(Step::Recover),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_of_puts_and_frees_keeps_contents_and_counts(steps in prop::collection::vec(step(), 1..400)) {
        // A small store: 17 size classes and 12 slabs, so some puts return `Full`.
        let (mut store, fd, budget) = small_store(12 * SLAB_BYTES as u64);
        let mut kept: Vec<(u64, u64, Handle)> = Vec::new();
        for (page, step) in (0u64..).zip(steps) {
            match step {
                Step::Put(seed) => match store.put(key(page), &pages::mixed(seed)) {
                    PutOutcome::Stored(handle) => kept.push((page, seed, handle)),
                    other => prop_assert_eq!(other, PutOutcome::Full),
                },
                Step::Free(which) if !kept.is_empty() => {
                    let (page, seed, handle) = kept.swap_remove(which.index(kept.len()));
                    must_hold(&store, page, handle, &pages::mixed(seed));
                    store.free(key(page), handle);
                }
                Step::Free(_) => {}
                Step::Reopen => {
                    drop(store);
                    store = reopen(&fd, &budget);
                }
                Step::Recover => {
                    let report = store.sweep(kept.iter().map(|(.., handle)| *handle));
                    prop_assert_eq!((report.freed_slots, report.missing), (0, 0));
                }
            }
            store.validate().expect("valid");
            prop_assert_eq!(store.usage().pages, kept.len() as u64);
            prop_assert_eq!(store.usage().bytes, budget.used().0);
            prop_assert!(store.usage().bytes <= budget.limit().0);
        }
        for (page, seed, handle) in kept {
            must_hold(&store, page, handle, &pages::mixed(seed));
            store.free(key(page), handle);
        }
        store.tidy();
        prop_assert_eq!((store.usage().pages, store.usage().bytes), (0, 0));
    }

    #[test]
    fn no_garbage_in_the_arena_and_no_handle_can_do_harm(
        seed: u64, bits in prop::collection::vec(0..=Handle::MAX, 64)
    ) {
        // One slab for each size class, so that everything fits.
        let (store, fd, budget) = small_store(17 * SLAB_BYTES as u64);
        let originals: Vec<_> = (0..60).map(|page| (page, put(&store, page, &pages::mixed(page ^ seed)))).collect();
        let file = File::from(fd);
        // Damages a few pages of the header, the table and the slabs.
        let size = memfd::size(&file).expect("stat").0;
        let table_end = 4096 + 1024 * 128;
        for n in 0..24 {
            let noise = pages::incompressible(seed.wrapping_add(n));
            let pick = u64::from_le_bytes(*noise.first_chunk().expect("8 bytes"));
            let offset = match n % 3 {
                0 => pick % table_end,
                1 => table_end.next_multiple_of(SLAB_BYTES as u64) + pick % (17 * SLAB_BYTES as u64),
                _ => 4096 + pick % 17 * 128,
            };
            let len = if n % 3 == 2 { 1 + pick as usize % 128 } else { 1 + pick as usize % PAGE_SIZE };
            file.write_all_at(&noise[..len.min((size - offset) as usize)], offset).expect("write");
        }
        for (page, handle) in &originals {
            let (outcome, out) = get(&store, *page, *handle);
            prop_assert!(outcome != GetOutcome::Found || out == pages::mixed(*page ^ seed), "wrong bytes were found");
        }
        for handle in bits.into_iter().filter_map(Handle::new) {
            let _ = get(&store, 1, handle);
            // Small slab and slot numbers, too: they name something more often.
            let near = Handle::new(handle.bits() & 0x7f_0000_3fff).expect("handle");
            let _ = get(&store, 1, near);
            store.free(key(1), handle);
            store.free(key(1), near);
        }
        for page in 100..150 {
            if let PutOutcome::Stored(handle) = store.put(key(page), &pages::mixed(page)) {
                let (outcome, out) = get(&store, page, handle);
                prop_assert!(outcome != GetOutcome::Found || out == pages::mixed(page));
            }
        }
        let _ = (store.usage(), store.usage_detail(), store.validate());
        // Whatever the arena had, recover makes a sound and empty store of it.
        store.sweep(std::iter::empty());
        store.validate().expect("valid");
        prop_assert_eq!((store.usage().pages, store.usage().bytes, budget.used().0), (0, 0, 0));
        let handle = put(&store, 0, &pages::half_compressible(seed));
        must_hold(&store, 0, handle, &pages::half_compressible(seed));
        prop_assert!(memfd::is_shmem(file.as_fd()).expect("statfs"));
    }
}
