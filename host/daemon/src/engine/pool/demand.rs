//! Memory on demand between the pool and the governor: how much VMs can have far, and how much the pool has for them on
//! nodes that have promised more.
//!
//! Before: the engine has a governor. After: the pool promises what it has plus what the VMs can have far, and the
//! governor divides the pool's memory when little is left.
//! Threads: the pool's reads the pool; the governor's, and those of the API, read its last results. Units: bytes.
//! Promise: the governor does not wait for the pool: it reads a copy, and the pool calls it without its lock.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use ballast_base::Bytes;
use ballast_pool::{Error, Far, Overcommitted, Reserve};
use ballast_sys::lock::Lock;
use ballast_sys::memfd::FileId;

/// The pool's files of VMs on demand, with the node and the amount promised in each. A file itself also says whether it
/// is of that kind, but its VMM can change the file: only the pool's record counts.
pub type Promised = HashMap<FileId, (u32, Bytes)>;
/// Nodes that have promised VMs on demand more than the pool has for them, by their numbers on the host.
pub type Over = BTreeMap<u32, Overcommitted>;

/// Calls from the pool to the rest of the engine.
pub struct Links {
    /// How much of their promised memory VMs on demand can have far.
    pub far: Box<dyn Fn() -> Far + Send + Sync>,
    /// Little memory is left for touches.
    pub short: Box<dyn Fn() + Send + Sync>,
}

impl fmt::Debug for Links {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Links").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
pub struct Demand {
    links: OnceLock<Links>,
    /// Whether the pool was read, and no VM was promised any memory on demand.
    is_none: AtomicBool,
    /// Whether the pool was read since this engine has it.
    is_known: AtomicBool,
    over: Mutex<Over>,
    files: Mutex<Arc<Promised>>,
}

impl Demand {
    pub fn link(&self, links: Links) {
        let _ = self.links.set(links);
    }

    pub fn far(&self) -> Far {
        let links = self.links.get().filter(|_| !self.is_none.load(Ordering::Relaxed));
        links.map_or_else(Far::default, |links| (links.far)())
    }

    pub fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Acquire)
    }

    pub fn overcommitted(&self) -> Over {
        self.over.locked().clone()
    }

    pub fn files(&self) -> Arc<Promised> {
        self.files.locked().clone()
    }

    fn set_files(&self, files: Promised) {
        *self.files.locked() = Arc::new(files);
    }

    /// Tells the governor if little is left. No lock is held during the call.
    pub fn tell_if_short(&self) {
        let is_short = self.over.locked().values().any(|over| over.free() < over.low());
        if let Some(links) = self.links.get().filter(|_| is_short) {
            (links.short)();
        }
    }

    pub fn show(&self, reserve: &mut Reserve) {
        if reserve.has_on_demand() {
            // A failure here occurs again in the next round, which reports it.
            let _ = self.tend(Some(reserve), true);
        }
    }

    /// Sets memory aside for the next touches, and checks how much is left. `all`: also reads how much the pool has,
    /// for which each slice may be read.
    pub fn tend(&self, reserve: Option<&mut Reserve>, all: bool) -> Result<(), Error> {
        self.is_none.store(reserve.is_none(), Ordering::Relaxed);
        let Some(reserve) = reserve else {
            *self.over.locked() = Over::new();
            self.set_files(Promised::new());
            self.is_known.store(true, Ordering::Release);
            return Ok(());
        };
        let done = reserve.set_aside();
        if all {
            self.set_files(reserve.on_demand_files()?);
        }
        let mut over = if all { reserve.overcommitted()? } else { self.overcommitted() };
        for (numa, over) in over.iter_mut().filter(|_| !all) {
            over.touched = reserve.on_demand_touched(*numa)?;
        }
        *self.over.locked() = over;
        self.is_known.fetch_or(all, Ordering::Release);
        done
    }
}
