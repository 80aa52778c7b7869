//! The file store's promises, on a real disk: through its public interface, and with injected faults.
//!
//! Before: a store in a file without a name in the directory for temporary files. After: contents, counts, charge and
//! the used space are right.
//! Threads: the conformance kit uses four. Units: bytes, pages, areas of 2 MiB.
//! Promise: no sleeps, no dependence on time. Where the directory has no direct I/O, or io_uring is off, tests are
//! skipped.

use std::fs::File;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_store::{
    AREA_BYTES, Budget, DiskFault, DiskFaults, DurableStore, Ends, FileOptions, FileStore, GetOutcome, Handle,
    IoContext, PageBytes, PutOutcome, Recovered, Refusal, SlowStore, Store,
};
use ballast_sys::memfd;
use ballast_testkit::skip;
use ballast_testkit::{conformance, pages};
use ballast_testvm::fuse::Fuse;
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, poll};

use crate::common::{EIO, MIB, TRIES, block_of, get, key, must_hold, put, put_run};

const ENOSPC: i32 = 28;

struct Made {
    store: FileStore,
    file: OwnedFd,
    index: OwnedFd,
    budget: Arc<Budget>,
    faults: Arc<DiskFaults>,
}

fn options(budget: &Arc<Budget>, faults: &Arc<DiskFaults>) -> FileOptions {
    FileOptions { max_bytes: Bytes(64 * MIB), faults: Some(Arc::clone(faults)), ..FileOptions::new(Arc::clone(budget)) }
}

fn made(limit: u64) -> Option<Made> {
    made_in(&std::env::temp_dir(), limit)
}

fn made_in(dir: &Path, limit: u64) -> Option<Made> {
    made_with(dir, limit, |options| options)
}

/// A store that gives a page up after the device reported errors for this long.
fn made_to_last(unreadable_for: Duration) -> Option<Made> {
    made_with(&std::env::temp_dir(), 64 * MIB, |options| FileOptions { unreadable_for, ..options })
}

fn made_with(dir: &Path, limit: u64, with: impl FnOnce(FileOptions) -> FileOptions) -> Option<Made> {
    let (budget, faults) = (Budget::new(Bytes(limit)), Arc::default());
    let created = FileStore::create(dir, with(options(&budget, &faults)));
    let (store, file, index) = created.inspect_err(|error| skip("disk", error)).ok()?;
    Some(Made { store, file, index, budget, faults })
}

fn reopened(made: Made) -> Made {
    let Made { store, file, index, budget, faults } = made;
    drop(store);
    let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
    let store = FileStore::open(dup(&file), dup(&index), options(&budget, &faults)).expect("open");
    Made { store, file, index, budget, faults }
}

fn recover(store: &FileStore, live: impl Iterator<Item = Handle>) -> std::io::Result<Recovered> {
    store.recover(&mut live.map(|handle| (key(0), handle)))
}

fn run_of(range: std::ops::Range<u64>) -> Vec<PageBytes> {
    range.map(pages::incompressible).collect()
}

/// Repeats the get of a run while the disk is late with a part of it.
fn get_run(store: &FileStore, first: u64, handles: &[Handle], out: &mut [PageBytes]) -> Vec<GetOutcome> {
    let mut tries = (0..TRIES).map(|_| store.get_run(&key(first).run(handles.iter().copied()), out, IoContext::GUEST));
    tries.find(|outcomes| !outcomes.contains(&GetOutcome::Busy)).expect("the disk answers")
}

fn must_hold_and_free(store: &FileStore, page: u64, handle: Handle) {
    must_hold(store, page, handle, &pages::incompressible(page));
    store.free(key(page), handle);
}

fn must_be_empty(made: &Made) {
    made.store.tidy();
    assert_eq!((made.store.usage().pages, made.store.usage().bytes, made.budget.used().0), (0, 0, 0));
    made.store.validate().expect("valid");
}

#[test]
fn the_file_store_passes_the_conformance_kit() {
    if made(4 * MIB).is_some() {
        conformance::run_slow(&|| Box::new(made(4 * MIB).expect("a second one").store));
    }
}

/// Begins to read a page. Returns a descriptor that is readable at the end, or `None` if nothing was begun.
fn begin(store: &FileStore, page: u64, handle: Handle) -> Option<OwnedFd> {
    let fd = Mutex::new(None);
    let watch = |watched: BorrowedFd<'_>| *fd.lock().expect("no panic") = watched.try_clone_to_owned().ok();
    let is_begun = store.begin(key(page), handle, &watch);
    is_begun.then(|| fd.into_inner().expect("no panic").expect("a descriptor"))
}

/// Begins to read a page, and waits until it is read. On a slow disk, repeats this after a quick read.
fn begin_and_wait(store: &FileStore, page: u64, handle: Handle) {
    let tries = std::iter::repeat_with(|| {
        let begun = begin(store, page, handle);
        if begun.is_none() {
            get(store, page, handle);
        }
        begun
    });
    let until = Instant::now() + Duration::from_mins(1);
    let fd = tries.take_while(|_| Instant::now() < until).flatten().next().expect("a read was begun");
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], None).expect("poll");
}

fn get_begun(store: &FileStore, page: u64, handle: Handle) -> (GetOutcome, PageBytes) {
    let mut out = [0x77; PAGE_SIZE];
    (store.get(key(page), handle, &mut out, IoContext::GUEST.ended_by(Ends::AtOnce(&|_| ()))), out)
}

#[test]
fn a_page_that_was_begun_is_there_when_its_descriptor_is_readable() {
    let Some(made) = made(4 * MIB) else { return };
    let handles = put_run(&made.store, 0, &run_of(0..32));
    for (page, handle) in (0u64..).zip(&handles) {
        begin_and_wait(&made.store, page, *handle);
        assert_eq!(get_begun(&made.store, page, *handle), (GetOutcome::Found, pages::incompressible(page)));
        assert_eq!(get_begun(&made.store, page, *handle).0, GetOutcome::Busy, "it was taken");
    }
}

#[test]
fn a_page_that_was_begun_is_not_read_again_by_a_thread_that_waits_for_it() {
    let Some(made) = made(4 * MIB) else { return };
    let handle = put(&made.store, 5, &pages::incompressible(5));
    begin_and_wait(&made.store, 5, handle);
    made.faults.fail_reads(1, DiskFault::Errno(EIO));
    let (outcome, out) = get(&made.store, 5, handle);
    assert!(outcome == GetOutcome::Found && out == pages::incompressible(5), "{outcome:?}");
    assert_eq!(get(&made.store, 5, handle).0, GetOutcome::Busy, "this is the read that fails");
    must_hold(&made.store, 5, handle, &pages::incompressible(5));
}

#[test]
fn a_page_that_was_begun_and_freed_is_not_found_though_its_block_is_written_again() {
    let Some(made) = made(4 * MIB) else { return };
    for turn in 0..50 {
        let handle = put(&made.store, 5, &pages::incompressible(turn));
        begin_and_wait(&made.store, 5, handle);
        made.store.free(key(5), handle);
        let again = put(&made.store, 5, &pages::incompressible(turn + 1000));
        assert_eq!(get_begun(&made.store, 5, handle).0, GetOutcome::Busy, "its page was freed");
        assert_eq!(get_begun(&made.store, 5, again).0, GetOutcome::Busy, "it was not begun");
        must_hold(&made.store, 5, again, &pages::incompressible(turn + 1000));
        made.store.free(key(5), again);
    }
    must_be_empty(&made);
}

#[test]
fn a_begun_read_does_not_find_bytes_that_are_no_longer_the_pages() {
    let Some(made) = made(4 * MIB) else { return };
    let handles = put_run(&made.store, 0, &run_of(0..3));
    overwrite_a_byte(&made, handles[1]);
    begin_and_wait(&made.store, 1, handles[1]);
    assert_eq!(get_begun(&made.store, 1, handles[1]).0, GetOutcome::Busy);
    let outcome = (0..TRIES).map(|_| get(&made.store, 1, handles[1]).0).find(|outcome| *outcome != GetOutcome::Busy);
    assert_eq!(outcome, Some(GetOutcome::Corrupt));
    begin_and_wait(&made.store, 2, handles[2]);
    assert_eq!(get_begun(&made.store, 2, handles[2]), (GetOutcome::Found, pages::incompressible(2)));
}

#[test]
fn reads_that_never_end_are_few_and_cost_no_page() {
    let Some(made) = made(4 * MIB) else { return };
    let handles = put_run(&made.store, 0, &run_of(0..32));
    begin_and_wait(&made.store, 0, handles[0]);
    assert_eq!(get_begun(&made.store, 0, handles[0]).0, GetOutcome::Found);
    made.faults.fail_reads(32, DiskFault::Late);
    let begun = (0u64..).zip(&handles).filter(|(page, handle)| begin(&made.store, *page, **handle).is_some()).count();
    assert!(begun < handles.len(), "all {begun} were begun");
    made.faults.forget();
    for (page, handle) in (0u64..).zip(&handles) {
        assert_eq!(get_begun(&made.store, page, *handle).0, GetOutcome::Busy);
        must_hold_and_free(&made.store, page, *handle);
    }
    must_be_empty(&made);
}

#[test]
fn after_a_late_read_nothing_is_begun_for_a_while() {
    let Some(made) = made(4 * MIB) else { return };
    let handles = put_run(&made.store, 0, &run_of(0..2));
    let before = loop {
        made.faults.fail_reads(1, DiskFault::Late);
        let begun = begin(&made.store, 1, handles[1]);
        let before = Instant::now();
        made.faults.forget();
        must_hold(&made.store, 1, handles[1], &pages::incompressible(1));
        if begun.is_some() {
            break before;
        }
    };
    let is_begun = begin(&made.store, 0, handles[0]).is_some();
    assert!(!is_begun || before.elapsed() > Duration::from_millis(500), "it was late just now");
    begin_and_wait(&made.store, 0, handles[0]);
    assert_eq!(get_begun(&made.store, 0, handles[0]), (GetOutcome::Found, pages::incompressible(0)));
}

#[test]
fn a_page_restored_in_another_way_leaves_no_read_behind() {
    let Some(made) = made(4 * MIB) else { return };
    for turn in 0..50 {
        let handle = put(&made.store, 5, &pages::incompressible(turn));
        begin_and_wait(&made.store, 5, handle);
        let (mut out, mut outcomes) = ([[0; PAGE_SIZE]; 1], vec![GetOutcome::Busy]);
        while outcomes == [GetOutcome::Busy] {
            outcomes = made.store.get_run(&[(key(5), handle)], &mut out, IoContext::GUEST);
        }
        assert_eq!((outcomes[0], out[0]), (GetOutcome::Found, pages::incompressible(turn)));
        made.store.free(key(5), handle);
    }
    must_be_empty(&made);
}

#[test]
fn a_begun_read_that_is_short_or_refused_costs_no_page() {
    let Some(made) = made(4 * MIB) else { return };
    let handle = put(&made.store, 5, &pages::incompressible(5));
    for fault in [DiskFault::Short(512), DiskFault::Errno(EIO)] {
        made.faults.fail_reads(1, fault);
        begin(&made.store, 5, handle);
        assert_eq!(get_begun(&made.store, 5, handle).0, GetOutcome::Busy, "{fault:?}");
        must_hold(&made.store, 5, handle, &pages::incompressible(5));
    }
}

#[test]
fn freed_space_returns_to_the_file_system() {
    let Some(made) = made(64 * MIB) else { return };
    let before = memfd::resident(&made.file).expect("stat").bytes().0;
    let handles = put_run(&made.store, 0, &run_of(0..2048));
    let full = memfd::resident(&made.file).expect("stat").bytes().0 - before;
    assert!((8 * MIB..9 * MIB).contains(&full), "{full} bytes on disk for 8 MiB");
    assert_eq!((made.store.usage().bytes, made.budget.used().0), (8 * MIB, 8 * MIB));
    for (page, handle) in (0u64..).zip(&handles) {
        must_hold(&made.store, page, *handle, &pages::incompressible(page));
        made.store.free(key(page), *handle);
    }
    must_be_empty(&made);
    let left = memfd::resident(&made.file).expect("stat").bytes().0 - before;
    assert!(left < 64 * 1024, "{left} bytes are still on disk");
}

#[test]
fn a_run_is_one_extent_and_each_of_its_pages_is_read_and_freed_alone() {
    let Some(made) = made(64 * MIB) else { return };
    let store = &made.store;
    // Same-filled pages in the middle become handles; the others go to consecutive blocks.
    let mut content = run_of(0..1000);
    content[500] = [0; PAGE_SIZE];
    let handles = put_run(store, 70, &content);
    assert_eq!(store.usage_detail().block_pages, 999);
    let blocks: Vec<u64> = handles.iter().map(|handle| handle.bits() & 0xffff_ffff).collect();
    assert!(blocks[..500].windows(2).all(|pair| pair[0] + 1 == pair[1]), "{blocks:x?}");
    let mut out = vec![[1; PAGE_SIZE]; 1000];
    let outcomes = get_run(store, 70, &handles, &mut out);
    assert!(outcomes.iter().all(|outcome| *outcome == GetOutcome::Found) && outcomes.len() == 1000);
    assert!(out == content);
    // Every second page is freed; the others are found one by one, and as a run with holes.
    for (index, handle) in (0u64..).zip(&handles).step_by(2) {
        store.free(key(70 + index), *handle);
    }
    let outcomes = get_run(store, 70, &handles, &mut out);
    for (index, outcome) in outcomes.iter().enumerate().filter(|(index, _)| *index != 500) {
        let expected = if index % 2 == 0 { GetOutcome::Absent } else { GetOutcome::Found };
        assert_eq!(*outcome, expected, "{index}");
        assert!(*outcome == GetOutcome::Absent || out[index] == content[index]);
    }
    for (index, handle) in (0u64..).zip(&handles).skip(1).step_by(2) {
        must_hold(store, 70 + index, *handle, &content[index as usize]);
        store.free(key(70 + index), *handle);
    }
    must_be_empty(&made);
}

#[test]
fn a_run_that_does_not_fit_is_stored_as_far_as_it_fits() {
    let Some(made) = made(AREA_BYTES) else { return };
    let mut outcomes = Vec::new();
    made.store.put_run(key(0), &run_of(0..600), &mut outcomes);
    let stored = outcomes.iter().filter(|outcome| matches!(outcome, PutOutcome::Stored(_))).count();
    assert_eq!((outcomes.len(), stored), (600, 512));
    assert_eq!(made.store.usage_detail().last_refusal, Some(Refusal::Budget));
    for (page, outcome) in (0u64..).zip(outcomes) {
        if let PutOutcome::Stored(handle) = outcome {
            must_hold(&made.store, page, handle, &pages::incompressible(page));
            made.store.free(key(page), handle);
        }
    }
    must_be_empty(&made);
}

#[test]
fn a_block_that_cannot_be_written_is_never_used_again_not_even_by_a_successor() {
    let Some(made) = made(64 * MIB) else { return };
    let first = put(&made.store, 0, &pages::incompressible(0));
    made.faults.fail_writes(3, DiskFault::Errno(EIO));
    for page in 1..4 {
        assert_eq!(made.store.put(key(page), &pages::incompressible(page)), PutOutcome::Busy);
    }
    let usage = made.store.usage_detail();
    assert_eq!((usage.bad_blocks, usage.block_pages), (3, 1));
    assert!(matches!(usage.last_refusal, Some(Refusal::Failed(_))), "{usage:?}");
    let after = put(&made.store, 4, &pages::incompressible(4));
    let block = |handle: Handle| handle.bits() & 0xffff_ffff;
    assert_eq!(block(after), block(first) + 4);
    let made = reopened(made);
    let report = recover(&made.store, [first].into_iter()).expect("recover");
    assert_eq!((report.kept_blobs, report.freed_slots), (1, 1));
    assert_eq!(made.store.usage_detail().bad_blocks, 3);
    made.store.validate().expect("valid");
    assert_eq!(block(put(&made.store, 5, &pages::incompressible(5))), block(first) + 4);
    must_hold(&made.store, 0, first, &pages::incompressible(0));
}

#[test]
fn a_page_that_cannot_be_read_is_read_again_and_then_lost_and_its_block_retired() {
    let Some(made) = made_to_last(Duration::ZERO) else { return };
    let store = &made.store;
    let handles = put_run(store, 0, &run_of(0..4));
    made.faults.fail_reads(2, DiskFault::Errno(EIO));
    assert_eq!(get(store, 1, handles[1]).0, GetOutcome::Busy);
    assert_eq!(get(store, 1, handles[1]).0, GetOutcome::Busy);
    must_hold(store, 1, handles[1], &pages::incompressible(1));
    made.faults.fail_reads(6, DiskFault::Errno(EIO));
    let outcomes: Vec<_> = (0..6).map(|_| get(store, 2, handles[2]).0).collect();
    assert_eq!(outcomes[..5], [GetOutcome::Busy; 5]);
    assert_eq!(outcomes[5], GetOutcome::Corrupt);
    store.free(key(2), handles[2]);
    assert_eq!(get(store, 2, handles[2]).0, GetOutcome::Absent);
    assert_eq!((store.usage_detail().bad_blocks, store.usage_detail().block_pages), (1, 3));
    store.validate().expect("valid");
    // An extent that cannot be read as a whole is read page by page.
    made.faults.fail_reads(1, DiskFault::Errno(EIO));
    let mut out = vec![[0; PAGE_SIZE]; 2];
    let outcomes = store.get_run(&key(0).run(handles[..2].iter().copied()), &mut out, IoContext::GUEST);
    assert_eq!(outcomes, [GetOutcome::Found; 2]);
    assert!(out == run_of(0..2));
}

#[test]
fn a_query_of_the_usage_does_not_wait_for_the_disk() {
    let Ok(fuse) = Fuse::serve().inspect_err(|error| skip("fuse", error)) else { return };
    let Some(made) = made_in(&fuse.dir(), 64 * MIB) else { return };
    for (page, handle) in (0..).zip(put_run(&made.store, 0, &run_of(0..1024))) {
        made.store.free(key(page), handle);
    }
    fuse.hold();
    let (says, said) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(|| says.send((made.store.usage().bytes, made.store.usage_detail().areas)).expect("heard"));
        let usage = said.recv_timeout(Duration::from_secs(20));
        fuse.release();
        assert_eq!(usage, Ok((4 * MIB, 2)), "what was emptied is counted until `tidy`");
    });
    must_be_empty(&made);
}

#[test]
fn a_late_put_is_refused_and_its_block_is_freed_when_the_write_is_done() {
    let Some(made) = made(64 * MIB) else { return };
    made.faults.fail_writes(2, DiskFault::Late);
    for page in 0..2 {
        assert_eq!(made.store.put(key(page), &pages::incompressible(page)), PutOutcome::Busy);
    }
    assert_eq!(made.store.usage_detail().last_refusal, Some(Refusal::Late));
    made.store.validate().expect("what is still being written is no contradiction");
    // This thread's ring notes the end of the late writes while it does other writes.
    while made.store.usage().bytes > 0 {
        let handle = put(&made.store, 3, &pages::incompressible(3));
        must_hold(&made.store, 3, handle, &pages::incompressible(3));
        made.store.free(key(3), handle);
        made.store.tidy();
    }
    must_be_empty(&made);
}

#[test]
fn after_a_late_write_a_call_begins_no_more_and_its_other_blocks_are_freed() {
    let Some(made) = made(64 * MIB) else { return };
    // Every second block is free, so that no two of the next pages go together.
    let handles: Vec<_> = (0..80).map(|page| put(&made.store, page, &pages::incompressible(page))).collect();
    (0..80).step_by(2).for_each(|page| made.store.free(key(page), handles[page as usize]));
    made.faults.fail_writes(1, DiskFault::Late);
    let mut outcomes = Vec::new();
    made.store.put_run(key(100), &run_of(100..140), &mut outcomes);
    assert_eq!(outcomes[0], PutOutcome::Busy, "it is late");
    assert!(outcomes[8..].iter().all(|outcome| *outcome == PutOutcome::Busy), "eight are under way at a time");
    assert_eq!(made.store.usage_detail().last_refusal, Some(Refusal::Late));
    for (page, outcome) in (100..).zip(outcomes) {
        if let PutOutcome::Stored(handle) = outcome {
            must_hold_and_free(&made.store, page, handle);
        }
    }
    (1..80).step_by(2).for_each(|page| must_hold_and_free(&made.store, page, handles[page as usize]));
    // This thread's ring notes the end of late writes while it does other writes.
    while made.store.usage().bytes > 0 {
        let handle = put(&made.store, 3, &pages::incompressible(3));
        must_hold_and_free(&made.store, 3, handle);
        made.store.tidy();
    }
    must_be_empty(&made);
}

#[test]
fn the_end_of_a_late_write_frees_no_block_that_recovery_has_given_to_another_page() {
    let Some(made) = made(64 * MIB) else { return };
    made.faults.fail_writes(1, DiskFault::Late);
    assert_eq!(made.store.put(key(0), &pages::incompressible(0)), PutOutcome::Busy);
    // Recovery waits for the write and frees its block, and the next page gets it, before this process notes the end.
    let report = recover(&made.store, std::iter::empty()).expect("recover");
    assert_eq!((report.kept_blobs, report.freed_slots), (0, 1));
    let handles: Vec<_> = (1..4).map(|page| put(&made.store, page, &pages::incompressible(page))).collect();
    made.store.validate().expect("valid");
    for (page, handle) in (1..4).zip(handles) {
        must_hold(&made.store, page, handle, &pages::incompressible(page));
    }
}

#[test]
fn a_closed_store_changes_nothing_when_its_last_write_is_done() {
    let Some(made) = made(64 * MIB) else { return };
    // The first store leaves an emptied area, and a block whose late write is done, which this thread has not noted.
    for (page, handle) in (0..).zip(put_run(&made.store, 0, &run_of(0..1024))) {
        made.store.free(key(page), handle);
    }
    made.faults.fail_writes(1, DiskFault::Late);
    assert_eq!(made.store.put(key(0), &pages::incompressible(0)), PutOutcome::Busy);
    let made = reopened(made);
    recover(&made.store, std::iter::empty()).expect("recover");
    let fill = || put_run(&made.store, 0, &run_of(0..1024));
    let handles = std::thread::scope(|scope| scope.spawn(fill).join()).expect("no panic");
    // The charge of the first store ends when that store does.
    while made.budget.used().0 > made.store.usage().bytes {
        let handle = put(&made.store, 2000, &pages::incompressible(2000));
        made.store.free(key(2000), handle);
    }
    for (page, handle) in (0..).zip(&handles) {
        must_hold(&made.store, page, *handle, &pages::incompressible(page));
    }
    made.store.validate().expect("valid");
}

#[test]
fn on_a_slow_disk_each_page_is_found_and_after_a_quick_read_the_waits_are_short() {
    let Some(made) = made(64 * MIB) else { return };
    let tries = |page: u64, handle: Handle, takes: Duration| {
        made.faults.fail_reads(TRIES, DiskFault::Takes(takes));
        let busy = (0..TRIES).take_while(|_| get(&made.store, page, handle).0 == GetOutcome::Busy).count();
        made.faults.forget();
        busy
    };
    let handles = put_run(&made.store, 0, &run_of(0..9));
    made.faults.fail_reads_of(block_of(handles[0]), None);
    let tried = tries(0, handles[0], Duration::from_secs(5));
    assert_eq!(made.faults.reads_of(block_of(handles[0])), 1, "it was read once");
    assert!((5..TRIES).contains(&tried), "0.1, 0.2, 0.4, 0.8, 1.6 s are too short: {tried}");
    must_hold(&made.store, 0, handles[0], &pages::incompressible(0));
    assert!(tries(0, handles[0], Duration::from_millis(150)) > 0, "the page came, so its waits are short again");
    assert_eq!(tries(8, handles[8], Duration::from_secs(3600)), TRIES, "each wait is bounded");
    // A wait for pages that are read together is as long as for the slowest of them.
    made.faults.fail_reads(1, DiskFault::Takes(Duration::from_secs(5)));
    assert!((0..5).all(|_| get(&made.store, 1, handles[1]).0 == GetOutcome::Busy));
    made.faults.fail_reads(TRIES, DiskFault::Takes(Duration::from_secs(3)));
    let mut out = vec![[0; PAGE_SIZE]; 8];
    let outcomes = made.store.get_run(&key(0).run(handles[..8].iter().copied()), &mut out, IoContext::GUEST);
    made.faults.forget();
    assert_eq!(outcomes, [GetOutcome::Found; 8]);
    assert!(out == run_of(0..8));
    made.store.validate().expect("valid");
}

#[test]
fn the_days_writes_are_limited_across_successors_and_reported() {
    let Some(made) = made(64 * MIB) else { return };
    put_run(&made.store, 0, &run_of(0..10));
    assert_eq!(made.store.usage_detail().written_today_bytes, 40960);
    let made = reopened(made);
    made.store.set_writes_per_day(Bytes(45056));
    put(&made.store, 10, &pages::incompressible(10));
    assert_eq!(made.store.put(key(11), &pages::incompressible(11)), PutOutcome::Full);
    let why = made.store.usage_detail().last_refusal.expect("a reason").to_string();
    assert!(why.contains("45056 bytes were written today"), "{why}");
    put(&made.store, 12, &[0; PAGE_SIZE]);
    made.store.set_writes_per_day(Bytes(0));
    put(&made.store, 11, &pages::incompressible(11));
}

fn overwrite_a_byte(made: &Made, handle: Handle) {
    let file = File::from(memfd::reopen(std::os::fd::AsFd::as_fd(&made.file), true).expect("reopen"));
    file.write_all_at(&[1], block_of(handle) * PAGE_SIZE as u64 + 100).expect("write");
    file.sync_all().expect("sync");
}

#[test]
fn a_descriptor_of_no_file_store_is_refused_with_the_reason() {
    let Some(one) = made(4 * MIB) else { return };
    let Some(two) = made(4 * MIB) else { return };
    let (budget, faults) = (Budget::new(Bytes(MIB)), Arc::default());
    let open = |file: &OwnedFd, index: &OwnedFd| {
        let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
        FileStore::open(dup(file), dup(index), options(&budget, &faults)).expect_err("accepted").to_string()
    };
    assert!(open(&one.file, &two.index).contains("the index belongs to another file"));
    // The first block of this file was never written. With another one written, the index seems to lack its header.
    let read = ballast_sys::direct::reopen(std::os::fd::AsFd::as_fd(&one.file), true).expect("reopen");
    let said = open(&one.file, &read);
    assert!(said.contains("Opening a file store index: "), "{said}");
    let error = FileStore::create(Path::new("/proc/self"), options(&budget, &faults)).expect_err("accepted");
    assert!(error.to_string().contains("/proc/self"), "{error}");
    let nothing = FileOptions { max_bytes: Bytes(0), ..options(&budget, &faults) };
    assert!(FileStore::create(&std::env::temp_dir(), nothing).is_err());
}

struct Mounted(std::path::PathBuf);

impl Mounted {
    fn tmpfs(bytes: u64) -> Result<Self, String> {
        static MADE: AtomicU64 = AtomicU64::new(0);
        let number = MADE.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("ballast-test-{}-{number}", std::process::id()));
        std::fs::create_dir(&dir).map_err(|error| error.to_string())?;
        let size = format!("size={bytes}");
        let mount = Command::new("mount").args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(&dir).output();
        match mount {
            Ok(done) if done.status.success() => Ok(Self(dir)),
            other => {
                let _ = std::fs::remove_dir(&dir);
                Err(format!("mounting a tmpfs: {other:?}"))
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Lazily, because a failed test may have left a store open.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
        let _ = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn pages_on_a_disk_that_turned_read_only_are_found_and_none_is_put_there() {
    let Ok(dir) = Mounted::tmpfs(64 * MIB).inspect_err(|why| skip("root", why)) else { return };
    let Some(made) = made_in(&dir.0, 4 * MIB) else { return };
    let handles = put_run(&made.store, 0, &run_of(0..3));
    let Made { store, file, index, budget, faults } = made;
    drop(store);
    let begun = std::time::Instant::now();
    // The store's file is closed on another thread, and keeps the file system writable until then.
    while !Command::new("mount").args(["-o", "remount,bind,ro"]).arg(&dir.0).status().expect("mount").success() {
        assert!(begun.elapsed() < Duration::from_secs(60), "the file system cannot be made read-only");
    }
    let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
    let store = FileStore::open(dup(&file), dup(&index), options(&budget, &faults)).expect("open");
    assert!(store.is_read_only());
    (0..3).for_each(|page| must_hold(&store, page, handles[page as usize], &pages::incompressible(page)));
    assert_eq!(store.put(key(9), &pages::incompressible(9)), PutOutcome::Busy);
    assert_eq!(store.usage_detail().last_refusal, Some(Refusal::ReadOnly));
    (0..3).for_each(|page| store.free(key(page), handles[page as usize]));
    store.tidy();
    assert_eq!(store.usage().pages, 0);
    drop(store);
    // The next opening finds the file system writable, and the space that was not returned.
    assert!(Command::new("mount").args(["-o", "remount,bind,rw"]).arg(&dir.0).status().expect("mount").success());
    let store = FileStore::open(file, index, options(&budget, &faults)).expect("open");
    assert!(!store.is_read_only());
    recover(&store, std::iter::empty()).expect("recovered");
    store.validate().expect("nothing is left of it");
    put(&store, 9, &pages::incompressible(9));
}

#[test]
fn pages_are_read_without_a_ring_and_none_is_put() {
    let Some(made) = made(64 * MIB) else { return };
    // More than one transfer.
    let handles = put_run(&made.store, 0, &run_of(0..100));
    made.faults.refuse_rings();
    let mut out = vec![[0; PAGE_SIZE]; 100];
    let outcomes = made.store.get_run(&key(0).run(handles), &mut out, IoContext::GUEST);
    assert_eq!(outcomes, [GetOutcome::Found; 100]);
    assert!((0..).zip(&out).all(|(page, bytes)| *bytes == pages::incompressible(page)));
    assert_eq!(made.store.put(key(200), &pages::incompressible(9)), PutOutcome::Busy);
}

#[test]
fn a_file_system_that_is_really_full_returns_full_until_there_is_space() {
    let Ok(mounted) = Mounted::tmpfs(3 * MIB).inspect_err(|why| skip("root", why)) else { return };
    let (budget, faults) = (Budget::new(Bytes(64 * MIB)), Arc::default());
    let created = FileStore::create(&mounted.0, options(&budget, &faults));
    // Direct I/O came to tmpfs in 6.6.
    let Ok((store, ..)) = created.inspect_err(|error| skip("disk", error)) else { return };
    let mut kept = Vec::new();
    let refused = loop {
        let page = kept.len() as u64;
        match store.put(key(page), &pages::incompressible(page)) {
            PutOutcome::Stored(handle) => kept.push(handle),
            other => break other,
        }
        assert!(page < 1000, "3 MiB hold 4 MiB");
    };
    assert_eq!(refused, PutOutcome::Full);
    assert!(matches!(store.usage_detail().last_refusal, Some(Refusal::DiskFull(_))), "{:?}", store.usage_detail());
    assert!(kept.len() > 500, "{} pages", kept.len());
    store.validate().expect("valid");
    for (page, handle) in (0u64..).zip(&kept) {
        must_hold(&store, page, *handle, &pages::incompressible(page));
        store.free(key(page), *handle);
    }
    store.validate().expect("valid");
    put(&store, 0, &pages::incompressible(0));
}

#[derive(Clone, Debug)]
enum Step {
    Put(u64),
    PutRun(u64, usize),
    Free(prop::sample::Index),
    FailWrite(i32),
    FailRead,
    Reopen,
    Recover,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        30 => any::<u64>().prop_map(Step::Put),
        8 => (any::<u64>(), 1..200usize).prop_map(|(seed, len)| Step::PutRun(seed, len)),
        60 => any::<prop::sample::Index>().prop_map(Step::Free),
        2 => prop_oneof![Just(EIO), Just(ENOSPC)].prop_map(Step::FailWrite),
        2 => Just(Step::FailRead),
        1 => Just(Step::Reopen),
        1 => Just(Step::Recover),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_history_keeps_contents_and_counts(steps in prop::collection::vec(step(), 1..200)) {
        let Some(mut made) = made(3 * AREA_BYTES) else { return Ok(()) };
        let mut kept: Vec<(u64, u64, Handle)> = Vec::new();
        let mut next_page = 0;
        for step in steps {
            match step {
                Step::Put(seed) => {
                    if let PutOutcome::Stored(handle) = made.store.put(key(next_page), &pages::mixed(seed)) {
                        kept.push((next_page, seed, handle));
                    }
                    next_page += 1;
                }
                Step::PutRun(seed, len) => {
                    let seeds: Vec<u64> = (0..len as u64).map(|n| seed.wrapping_add(n)).collect();
                    let content: Vec<_> = seeds.iter().map(|seed| pages::mixed(*seed)).collect();
                    let mut outcomes = Vec::new();
                    made.store.put_run(key(next_page), &content, &mut outcomes);
                    for ((page, seed), outcome) in (next_page..).zip(seeds).zip(outcomes) {
                        if let PutOutcome::Stored(handle) = outcome {
                            kept.push((page, seed, handle));
                        }
                    }
                    next_page += len as u64;
                }
                Step::Free(which) if !kept.is_empty() => {
                    let (page, seed, handle) = kept.swap_remove(which.index(kept.len()));
                    let (outcome, out) = get(&made.store, page, handle);
                    match outcome {
                        GetOutcome::Found => prop_assert!(out == pages::mixed(seed)),
                        other => prop_assert_eq!(other, GetOutcome::Busy),
                    }
                    made.store.free(key(page), handle);
                }
                Step::Free(_) => {}
                Step::FailWrite(errno) => made.faults.fail_writes(1, DiskFault::Errno(errno)),
                Step::FailRead => made.faults.fail_reads(1, DiskFault::Errno(EIO)),
                Step::Reopen => made = reopened(made),
                Step::Recover => {
                    let report = recover(&made.store, kept.iter().map(|(.., handle)| *handle)).expect("recover");
                    prop_assert_eq!((report.freed_slots, report.missing), (0, 0));
                }
            }
            made.store.validate().expect("valid");
            prop_assert_eq!(made.store.usage().pages, kept.len() as u64);
            prop_assert_eq!(made.store.usage().bytes, made.budget.used().0);
        }
        // Uses up the faults that have not happened yet.
        let _ = made.store.put(key(next_page), &pages::incompressible(1));
        let made = reopened(made);
        for (page, seed, handle) in &kept {
            let (outcome, out) = get(&made.store, *page, *handle);
            if outcome == GetOutcome::Busy {
                continue;
            }
            prop_assert!(outcome == GetOutcome::Found && out == pages::mixed(*seed));
        }
    }
    #[test]
    fn no_garbage_in_the_index_and_no_handle_can_do_harm(
        seed: u64, bits in prop::collection::vec(0..=Handle::MAX, 64)
    ) {
        let Some(made) = made(4 * AREA_BYTES) else { return Ok(()) };
        let put_one = |page| (page, put(&made.store, page, &pages::mixed(page ^ seed)));
        let originals: Vec<_> = (0..30).map(put_one).collect();
        put_run(&made.store, 1000, &run_of(0..100));
        let index = File::from(made.index.try_clone().expect("dup"));
        for n in 0..24 {
            let noise = pages::incompressible(seed.wrapping_add(n));
            let pick = u64::from_le_bytes(*noise.first_chunk().expect("8 bytes"));
            // The header, the table of 32 areas, and the headers of the first areas.
            let offset = match n % 3 {
                0 => pick % (4096 + 32 * 128),
                1 => 8192 + pick % (4 * 8192),
                _ => 4096 + pick % 4 * 128,
            };
            let len = if n % 3 == 2 { 1 + pick as usize % 128 } else { 1 + pick as usize % PAGE_SIZE };
            index.write_all_at(&noise[..len], offset).expect("write");
        }
        for (page, handle) in &originals {
            let (outcome, out) = get(&made.store, *page, *handle);
            prop_assert!(outcome != GetOutcome::Found || out == pages::mixed(*page ^ seed), "wrong bytes were found");
        }
        for handle in bits.into_iter().filter_map(Handle::new) {
            for near in [handle.bits(), handle.bits() & 0x7f_0000_0fff].into_iter().filter_map(Handle::new) {
                let _ = get(&made.store, 1, near);
                made.store.free(key(1), near);
            }
        }
        for page in 100..120 {
            if let PutOutcome::Stored(handle) = made.store.put(key(page), &pages::mixed(page)) {
                let (outcome, out) = get(&made.store, page, handle);
                prop_assert!(outcome != GetOutcome::Found || out == pages::mixed(page));
            }
        }
        let _ = (made.store.usage(), made.store.usage_detail(), made.store.validate());
        // Whatever the index had, recover makes an empty store of it, except for blocks that the noise calls bad.
        recover(&made.store, std::iter::empty()).expect("recover");
        made.store.validate().expect("valid");
        prop_assert_eq!(made.store.usage().pages, 0);
    }
}
