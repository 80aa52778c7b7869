//! The remote store: far pages in a Valkey or Redis cluster, one value each.
//!
//! Before: the spill worker has pages that have been far for a long time. After: a primary and the required number of
//! replicas have each page, compressed and with a checksum; a slow worker gets it back.
//! Threads: any; every call except `free` and `usage` may wait for the network. A read waits up to its node's timeout
//! (0.1 to 1.6 s, see `nodes`), a write up to another one (1 to 4 s). Units: a page is a value; `budget` counts pages.
//! Promise: `Stored` means that an `OK` and a `WAIT` for the replicas arrived in one pipeline on one connection.
//! `Absent` means that every node that might have the page was asked (`loss`).
//!
//! *No index.* The handle is the page's generation, and both form the key. Generations are ticks of the clock that all
//! processes of the host share, and a generation is never drawn ahead of that clock. So no two runs of pages have the
//! same generation, even in different engines of this VM, and the last one used need not be stored. A write that a dead
//! engine left with a server thus never replaces a page of another engine.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_base::store::{Ending, Recovered};
use ballast_base::wire::VmId;
use ballast_store::{Codec, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage, blob};
use ballast_sys::clock;

use crate::begun::Begun;
use crate::budget::{RemoteBudget, Share};
use crate::cluster::Cluster;
use crate::garbage::Garbage;
use crate::identity::{self, Home, Kept, Tell};
use crate::lease::Lease;
use crate::loss::{self, Verdict};
use crate::name::{self, CHUNK_PAGES};
use crate::request::{self, Found, Verb};
use crate::seal::{SEALED_MAX, Seal};

mod write;

use write::UnderWay;

/// Tick of the generations. 40 bits of it are 3.4 years of a host's uptime; then the store is full.
const TICK: Duration = Duration::from_micros(100);
/// Pause of `tidy` after the cluster did not respond.
const REST: Duration = Duration::from_secs(1);
/// Pause after a read that failed, so that no CPU is busy with requests to an unreachable node.
const PAUSE: Duration = Duration::from_millis(5);
/// Pages sent together. The server stores them while the next ones are compressed.
const PART: usize = 64;

/// The store of one VM.
#[derive(Debug)]
pub struct RemoteStore {
    vm: VmId,
    cluster: Arc<Cluster>,
    share: Share,
    codec: Codec,
    seal: RwLock<Arc<Seal>>,
    when_alone: Option<WhenAlone>,
    home: Home,
    lease: Lease,
    /// Last generation drawn.
    last: Mutex<u64>,
    /// True if the store ever had pages. Then the lease is renewed.
    used: AtomicBool,
    garbage: Garbage,
    begun: Begun,
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
            share: Share::new(budget),
            codec,
            seal: RwLock::new(Arc::new(Seal::plain())),
            when_alone: None,
            home: Home::new(vm, Box::new(Arc::new(AtomicU64::new(0))), None),
            lease: Lease::new(vm, lease),
            last: Mutex::new(tick_now()),
            used: AtomicBool::new(false),
            garbage: Garbage::default(),
            begun: Begun::default(),
            refusal: Mutex::default(),
            rests_until: Mutex::default(),
        }
    }

    /// Makes the store seal its pages with `seal`.
    #[must_use]
    pub fn sealed(mut self, seal: Seal) -> Self {
        self.seal = RwLock::new(Arc::new(seal));
        self
    }

    /// Makes the store seal its pages with the result of `make`, from the time when no other process has the store
    /// ([`Store::own`], or [`Store::recover`]). Until then the other process may store pages again, and it does not
    /// know a new key.
    #[must_use]
    pub fn sealed_when_alone(mut self, make: impl Fn() -> Seal + Send + Sync + 'static) -> Self {
        self.when_alone = Some(WhenAlone(Box::new(make)));
        self
    }

    /// Makes the store keep there which cluster has its pages, and tell operators if that is not the one it has.
    #[must_use]
    pub fn kept_in(mut self, kept: impl Kept + 'static, tell: Option<Tell>) -> Self {
        self.home = Home::new(self.vm, Box::new(kept), tell);
        self
    }

    /// Returns what operators were told if its pages are in another cluster, or in this one before it was emptied.
    pub fn elsewhere(&self) -> Option<String> {
        self.home.elsewhere()
    }

    fn seal(&self) -> Arc<Seal> {
        self.seal.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// No other process has the store: makes the seal that waited for that.
    fn seal_alone(&self) {
        if let Some(WhenAlone(make)) = &self.when_alone {
            *self.seal.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(make());
        }
    }

    /// Returns an unused generation, or `None` if none is left.
    fn draw(&self) -> Option<Handle> {
        let mut last = lock(&self.last);
        while tick_now() <= *last {
            std::thread::sleep(TICK);
        }
        *last = tick_now();
        Handle::new(*last)
    }

    /// Returns the VM that has the store.
    pub fn vm(&self) -> VmId {
        self.vm
    }

    /// Renews the lease of the VM if the store ever had pages. This must be called at least ten times in a lease, as
    /// long as a word may name a page of the store. Returns, if half of the lease is over or more, for how long it was
    /// not renewed, and why.
    pub fn keep_lease(&self) -> Option<(Duration, String)> {
        if !self.used.load(Relaxed) {
            return None;
        }
        let here = self.home.takes(&self.cluster);
        // A cluster that cannot be given an identity, because a node is full, may have the VM's pages all the same.
        let here = if self.home.is_proved(&self.cluster.map()) { Ok(()) } else { here };
        let why = here.and_then(|()| self.lease.ensure(&self.cluster)).err()?;
        Some((self.lease.overdue()?, why))
    }

    /// Returns whether the cluster may have pages, or a lease, of the VM.
    pub fn may_be_used(&self) -> bool {
        self.used.load(Relaxed) || self.home.is_kept() || !self.is_tidy()
    }

    /// Returns whether nothing is left to be unlinked of what was freed.
    pub fn is_tidy(&self) -> bool {
        self.garbage.is_empty()
    }

    /// In another cluster than its own it needs none.
    fn ensure_lease(&self) -> Result<(), String> {
        self.home.takes(&self.cluster)?;
        self.lease.ensure(&self.cluster)
    }

    /// These pages are in the cluster already.
    fn inherit(&self, live: &HashSet<(PageKey, Handle)>, waiting: u64) {
        let count = live.len() as u64 + waiting;
        self.used.fetch_or(count > 0, Relaxed);
        self.share.inherit(count);
        self.home.is_named(name::keys(live.iter().take(identity::PROOFS).copied()));
    }

    /// Records the reason of a refused put.
    fn refuse(&self, why: String, outcome: PutOutcome) -> PutOutcome {
        *lock(&self.refusal) = Some(why);
        outcome
    }

    /// Gets pages of one chunk.
    fn get_chunk(&self, keys: &[PageKey], handles: &[Handle], out: &mut [PageBytes], outcomes: &mut [GetOutcome]) {
        let names = name::keys(keys.iter().copied().zip(handles.iter().copied()));
        let map = self.cluster.map();
        // Only if it was asked by one map is it known which cluster has a page.
        let is_here = || {
            if Arc::ptr_eq(&map, &self.cluster.map()) {
                self.home.found(&map);
            }
        };
        let mut missing = Vec::new();
        let seal = self.seal();
        let opens = |at: usize, value: &[u8], out: &mut PageBytes| {
            let (key, handle) = (keys[at], handles[at]);
            let mut buffer = [0; SEALED_MAX];
            let blob = seal.open(key, handle, value, &mut buffer);
            blob.is_some_and(|blob| blob::open(key, handle, blob, out))
        };
        let found = |at: usize, value: &[u8], out: &mut [PageBytes]| {
            let found = opens(at, value, &mut out[at]);
            if found {
                self.share.budget().saw(1, value.len() as u64);
            }
            found
        };
        if keys.len() == 1 && self.begun.end(&names[0], |value| found(0, value, out)) == Some(true) {
            outcomes[0] = GetOutcome::Found;
            return;
        }
        let asked = request::run(&self.cluster, Verb::Get, &names, &mut |at, said| match said {
            Found::Value(bytes) if found(at, bytes, out) => {
                is_here();
                outcomes[at] = GetOutcome::Found;
            }
            // A replica may have it undamaged.
            Found::Value(_) | Found::Nothing => missing.push(at),
            Found::Elsewhere | Found::Done(_) => {}
        });
        if let Err(failed) = asked {
            // The outcomes that failed are still `Busy`, and the caller retries at once.
            *lock(&self.refusal) = Some(failed.why);
            std::thread::sleep(PAUSE);
        }
        let names: Vec<&[u8]> = missing.iter().map(|at: &usize| &names[*at][..]).collect();
        let loses = |map: &_| self.home.loses(&self.cluster, map);
        let mut opens = |number: usize, value: &[u8]| opens(missing[number], value, &mut out[missing[number]]);
        let verdicts = loss::verdicts(&self.cluster, &names, &mut opens, &loses);
        for (at, verdict) in missing.iter().zip(verdicts) {
            outcomes[*at] = match verdict {
                Verdict::Found => {
                    is_here();
                    GetOutcome::Found
                }
                Verdict::Damaged => GetOutcome::Corrupt,
                Verdict::Lost => GetOutcome::Absent,
                Verdict::Unknown(why) => {
                    *lock(&self.refusal) = Some(why);
                    GetOutcome::Busy
                }
            };
        }
    }
}

/// Returns the key of the page that is this many after the first.
fn plus(first: PageKey, pages: usize) -> PageKey {
    first.region.page(PageIdx(first.page.0 + pages as u64))
}

/// Returns the parts of a run, each of which is in one chunk.
fn parts(first: PageKey, len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let page = first.page.0 + from as u64;
        let part = from..len.min(from + (CHUNK_PAGES - page % CHUNK_PAGES) as usize);
        from = part.end;
        (!part.is_empty()).then_some(part)
    })
}

/// Returns the blobs of a part of a run, if there are any.
fn of_part<'a>(blobs: &'a [Vec<u8>], part: &Range<usize>) -> &'a [Vec<u8>] {
    blobs.get(part.clone()).unwrap_or_default()
}

impl Store for RemoteStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.put_chunk(key, std::slice::from_ref(bytes), &[])
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        let mut outcome = [GetOutcome::Busy];
        self.get_chunk(&[key], &[handle], std::slice::from_mut(out), &mut outcome);
        outcome[0]
    }

    fn begin(&self, key: PageKey, handle: Handle) {
        self.begun.begin(&self.cluster, name::key(key, handle));
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        self.put_blobs(first, pages, &[], outcomes);
    }

    /// The payloads are sent as they are.
    fn put_blobs(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>], outcomes: &mut Vec<PutOutcome>) {
        for part in parts(first, pages.len()) {
            let outcome = self.put_chunk(plus(first, part.start), &pages[part.clone()], of_part(blobs, &part));
            outcomes.resize(outcomes.len() + part.len(), outcome);
        }
    }

    /// The last chunk is under way afterwards, and those before it are stored.
    fn begin_put(self: Arc<Self>, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> Ending {
        let mut parts: Vec<_> = parts(first, pages.len()).collect();
        let (mut outcomes, last) = (Vec::with_capacity(pages.len()), parts.pop().unwrap_or_default());
        if let Some(end) = parts.last().map(|part| part.end) {
            self.put_blobs(first, &pages[..end], blobs.get(..end).unwrap_or_default(), &mut outcomes);
        }
        let sent = self.begin_chunk(plus(first, last.start), &pages[last.clone()], of_part(blobs, &last));
        let write = sent.map(|write| UnderWay::new(self, write));
        Box::new(move |all| {
            all.append(&mut outcomes);
            all.resize(all.len() + last.len(), write.map_or_else(|outcome| outcome, UnderWay::end));
        })
    }

    fn get_run(&self, first: PageKey, handles: &[Handle], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        let names = (first.page.0..).map(|page| first.region.page(PageIdx(page)));
        let names: Vec<_> = names.zip(handles.iter().copied()).take(out.len()).collect();
        self.get_some(&names, out, outcomes);
    }

    /// All pages of a chunk by one request.
    fn get_some(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        let (keys, handles): (Vec<PageKey>, Vec<Handle>) = pages.iter().copied().take(out.len()).unzip();
        let start = outcomes.len();
        outcomes.resize(start + keys.len(), GetOutcome::Busy);
        let mut from = 0;
        for chunk in keys.chunk_by(|a, b| (a.region, a.page.0 / CHUNK_PAGES) == (b.region, b.page.0 / CHUNK_PAGES)) {
            let end = from + chunk.len();
            let outcomes = &mut outcomes[start + from..start + end];
            self.get_chunk(chunk, &handles[from..end], &mut out[from..end], outcomes);
            from = end;
        }
    }

    /// The next `tidy` unlinks the page, because the caller may be a fault worker.
    fn free(&self, key: PageKey, handle: Handle) {
        self.garbage.free(key, handle);
    }

    fn tidy(&self) {
        if lock(&self.rests_until).is_some_and(|until| Instant::now() < until) {
            return;
        }
        let steps = || {
            let unlinked = self.garbage.unlink_freed(&self.cluster, &self.share);
            self.garbage.sweep(&self.cluster).and(unlinked)
        };
        if let Err(why) = steps() {
            *lock(&self.rests_until) = Some(Instant::now() + REST);
            *lock(&self.refusal) = Some(why);
        }
    }

    fn is_untidy(&self) -> bool {
        lock(&self.rests_until).is_none_or(|until| Instant::now() >= until) && self.garbage.waiting_briefly() > 0
    }

    /// Sends nothing to the cluster; `tidy` finds the leftovers.
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.seal_alone();
        let newest = self.draw().or(Handle::new(Handle::MAX)).ok_or_else(|| io::Error::other("no generation"))?;
        let live: HashSet<_> = live.collect();
        let kept_blobs = live.len() as u64;
        self.garbage.forget_freed();
        self.share.sub(self.share.pages());
        self.inherit(&live, 0);
        self.garbage.begin_sweep(self.vm, live, newest);
        Ok(Recovered { kept_blobs, ..Recovered::default() })
    }

    /// The store may have pages, so their lease must not expire.
    fn follow(&self, _live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.used.store(true, Relaxed);
        self.home.has_pages();
    }

    /// Pages that were freed here since [`Store::follow`] must still be unlinked, and count until then. A page that is
    /// freed during this call may be counted once too little.
    fn own(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.seal_alone();
        let Some(newest) = self.draw().or(Handle::new(Handle::MAX)) else { return };
        let live: HashSet<_> = live.collect();
        self.inherit(&live, self.garbage.waiting_beside(&live));
        self.garbage.begin_sweep(self.vm, live, newest);
    }

    fn is_told(&self) -> bool {
        true
    }

    fn last_refusal(&self) -> Option<String> {
        lock(&self.refusal).clone()
    }

    fn is_short(&self) -> bool {
        let (used, limit) = (self.share.budget().used().0, self.share.budget().limit().0);
        used > limit - limit / 16
    }

    fn usage(&self) -> StoreUsage {
        let (pages, budget) = (self.share.pages().saturating_sub(self.garbage.waiting()), self.share.budget());
        StoreUsage { pages, bytes: budget.bytes(pages), budget_bytes: budget.limit().0 }
    }
}
