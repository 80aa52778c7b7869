//! Conformance: the checks that every store must pass.
//!
//! Before: a new store exists. After: its own tests call [`run`] with a way to make one.
//! Threads: one check uses four. Units: budgets are bytes; about 5000 pages are put in all.
//! Promise: a failed check panics with a sentence that says which promise of [`Store`] was broken.

use std::os::fd::BorrowedFd;

use ballast_base::store::{
    DurableStore, Ends, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, RegionKey, SlowStore,
    Store,
};
use ballast_base::wire::VmId;
use ballast_base::{PAGE_SIZE, PageIdx};

use crate::pages;

/// Check every promise of a [`NearStore`]. Each time, `make` returns an empty store with its own budget of 1 to 64 MiB.
pub fn run_near(make: &dyn Fn() -> Box<dyn NearStore>) {
    run(&|| make());
    a_page_is_known_by_its_form(&*make());
}

/// Check every promise of a [`SlowStore`].
pub fn run_slow(make: &dyn Fn() -> Box<dyn SlowStore>) {
    run(&|| make());
    a_page_that_was_begun_comes_back_or_is_busy(&*make());
}

fn run(make: &dyn Fn() -> Box<dyn DurableStore>) {
    every_kind_of_page_comes_back_as_often_as_it_is_asked_for(&*make());
    a_run_comes_back_as_a_run_and_page_by_page(&*make());
    another_key_never_gets_the_bytes(&*make());
    a_freed_handle_never_answers_with_another_pages_bytes(&*make());
    handles_that_were_never_given_out_are_harmless(&*make());
    full_keeps_nothing_and_ends_after_frees(&*make());
    what_no_word_names_is_swept_and_the_rest_stays(&*make());
    threads_get_their_own_bytes(&*make());
}

fn key(region: u32, page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: region }.page(PageIdx(page))
}

fn of_another_vm(key: PageKey) -> PageKey {
    RegionKey { vm: VmId([8; 16]), ..key.region }.page(key.page)
}

fn stored(store: &dyn Store, key: PageKey, bytes: &PageBytes) -> Handle {
    match store.put(key, bytes) {
        PutOutcome::Stored(handle) => handle,
        other => panic!("a put into a store with room answered {other:?}"),
    }
}

/// Tries of a get. A store may be busy: its disk or its nodes have other work.
const TRIES: usize = 100;

/// The outcome of a get, with the bytes if they were found. Repeats the get while the store is busy.
fn ask(store: &dyn Store, key: PageKey, handle: Handle) -> Result<Box<PageBytes>, GetOutcome> {
    let mut out = Box::new([0x5a; PAGE_SIZE]);
    match (0..TRIES)
        .map(|_| store.get(key, handle, &mut out, IoContext::GUEST))
        .find(|outcome| *outcome != GetOutcome::Busy)
    {
        Some(GetOutcome::Found) => Ok(out),
        other => Err(other.unwrap_or(GetOutcome::Busy)),
    }
}

fn must_hold(store: &dyn Store, key: PageKey, handle: Handle, bytes: &PageBytes) {
    match ask(store, key, handle) {
        Ok(found) => assert!(*found == *bytes, "{key:?} was restored with other bytes than were put"),
        Err(outcome) => panic!("{key:?} was put and not freed, and get returned {outcome:?}"),
    }
}

/// Bytes held once all emptied space has been returned.
fn bytes_held(store: &dyn Store) -> u64 {
    store.tidy();
    store.usage().bytes
}

fn must_be_empty(store: &dyn Store, bytes_when_new: u64) {
    store.tidy();
    let usage = store.usage();
    assert_eq!(usage.pages, 0, "everything was freed and pages are left: {usage:?}");
    assert_eq!(usage.bytes, bytes_when_new, "everything was freed and bytes are left: {usage:?}");
}

/// Does the page repeat one word of 32 bits? Such a page may be in its handle alone.
fn is_same_filled(bytes: &PageBytes) -> bool {
    bytes[4..] == bytes[..PAGE_SIZE - 4]
}

fn samples() -> Vec<PageBytes> {
    let mut samples = vec![
        [0; PAGE_SIZE],
        [0xff; PAGE_SIZE],
        pages::filled(0x1234_5678_1234_5678),
        pages::filled(0x0123_4567_89ab_cdef),
        pages::half_compressible(7),
        pages::incompressible(7),
    ];
    let mut last_byte_only = [0; PAGE_SIZE];
    last_byte_only[PAGE_SIZE - 1] = 1;
    samples.push(last_byte_only);
    samples.extend((0..64).map(pages::mixed));
    samples
}

fn every_kind_of_page_comes_back_as_often_as_it_is_asked_for(store: &dyn Store) {
    let bytes_when_new = bytes_held(store);
    let samples = samples();
    let handles: Vec<Handle> = (0u64..).zip(&samples).map(|(page, bytes)| stored(store, key(0, page), bytes)).collect();
    assert_eq!(store.usage().pages, samples.len() as u64, "pages are counted when they are put");
    for _ in 0..2 {
        for ((page, bytes), handle) in (0u64..).zip(&samples).zip(&handles) {
            must_hold(store, key(0, page), *handle, bytes);
        }
    }
    for (page, handle) in (0u64..).zip(&handles) {
        store.free(key(0, page), *handle);
    }
    must_be_empty(store, bytes_when_new);
}

fn a_page_is_known_by_its_form(store: &dyn NearStore) {
    let bytes_when_new = bytes_held(store);
    let (mut out, mut blob) = ([0; PAGE_SIZE], b"left over".to_vec());
    for (page, bytes) in (0u64..).zip(&samples()) {
        let handle = stored(store, key(0, page), bytes);
        assert_eq!(store.get_blob(key(0, page), handle, &mut out, &mut blob), GetOutcome::Found);
        assert!(out == *bytes && store.still_has(key(0, page), handle, &out, &blob), "page {page} is there");
        let other = pages::half_compressible(1000 + page);
        let replaced = stored(store, key(0, page), &other);
        assert!(!store.still_has(key(0, page), replaced, &out, &blob), "page {page} has other bytes there");
        store.free(key(0, page), handle);
        store.free(key(0, page), replaced);
    }
    must_be_empty(store, bytes_when_new);
}

fn a_page_that_was_begun_comes_back_or_is_busy(store: &dyn SlowStore) {
    let bytes_when_new = bytes_held(store);
    let samples = samples();
    let handles: Vec<Handle> = (0u64..).zip(&samples).map(|(page, bytes)| stored(store, key(0, page), bytes)).collect();
    let begun = |page: u64, handle| {
        let (watch, mut out) = (|_: BorrowedFd<'_>| (), [0x5a; PAGE_SIZE]);
        match store.get(key(0, page), handle, &mut out, IoContext::GUEST.ended_by(Ends::AtOnce(&watch))) {
            GetOutcome::Found => Some(out),
            GetOutcome::Busy => None,
            other => panic!("page {page}: a get at once is {other:?}"),
        }
    };
    for ((page, bytes), handle) in (0u64..).zip(&samples).zip(&handles) {
        assert!(
            begun(page, *handle).is_none_or(|out| out == *bytes),
            "page {page} came with other bytes than were put"
        );
        if store.begin(key(0, page), *handle, &|_| ()) {
            let out = (0..TRIES).find_map(|_| begun(page, *handle));
            assert!(out.is_none_or(|out| out == *bytes), "page {page} came with other bytes than were put");
        }
        // A get, and a free, while a read of the page is under way.
        store.begin(key(0, page), *handle, &|_| ());
        must_hold(store, key(0, page), *handle, bytes);
        store.begin(key(0, page), *handle, &|_| ());
        store.free(key(0, page), *handle);
        let handle = stored(store, key(0, page), &pages::mixed(page + 1000));
        let out = (0..TRIES).find_map(|_| begun(page, handle));
        assert!(out.is_none_or(|out| out == pages::mixed(page + 1000)), "page {page} came with bytes of before");
        must_hold(store, key(0, page), handle, &pages::mixed(page + 1000));
        store.free(key(0, page), handle);
    }
    must_be_empty(store, bytes_when_new);
}

fn a_run_comes_back_as_a_run_and_page_by_page(store: &dyn Store) {
    let bytes_when_new = bytes_held(store);
    let content: Vec<PageBytes> = (0..70).map(pages::mixed).collect();
    let mut outcomes = vec![PutOutcome::Busy];
    store.put_run(key(2, 1000), &content, &mut outcomes);
    let handles: Vec<Handle> = outcomes[1..]
        .iter()
        .map(|outcome| match outcome {
            PutOutcome::Stored(handle) => *handle,
            other => panic!("a run put into a store with room answered {other:?}"),
        })
        .collect();
    assert_eq!((handles.len(), outcomes[0]), (content.len(), PutOutcome::Busy), "one outcome for each page, appended");
    for (page, (handle, bytes)) in (1000..).zip(handles.iter().zip(&content)) {
        must_hold(store, key(2, page), *handle, bytes);
    }
    // Every third page is freed. The whole run is read, and the other pages must not be shifted.
    let gone = |index: usize| index.is_multiple_of(3);
    for index in (0..handles.len()).filter(|index| gone(*index)) {
        store.free(key(2, 1000 + index as u64), handles[index]);
    }
    let mut out = vec![[0x5a; PAGE_SIZE]; content.len()];
    let mut tries =
        (0..TRIES).map(|_| store.get_run(&key(2, 1000).run(handles.iter().copied()), &mut out, IoContext::GUEST));
    let outcomes = tries.find(|outcomes| !outcomes.contains(&GetOutcome::Busy)).expect("it is not busy for ever");
    drop(tries);
    assert_eq!(outcomes.len(), content.len(), "one outcome for each page");
    for (index, outcome) in outcomes.iter().enumerate() {
        let found = *outcome == GetOutcome::Found;
        assert!(found || gone(index), "page {index} of a run was not freed, and get returned {outcome:?}");
        assert!(!found || out[index] == content[index], "page {index} of a run was restored with other bytes");
    }
    for index in (0..handles.len()).filter(|index| !gone(*index)) {
        store.free(key(2, 1000 + index as u64), handles[index]);
    }
    must_be_empty(store, bytes_when_new);
}

fn another_key_never_gets_the_bytes(store: &dyn Store) {
    let mut same_filled_found = 0;
    for (page, bytes) in (0u64..).zip(&samples()) {
        let (own, handle) = (key(3, page), stored(store, key(3, page), bytes));
        for other in [
            key(3, page + 1),
            key(4, page),
            key(0, 0),
            key(3, page | 1 << 31),
            key(page as u32 + 5, 3),
            of_another_vm(own),
        ] {
            match ask(store, other, handle) {
                Err(GetOutcome::Absent | GetOutcome::Corrupt) => {}
                Err(outcome) => panic!("{other:?} asked for the handle of {own:?} got {outcome:?}"),
                Ok(found) if is_same_filled(bytes) && *found == *bytes => same_filled_found += 1,
                Ok(_) => panic!("{other:?} got the bytes of {own:?}"),
            }
            if !is_same_filled(bytes) {
                store.free(other, handle);
            }
        }
        must_hold(store, own, handle, bytes);
        store.free(own, handle);
    }
    assert!(same_filled_found <= 5, "{same_filled_found} wrong keys got a same-filled page; about 1 in 128 may");
}

fn a_freed_handle_never_answers_with_another_pages_bytes(store: &dyn Store) {
    let own = key(0, 0);
    let bytes = pages::half_compressible(0);
    let stale = stored(store, own, &bytes);
    store.free(own, stale);
    for page in 1..200 {
        let other = pages::half_compressible(page);
        let handle = stored(store, key(0, page), &other);
        if let Ok(found) = ask(store, own, stale) {
            assert!(*found == bytes, "a freed handle gives bytes that were never put under its key");
        }
        store.free(own, stale);
        must_hold(store, key(0, page), handle, &other);
        store.free(key(0, page), handle);
    }
    assert_eq!(store.usage().pages, 0, "freeing twice must not be counted twice");
}

fn handles_that_were_never_given_out_are_harmless(store: &dyn Store) {
    let bytes = pages::incompressible(1);
    let handle = stored(store, key(1, 1), &bytes);
    let bits = (0..Handle::BITS).map(|bit| 1u64 << bit).chain([0, Handle::MAX, Handle::MAX - 1]);
    for unknown in bits.filter_map(Handle::new).filter(|unknown| *unknown != handle) {
        if let Ok(found) = ask(store, key(1, 2), unknown) {
            assert!(is_same_filled(&found), "{unknown:?} was never given out and gives a page");
        }
        store.free(key(1, 2), unknown);
    }
    must_hold(store, key(1, 1), handle, &bytes);
    store.free(key(1, 1), handle);
}

fn full_keeps_nothing_and_ends_after_frees(store: &dyn Store) {
    let bytes_when_new = bytes_held(store);
    let budget = store.usage().budget_bytes;
    assert!((1 << 20..=64 << 20).contains(&budget), "this kit needs a budget of 1 to 64 MiB, not {budget} bytes");
    let mut kept = Vec::new();
    let refused_at = loop {
        let page = kept.len() as u64;
        match store.put(key(0, page), &pages::incompressible(page)) {
            PutOutcome::Stored(handle) => kept.push(handle),
            PutOutcome::Full => break page,
            PutOutcome::Busy => panic!("a store under test alone returned Busy"),
        }
        assert!(page * PAGE_SIZE as u64 <= budget, "more incompressible pages than the budget holds were stored");
    };
    assert!(refused_at * PAGE_SIZE as u64 >= budget / 2, "Full after {refused_at} pages of a budget of {budget} bytes");
    let usage = store.usage();
    assert!(usage.pages == refused_at && usage.bytes <= budget + bytes_when_new, "Full kept something: {usage:?}");
    for (page, handle) in (0u64..).zip(&kept) {
        must_hold(store, key(0, page), *handle, &pages::incompressible(page));
    }
    let half = kept.split_off(kept.len() / 2);
    for (page, handle) in (kept.len() as u64..).zip(&half) {
        store.free(key(0, page), *handle);
    }
    for page in kept.len() as u64..refused_at - 1 {
        kept.push(stored(store, key(0, page), &pages::incompressible(page + 1_000_000)));
    }
    for (page, handle) in (0u64..).zip(&kept) {
        store.free(key(0, page), *handle);
    }
    must_be_empty(store, bytes_when_new);
}

fn what_no_word_names_is_swept_and_the_rest_stays(store: &dyn DurableStore) {
    let bytes_when_new = bytes_held(store);
    let samples = samples();
    let put = |page: u64, bytes: &PageBytes| (key(5, page), stored(store, key(5, page), bytes));
    let all: Vec<(PageKey, Handle)> = (0..).zip(&samples).map(|(page, bytes)| put(page, bytes)).collect();
    let is_live = |page: &(PageKey, Handle)| !page.0.page.0.is_multiple_of(3);
    let mut live = all.iter().copied().filter(is_live);
    store.recover(&mut live).expect("a store under test alone can be swept");
    for ((own, handle), bytes) in all.iter().zip(&samples).filter(|(page, _)| is_live(page)) {
        must_hold(store, *own, *handle, bytes);
        store.free(*own, *handle);
    }
    must_be_empty(store, bytes_when_new);
}

fn threads_get_their_own_bytes(store: &dyn Store) {
    const THREADS: u32 = 4;
    const ROUNDS: u64 = 400;
    const WINDOW: usize = 20;
    let bytes_when_new = bytes_held(store);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let content = |page: u64| pages::mixed(page * u64::from(THREADS) + u64::from(thread));
                let mut kept = std::collections::VecDeque::new();
                let check_and_free = |(page, handle): (u64, Handle)| {
                    must_hold(store, key(thread, page), handle, &content(page));
                    store.free(key(thread, page), handle);
                };
                for page in 0..ROUNDS {
                    kept.push_back((page, stored(store, key(thread, page), &content(page))));
                    if kept.len() > WINDOW
                        && let Some(oldest) = kept.pop_front()
                    {
                        check_and_free(oldest);
                    }
                }
                kept.into_iter().for_each(check_and_free);
            });
        }
    });
    must_be_empty(store, bytes_when_new);
}
