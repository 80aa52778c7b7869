//! Speed of the file store on this machine's disk, beside the RAM store and plain direct I/O.
//!
//! Before: `cargo run --release -p ballast-store --example file_speed [DIRECTORY]` (default: the directory for
//! temporary files). After: one line per operation. Units: us per page (4 KiB) or per extent (2 MiB), p50 with p10, p90
//! and p99; one operation at a time, one thread.
//! Promise: pages are read in another order than they were written in, and the page cache is not used.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, GIB, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, FileOptions, FileStore, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RamOptions,
    RamStore, RegionKey, Store,
};
use ballast_sys::{direct, ring::Buffer};
use ballast_testkit::pages;

const PAGES: usize = 4096;
const EXTENT: usize = 512;
const SCATTERED: usize = 32;

fn key(page: usize) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 0 }.page(PageIdx(page as u64))
}

/// A permutation of `0..n` without locality; `n` is a power of two.
fn shuffled(n: usize) -> impl Iterator<Item = usize> {
    (0..n).map(move |index| index.wrapping_mul(1_664_525).wrapping_add(1_013_904_223) % n)
}

#[derive(Default)]
struct Times(Vec<f64>);

impl Times {
    fn time<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let done = work();
        self.0.push(start.elapsed().as_secs_f64() * 1e6);
        done
    }

    fn print(mut self, what: &str) {
        self.0.sort_by(f64::total_cmp);
        let at = |percent: usize| self.0[(self.0.len() - 1) * percent / 100];
        println!("{what:44} {:8.1} us ({:.1}, {:.1}, {:.1})", at(50), at(10), at(90), at(99));
    }
}

fn stored(outcome: PutOutcome) -> Handle {
    match outcome {
        PutOutcome::Stored(handle) => handle,
        other => panic!("{other:?}"),
    }
}

fn measure(name: &str, store: &dyn Store, content: &[PageBytes]) {
    let mut out = vec![[0; PAGE_SIZE]; EXTENT];
    for round in ["new", "again"] {
        let mut times = Times::default();
        let handles: Vec<Handle> = content
            .iter()
            .enumerate()
            .map(|(page, bytes)| stored(times.time(|| store.put(key(page), bytes))))
            .collect();
        times.print(&format!("{name} put a page, {round}"));
        let mut times = Times::default();
        for page in shuffled(content.len()) {
            assert_eq!(
                times.time(|| store.get(key(page), handles[page], &mut out[0], IoContext::GUEST)),
                GetOutcome::Found
            );
        }
        times.print(&format!("{name} get a page, {round}"));
        let mut times = Times::default();
        for (page, handle) in handles.iter().enumerate() {
            times.time(|| store.free(key(page), *handle));
        }
        times.print(&format!("{name} free a page, {round}"));
    }
    // Pages that are neighbours in the guest but not on the disk, read together.
    let mut handles = vec![None; content.len()];
    for page in shuffled(content.len()) {
        handles[page] = Some(stored(store.put(key(page), &content[page])));
    }
    let handles: Vec<Handle> = handles.into_iter().flatten().collect();
    let mut times = Times::default();
    for first in (0..content.len()).step_by(SCATTERED) {
        let pages = key(first).run(handles[first..first + SCATTERED].iter().copied());
        let found = times.time(|| store.get_run(&pages, &mut out[..SCATTERED], IoContext::GUEST));
        assert!(found.iter().all(|outcome| *outcome == GetOutcome::Found));
    }
    times.print(&format!("{name} get {SCATTERED} pages from all over"));
    for (page, handle) in handles.iter().enumerate() {
        store.free(key(page), *handle);
    }
    let (mut puts, mut gets) = (Times::default(), Times::default());
    for _ in 0..4 {
        let mut outcomes = Vec::new();
        for first in (0..content.len()).step_by(EXTENT) {
            puts.time(|| store.put_run(key(first), &content[first..first + EXTENT], &mut outcomes));
        }
        let handles: Vec<Handle> = outcomes.into_iter().map(stored).collect();
        for number in shuffled(content.len() / EXTENT) {
            let first = number * EXTENT;
            let pages = key(first).run(handles[first..first + EXTENT].iter().copied());
            let found = gets.time(|| store.get_run(&pages, &mut out, IoContext::GUEST));
            assert!(found.iter().all(|outcome| *outcome == GetOutcome::Found));
        }
        for (page, handle) in handles.iter().enumerate() {
            store.free(key(page), *handle);
        }
    }
    puts.print(&format!("{name} put 2 MiB"));
    gets.print(&format!("{name} get 2 MiB"));
}

/// The cost of the disk alone, by `pread` and `pwrite`.
fn plain(dir: &std::path::Path) {
    let file = direct::create_unnamed(dir, Bytes((PAGES * PAGE_SIZE) as u64)).expect("a file");
    let file = std::fs::File::from(file);
    let mut buffer = Buffer::new(EXTENT * PAGE_SIZE).expect("memory");
    buffer.as_mut_slice().fill(0x5a);
    for (what, bytes) in [("a page", PAGE_SIZE), ("2 MiB", EXTENT * PAGE_SIZE)] {
        let n = PAGES * PAGE_SIZE / bytes;
        for round in ["new", "again"] {
            let mut times = Times::default();
            for at in 0..n {
                times.time(|| file.write_all_at(&buffer.as_slice()[..bytes], (at * bytes) as u64).expect("write"));
            }
            times.print(&format!("pwrite {what}, {round}"));
        }
        let mut times = Times::default();
        for at in shuffled(n) {
            times.time(|| file.read_exact_at(&mut buffer.as_mut_slice()[..bytes], (at * bytes) as u64).expect("read"));
        }
        times.print(&format!("pread {what}"));
    }
}

fn main() {
    let dir = std::env::args_os().nth(1).map_or_else(std::env::temp_dir, PathBuf::from);
    println!("{PAGES} half-compressible pages, {}: p50 (p10, p90, p99)", dir.display());
    let content: Vec<PageBytes> = (0..PAGES as u64).map(pages::half_compressible).collect();
    plain(&dir);
    let options = FileOptions::new(Budget::new(Bytes(GIB)));
    let (store, _file, _index) = FileStore::create(&dir, options).expect("create a file store");
    measure("file:", &store, &content);
    let (store, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(GIB)))).expect("create a RAM store");
    measure("ram:", &store, &content);
    let later = RamOptions { punch_later: true, ..RamOptions::new(Budget::new(Bytes(GIB))) };
    let (store, _arena) = RamStore::create(later).expect("create a RAM store");
    measure("ram, punched later:", &store, &content);
}
