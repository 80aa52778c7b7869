//! Garbage: pages of one store that no word names any more, until their keys are unlinked.
//!
//! Before: a page was freed, a write failed, or an earlier engine ended. After: `tidy` has unlinked the keys, a chunk
//! at a time, and the budget counts the pages no more.
//! Threads: any may free; one thread at a time unlinks and sweeps. Units: pages of the VM, by key and handle.
//! Promise: a page is unlinked only if it was freed, or if it is older than the sweep and no word named it when that
//! began. What cannot be unlinked now stays here.
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
use crate::sweep::{self, Scan};

/// Time limit of the sweep in one call of `tidy`.
const SWEEP_SLICE: Duration = Duration::from_millis(20);

/// All garbage of one store.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    freed: Mutex<Freed>,
    leftovers: Mutex<Option<Leftovers>>,
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
        lock(&self.freed).pages.entry((key, handle)).or_default();
    }

    /// Adds pages that a failed write may have left.
    pub fn failed(&self, pages: impl Iterator<Item = (PageKey, Handle)>) {
        lock(&self.freed).failed.extend(pages);
    }

    /// Returns the number of freed pages that have not been unlinked.
    pub fn waiting(&self) -> u64 {
        lock(&self.freed).pages.len() as u64
    }

    /// Returns the number of freed pages that have not been unlinked and are not in `live`.
    pub fn waiting_beside(&self, live: &HashSet<(PageKey, Handle)>) -> u64 {
        lock(&self.freed).pages.keys().filter(|page| !live.contains(page)).count() as u64
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
    /// The reason why the cluster does not respond. The next call unlinks the remaining pages.
    pub fn unlink_freed(&self, cluster: &Cluster, share: &Share) -> Result<(), String> {
        let freed = std::mem::take(&mut *lock(&self.freed));
        let mut pages: Vec<_> = freed.pages.into_iter().collect();
        pages.sort_unstable_by_key(|((key, handle), _)| (key.region.vm, key.region.number, key.page, handle.bits()));
        let chunk = |key: &PageKey| (key.region, key.page.0 / CHUNK_PAGES);
        let mut result = Ok(());
        for run in pages.chunk_by(|((a, _), _), ((b, _), _)| chunk(a) == chunk(b)) {
            let was_asked = result.is_ok();
            if was_asked {
                // A large run of one chunk may span several generations.
                let keys = run.iter().map(|((key, handle), _)| name::key(*key, *handle)).collect();
                match sweep::unlink(cluster, keys) {
                    // A page that may have been unlinked before counts as unlinked now.
                    Ok(gone) => {
                        let maybe = run.iter().filter(|(_, maybe)| *maybe).count() as u64;
                        share.sub((gone + maybe).min(run.len() as u64));
                        continue;
                    }
                    Err(failed) => result = Err(failed.why),
                }
            }
            let mut freed = lock(&self.freed);
            for (page, maybe) in run {
                *freed.pages.entry(*page).or_default() |= *maybe || was_asked;
            }
        }
        if result.is_ok() && !freed.failed.is_empty() {
            let keys = freed.failed.iter().map(|(key, handle)| name::key(*key, *handle)).collect();
            result = sweep::unlink(cluster, keys).map(drop).map_err(|failed| failed.why);
        }
        if result.is_err() {
            lock(&self.freed).failed.extend(freed.failed);
        }
        result
    }

    /// Continues the sweep for leftovers of this VM, for a short time.
    ///
    /// # Errors
    /// The reason why the cluster does not respond. The next call starts the sweep again.
    pub fn sweep(&self, cluster: &Cluster, vm: VmId) -> Result<(), String> {
        let mut leftovers = lock(&self.leftovers);
        let Some(Leftovers { live, newest, scan }) = &mut *leftovers else { return Ok(()) };
        let until = Instant::now() + SWEEP_SLICE;
        while Instant::now() < until {
            let under_way = scan.take().map_or_else(|| Scan::begin(cluster, name::pattern(vm)), Ok);
            let stepped = under_way.and_then(|mut scan| Ok((scan.step(cluster)?, scan)));
            let (mut garbage, rest) = match stepped.map_err(|error| error.to_string())? {
                (Some(keys), rest) => (keys, rest),
                (None, _) => {
                    *leftovers = None;
                    return Ok(());
                }
            };
            garbage.retain(|bytes| {
                name::parse(bytes).is_some_and(|page| page.1.bits() <= newest.bits() && !live.contains(&page))
            });
            sweep::unlink(cluster, garbage).map_err(|failed| failed.why)?;
            *scan = Some(rest);
        }
        Ok(())
    }
}
