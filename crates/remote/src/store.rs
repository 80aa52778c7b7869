//! The remote store: far pages in a Valkey or Redis cluster, one value each.
//!
//! Before: the spill worker has pages that have been far for a long time. After: a primary and the required number of
//! replicas have each page, compressed and with a checksum; a slow worker gets it back.
//! Threads: any; every call except `free` and `usage` may wait for the network. A read waits up to its node's timeout
//! (0.1 to 1.6 s, see `nodes`), a write ten times that, 4 s at most.
//! Units: a page is one value; the budget counts pages at the mean size of the pages that were put.
//! Promise: `Stored` means that an `OK` and a `WAIT` for the replicas arrived in one pipeline on one connection.
//! `Absent` means that every node that might have the page was asked (`loss`).
//!
//! *No index.* The handle is the page's generation, and both form the key. Generations are ticks of the clock that all
//! processes of the host share, and a generation is never drawn ahead of that clock. So no two runs of pages have the
//! same generation, even in different engines of this VM, and the last one used need not be stored. A write that a dead
//! engine left with a server thus never replaces a page of another engine.
//!
//! *Leftovers.* Pages that a dead engine put and no word names are found by a sweep of the VM's keys. It runs after
//! `recover`, and after `own` for keys that a departed engine could not unlink. The thread that calls `tidy` runs it in
//! steps. A key is garbage if its generation is older than that call and no word named it at that time. The alternative
//! is a mark for each chunk in shared memory that says where to look. But pages are freed in all chunks all the time,
//! so nearly every mark would be set. A mark could be cleared only when all words that the chunk's copies ever had are
//! known to agree, which no store is told. And it would not find writes of a dead engine that arrive later.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_base::store::Recovered;
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_store::{Codec, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage, blob};
use ballast_sys::clock;

use crate::cluster::Cluster;
use crate::lease::Lease;
use crate::loss::{self, Verdict};
use crate::name::{self, CHUNK_PAGES};
use crate::request::{self, Found, Values, Verb};
use crate::seal::{SEALED_MAX, Seal};
use crate::sweep::{self, Scan, write_timeout};

/// Tick of the generations. 40 bits of it are 3.4 years of a host's uptime; then the store is full.
const TICK: Duration = Duration::from_micros(100);
/// Memory that a server needs for a page in addition to its value: the key, and its own tables.
const KEY_BYTES: u64 = 128;
/// Pause of `tidy` after the cluster did not respond.
const REST: Duration = Duration::from_secs(1);
/// Pause after a read that failed, so that no CPU is busy with requests to an unreachable node.
const PAUSE: Duration = Duration::from_millis(5);
/// Pages sent together. The server stores them while the next ones are compressed.
const PART: usize = 64;
/// Time limit of the search for pages of a run that their owner does not have, after the first one.
const LOOKS: Duration = Duration::from_secs(1);
/// Time limit of the sweep in one call of `tidy`.
const SWEEP_SLICE: Duration = Duration::from_millis(20);

/// Budget of all stores of a process in the cluster.
#[derive(Debug)]
pub struct RemoteBudget {
    limit: Bytes,
    pages: AtomicU64,
    /// Pages ever put and their bytes, for the mean size.
    put_pages: AtomicU64,
    put_bytes: AtomicU64,
}

impl RemoteBudget {
    /// Creates a budget of this size. It covers keys and the servers' tables.
    pub fn new(limit: Bytes) -> Arc<Self> {
        let [pages, put_pages, put_bytes] = [0; 3].map(AtomicU64::new);
        Arc::new(Self { limit, pages, put_pages, put_bytes })
    }

    /// Returns the estimated size of this many pages.
    fn bytes(&self, pages: u64) -> u64 {
        let (put, bytes) = (self.put_pages.load(Relaxed), self.put_bytes.load(Relaxed));
        let mean = bytes.checked_div(put).unwrap_or(PAGE_SIZE as u64 + KEY_BYTES);
        pages.saturating_mul(mean)
    }

    /// Returns the estimated size of all pages in the cluster.
    pub fn used(&self) -> Bytes {
        Bytes(self.bytes(self.pages.load(Relaxed)))
    }

    /// Returns the limit.
    pub fn limit(&self) -> Bytes {
        self.limit
    }
}

/// The store of one VM.
#[derive(Debug)]
pub struct RemoteStore {
    vm: VmId,
    cluster: Arc<Cluster>,
    budget: Arc<RemoteBudget>,
    codec: Codec,
    seal: RwLock<Arc<Seal>>,
    when_alone: Option<WhenAlone>,
    lease: Lease,
    /// Last generation drawn.
    last: Mutex<u64>,
    /// Estimated number of pages that were put and not unlinked.
    pages: AtomicU64,
    /// The store had pages at some time. The lease is renewed, whatever the count is.
    used: AtomicBool,
    freed: Mutex<Freed>,
    leftovers: Mutex<Option<Leftovers>>,
    refusal: Mutex<Option<String>>,
    rests_until: Mutex<Option<Instant>>,
}

/// Makes the seal of a store.
struct WhenAlone(Box<dyn Fn() -> Seal + Send + Sync>);

impl std::fmt::Debug for WhenAlone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WhenAlone")
    }
}

/// Pages that must still be unlinked.
#[derive(Debug, Default)]
struct Freed {
    /// Pages, and whether they may already have been unlinked.
    pages: HashMap<(PageKey, Handle), bool>,
    /// Pages that a failed write may have left. They were never counted.
    failed: Vec<(PageKey, Handle)>,
}

/// State of the sweep for pages that earlier engines may have left.
#[derive(Debug)]
struct Leftovers {
    /// Pages that a word names, and that must stay.
    live: HashSet<(PageKey, Handle)>,
    /// All pages that are put from now on have a larger generation.
    newest: Handle,
    scan: Option<Scan>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the largest generation that a page put before now can have.
pub fn tick_now() -> u64 {
    clock::monotonic_ns() / TICK.as_nanos() as u64
}

impl RemoteStore {
    /// Creates the empty store of a VM. If an earlier engine had pages in it, `recover` must be called next.
    pub fn new(vm: VmId, cluster: Arc<Cluster>, budget: Arc<RemoteBudget>, codec: Codec, lease: Duration) -> Self {
        Self {
            vm,
            cluster,
            budget,
            codec,
            seal: RwLock::new(Arc::new(Seal::plain())),
            when_alone: None,
            lease: Lease::new(vm, lease),
            last: Mutex::new(tick_now()),
            pages: AtomicU64::new(0),
            used: AtomicBool::new(false),
            freed: Mutex::default(),
            leftovers: Mutex::default(),
            refusal: Mutex::default(),
            rests_until: Mutex::default(),
        }
    }

    /// Returns the store with sealed pages.
    #[must_use]
    pub fn sealed(mut self, seal: Seal) -> Self {
        self.seal = RwLock::new(Arc::new(seal));
        self
    }

    /// Returns the store with sealed pages, whose seal `make` creates once no other process has the store any more
    /// ([`Store::own`]). Until then, the other process may resume storing pages, and does not know a new key.
    #[must_use]
    pub fn sealed_when_alone(mut self, make: impl Fn() -> Seal + Send + Sync + 'static) -> Self {
        self.when_alone = Some(WhenAlone(Box::new(make)));
        self
    }

    fn seal(&self) -> Arc<Seal> {
        self.seal.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a generation that nobody had before; `None` if there are no more.
    fn draw(&self) -> Option<Handle> {
        let mut last = lock(&self.last);
        while tick_now() <= *last {
            std::thread::sleep(TICK);
        }
        *last = tick_now();
        Handle::new(*last)
    }

    fn add_pages(&self, count: u64) {
        self.used.fetch_or(count > 0, Relaxed);
        self.pages.fetch_add(count, Relaxed);
        self.budget.pages.fetch_add(count, Relaxed);
    }

    fn sub_pages(&self, count: u64) {
        let less = |pages: &AtomicU64, by: u64| {
            let before = pages.fetch_update(Relaxed, Relaxed, |pages| Some(pages.saturating_sub(by)));
            before.unwrap_or_default().min(by)
        };
        let had = less(&self.pages, count);
        less(&self.budget.pages, had);
    }

    /// Records why a page was refused.
    fn refuse(&self, why: String, outcome: PutOutcome) -> PutOutcome {
        *lock(&self.refusal) = Some(why);
        outcome
    }

    /// Puts pages of one chunk, all or none.
    fn put_chunk(&self, first: PageKey, pages: &[PageBytes]) -> Result<Handle, PutOutcome> {
        let count = pages.len() as u64;
        let seal = self.seal();
        if !seal.works() {
            return Err(self.refuse("the key that its pages are sealed with is lost".into(), PutOutcome::Busy));
        }
        let waiting = lock(&self.freed).pages.len() as u64;
        let held = self.budget.pages.load(Relaxed).saturating_sub(waiting);
        if self.budget.bytes(held + count) > self.budget.limit.0 {
            return Err(self.refuse(format!("its budget of {} is used", self.budget.limit), PutOutcome::Full));
        }
        self.lease.ensure(&self.cluster).map_err(|why| self.refuse(why, PutOutcome::Busy))?;
        let Some(generation) = self.draw() else {
            return Err(self.refuse("the host has run for so long that no generation is left".into(), PutOutcome::Full));
        };
        let keys: Vec<PageKey> =
            (first.page.0..).zip(pages).map(|(page, _)| first.region.page(PageIdx(page))).collect();
        let names: Vec<Vec<u8>> = keys.iter().map(|key| name::key(*key, generation)).collect();
        let mut values = Values::default();
        let mut make = |values: &mut Values| {
            let from = values.len();
            for (key, bytes) in keys.iter().zip(pages).skip(from).take(PART) {
                values.add(|blobs| {
                    let start = blobs.len();
                    blob::seal(*key, generation, bytes, self.codec, blobs);
                    seal.seal(*key, generation, blobs, start);
                });
            }
        };
        let replicas = self.cluster.options().replicas;
        match request::set_as_made(&self.cluster, replicas, &names, write_timeout, &mut values, &mut make) {
            Ok(()) => {
                self.budget.put_pages.fetch_add(count, Relaxed);
                self.budget.put_bytes.fetch_add(values.bytes() as u64 + count * KEY_BYTES, Relaxed);
                self.add_pages(count);
                Ok(generation)
            }
            Err(failed) => {
                if failed.unknown {
                    lock(&self.freed).failed.extend(keys.into_iter().map(|key| (key, generation)));
                }
                Err(self.refuse(failed.why, if failed.full { PutOutcome::Full } else { PutOutcome::Busy }))
            }
        }
    }

    /// Gets pages of one chunk.
    fn get_chunk(&self, keys: &[PageKey], handles: &[Handle], out: &mut [PageBytes], outcomes: &mut [GetOutcome]) {
        let names: Vec<Vec<u8>> = keys.iter().zip(handles).map(|(key, handle)| name::key(*key, *handle)).collect();
        let mut gone = Vec::new();
        let seal = self.seal();
        let opened = |at: usize, value: &[u8], out: &mut PageBytes| {
            let (key, handle) = (keys[at], handles[at]);
            let mut buffer = [0; SEALED_MAX];
            let blob = seal.open(key, handle, value, &mut buffer);
            let is_it = blob.is_some_and(|blob| blob::open(key, handle, blob, out));
            if is_it { GetOutcome::Found } else { GetOutcome::Corrupt }
        };
        let asked = request::run(&self.cluster, Verb::Get, &names, |timeout| timeout, &mut |at, found| match found {
            Found::Value(bytes) => outcomes[at] = opened(at, bytes, &mut out[at]),
            Found::Nothing => gone.push(at),
            Found::Elsewhere | Found::Done(_) => {}
        });
        if let Err(failed) = asked {
            // The outcomes that failed are still `Busy`, and the caller retries at once.
            *lock(&self.refusal) = Some(failed.why);
            std::thread::sleep(PAUSE);
        }
        let begun = Instant::now();
        for (number, at) in gone.into_iter().enumerate() {
            if number > 0 && begun.elapsed() > LOOKS {
                // The remaining outcomes are still `Busy`. The next read of each page searches for it.
                break;
            }
            outcomes[at] = match loss::look(&self.cluster, &names[at]) {
                Verdict::Found(bytes) => opened(at, &bytes, &mut out[at]),
                Verdict::Lost => GetOutcome::Absent,
                Verdict::Unknown(why) => {
                    *lock(&self.refusal) = Some(why);
                    GetOutcome::Busy
                }
            };
        }
    }

    /// Unlinks the pages that were freed. Returns false if the cluster does not respond.
    fn unlink_freed(&self) -> bool {
        let freed = std::mem::take(&mut *lock(&self.freed));
        let mut pages: Vec<_> = freed.pages.into_iter().collect();
        pages.sort_unstable_by_key(|((key, handle), _)| (key.region.vm, key.region.number, key.page, handle.bits()));
        let chunk = |key: &PageKey| (key.region, key.page.0 / CHUNK_PAGES);
        let mut works = true;
        for run in pages.chunk_by(|((a, _), _), ((b, _), _)| chunk(a) == chunk(b)) {
            // A large run of one chunk may span several generations.
            let keys = run.iter().map(|((key, handle), _)| name::key(*key, *handle)).collect();
            match if works { sweep::unlink(&self.cluster, keys) } else { Err(rests()) } {
                // A page that may have been unlinked before counts as unlinked now.
                Ok(gone) => {
                    let maybe = run.iter().filter(|(_, maybe)| *maybe).count() as u64;
                    self.sub_pages((gone + maybe).min(run.len() as u64));
                }
                Err(failed) => {
                    let mut freed = lock(&self.freed);
                    for (page, maybe) in run {
                        *freed.pages.entry(*page).or_default() |= *maybe || works;
                    }
                    self.note_rest(failed.why);
                    works = false;
                }
            }
        }
        if works && !freed.failed.is_empty() {
            let keys = freed.failed.iter().map(|(key, handle)| name::key(*key, *handle)).collect();
            works = sweep::unlink(&self.cluster, keys).inspect_err(|failed| self.note_rest(failed.why.clone())).is_ok();
        }
        if !works {
            lock(&self.freed).failed.extend(freed.failed);
        }
        works
    }

    fn note_rest(&self, why: String) {
        *lock(&self.rests_until) = Some(Instant::now() + REST);
        *lock(&self.refusal) = Some(why);
    }

    /// Continues the sweep for leftovers.
    fn sweep(&self) {
        let mut leftovers = lock(&self.leftovers);
        let Some(Leftovers { live, newest, scan }) = &mut *leftovers else { return };
        let until = Instant::now() + SWEEP_SLICE;
        while Instant::now() < until {
            let under_way = scan.take().map_or_else(|| Scan::begin(&self.cluster, name::pattern(self.vm)), Ok);
            let stepped = under_way.and_then(|mut scan| Ok((scan.step(&self.cluster)?, scan)));
            let (keys, rest) = match stepped {
                Ok((Some(keys), rest)) => (keys, rest),
                Ok((None, _)) => {
                    *leftovers = None;
                    return;
                }
                Err(error) => return self.note_rest(error.to_string()),
            };
            let mut garbage = keys;
            garbage.retain(|bytes| {
                name::parse(bytes).is_some_and(|page| page.1.bits() <= newest.bits() && !live.contains(&page))
            });
            if let Err(failed) = sweep::unlink(&self.cluster, garbage) {
                return self.note_rest(failed.why);
            }
            *scan = Some(rest);
        }
    }
}

fn rests() -> request::Failed {
    request::Failed { full: false, why: "it does not answer".into(), unknown: false }
}

impl Drop for RemoteStore {
    fn drop(&mut self) {
        self.sub_pages(self.pages.load(Relaxed));
    }
}

/// Returns the end of the next part of a run that is in one chunk.
fn chunk_end(first: PageIdx, from: usize, len: usize) -> usize {
    let page = first.0 + from as u64;
    len.min(from + (CHUNK_PAGES - page % CHUNK_PAGES) as usize)
}

impl Store for RemoteStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.put_chunk(key, std::slice::from_ref(bytes)).map_or_else(|outcome| outcome, PutOutcome::Stored)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        let mut outcome = [GetOutcome::Busy];
        self.get_chunk(&[key], &[handle], std::slice::from_mut(out), &mut outcome);
        outcome[0]
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        let mut from = 0;
        while from < pages.len() {
            let end = chunk_end(first.page, from, pages.len());
            let key = first.region.page(PageIdx(first.page.0 + from as u64));
            let outcome = self.put_chunk(key, &pages[from..end]);
            let outcome = outcome.map_or_else(|outcome| outcome, PutOutcome::Stored);
            outcomes.resize(outcomes.len() + end - from, outcome);
            from = end;
        }
    }

    fn get_run(&self, first: PageKey, handles: &[Handle], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        let (len, start) = (handles.len().min(out.len()), outcomes.len());
        outcomes.resize(start + len, GetOutcome::Busy);
        let keys: Vec<PageKey> = (first.page.0..).take(len).map(|page| first.region.page(PageIdx(page))).collect();
        let mut from = 0;
        while from < len {
            let end = chunk_end(first.page, from, len);
            let outcomes = &mut outcomes[start + from..start + end];
            self.get_chunk(&keys[from..end], &handles[from..end], &mut out[from..end], outcomes);
            from = end;
        }
    }

    /// The next `tidy` unlinks the page, because the caller may be a fault worker.
    fn free(&self, key: PageKey, handle: Handle) {
        lock(&self.freed).pages.entry((key, handle)).or_default();
    }

    fn tidy(&self) {
        if lock(&self.rests_until).is_some_and(|until| Instant::now() < until) {
            return;
        }
        if !self.unlink_freed() {
            return;
        }
        if self.used.load(Relaxed)
            && let Err(why) = self.lease.ensure(&self.cluster)
        {
            return self.note_rest(why);
        }
        self.sweep();
    }

    /// Sends nothing to the cluster; `tidy` finds the leftovers.
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        let newest = self.draw().or(Handle::new(Handle::MAX)).ok_or_else(|| io::Error::other("no generation"))?;
        let live: HashSet<_> = live.collect();
        let kept_blobs = live.len() as u64;
        // The sweep also finds these pages.
        *lock(&self.freed) = Freed::default();
        self.sub_pages(self.pages.load(Relaxed));
        self.add_pages(kept_blobs);
        *lock(&self.leftovers) = Some(Leftovers { live, newest, scan: None });
        Ok(Recovered { kept_blobs, ..Recovered::default() })
    }

    /// The store may have pages, so their lease must not expire.
    fn follow(&self, _live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.used.store(true, Relaxed);
    }

    /// Pages that were freed here since [`Store::follow`] must still be unlinked, and count until then. A page that is
    /// freed during this call may be counted once too little.
    fn own(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        if let Some(WhenAlone(make)) = &self.when_alone {
            *self.seal.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(make());
        }
        let Some(newest) = self.draw().or(Handle::new(Handle::MAX)) else { return };
        let live: HashSet<_> = live.collect();
        let waiting = lock(&self.freed).pages.keys().filter(|page| !live.contains(page)).count();
        self.add_pages((live.len() + waiting) as u64);
        *lock(&self.leftovers) = Some(Leftovers { live, newest, scan: None });
    }

    fn is_told(&self) -> bool {
        true
    }

    fn last_refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    fn is_short(&self) -> bool {
        self.budget.used().0 > self.budget.limit.0 - self.budget.limit.0 / 16
    }

    fn usage(&self) -> StoreUsage {
        let waiting = lock(&self.freed).pages.len() as u64;
        let pages = self.pages.load(Relaxed).saturating_sub(waiting);
        StoreUsage { pages, bytes: self.budget.bytes(pages), budget_bytes: self.budget.limit.0 }
    }
}
