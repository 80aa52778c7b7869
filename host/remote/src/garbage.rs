//! Garbage: pages of one store that no word names any more, until their keys are unlinked.
//!
//! Before: a page was freed, a write failed, or an earlier engine ended. After: `tidy` has unlinked the keys, a chunk
//! at a time, and the budget no longer counts the pages.
//! Threads: any may free; one thread at a time unlinks and sweeps. Units: pages of the VM, by key and handle.
//! Promise: a page is unlinked only if it was freed, or if it is older than the sweep and no word named it when the
//! sweep began. What cannot be unlinked now stays here. A node that refuses delays its own pages only. A call takes
//! [`SLICE`], or as long as one node takes to fail, and the next call continues there. Each chunk has the leavings of
//! at most one failed write: no other page is put there before these are unlinked. If a server was stopped and executes
//! the write afterwards, its pages stay until the sweep at the VM's end.
//!
//! *Leftovers.* A sweep of the VM's keys finds pages that an ended engine put and no word names. It runs after
//! `recover`, and after `own` for keys that the other engine could not unlink. The thread that calls `tidy` runs it in
//! steps. The alternative is a mark in shared memory for each chunk that may have leftovers. But pages are freed in all
//! chunks all the time, so nearly every mark would be set. A store could clear a mark only if all words that ever named
//! a page of the chunk agreed, and a store does not know them. And marks would not find writes of an ended engine that
//! arrive later.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::ops::Bound;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_base::wire::VmId;
use ballast_store::{Handle, PageKey};
use ballast_sys::lock::Lock;

use crate::budget::Share;
use crate::cluster::Cluster;
use crate::name::{self, CHUNK_PAGES};
use crate::refusal::Addr;
use crate::slot::slot_of;
use crate::sweep::{self, Scan};

/// Time limit of freed pages in one call of `tidy`: an engine that hands its VMs over waits for it.
const SLICE: Duration = Duration::from_millis(100);
/// Time limit of the sweep in one call of `tidy`.
const SWEEP_SLICE: Duration = Duration::from_millis(20);
/// How long a node that refused is not asked. Until it answers, that may take seconds each time.
const REFUSES_FOR: Duration = Duration::from_secs(3);

#[derive(Debug, Default)]
pub(crate) struct Garbage {
    freed: Mutex<Freed>,
    leftovers: Mutex<Option<Leftovers>>,
}

/// Pages of a chunk that a failed write may have left: the first, their number, and the generation.
type FailedRun = (PageKey, u64, Handle);

/// A chunk of a VM: the region's number, and the chunk in it.
type Chunk = (u32, u64);

fn chunk_of(key: PageKey) -> Chunk {
    (key.region.number, key.page.0 / CHUNK_PAGES)
}

#[derive(Debug, Default)]
struct Freed {
    chunks: BTreeMap<Chunk, Waiting>,
    /// Freed pages among them that no node has refused to unlink, and all others.
    new: u64,
    left: u64,
    last: Chunk,
    /// Nodes that refused, and until when they are not asked. `None` stands for slots without a known owner.
    refusing: HashMap<Option<Addr>, Instant>,
}

/// The pages of a chunk that must be unlinked.
#[derive(Debug, Default)]
struct Waiting {
    pages: HashMap<(PageKey, Handle), Tried>,
    /// Pages of failed writes, which the budget never counted.
    uncounted: Vec<FailedRun>,
}

/// Whether an earlier call tried to unlink a freed page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tried {
    Not,
    /// Its node refused.
    Refused,
    /// Its node was asked, and may have unlinked it.
    Maybe,
}

impl Freed {
    fn count(&mut self, tried: Tried) -> &mut u64 {
        if tried == Tried::Not { &mut self.new } else { &mut self.left }
    }

    /// Adds a freed page. If it is there already, the later result counts.
    fn add(&mut self, page: (PageKey, Handle), tried: Tried) {
        let before = self.chunks.entry(chunk_of(page.0)).or_default().pages.insert(page, tried);
        before.into_iter().for_each(|before| *self.count(before) -= 1);
        *self.count(tried) += 1;
    }

    fn take(&mut self, chunk: Chunk) -> Waiting {
        let waiting = self.chunks.remove(&chunk).unwrap_or_default();
        waiting.pages.values().for_each(|tried| *self.count(*tried) -= 1);
        waiting
    }

    /// Returns the chunk after the last one, in a circle.
    fn next(&mut self) -> Option<Chunk> {
        let after = self.chunks.range((Bound::Excluded(self.last), Bound::Unbounded)).next();
        self.last = *after.or_else(|| self.chunks.first_key_value())?.0;
        Some(self.last)
    }

    fn is_refused(&mut self, chunk: Chunk) {
        let Some(waiting) = self.chunks.get_mut(&chunk) else { return };
        for tried in waiting.pages.values_mut().filter(|tried| **tried == Tried::Not) {
            *tried = Tried::Refused;
            self.new -= 1;
            self.left += 1;
        }
    }
}

/// State of the sweep for pages that earlier engines may have left.
#[derive(Debug)]
struct Leftovers {
    /// Pages that a word names, and that must stay.
    live: HashSet<(PageKey, Handle)>,
    /// The largest generation at the start of the sweep. Later pages have a larger one.
    newest: Handle,
    scan: Scan,
}

fn node_of(cluster: &Cluster, waiting: &Waiting) -> Option<Addr> {
    let freed = waiting.pages.keys().next().copied();
    let page = freed.or_else(|| waiting.uncounted.first().map(|(first, _, handle)| (*first, *handle)))?;
    cluster.map().primary(slot_of(&name::key(page.0, page.1))).cloned()
}

fn unlink_all(cluster: &Cluster, runs: &[FailedRun]) -> io::Result<()> {
    let pages = |(first, count, handle): &FailedRun| {
        let (region, start, handle) = (first.region, first.page.0, *handle);
        (start..start + count).map(move |page| (region.page(PageIdx(page)), handle))
    };
    sweep::unlink(cluster, name::keys(runs.iter().flat_map(pages))).map(drop)
}

impl Garbage {
    pub fn free(&self, key: PageKey, handle: Handle) {
        let mut freed = self.freed.locked();
        let known = freed.chunks.get(&chunk_of(key)).is_some_and(|waiting| waiting.pages.contains_key(&(key, handle)));
        if !known {
            freed.add((key, handle), Tried::Not);
        }
    }

    /// Adds a run of pages of one chunk that a failed write may have left.
    pub fn failed(&self, first: PageKey, count: u64, handle: Handle) {
        self.freed.locked().chunks.entry(chunk_of(first)).or_default().uncounted.push((first, count, handle));
    }

    /// Unlinks what failed writes may have left in the chunk of this page. Fails if its node does not do so.
    pub fn unlink_failed(&self, cluster: &Cluster, key: PageKey) -> io::Result<()> {
        let runs = match self.freed.locked().chunks.get_mut(&chunk_of(key)) {
            Some(waiting) if !waiting.uncounted.is_empty() => std::mem::take(&mut waiting.uncounted),
            _ => return Ok(()),
        };
        self.unlink_runs(cluster, &runs)
    }

    /// Unlinks what failed writes left; what cannot be unlinked is added again.
    fn unlink_runs(&self, cluster: &Cluster, runs: &[FailedRun]) -> io::Result<()> {
        unlink_all(cluster, runs).inspect_err(|_| self.put_back(runs))
    }

    fn put_back(&self, runs: &[FailedRun]) {
        runs.iter().for_each(|(first, count, handle)| self.failed(*first, *count, *handle));
    }

    /// Returns the number of freed pages that have not been unlinked.
    pub fn waiting(&self) -> u64 {
        let freed = self.freed.locked();
        freed.new + freed.left
    }

    /// Returns the number of freed pages that wait and that no node has refused to unlink.
    pub fn waiting_briefly(&self) -> u64 {
        self.freed.locked().new
    }

    /// Returns the number of freed pages that have not been unlinked and are not in `live`.
    pub fn waiting_beside(&self, live: &HashSet<(PageKey, Handle)>) -> u64 {
        let freed = self.freed.locked();
        freed.chunks.values().flat_map(|waiting| waiting.pages.keys()).filter(|page| !live.contains(page)).count()
            as u64
    }

    pub fn is_empty(&self) -> bool {
        self.freed.locked().chunks.is_empty() && self.leftovers.locked().is_none()
    }

    /// Forgets the freed pages. The next sweep finds them.
    pub fn forget_freed(&self) {
        *self.freed.locked() = Freed::default();
    }

    /// Starts a sweep over all keys of the VM. It keeps these pages, and those of a generation after `newest`.
    pub fn begin_sweep(&self, vm: VmId, live: HashSet<(PageKey, Handle)>, newest: Handle) {
        *self.leftovers.locked() = Some(Leftovers { live, newest, scan: Scan::new(name::pattern(vm)) });
    }

    /// Unlinks pages that were freed, for a short time. A node may fail to do so: a later call unlinks its pages.
    pub fn unlink_freed(&self, cluster: &Cluster, share: &Share) -> io::Result<()> {
        let (begun, mut refusal) = (Instant::now(), None);
        let chunks = self.freed.locked().chunks.len();
        for _ in 0..chunks {
            if begun.elapsed() > SLICE {
                break;
            }
            let (node, waiting) = {
                let mut freed = self.freed.locked();
                let Some(chunk) = freed.next() else { break };
                let node = freed.chunks.get(&chunk).and_then(|waiting| node_of(cluster, waiting));
                if freed.refusing.get(&node).is_some_and(|until| Instant::now() < *until) {
                    freed.is_refused(chunk);
                    continue;
                }
                (node, freed.take(chunk))
            };
            match self.unlink(cluster, share, waiting) {
                Ok(()) => drop(self.freed.locked().refusing.remove(&node)),
                Err(why) => {
                    let (now, mut freed) = (Instant::now(), self.freed.locked());
                    // The map may have other nodes now.
                    freed.refusing.retain(|_, until| now < *until);
                    freed.refusing.insert(node, now + REFUSES_FOR);
                    refusal.get_or_insert(why);
                }
            }
        }
        refusal.map_or(Ok(()), Err)
    }

    /// Unlinks the pages of a chunk that were taken out. Those that the node refuses go back.
    fn unlink(&self, cluster: &Cluster, share: &Share, waiting: Waiting) -> io::Result<()> {
        let Waiting { pages, uncounted } = waiting;
        let keys = pages.keys().map(|(key, handle)| name::key(*key, *handle)).collect();
        let unlinked = sweep::unlink(cluster, keys);
        if let Ok(gone) = &unlinked {
            // A page whose unlinking may have succeeded before counts as unlinked now.
            let maybe = pages.values().filter(|tried| **tried == Tried::Maybe).count() as u64;
            share.sub((gone + maybe).min(pages.len() as u64));
        } else {
            let mut freed = self.freed.locked();
            pages.into_keys().for_each(|page| freed.add(page, Tried::Maybe));
        }
        unlinked.inspect_err(|_| self.put_back(&uncounted))?;
        self.unlink_runs(cluster, &uncounted)
    }

    /// Continues the sweep for leftovers of this VM, for a short time. If a node does not list or unlink its keys,
    /// fails with the reason; a later call repeats the step.
    pub fn sweep(&self, cluster: &Cluster) -> io::Result<()> {
        let mut leftovers = self.leftovers.locked();
        let Some(Leftovers { live, newest, scan }) = &mut *leftovers else { return Ok(()) };
        let until = Instant::now() + SWEEP_SLICE;
        while Instant::now() < until {
            let Some(keys) = scan.step(cluster)? else {
                *leftovers = None;
                return Ok(());
            };
            let pages = keys.iter().filter_map(|bytes| name::parse(bytes));
            let garbage = pages.filter(|page| page.1.bits() <= newest.bits() && !live.contains(page));
            let keys = garbage.map(|(key, handle)| name::key(key, handle)).collect();
            sweep::unlink(cluster, keys).inspect_err(|_| scan.again())?;
        }
        Ok(())
    }
}
