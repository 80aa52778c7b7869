//! Two real processes on one arena: both at once, and one killed in the middle of its work.
//!
//! Before: this test program starts itself again as a worker, which opens the parent's arena through `/proc`. After:
//! the parent reads back each page in the worker's ledger, and nothing that was lost with the worker stays charged.
//! Threads: two in the worker, one in the parent. Units: a ledger word is a handle, a ledger slot is a page.
//! Promise: no sleeps; the moment of the kill is chosen by counting the worker's progress reports.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, GetOutcome, Handle, IoContext, PageKey, PutOutcome, RamOptions, RamStore, RegionKey, Store,
};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::pages;

use crate::ledger::{live, replace};

const ENV_ARENA: &str = "BALLAST_TEST_ARENA";
const ENV_LEDGER: &str = "BALLAST_TEST_LEDGER";
const ENV_ROUNDS: &str = "BALLAST_TEST_ROUNDS";
const THREADS: u64 = 2;
/// Pages that each worker thread keeps.
const PAGES: u64 = 256;
const LEDGER_BYTES: usize = (THREADS * PAGES * 16) as usize;

fn options() -> RamOptions {
    RamOptions { max_slabs: 4096, ..RamOptions::new(Budget::new(Bytes(64 << 20))) }
}

fn key(page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 9 }.page(PageIdx(page))
}

fn put(store: &RamStore, page: u64, seed: u64) -> Handle {
    match store.put(key(page), &pages::mixed(seed)) {
        PutOutcome::Stored(handle) => handle,
        other => panic!("page {page}: {other:?}"),
    }
}

fn must_hold(store: &RamStore, page: u64, handle: Handle, seed: u64) {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key(page), handle, &mut out, IoContext::GUEST);
    assert!(outcome == GetOutcome::Found && out == pages::mixed(seed), "page {page}: {outcome:?}");
}

/// Replaces pages forever (or for `rounds` rounds), and writes each handle to the ledger before it frees the old one.
fn churn(store: &RamStore, ledger: &[AtomicU64], thread: u64, rounds: u64, report: bool) {
    for round in 0..rounds {
        for page in thread * PAGES..(thread + 1) * PAGES {
            let seed = round << 32 | page;
            let new = put(store, page, seed);
            if let Some(old) = replace(ledger, page, new, seed) {
                store.free(key(page), old);
            }
            if report && page % 16 == 0 {
                std::io::stderr().write_all(b"+").expect("the parent reads");
            }
        }
    }
}

/// The worker process; not a test.
#[test]
fn worker() {
    let Ok(arena) = std::env::var(ENV_ARENA) else { return };
    let open = |path: &str| File::options().read(true).write(true).open(path).expect("open through /proc");
    let store = RamStore::open(open(&arena).into(), options()).expect("open the arena");
    let ledger_file = open(&std::env::var(ENV_LEDGER).expect("a ledger"));
    let ledger = Mapping::shared(&ledger_file, 0, LEDGER_BYTES).expect("map the ledger");
    let rounds = std::env::var(ENV_ROUNDS).expect("rounds").parse().expect("a number");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (store, words) = (&store, ledger.words(0, LEDGER_BYTES / 8));
            scope.spawn(move || churn(store, words, thread, rounds, thread == 0));
        }
    });
}

fn start_worker(arena: &OwnedFd, ledger: &OwnedFd, rounds: u64) -> Child {
    let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "two_processes::worker", "--nocapture"])
        .envs([(ENV_ARENA, path(arena)), (ENV_LEDGER, path(ledger)), (ENV_ROUNDS, rounds.to_string())])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start the worker")
}

fn free_all_and_check_empty(store: &RamStore, live: &[(u64, Handle, u64)]) {
    for (page, handle, _) in live {
        store.free(key(*page), *handle);
    }
    store.validate().expect("valid");
    assert_eq!((store.usage().pages, store.usage().bytes), (0, 0));
}

#[test]
fn two_processes_allocate_from_one_arena_at_once() {
    let (store, arena) = RamStore::create(options()).expect("create");
    let ledger_fd = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
    let ledger = Mapping::shared(&ledger_fd, 0, LEDGER_BYTES).expect("map");
    let mut child = start_worker(&arena, &ledger_fd, 20);
    // While the worker puts its pages, the parent puts others.
    let base = THREADS * PAGES;
    let mut progress = [0; 8];
    let mut stderr = child.stderr.take().expect("piped");
    let mut round = 0;
    while stderr.read(&mut progress).expect("read") > 0 {
        let handles: Vec<_> = (base..base + 100).map(|page| put(&store, page, page ^ round)).collect();
        for (page, handle) in (base..).zip(handles) {
            must_hold(&store, page, handle, page ^ round);
            store.free(key(page), handle);
        }
        round += 1;
    }
    assert!(child.wait().expect("wait").success() && round > 0);
    let live = live(ledger.words(0, LEDGER_BYTES / 8));
    assert_eq!(live.len() as u64, THREADS * PAGES);
    store.validate().expect("valid");
    assert_eq!(store.usage().pages, live.len() as u64);
    for (page, handle, seed) in &live {
        must_hold(&store, *page, *handle, *seed);
    }
    free_all_and_check_empty(&store, &live);
}

#[test]
fn a_process_killed_anywhere_loses_no_page_of_its_ledger_and_leaks_nothing() {
    let (store, arena) = RamStore::create(options()).expect("create");
    drop(store);
    let (mut found_a_leak, mut kills) = (false, 0);
    // Until one kill fell between a put and its ledger entry.
    while kills < 40 || !found_a_leak {
        assert!(kills < 4000, "no kill fell between a put and its ledger entry: the test does not test");
        kills += 1;
        let ledger_fd = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
        let ledger = Mapping::shared(&ledger_fd, 0, LEDGER_BYTES).expect("map");
        let mut child = start_worker(&arena, &ledger_fd, u64::MAX);
        let mut progress = vec![0; 1 + kills % 40 * 2];
        child.stderr.take().expect("piped").read_exact(&mut progress).expect("progress");
        child.kill().expect("kill");
        child.wait().expect("wait");
        let store = RamStore::open(arena.try_clone().expect("dup"), options()).expect("open");
        let live = live(ledger.words(0, LEDGER_BYTES / 8));
        let report = store.sweep(live.iter().map(|(_, handle, _)| *handle));
        store.validate().expect("valid");
        assert_eq!((report.kept_blobs + report.same_filled, report.missing), (live.len() as u64, 0));
        found_a_leak |= report.freed_slots > 0;
        for (page, handle, seed) in &live {
            must_hold(&store, *page, *handle, *seed);
        }
        free_all_and_check_empty(&store, &live);
    }
}
