//! Two real processes on one file store: both at once, and one killed in the middle of its writes.
//!
//! Before: this test program starts itself again as a worker, which opens the parent's file and index through `/proc`.
//! After: the parent reads back each page in the worker's ledger, and nothing that was lost with the worker stays
//! charged.
//! Threads: two in the worker, one in the parent. Units: a ledger word is a handle, a ledger slot is a page.
//! Promise: no sleeps; the moment of the kill is chosen by counting the worker's progress reports.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::AtomicU64;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, DurableStore, FileOptions, FileStore, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome,
    Recovered, RegionKey, Store,
};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::pages;
use ballast_testkit::skip;

use crate::ledger::{live, replace};

const ENV_FILE: &str = "BALLAST_TEST_FILE";
const ENV_INDEX: &str = "BALLAST_TEST_INDEX";
const ENV_LEDGER: &str = "BALLAST_TEST_LEDGER";
const ENV_GROUP: &str = "BALLAST_TEST_GROUP";
const ENV_ROUNDS: &str = "BALLAST_TEST_ROUNDS";
const THREADS: u64 = 2;
/// Pages that each worker thread keeps. The ledger has two words per page: handle (with a bit for "valid") and seed.
const PAGES: u64 = 64;
/// The pages of a run that a worker puts at once.
const RUN: u64 = 8;
const LEDGER_BYTES: usize = (THREADS * PAGES * 16) as usize;
const O_DIRECT: i32 = 0o40000;

fn options() -> FileOptions {
    FileOptions::new(Budget::new(Bytes(64 << 20)))
}

fn recover(store: &FileStore, live: impl Iterator<Item = Handle>) -> std::io::Result<Recovered> {
    store.recover(&mut live.map(|handle| (key(0), handle)))
}

fn key(page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 9 }.page(PageIdx(page))
}

fn put_run(store: &FileStore, first: u64, seeds: &[u64]) -> Vec<Handle> {
    let content: Vec<PageBytes> = seeds.iter().map(|seed| pages::mixed(*seed)).collect();
    let mut outcomes = Vec::new();
    store.put_run(key(first), &content, &mut outcomes);
    let handles = outcomes.into_iter().map(|outcome| match outcome {
        PutOutcome::Stored(handle) => handle,
        other => panic!("pages from {first}: {other:?}"),
    });
    handles.collect()
}

fn must_hold(store: &FileStore, page: u64, handle: Handle, seed: u64) {
    let mut out = [0; PAGE_SIZE];
    // A disk that others use, too, may be late.
    let mut asks = std::iter::repeat_with(|| store.get(key(page), handle, &mut out, IoContext::GUEST));
    let outcome = asks.find(|outcome| *outcome != GetOutcome::Busy);
    assert!(outcome == Some(GetOutcome::Found) && out == pages::mixed(seed), "page {page}: {outcome:?}");
}

/// Replaces pages forever (or for `rounds` rounds), and writes each handle to the ledger before it frees the old one.
/// Puts a run at once, or page by page, in turn.
fn churn(store: &FileStore, ledger: &[AtomicU64], thread: u64, rounds: u64, report: bool) {
    for round in 0..rounds {
        let step = if round % 2 == 0 { RUN } else { 1 };
        for first in (thread * PAGES..(thread + 1) * PAGES).step_by(step as usize) {
            let seeds: Vec<u64> = (first..first + step).map(|page| round << 32 | page).collect();
            let handles = put_run(store, first, &seeds);
            for ((page, seed), new) in (first..).zip(seeds).zip(handles) {
                if let Some(old) = replace(ledger, page, new, seed) {
                    store.free(key(page), old);
                }
            }
            if report {
                std::io::stderr().write_all(b"+").expect("the parent reads");
            }
        }
    }
}

/// The worker process; not a test.
#[test]
fn worker() {
    let Ok(file) = std::env::var(ENV_FILE) else { return };
    if let Ok(group) = std::env::var(ENV_GROUP) {
        std::fs::write(group, std::process::id().to_string()).expect("join the control group");
    }
    let open = |path: &str, flags: i32| {
        File::options().read(true).write(true).custom_flags(flags).open(path).expect("open through /proc")
    };
    let index = open(&std::env::var(ENV_INDEX).expect("an index"), 0);
    let store = FileStore::open(open(&file, O_DIRECT), index.into(), options()).expect("open the store");
    let ledger_file = open(&std::env::var(ENV_LEDGER).expect("a ledger"), 0);
    let ledger = Mapping::shared(&ledger_file, 0, LEDGER_BYTES).expect("map the ledger");
    let rounds = std::env::var(ENV_ROUNDS).expect("rounds").parse().expect("a number");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (store, words) = (&store, ledger.words(0, LEDGER_BYTES / 8));
            scope.spawn(move || churn(store, words, thread, rounds, thread == 0));
        }
    });
}

fn start_worker(file: &OwnedFd, index: &OwnedFd, ledger: &OwnedFd, rounds: u64, slow: Option<&SlowDevice>) -> Child {
    let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "file_processes::worker", "--nocapture"])
        .envs([(ENV_FILE, path(file)), (ENV_INDEX, path(index)), (ENV_LEDGER, path(ledger))])
        .env(ENV_ROUNDS, rounds.to_string())
        .envs(slow.map(|slow| (ENV_GROUP, slow.0.join("cgroup.procs"))))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("start the worker")
}

/// A control group whose processes write to the test's device at 1 MiB/s; removed on drop.
struct SlowDevice(PathBuf);

impl SlowDevice {
    fn new() -> std::io::Result<Self> {
        let device = std::fs::metadata(std::env::temp_dir())?.st_dev();
        let (major, minor) = (device >> 8 & 0xfff, device & 0xff | device >> 12 & 0xfff00);
        let slow = Self(Path::new("/sys/fs/cgroup/blkio").join(format!("ballast-test-{}", std::process::id())));
        std::fs::create_dir(&slow.0)?;
        std::fs::write(slow.0.join("blkio.throttle.write_bps_device"), format!("{major}:{minor} {}", 1 << 20))?;
        Ok(slow)
    }
}

impl Drop for SlowDevice {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.0);
    }
}

fn free_all_and_check_empty(store: &FileStore, live: &[(u64, Handle, u64)]) {
    for (page, handle, _) in live {
        store.free(key(*page), *handle);
    }
    store.validate().expect("valid");
    assert_eq!((store.usage().pages, store.usage().bytes), (0, 0));
}

fn made() -> Option<(FileStore, OwnedFd, OwnedFd)> {
    FileStore::create(&std::env::temp_dir(), options()).inspect_err(|error| skip("disk", error)).ok()
}

#[test]
fn two_processes_use_one_file_at_once() {
    let Some((store, file, index)) = made() else { return };
    let ledger_fd = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
    let ledger = Mapping::shared(&ledger_fd, 0, LEDGER_BYTES).expect("map");
    let mut child = start_worker(&file, &index, &ledger_fd, 10, None);
    // The parent's own pages, beside the worker's, while it works.
    let base = THREADS * PAGES;
    let mut progress = [0; 8];
    let mut stderr = child.stderr.take().expect("piped");
    let mut round = 0;
    while stderr.read(&mut progress).expect("read") > 0 {
        let seeds: Vec<u64> = (base..base + 20).map(|page| page ^ round).collect();
        let handles = put_run(&store, base, &seeds);
        for ((page, seed), handle) in (base..).zip(seeds).zip(handles) {
            must_hold(&store, page, handle, seed);
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
    let Some((store, file, index)) = made() else { return };
    drop(store);
    let mut found_a_leak = false;
    for kill in 0..40usize {
        let ledger_fd = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
        let ledger = Mapping::shared(&ledger_fd, 0, LEDGER_BYTES).expect("map");
        let mut child = start_worker(&file, &index, &ledger_fd, u64::MAX, None);
        let mut progress = vec![0; 1 + kill];
        child.stderr.take().expect("piped").read_exact(&mut progress).expect("progress");
        child.kill().expect("kill");
        child.wait().expect("wait");
        let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
        let store = FileStore::open(dup(&file), dup(&index), options()).expect("open");
        let live = live(ledger.words(0, LEDGER_BYTES / 8));
        let report = recover(&store, live.iter().map(|(_, handle, _)| *handle)).expect("recover");
        store.validate().expect("valid");
        assert_eq!((report.kept_blobs + report.same_filled, report.missing), (live.len() as u64, 0));
        found_a_leak |= report.freed_slots > 0;
        // New pages at once, in the blocks to which the dead process wrote: none of its writes may still be in flight.
        let seeds: Vec<u64> = (0..64).map(|page| page ^ 0xabcd << 16).collect();
        let handles = put_run(&store, 1 << 20, &seeds);
        for (page, handle, seed) in &live {
            must_hold(&store, *page, *handle, *seed);
        }
        for ((page, seed), handle) in (1 << 20..).zip(seeds).zip(handles) {
            must_hold(&store, page, handle, seed);
            store.free(key(page), handle);
        }
        free_all_and_check_empty(&store, &live);
    }
    assert!(found_a_leak, "no kill in 40 fell between a put and its ledger entry: the test does not test");
}

#[test]
fn writes_of_a_dead_process_cannot_reach_a_block_after_recover() {
    let slow = match SlowDevice::new() {
        Ok(slow) => slow,
        Err(why) => return skip("root", format_args!("a control group of blkio that slows a device down: {why}")),
    };
    let Some((store, file, index)) = made() else { return };
    drop(store);
    for kill in 0..8usize {
        let ledger_fd = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
        let ledger = Mapping::shared(&ledger_fd, 0, LEDGER_BYTES).expect("map");
        let mut child = start_worker(&file, &index, &ledger_fd, u64::MAX, Some(&slow));
        // When one thread reports, the other waits for its write.
        let mut progress = vec![0; 2 + kill];
        child.stderr.take().expect("piped").read_exact(&mut progress).expect("progress");
        child.kill().expect("kill");
        child.wait().expect("wait");
        let dup = |fd: &OwnedFd| fd.try_clone().expect("dup");
        let store = FileStore::open(dup(&file), dup(&index), options()).expect("open");
        let live = live(ledger.words(0, LEDGER_BYTES / 8));
        recover(&store, live.iter().map(|(_, handle, _)| *handle)).expect("recover");
        // Quick writes to where the slow ones went: the first free blocks of the area for single pages and short runs.
        let seeds: Vec<u64> = (0..256).map(|page| page ^ 0xabcd << 16).collect();
        let runs = (1u64 << 20..).step_by(RUN as usize).zip(seeds.chunks(RUN as usize));
        let handles: Vec<Handle> = runs.flat_map(|(first, seeds)| put_run(&store, first, seeds)).collect();
        // Each write in flight ends before the next recover does.
        let all = live.iter().map(|(_, handle, _)| *handle).chain(handles.iter().copied());
        assert_eq!(recover(&store, all).expect("recover").missing, 0);
        for ((page, seed), handle) in (1 << 20..).zip(seeds).zip(handles) {
            must_hold(&store, page, handle, seed);
            store.free(key(page), handle);
        }
        for (page, handle, seed) in &live {
            must_hold(&store, *page, *handle, *seed);
        }
        free_all_and_check_empty(&store, &live);
    }
}
