//! A third store: in memory, outlives an engine, and takes its time. What a store must bring is this file, and one line
//! that says its number and where it stands among the others.

use std::collections::HashSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_base::Bytes;
use ballast_store::{GetOutcome, Handle, NullStore, PageBytes, PageKey, PutOutcome, Recovered, Store, StoreUsage};

/// Its number.
pub const THIRD: u8 = 3;

/// A store that is busy whenever it is asked for a page for the first time.
#[derive(Debug)]
pub struct ThirdStore {
    inner: NullStore,
    asked: Mutex<HashSet<Handle>>,
    silent: AtomicBool,
}

impl ThirdStore {
    pub fn new(budget: Bytes) -> Self {
        Self { inner: NullStore::new(budget), asked: Mutex::default(), silent: AtomicBool::new(false) }
    }

    /// From now on it returns no page, or does again.
    pub fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::Release);
    }
}

impl Store for ThirdStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.inner.put(key, bytes)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        if self.asked.lock().expect("asked").insert(handle) || self.silent.load(Ordering::Acquire) {
            return GetOutcome::Busy;
        }
        self.inner.get(key, handle, out)
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.inner.free(key, handle);
    }

    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.inner.recover(live)
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }
}
