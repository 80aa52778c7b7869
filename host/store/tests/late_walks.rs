//! Random histories of a file store whose disk is late, fails and transfers less than requested, against a model.
//!
//! Before: a store in a file without a name in the directory for temporary files. After: each walk got the bytes that
//! it had put, or an outcome that the faults allow; nothing is in flight, and the store is empty.
//! Threads: several in each walk; a run of pages belongs to one thread at a time, as in the pager. Units: pages,
//! blocks.
//! Promise: injected delays take no real time. `BALLAST_WALKS` is the number of walks, `BALLAST_WALK` the seed of the
//! first.

use std::collections::HashSet;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_store::{
    Budget, DiskFault, DiskFaults, Ends, FileOptions, FileStore, GetOutcome, Handle, IoContext, PageKey, PutOutcome,
    RegionKey, SlowStore, Store, has_late_writes, notice_late_writes,
};
use ballast_testkit::pages;
use ballast_testkit::random::Random;
use ballast_testkit::skip;

const MIB: u64 = 1 << 20;
const BLOCKS: usize = (64 * MIB) as usize / PAGE_SIZE;
const RUNS: usize = 24;
const THREADS: u64 = 3;
const STEPS: usize = 150;
const EIO: i32 = 5;

/// The faults of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Disk {
    /// Reads are late. No block may be read more often than needed.
    Late,
    /// All kinds, for less time than it takes to give a page up.
    Flaky,
    /// Some blocks always fail. Only their pages may be lost.
    Bad,
}

/// The pages of a run, each with content and handle if it is stored.
type Stored = Vec<Option<(u64, Handle)>>;

struct Walk {
    store: FileStore,
    faults: Arc<DiskFaults>,
    disk: Disk,
    runs: Vec<Mutex<Stored>>,
    /// For each block: gets that found its page, and frees of it.
    ended: Vec<AtomicU64>,
    bad: HashSet<u64>,
    content: AtomicU64,
}

fn key(run: usize, page: usize) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: run as u32 }.page(PageIdx(page as u64))
}

fn block_of(handle: Handle) -> u64 {
    handle.bits() & 0x3ff | (handle.bits() >> 10 & 0x3f_ffff) << 9
}

impl Walk {
    fn begin(disk: Disk, random: &mut Random) -> Option<Self> {
        let (budget, faults) = (Budget::new(Bytes(64 * MIB)), Arc::<DiskFaults>::default());
        let unreadable_for = if disk == Disk::Bad { Duration::ZERO } else { Duration::from_hours(1) };
        let options = FileOptions { unreadable_for, faults: Some(faults.clone()), ..FileOptions::new(budget) };
        let created = FileStore::create(&std::env::temp_dir(), options);
        let (store, _, _) = created.inspect_err(|error| skip("disk", error)).ok()?;
        let bad = if disk == Disk::Bad { (0..40).map(|_| random.index(1024) as u64).collect() } else { HashSet::new() };
        Some(Self {
            store,
            faults,
            disk,
            runs: (0..RUNS).map(|_| Mutex::default()).collect(),
            ended: (0..BLOCKS).map(|_| AtomicU64::new(0)).collect(),
            bad,
            content: AtomicU64::new(0),
        })
    }

    /// From now on, reads of this page have this fault, or the lasting one of its block, and are counted.
    fn fail(&self, handle: Handle, fault: Option<DiskFault>) {
        let always = self.bad.contains(&block_of(handle)).then_some(DiskFault::Errno(EIO));
        self.faults.fail_reads_of(block_of(handle), fault.or(always));
    }

    fn ended(&self, handle: Handle) -> &AtomicU64 {
        &self.ended[block_of(handle) as usize]
    }

    fn next_fault(&self, random: &mut Random) -> DiskFault {
        let takes = Duration::from_millis(random.index(1500) as u64);
        match (self.disk, random.index(10)) {
            (_, 0..=2) => DiskFault::Late,
            (Disk::Flaky | Disk::Bad, 3) => DiskFault::Short(random.index(40 * PAGE_SIZE) + 1),
            (Disk::Flaky | Disk::Bad, 4) => DiskFault::Errno([4, 11, 12, 125][random.index(4)]),
            (Disk::Flaky, 5) => DiskFault::Errno(EIO),
            (Disk::Flaky, 6) => DiskFault::FailsAfter(takes, EIO),
            _ => DiskFault::Takes(takes),
        }
    }

    fn put(&self, run: usize, pages: &mut Stored, random: &mut Random) {
        let many = if random.one_in(3) { 1 } else { random.index(90) + 1 };
        let first = self.content.fetch_add(many as u64, Ordering::Relaxed);
        let content: Vec<_> = (first..first + many as u64).map(pages::incompressible).collect();
        if random.one_in(4) {
            let fault = [DiskFault::Late, DiskFault::Short(1 + random.index(9000))][random.index(2)];
            self.faults.fail_writes(1, fault);
        }
        let mut outcomes = Vec::new();
        self.store.put_run(key(run, 0), &content, &mut outcomes);
        let stored = (first..).zip(outcomes).map(|(content, outcome)| match outcome {
            PutOutcome::Stored(handle) => Some((content, handle)),
            PutOutcome::Full | PutOutcome::Busy => None,
        });
        *pages = stored.collect();
        pages.iter().flatten().for_each(|(_, handle)| self.fail(*handle, None));
    }

    fn check(&self, (content, handle): (u64, Handle), outcome: GetOutcome, bytes: &[u8; PAGE_SIZE]) {
        match outcome {
            GetOutcome::Found => {
                assert!(*bytes == pages::incompressible(content), "wrong bytes in block {}", block_of(handle));
                self.ended(handle).fetch_add(1, Ordering::Relaxed);
            }
            GetOutcome::Busy => {}
            GetOutcome::Corrupt if self.bad.contains(&block_of(handle)) => {}
            lost => panic!("{lost:?}: block {} has no fault that lasts", block_of(handle)),
        }
        if self.disk == Disk::Late {
            let (reads, ended) = (self.faults.reads_of(block_of(handle)), self.ended(handle).load(Ordering::Relaxed));
            assert!(reads <= ended + 1, "block {} was read {reads} times and used {ended} times", block_of(handle));
        }
    }

    fn get(&self, run: usize, pages: &Stored, random: &mut Random, context: IoContext<'_>) {
        let from = random.index(pages.len());
        let most = if random.one_in(3) { 1 } else { pages.len() - from };
        let stored: Vec<_> = pages[from..][..most].iter().map_while(|page| *page).collect();
        let handles: Vec<_> = stored.iter().map(|(_, handle)| *handle).collect();
        let mut next = Random(random.index(usize::MAX) as u64);
        for handle in handles.iter().filter(|_| next.one_in(20)) {
            self.fail(*handle, Some(self.next_fault(random)));
        }
        let mut out = vec![[0x77; PAGE_SIZE]; handles.len()];
        let outcomes = if self.disk != Disk::Late && handles.len() == 1 && random.one_in(3) {
            let (key, out) = (key(run, from), &mut out[0]);
            self.store.begin(key, handles[0], &|_| ());
            let at_once = context.ended_by(Ends::AtOnce(&|_| ()));
            vec![self.store.get(key, handles[0], out, if random.one_in(2) { at_once } else { context })]
        } else {
            self.store.get_run(&key(run, from).run(handles), &mut out, context)
        };
        for (page, (outcome, bytes)) in stored.into_iter().zip(outcomes.into_iter().zip(&out)) {
            self.fail(page.1, None);
            self.check(page, outcome, bytes);
        }
    }

    fn free(&self, run: usize, (page, stored): (usize, &mut Option<(u64, Handle)>)) {
        if let Some((_, handle)) = stored.take() {
            // The next page may get the block before `free` returns, so this is counted first.
            self.ended(handle).fetch_add(1, Ordering::Relaxed);
            self.store.free(key(run, page), handle);
        }
    }

    fn step(&self, random: &mut Random) {
        let run = random.index(RUNS);
        let Ok(mut pages) = self.runs[run].try_lock() else { return };
        let wanted = AtomicU32::new(random.index(3) as u32 / 2);
        let ends = if random.one_in(2) { Ends::Wanted(&wanted) } else { Ends::Never };
        let context = if random.one_in(3) { IoContext::BACKGROUND } else { IoContext::GUEST }.ended_by(ends);
        match random.index(16) {
            _ if pages.is_empty() => self.put(run, &mut pages, random),
            0 => {
                pages.iter_mut().enumerate().for_each(|page| self.free(run, page));
                pages.clear();
            }
            1..=3 => {
                let (from, most) = (random.index(pages.len()), random.index(20) + 1);
                pages.iter_mut().enumerate().skip(from).take(most).for_each(|page| self.free(run, page));
            }
            4 => {
                // A read that outlasts every wait for it.
                let page = random.index(pages.len());
                if let Some((_, handle)) = pages[page] {
                    self.fail(handle, Some(DiskFault::Takes(Duration::MAX)));
                    self.get(run, &pages, random, context);
                    for page in pages.iter_mut().enumerate() {
                        self.free(run, page);
                    }
                    pages.clear();
                }
            }
            _ => self.get(run, &pages, random, context),
        }
    }

    /// Without faults, each page is found or known to be lost, and then the store is empty.
    fn end(&self) {
        let until = Instant::now() + Duration::from_mins(1);
        for (run, pages) in self.runs.iter().enumerate() {
            let mut pages = pages.lock().expect("no panic");
            for (page, stored) in pages.iter_mut().enumerate() {
                while let Some((content, handle)) = *stored {
                    let context = if page % 2 == 1 { IoContext::BACKGROUND } else { IoContext::GUEST };
                    let mut out = [0; PAGE_SIZE];
                    let outcome = self.store.get(key(run, page), handle, &mut out, context);
                    self.check((content, handle), outcome, &out);
                    assert!(Instant::now() < until, "block {} does not come", block_of(handle));
                    // An earlier read with another fault may have brought the bytes of a bad block.
                    let is_bad = self.bad.contains(&block_of(handle));
                    if outcome == if is_bad { GetOutcome::Corrupt } else { GetOutcome::Found } {
                        self.free(run, (page, stored));
                    }
                }
            }
        }
        self.store.validate().expect("valid");
        let usage = self.store.usage_detail();
        assert_eq!(usage.block_pages, 0);
        assert!(usage.bad_blocks <= self.bad.len() as u64, "{usage:?}");
    }
}

fn rings() -> usize {
    let open = std::fs::read_dir("/proc/self/fd").expect("proc").flatten();
    let names = open.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    names.filter(|name| name.to_string_lossy().contains("io_uring")).count()
}

#[test]
fn whatever_a_disk_does_each_page_has_its_bytes_and_no_block_is_read_in_vain() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let first = number("BALLAST_WALK").unwrap_or(0);
    for seed in first..first + number("BALLAST_WALKS").unwrap_or(12) {
        let disk = [Disk::Late, Disk::Flaky, Disk::Bad][seed as usize % 3];
        eprintln!("walk {seed}: {disk:?}");
        let Some(walk) = Walk::begin(disk, &mut Random(seed)) else { return };
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let (walk, mut random) = (&walk, Random(seed << 8 | thread));
                scope.spawn(move || {
                    (0..STEPS).for_each(|_| walk.step(&mut random));
                    while has_late_writes() {
                        notice_late_writes();
                    }
                });
            }
        });
        walk.end();
        drop(walk);
        // The rings that this thread keeps, and those for asynchronous reads, which any thread may have.
        assert!(rings() <= 2 + 8 + THREADS as usize, "{} rings are left", rings());
    }
}
