//! Garbage: pages of one store that no word names any more, until their keys are unlinked.
//!
//! Before: a page was freed, a write failed, or an earlier engine ended. After: `tidy` has unlinked the keys, a chunk
//! at a time, and the budget counts the pages no more.
//! Threads: any may free; one thread at a time unlinks and sweeps. Units: pages of the VM, by key and handle.
//! Promise: a page is unlinked only if it was freed, or if it is older than the sweep and no word named it when that
//! began. What cannot be unlinked now stays here. A node that refuses delays its own pages only.
//!
//! *Leftovers.* A sweep of the VM's keys finds pages that an ended engine put and no word names. It runs after
//! `recover`, and after `own` for keys that the other engine could not unlink. The thread that calls `tidy` runs it in
//! steps. The alternative is a mark in shared memory for each chunk that may have leftovers. But pages are freed in all
//! chunks all the time, so nearly every mark would be set. A store could clear a mark only if all words that ever named
//! a page of the chunk agreed, and a store does not know them. And marks would not find writes of an ended engine that
//! arrive later.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_store::{Handle, PageKey};

use crate::budget::Share;
use crate::cluster::Cluster;
use crate::name::{self, CHUNK_PAGES};
use crate::refusal::Addr;
use crate::slot::slot_of;
use crate::sweep::{self, Scan};

/// Time limit of the sweep in one call of `tidy`.
const SWEEP_SLICE: Duration = Duration::from_millis(20);
/// Time limit of refused requests in one call of `tidy`: those of two nodes that do not answer.
const REFUSALS: Duration = Duration::from_secs(6);

/// All garbage of one store.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    freed: Mutex<Freed>,
    leftovers: Mutex<Option<Leftovers>>,
}

/// Pages that must still be unlinked.
#[derive(Debug, Default)]
struct Freed {
    /// Pages freed since the last time that freed pages were unlinked.
    new: HashSet<(PageKey, Handle)>,
    /// Pages that could not be unlinked then, and whether they may have been nevertheless.
    left: HashMap<(PageKey, Handle), bool>,
    /// Pages that a failed write or an earlier engine may have left. They were never counted.
    uncounted: Vec<(PageKey, Handle)>,
}

/// The nodes that refused a request.
#[derive(Default)]
struct Refused {
    /// `None` stands for slots without a known owner.
    nodes: HashSet<Option<Addr>>,
    /// Time that refused requests took.
    took: Duration,
    /// The first reason.
    why: Option<String>,
}

impl Refused {
    /// Unlinks these pages of one chunk. Returns how many existed; `Err` if their node refuses or has refused before,
    /// with whether some may be unlinked.
    fn unlink(&mut self, cluster: &Cluster, keys: Vec<Vec<u8>>) -> Result<u64, bool> {
        let node = keys.first().and_then(|key| cluster.map().primary(slot_of(key)).cloned());
        if self.nodes.contains(&node) || self.took > REFUSALS {
            return Err(false);
        }
        let begun = Instant::now();
        sweep::unlink(cluster, keys).map_err(|failed| {
            self.nodes.insert(node);
            self.took += begun.elapsed();
            self.why.get_or_insert(failed.why);
            true
        })
    }
}

/// State of the sweep for pages that earlier engines may have left.
#[derive(Debug)]
struct Leftovers {
    /// Pages that a word names, and that must stay.
    live: HashSet<(PageKey, Handle)>,
    /// The largest generation at the start of the sweep. Later pages have a larger one.
    newest: Handle,
    scan: Option<Scan>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Garbage {
    /// Adds a page that is to be unlinked.
    pub fn free(&self, key: PageKey, handle: Handle) {
        let mut freed = lock(&self.freed);
        if !freed.left.contains_key(&(key, handle)) {
            freed.new.insert((key, handle));
        }
    }

    /// Adds pages that a failed write may have left.
    pub fn failed(&self, pages: impl Iterator<Item = (PageKey, Handle)>) {
        lock(&self.freed).uncounted.extend(pages);
    }

    /// Returns the number of freed pages that have not been unlinked.
    pub fn waiting(&self) -> u64 {
        let freed = lock(&self.freed);
        (freed.new.len() + freed.left.len()) as u64
    }

    /// Returns the number of those that no node has refused to unlink.
    pub fn waiting_briefly(&self) -> u64 {
        lock(&self.freed).new.len() as u64
    }

    /// Returns the number of freed pages that have not been unlinked and are not in `live`.
    pub fn waiting_beside(&self, live: &HashSet<(PageKey, Handle)>) -> u64 {
        let freed = lock(&self.freed);
        freed.new.iter().chain(freed.left.keys()).filter(|page| !live.contains(page)).count() as u64
    }

    /// Forgets the freed pages. The next sweep finds them.
    pub fn forget_freed(&self) {
        *lock(&self.freed) = Freed::default();
    }

    /// Starts a sweep over all keys of the VM. It keeps these pages, and those of a generation after `newest`.
    pub fn begin_sweep(&self, live: HashSet<(PageKey, Handle)>, newest: Handle) {
        *lock(&self.leftovers) = Some(Leftovers { live, newest, scan: None });
    }

    /// Unlinks the pages that were freed.
    ///
    /// # Errors
    /// The first reason why a node does not do so. The next call unlinks its pages.
    pub fn unlink_freed(&self, cluster: &Cluster, share: &Share) -> Result<(), String> {
        let Freed { new, left, mut uncounted } = std::mem::take(&mut *lock(&self.freed));
        let mut pages: Vec<_> = new.into_iter().map(|page| (page, false)).chain(left).collect();
        let order = |(key, handle): &(PageKey, Handle)| (key.region.vm, key.region.number, key.page, handle.bits());
        let chunk = |(key, _): &(PageKey, Handle)| (key.region, key.page.0 / CHUNK_PAGES);
        // A large run of one chunk may span several generations.
        let keys = |(key, handle): &(PageKey, Handle)| name::key(*key, *handle);
        let mut refused = Refused::default();
        pages.sort_unstable_by_key(|(page, _)| order(page));
        for run in pages.chunk_by(|(a, _), (b, _)| chunk(a) == chunk(b)) {
            match refused.unlink(cluster, run.iter().map(|(page, _)| keys(page)).collect()) {
                // A page that may have been unlinked before counts as unlinked now.
                Ok(gone) => {
                    let maybe = run.iter().filter(|(_, maybe)| *maybe).count() as u64;
                    share.sub((gone + maybe).min(run.len() as u64));
                }
                Err(was_asked) => {
                    let mut freed = lock(&self.freed);
                    for (page, maybe) in run {
                        freed.new.remove(page);
                        *freed.left.entry(*page).or_default() |= *maybe || was_asked;
                    }
                }
            }
        }
        uncounted.sort_unstable_by_key(order);
        for run in uncounted.chunk_by(|a, b| chunk(a) == chunk(b)) {
            if refused.unlink(cluster, run.iter().map(keys).collect()).is_err() {
                self.failed(run.iter().copied());
            }
        }
        refused.why.map_or(Ok(()), Err)
    }

    /// Continues the sweep for leftovers of this VM, for a short time.
    ///
    /// # Errors
    /// The reason why a node does not respond. The next call goes on; or it starts again, if the
    /// node did not list its keys.
    pub fn sweep(&self, cluster: &Cluster, vm: VmId) -> Result<(), String> {
        let mut leftovers = lock(&self.leftovers);
        let Some(Leftovers { live, newest, scan }) = &mut *leftovers else { return Ok(()) };
        let until = Instant::now() + SWEEP_SLICE;
        while Instant::now() < until {
            let under_way = scan.take().map_or_else(|| Scan::begin(cluster, name::pattern(vm)), Ok);
            let stepped = under_way.and_then(|mut scan| Ok((scan.step(cluster)?, scan)));
            let (keys, rest) = match stepped.map_err(|error| error.to_string())? {
                (Some(keys), rest) => (keys, rest),
                (None, _) => {
                    *leftovers = None;
                    return Ok(());
                }
            };
            *scan = Some(rest);
            let pages = keys.iter().filter_map(|bytes| name::parse(bytes));
            let garbage: Vec<_> = pages.filter(|page| page.1.bits() <= newest.bits() && !live.contains(page)).collect();
            let keys = garbage.iter().map(|(key, handle)| name::key(*key, *handle)).collect();
            if let Err(failed) = sweep::unlink(cluster, keys) {
                // The sweep goes on after them.
                self.failed(garbage.into_iter());
                return Err(failed.why);
            }
        }
        Ok(())
    }
}
