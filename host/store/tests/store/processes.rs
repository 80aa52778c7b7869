//! Two real processes on one store: both at once, and one killed in the middle of its work.
//!
//! Before: this test program starts itself again as a worker, which opens the parent's arena, or its file and index,
//! through `/proc`. After: the parent reads back each page in the worker's ledger, and nothing that was lost with the
//! worker stays charged.
//! Threads: two in the worker, one in the parent. Units: two ledger words per page: handle (with a bit for "valid") and
//! seed.
//! Promise: no sleeps; the moment of the kill is chosen by counting the worker's progress reports.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::Bytes;
use ballast_store::{Budget, DurableStore, FileOptions, FileStore, Handle, PageBytes, RamOptions, RamStore, Recovered};
use ballast_sys::{Mapping, memfd};
use ballast_testkit::pages;
use ballast_testkit::skip;

use crate::common::{MIB, key, must_hold, put_run};

/// The worker's store: its arena, or its file and index.
const ENV_FILES: &str = "BALLAST_TEST_FILES";
const ENV_LEDGER: &str = "BALLAST_TEST_LEDGER";
const ENV_GROUP: &str = "BALLAST_TEST_GROUP";
const ENV_ROUNDS: &str = "BALLAST_TEST_ROUNDS";
const THREADS: u64 = 2;
/// Pages that each worker thread keeps.
const PAGES: u64 = 64;
/// The pages of a run that a worker puts at once.
const RUN: u64 = 8;
const LEDGER_BYTES: usize = (THREADS * PAGES * 16) as usize;
const VALID: u64 = 1 << 63;
const O_DIRECT: i32 = 0o40000;

/// A store that processes share through its files.
trait Shared: DurableStore + Sized {
    /// `None`, with a printed skip, where that is impossible.
    fn made() -> Option<(Self, Vec<OwnedFd>)>;
    fn open(files: Vec<OwnedFd>) -> Self;
    fn check(&self);
}

impl Shared for RamStore {
    fn made() -> Option<(Self, Vec<OwnedFd>)> {
        let (store, arena) = Self::create(ram_options()).expect("create");
        Some((store, vec![arena]))
    }

    fn open(files: Vec<OwnedFd>) -> Self {
        let [arena] = <[OwnedFd; 1]>::try_from(files).expect("an arena");
        Self::open(arena, ram_options()).expect("open the arena")
    }

    fn check(&self) {
        self.validate().expect("valid");
    }
}

impl Shared for FileStore {
    fn made() -> Option<(Self, Vec<OwnedFd>)> {
        let created = Self::create(&std::env::temp_dir(), FileOptions::new(Budget::new(Bytes(64 * MIB))));
        let (store, file, index) = created.inspect_err(|error| skip("disk", error)).ok()?;
        Some((store, vec![file, index]))
    }

    fn open(files: Vec<OwnedFd>) -> Self {
        let [file, index] = <[OwnedFd; 2]>::try_from(files).expect("a file and an index");
        Self::open(file, index, FileOptions::new(Budget::new(Bytes(64 * MIB)))).expect("open the store")
    }

    fn check(&self) {
        self.validate().expect("valid");
    }
}

fn ram_options() -> RamOptions {
    RamOptions { max_slabs: 4096, ..RamOptions::new(Budget::new(Bytes(64 * MIB))) }
}

/// A valid page of the ledger, with its seed.
type Page = (u64, Handle, u64);

/// Writes a page's new handle and seed. Returns the handle that it had.
fn replace(ledger: &[AtomicU64], page: u64, handle: Handle, seed: u64) -> Option<Handle> {
    let [handle_word, seed_word] = &ledger[page as usize * 2..][..2] else { unreachable!("a pair") };
    let old = handle_word.load(Ordering::Acquire);
    // Invalid between the two stores: after a kill there, the page's content is unknown.
    handle_word.store(0, Ordering::Release);
    seed_word.store(seed, Ordering::Release);
    handle_word.store(handle.bits() | VALID, Ordering::Release);
    (old & VALID != 0).then(|| Handle::new(old & !VALID).expect("40 bits"))
}

fn live(ledger: &Mapping) -> Vec<Page> {
    (0..)
        .zip(ledger.words(0, LEDGER_BYTES / 8).as_chunks::<2>().0)
        .filter_map(|(page, [handle, seed])| {
            let word = handle.load(Ordering::Acquire);
            let handle = Handle::new(word & !VALID).filter(|_| word & VALID != 0)?;
            Some((page, handle, seed.load(Ordering::Acquire)))
        })
        .collect()
}

fn recover(store: &impl Shared, live: &[Page]) -> Recovered {
    let found = store.recover(&mut live.iter().map(|(page, handle, _)| (key(*page), *handle))).expect("recover");
    store.check();
    found
}

fn put_seeds(store: &impl Shared, first: u64, seeds: impl Iterator<Item = u64> + Clone) -> Vec<Page> {
    let content: Vec<PageBytes> = seeds.clone().map(pages::mixed).collect();
    let handles = put_run(store, first, &content);
    (first..).zip(handles).zip(seeds).map(|((page, handle), seed)| (page, handle, seed)).collect()
}

fn must_hold_all(store: &impl Shared, pages: &[Page]) {
    for (page, handle, seed) in pages {
        must_hold(store, *page, *handle, &pages::mixed(*seed));
    }
}

fn free(store: &impl Shared, pages: &[Page]) {
    for (page, handle, _) in pages {
        store.free(key(*page), *handle);
    }
}

/// Replaces pages for `rounds` rounds, as a run or one by one in turn; each new handle is in the ledger before a free.
fn churn(store: &impl Shared, ledger: &[AtomicU64], thread: u64, rounds: u64) {
    for round in 0..rounds {
        let step = if round % 2 == 0 { RUN } else { 1 };
        for first in (thread * PAGES..(thread + 1) * PAGES).step_by(step as usize) {
            for (page, new, seed) in put_seeds(store, first, (first..first + step).map(|page| round << 32 | page)) {
                if let Some(old) = replace(ledger, page, new, seed) {
                    store.free(key(page), old);
                }
            }
            if thread == 0 {
                std::io::stderr().write_all(b"+").expect("the parent reads");
            }
        }
    }
}

/// The worker process; not a test.
#[test]
fn worker() {
    let Ok(files) = std::env::var(ENV_FILES) else { return };
    if let Ok(group) = std::env::var(ENV_GROUP) {
        std::fs::write(group, std::process::id().to_string()).expect("join the control group");
    }
    let open = |path: &str, flags: i32| -> OwnedFd {
        File::options().read(true).write(true).custom_flags(flags).open(path).expect("open through /proc").into()
    };
    match files.split(',').collect::<Vec<_>>()[..] {
        [arena] => work(&<RamStore as Shared>::open(vec![open(arena, 0)])),
        [file, index] => work(&<FileStore as Shared>::open(vec![open(file, O_DIRECT), open(index, 0)])),
        _ => panic!("{files} is no store"),
    }
}

fn work(store: &impl Shared) {
    let file = File::options().read(true).write(true).open(std::env::var(ENV_LEDGER).expect("a ledger"));
    let ledger = Mapping::shared(file.expect("open through /proc"), 0, LEDGER_BYTES).expect("map the ledger");
    let rounds = std::env::var(ENV_ROUNDS).expect("rounds").parse().expect("a number");
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let words = ledger.words(0, LEDGER_BYTES / 8);
            scope.spawn(move || churn(store, words, thread, rounds));
        }
    });
    // No other process knows of emptied memory whose return this process has put off.
    store.tidy();
}

struct Worker {
    child: Child,
    progress: ChildStderr,
    ledger: Mapping,
}

impl Worker {
    fn start(files: &[OwnedFd], rounds: u64, slow: Option<&SlowDevice>) -> Self {
        let ledger = memfd::create("ballast-test", Bytes(LEDGER_BYTES as u64)).expect("memfd");
        let path = |fd: &OwnedFd| format!("/proc/{}/fd/{}", std::process::id(), fd.as_raw_fd());
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--exact", "processes::worker", "--nocapture"])
            .env(ENV_FILES, files.iter().map(path).collect::<Vec<_>>().join(","))
            .envs([(ENV_LEDGER, path(&ledger)), (ENV_ROUNDS, rounds.to_string())])
            .envs(slow.map(|slow| (ENV_GROUP, slow.0.join("cgroup.procs"))))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start the worker");
        let progress = child.stderr.take().expect("piped");
        // The worker opens the ledger through this process.
        let mut worker = Self { child, progress, ledger: Mapping::shared(&ledger, 0, LEDGER_BYTES).expect("map") };
        worker.wait_for_reports(1);
        worker
    }

    fn wait_for_reports(&mut self, reports: usize) {
        self.progress.read_exact(&mut vec![0; reports]).expect("progress");
    }

    /// Kills it after further reports. Returns the pages of its ledger, and the store as its successor opens it.
    fn killed<S: Shared>(mut self, reports: usize, files: &[OwnedFd]) -> (Vec<Page>, S) {
        self.wait_for_reports(reports);
        self.child.kill().expect("kill");
        self.child.wait().expect("wait");
        let store = S::open(files.iter().map(|fd| fd.try_clone().expect("dup")).collect());
        (live(&self.ledger), store)
    }
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

fn free_all_and_check_empty(store: &impl Shared, live: &[Page]) {
    must_hold_all(store, live);
    free(store, live);
    store.check();
    assert_eq!((store.usage().pages, store.usage().bytes), (0, 0));
}

fn two_processes_use_one_store_at_once<S: Shared>(rounds: u64) {
    let Some((store, files)) = S::made() else { return };
    let mut worker = Worker::start(&files, rounds, None);
    // The parent's own pages, beside the worker's, while it works.
    let base = THREADS * PAGES;
    let mut round = 0;
    while worker.progress.read(&mut [0; 8]).expect("read") > 0 {
        let pages = put_seeds(&store, base, (base..base + 20).map(|page| page ^ round));
        must_hold_all(&store, &pages);
        free(&store, &pages);
        round += 1;
    }
    assert!(worker.child.wait().expect("wait").success() && round > 0);
    let live = live(&worker.ledger);
    assert_eq!(live.len() as u64, THREADS * PAGES);
    store.check();
    assert_eq!(store.usage().pages, live.len() as u64);
    free_all_and_check_empty(&store, &live);
}

fn a_process_killed_anywhere_loses_no_page_of_its_ledger_and_leaks_nothing<S: Shared>() {
    let Some((store, files)) = S::made() else { return };
    drop(store);
    let (mut found_a_leak, mut kills) = (false, 0);
    // The loop ends when one kill fell between a put and its ledger entry.
    while kills < 40 || !found_a_leak {
        assert!(kills < 4000, "no kill fell between a put and its ledger entry: the test does not test");
        let (live, store) = Worker::start(&files, u64::MAX, None).killed::<S>(kills % 40, &files);
        kills += 1;
        let found = recover(&store, &live);
        assert_eq!((found.kept_blobs + found.same_filled, found.missing), (live.len() as u64, 0));
        found_a_leak |= found.freed_slots > 0;
        // New pages at once, where the dead process wrote: none of its writes may still be in flight.
        let new = put_seeds(&store, 1 << 20, (0..64).map(|page| page ^ 0xabcd << 16));
        must_hold_all(&store, &live);
        must_hold_all(&store, &new);
        free(&store, &new);
        free_all_and_check_empty(&store, &live);
    }
}

#[test]
fn two_processes_allocate_from_one_arena_at_once() {
    two_processes_use_one_store_at_once::<RamStore>(200);
}

#[test]
fn two_processes_use_one_file_at_once() {
    two_processes_use_one_store_at_once::<FileStore>(10);
}

#[test]
fn a_process_killed_anywhere_loses_no_page_of_its_arena_and_leaks_nothing() {
    a_process_killed_anywhere_loses_no_page_of_its_ledger_and_leaks_nothing::<RamStore>();
}

#[test]
fn a_process_killed_anywhere_loses_no_page_of_its_file_and_leaks_nothing() {
    a_process_killed_anywhere_loses_no_page_of_its_ledger_and_leaks_nothing::<FileStore>();
}

#[test]
fn writes_of_a_dead_process_cannot_reach_a_block_after_recover() {
    let slow = match SlowDevice::new() {
        Ok(slow) => slow,
        Err(why) => return skip("root", format_args!("a control group of blkio that slows a device down: {why}")),
    };
    let Some((store, files)) = FileStore::made() else { return };
    drop(store);
    for kill in 0..8 {
        // When one thread reports, the other waits for its write.
        let (mut live, store) = Worker::start(&files, u64::MAX, Some(&slow)).killed::<FileStore>(1 + kill, &files);
        recover(&store, &live);
        // Quick writes to where the slow ones went: the first free blocks of the area for single pages and short runs.
        let seeds = |run: u64| (run * RUN..(run + 1) * RUN).map(|page| page ^ 0xabcd << 16);
        live.extend((0..32).flat_map(|run| put_seeds(&store, (1 << 20) + run * RUN, seeds(run))));
        // Each write in flight ends before the next recover does.
        assert_eq!(recover(&store, &live).missing, 0);
        free_all_and_check_empty(&store, &live);
    }
}
