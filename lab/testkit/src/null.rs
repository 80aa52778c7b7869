//! The null store: the simplest store that keeps the promises, a map in this process.
//!
//! Before: a test needs a store. After: the test runs with a store that cannot fail; with `FaultyStore` around it,
//! every failure comes on command.
//! Threads: any; one lock. Units: every page counts 4096 bytes, whatever it holds.
//! Promise: handles are never used twice. Nothing outlives the process.

use std::collections::HashMap;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_base::{Bytes, PAGE_SIZE};

use ballast_base::store::{
    DurableStore, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, Recovered, SlowStore,
    Store, StoreUsage,
};

/// A store that is a map.
#[derive(Debug)]
pub struct NullStore {
    budget: Bytes,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    next_handle: u64,
    objects: HashMap<Handle, (PageKey, Box<PageBytes>)>,
}

impl NullStore {
    /// An empty store that holds at most `budget`.
    pub fn new(budget: Bytes) -> Self {
        Self { budget, inner: Mutex::new(Inner { next_handle: 1, objects: HashMap::new() }) }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store for NullStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        let mut inner = self.lock();
        if (inner.objects.len() as u64 + 1) * PAGE_SIZE as u64 > self.budget.0 {
            return PutOutcome::Full;
        }
        let Some(handle) = Handle::new(inner.next_handle) else { return PutOutcome::Full };
        inner.next_handle += 1;
        inner.objects.insert(handle, (key, Box::new(*bytes)));
        PutOutcome::Stored(handle)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, _: IoContext<'_>) -> GetOutcome {
        match self.lock().objects.get(&handle) {
            None => GetOutcome::Absent,
            Some((of, _)) if *of != key => GetOutcome::Corrupt,
            Some((_, bytes)) => {
                out.copy_from_slice(&**bytes);
                GetOutcome::Found
            }
        }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        let mut inner = self.lock();
        if inner.objects.get(&handle).is_some_and(|(of, _)| *of == key) {
            inner.objects.remove(&handle);
        }
    }

    fn usage(&self) -> StoreUsage {
        let pages = self.lock().objects.len() as u64;
        StoreUsage { pages, bytes: pages * PAGE_SIZE as u64, budget_bytes: self.budget.0 }
    }
}

impl DurableStore for NullStore {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        let live: HashMap<Handle, PageKey> = live.map(|(key, handle)| (handle, key)).collect();
        let mut inner = self.lock();
        let before = inner.objects.len() as u64;
        inner.objects.retain(|handle, (of, _)| live.get(handle) == Some(of));
        let kept_blobs = inner.objects.len() as u64;
        let (freed_slots, missing) = (before - kept_blobs, live.len() as u64 - kept_blobs);
        Ok(Recovered { kept_blobs, freed_slots, missing, ..Recovered::default() })
    }
}

impl NearStore for NullStore {
    fn takes_room(&self, _: Handle) -> bool {
        true
    }

    fn is_short(&self) -> bool {
        self.usage().is_short()
    }
}

impl SlowStore for NullStore {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_null_store_passes_the_conformance_kit() {
        crate::conformance::run_near(&|| Box::new(NullStore::new(Bytes(4 << 20))));
        crate::conformance::run_slow(&|| Box::new(NullStore::new(Bytes(4 << 20))));
    }
}
