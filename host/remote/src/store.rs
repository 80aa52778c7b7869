//! The remote store: far pages in a Valkey or Redis cluster, one value each.
//!
//! Before: the spill worker has pages that have been far for a long time. After: a primary and the required number of
//! replicas have each page, compressed and with a checksum; a slow worker gets it back.
//! Threads: any; every call except `free` and `usage` may wait for the network. A read waits up to its node's timeout
//! (0.1 to 1.6 s, several pages to 3.2 s, see `nodes`), a write up to another one (1 to 4 s). A read whose caller has a
//! lock ends after 0.1 s if other threads want the lock. Units: a page is a value; `budget` counts pages.
//! Promise: `Stored` means that an `OK` and a `WAIT` for all replicas that may be elected arrived in one pipeline on
//! one connection, while the VM's lease lasted.
//! `Absent` means that every node that might have the page was asked (`loss`).
//!
//! *No index.* The handle is the page's generation (`generation`), and both form the key. No two runs of pages have the
//! same generation, even in different engines of this VM. A write that a dead engine left with a server thus never
//! replaces a page of another engine.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::store::{Attach, DurableStore, Ending, Ends, IoContext, OnReply, Recovered, SlowStore};
use ballast_base::wire::VmId;
use ballast_store::{Codec, GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage, blob};
use ballast_sys::clock;
use ballast_sys::lock::Lock;

use crate::begun::Begun;
use crate::budget::{RemoteBudget, Share};
use crate::chunk::{Write, of_part, parts, plus};
use crate::cluster::Cluster;
use crate::garbage::Garbage;
use crate::generation::Generations;
use crate::identity::{Home, Kept, Tell};
use crate::lease::Lease;
use crate::loss::{self, Verdict};
use crate::name::{self, CHUNK_PAGES};
use crate::request::{self, Failed, Found, Values, Verb};
use crate::seal::Seal;
use crate::sealing::Sealing;

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
    sealing: Sealing,
    home: Home,
    lease: Lease,
    generations: Generations,
    /// True if the store ever had pages. Then the lease is renewed.
    used: AtomicBool,
    garbage: Garbage,
    begun: Begun,
    refusal: Mutex<Option<String>>,
    rests_until: Mutex<Option<Instant>>,
}

impl RemoteStore {
    /// Creates the empty store of a VM. If an earlier engine had pages in it, `recover` must be called next.
    pub fn new(vm: VmId, cluster: Arc<Cluster>, budget: Arc<RemoteBudget>, codec: Codec, lease: Duration) -> Self {
        Self {
            vm,
            cluster,
            share: Share::new(budget),
            codec,
            sealing: Sealing::with(Seal::plain()),
            home: Home::new(Box::new(Arc::new(AtomicU64::new(0))), None),
            lease: Lease::new(vm, lease),
            generations: Generations::new(),
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
        self.sealing = Sealing::with(seal);
        self
    }

    /// Makes the store seal its pages with the result of `make`, from the time when no other process has the store
    /// ([`Attach::attach_exclusive`], or [`DurableStore::recover`]). Until then the other process may store pages
    /// again, and it does not know a new key.
    #[must_use]
    pub fn sealed_when_alone(mut self, make: impl Fn() -> Seal + Send + Sync + 'static) -> Self {
        self.sealing.when_alone(make);
        self
    }

    /// Keeps in `kept` which cluster has the store's pages, and tells operators if the current cluster is another one.
    #[must_use]
    pub fn kept_in(mut self, kept: impl Kept + 'static, tell: Option<Tell>) -> Self {
        self.home = Home::new(Box::new(kept), tell);
        self
    }

    /// Returns what operators were told if its pages are in another cluster, or in this one before it was emptied.
    pub fn elsewhere(&self) -> Option<String> {
        self.home.elsewhere()
    }

    /// Returns the VM that has the store.
    pub fn vm(&self) -> VmId {
        self.vm
    }

    /// Renews the lease of the VM if the store ever had pages. This must be called at least ten times in a lease, as
    /// long as a word may name a page of the store. If half of the lease is over, returns its age and the reason.
    pub fn keep_lease(&self) -> Option<(Duration, String)> {
        if !self.used.load(Relaxed) {
            return None;
        }
        let why = self.ensure_lease().err()?;
        Some((self.lease.overdue()?, why.to_string()))
    }

    /// Returns whether the cluster may have pages, or a lease, of the VM.
    pub fn may_be_used(&self) -> bool {
        self.used.load(Relaxed) || self.home.is_kept() || !self.is_tidy()
    }

    /// Returns whether every freed page is unlinked.
    pub fn is_tidy(&self) -> bool {
        self.garbage.is_empty()
    }

    /// Ensures the lease. If the cluster is not the VM's own, no page goes there, and no lease is needed.
    fn ensure_lease(&self) -> io::Result<()> {
        self.home.takes(&self.cluster)?;
        self.lease.ensure(&self.cluster)
    }

    fn inherit(&self, live: &HashSet<(PageKey, Handle)>, waiting: u64) {
        let count = live.len() as u64 + waiting;
        self.used.fetch_or(count > 0, Relaxed);
        self.share.inherit(count);
        if live.is_empty() {
            self.home.has_no_pages();
        } else {
            self.home.has_pages();
        }
    }

    fn refuse(&self, why: String, outcome: PutOutcome) -> PutOutcome {
        *self.refusal.locked() = Some(why);
        outcome
    }

    /// Sends pages of one chunk. `blobs` is empty, or has each page's form in another store.
    fn begin_chunk(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> Result<Write, PutOutcome> {
        let count = pages.len() as u64;
        let seal = self.sealing.get();
        if !seal.works() {
            return Err(self.refuse("the key that its pages are sealed with is lost".into(), PutOutcome::Busy));
        }
        if !self.share.has_room(count, self.garbage.waiting_briefly()) {
            let limit = self.share.budget().limit();
            return Err(self.refuse(format!("its budget of {limit} is used"), PutOutcome::Full));
        }
        let since = clock::boot_time();
        self.ensure_lease().map_err(|why| self.refuse(why.to_string(), PutOutcome::Busy))?;
        // Without this, each failed put would leave more.
        let unlinked = self.garbage.unlink_failed(&self.cluster, first);
        unlinked.map_err(|why| self.refuse(format!("what a failed write left: {why}"), PutOutcome::Busy))?;
        let Some(generation) = self.generations.draw() else {
            return Err(self.refuse("the host has run for so long that no generation is left".into(), PutOutcome::Full));
        };
        let keys: Vec<PageKey> = (0..pages.len()).map(|page| plus(first, page)).collect();
        let names = name::keys(keys.iter().map(|key| (*key, generation)));
        let mut values = Values::default();
        let mut make = |values: &mut Values| {
            let from = values.len();
            for (at, (key, bytes)) in keys.iter().zip(pages).enumerate().skip(from).take(PART) {
                values.add(|values| {
                    let start = values.len();
                    let kept = blobs.get(at).map_or(&[][..], Vec::as_slice);
                    blob::reseal(*key, generation, bytes, kept, self.codec, values);
                    seal.seal(*key, generation, values, start);
                });
            }
        };
        match request::send_as_made(&self.cluster, &names, &mut values, &mut make) {
            Ok(sent) => Ok(Write { first, count, generation, since, names, values, sent }),
            Err(failed) => Err(self.failed((first, count, generation), failed)),
        }
    }

    fn end_chunk(&self, write: Write) -> Result<Handle, PutOutcome> {
        let Write { first, count, generation, since, names, values, sent } = write;
        sent.end(&self.cluster, &names, &values).map_err(|failed| self.failed((first, count, generation), failed))?;
        // A node that belongs to another cluster may have brought that cluster's map meanwhile.
        if let Err(why) = self.home.takes(&self.cluster).and_then(|()| self.lease.has_lasted(since)) {
            self.garbage.failed(first, count, generation);
            return Err(self.refuse(why.to_string(), PutOutcome::Busy));
        }
        self.used.store(true, Relaxed);
        self.share.put(count, values.bytes() as u64);
        Ok(generation)
    }

    fn failed(&self, (first, count, generation): (PageKey, u64, Handle), failed: Failed) -> PutOutcome {
        if failed.unknown {
            self.garbage.failed(first, count, generation);
        }
        self.refuse(failed.why, if failed.full { PutOutcome::Full } else { PutOutcome::Busy })
    }

    /// Waits until the pages of a chunk that was sent are stored: all or none.
    fn outcome(&self, sent: Result<Write, PutOutcome>) -> PutOutcome {
        sent.and_then(|write| self.end_chunk(write)).map_or_else(|outcome| outcome, PutOutcome::Stored)
    }

    fn put_chunk(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> PutOutcome {
        self.outcome(self.begin_chunk(first, pages, blobs))
    }

    /// Stores a run of pages. `blobs` is as for [`SlowStore::begin_put`]: the payloads are sent as they are.
    pub fn put_blobs(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>], outcomes: &mut Vec<PutOutcome>) {
        for part in parts(first, pages.len()) {
            let outcome = self.put_chunk(plus(first, part.start), &pages[part.clone()], of_part(blobs, &part));
            outcomes.resize(outcomes.len() + part.len(), outcome);
        }
    }

    /// Gets a page whose reply is there, and never waits.
    fn get_begun(&self, key: PageKey, handle: Handle, out: &mut PageBytes, watch: OnReply<'_>) -> GetOutcome {
        let seal = self.sealing.get();
        let read = |value: &[u8]| {
            let found = seal.restores(key, handle, value, out);
            found.then(|| self.share.budget().saw(1, value.len() as u64)).is_some()
        };
        match self.begun.now(&name::key(key, handle), watch, read) {
            Some(true) => GetOutcome::Found,
            Some(false) | None => GetOutcome::Busy,
        }
    }

    fn get_chunk(
        &self,
        keys: &[PageKey],
        handles: &[Handle],
        out: &mut [PageBytes],
        outcomes: &mut [GetOutcome],
        context: IoContext<'_>,
    ) {
        let names = name::keys(keys.iter().copied().zip(handles.iter().copied()));
        let mut missing = Vec::new();
        let seal = self.sealing.get();
        let opens = |at: usize, value: &[u8], out: &mut PageBytes| seal.restores(keys[at], handles[at], value, out);
        let found = |at: usize, value: &[u8], out: &mut [PageBytes]| {
            let found = opens(at, value, &mut out[at]);
            if found {
                self.share.budget().saw(1, value.len() as u64);
            }
            found
        };
        if keys.len() == 1 && self.begun.end(&names[0], context, |value| found(0, value, out)) == Some(true) {
            outcomes[0] = GetOutcome::Found;
            return;
        }
        let mut each = |at: usize, said: Found<'_>| match said {
            Found::Value(bytes) if found(at, bytes, out) => outcomes[at] = GetOutcome::Found,
            // A replica may have it undamaged.
            Found::Value(_) | Found::Nothing => missing.push(at),
            Found::Elsewhere | Found::Done(_) => {}
        };
        if let Err(failed) = request::run(&self.cluster, Verb::Get, &names, &mut each, context) {
            // The outcomes that failed are still `Busy`, and the caller retries at once.
            *self.refusal.locked() = Some(failed.why);
            std::thread::sleep(PAUSE);
        }
        let names: Vec<&[u8]> = missing.iter().map(|at: &usize| &names[*at][..]).collect();
        let loses = |map: &_| self.home.loses(&self.cluster, map, context);
        let mut opens = |number: usize, value: &[u8]| opens(missing[number], value, &mut out[missing[number]]);
        let verdicts = loss::verdicts(&self.cluster, &names, &mut opens, &loses, context);
        for (at, verdict) in missing.iter().zip(verdicts) {
            outcomes[*at] = match verdict {
                Verdict::Found => GetOutcome::Found,
                Verdict::Damaged => GetOutcome::Corrupt,
                Verdict::Lost => GetOutcome::Absent,
                Verdict::Unknown(why) => {
                    *self.refusal.locked() = Some(why);
                    GetOutcome::Busy
                }
            };
        }
    }
}

impl Store for RemoteStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.put_chunk(key, std::slice::from_ref(bytes), &[])
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        let mut outcome = [GetOutcome::Busy];
        match context.ends {
            Ends::AtOnce(watch) => outcome[0] = self.get_begun(key, handle, out, watch),
            _ => self.get_chunk(&[key], &[handle], std::slice::from_mut(out), &mut outcome, context),
        }
        outcome[0]
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        self.put_blobs(first, pages, &[], outcomes);
    }

    /// All pages of a chunk by one request.
    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        let (keys, handles): (Vec<PageKey>, Vec<Handle>) = pages.iter().copied().take(out.len()).unzip();
        let mut outcomes = vec![GetOutcome::Busy; keys.len()];
        let mut from = 0;
        for chunk in keys.chunk_by(|a, b| (a.region, a.page.0 / CHUNK_PAGES) == (b.region, b.page.0 / CHUNK_PAGES)) {
            if from > 0 && context.is_wanted() {
                break;
            }
            let at = from..from + chunk.len();
            self.get_chunk(chunk, &handles[at.clone()], &mut out[at.clone()], &mut outcomes[at.clone()], context);
            from = at.end;
        }
        outcomes
    }

    /// The next `tidy` unlinks the page, because the caller may be a fault worker.
    fn free(&self, key: PageKey, handle: Handle) {
        self.garbage.free(key, handle);
    }

    fn tidy(&self) {
        if self.rests_until.locked().is_some_and(|until| Instant::now() < until) {
            return;
        }
        let steps = || {
            let unlinked = self.garbage.unlink_freed(&self.cluster, &self.share);
            self.garbage.sweep(&self.cluster).and(unlinked)
        };
        if let Err(why) = steps() {
            *self.rests_until.locked() = Some(Instant::now() + REST);
            *self.refusal.locked() = Some(why.to_string());
        }
    }

    fn usage(&self) -> StoreUsage {
        let (pages, budget) = (self.share.pages().saturating_sub(self.garbage.waiting()), self.share.budget());
        StoreUsage { pages, bytes: budget.bytes(pages), budget_bytes: budget.limit().0 }
    }
}

impl DurableStore for RemoteStore {
    /// Sends nothing to the cluster; `tidy` finds the leftovers.
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.sealing.alone();
        let newest =
            self.generations.draw().or(Handle::new(Handle::MAX)).ok_or_else(|| io::Error::other("no generation"))?;
        let live: HashSet<_> = live.collect();
        let kept_blobs = live.len() as u64;
        self.garbage.forget_freed();
        self.share.sub(self.share.pages());
        self.inherit(&live, 0);
        self.garbage.begin_sweep(self.vm, live, newest);
        Ok(Recovered { kept_blobs, ..Recovered::default() })
    }

    fn attach(&self) -> Option<&dyn Attach> {
        Some(self)
    }
}

impl Attach for RemoteStore {
    /// The store may have pages, so their lease must not expire.
    fn attach_shared(&self, _live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.used.store(true, Relaxed);
        self.home.has_pages();
    }

    /// Pages that were freed here since [`Attach::attach_shared`] must still be unlinked, and count until then. A page
    /// that is freed during this call may be counted once too little.
    fn attach_exclusive(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) {
        self.sealing.alone();
        let Some(newest) = self.generations.draw().or(Handle::new(Handle::MAX)) else { return };
        let live: HashSet<_> = live.collect();
        self.inherit(&live, self.garbage.waiting_beside(&live));
        self.garbage.begin_sweep(self.vm, live, newest);
    }
}

impl SlowStore for RemoteStore {
    fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        self.begun.begin(&self.cluster, name::key(key, handle), watch)
    }

    /// The last chunk is under way afterwards, and those before it are stored.
    fn begin_put(self: Arc<Self>, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> Ending {
        let mut parts: Vec<_> = parts(first, pages.len()).collect();
        let (mut outcomes, last) = (Vec::with_capacity(pages.len()), parts.pop().unwrap_or_default());
        if let Some(end) = parts.last().map(|part| part.end) {
            self.put_blobs(first, &pages[..end], blobs.get(..end).unwrap_or_default(), &mut outcomes);
        }
        let sent = self.begin_chunk(plus(first, last.start), &pages[last.clone()], of_part(blobs, &last));
        Box::new(move |all| {
            all.append(&mut outcomes);
            all.resize(all.len() + last.len(), self.outcome(sent));
        })
    }

    fn is_untidy(&self) -> bool {
        self.rests_until.locked().is_none_or(|until| Instant::now() >= until) && self.garbage.waiting_briefly() > 0
    }

    fn last_refusal(&self) -> Option<String> {
        self.refusal.locked().clone()
    }
}
