//! A third store: in memory, outlives an engine, and is slow. A new store needs a file like this, and one line with
//! its number and its place among the other stores.

use std::collections::HashSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_base::Bytes;
use ballast_store::{
    DurableStore, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, Recovered, SlowStore, Store,
    StoreUsage,
};
use ballast_testkit::NullStore;

pub const THIRD: u8 = 3;

/// A store that is busy at the first request for each page.
#[derive(Debug)]
pub struct ThirdStore {
    inner: NullStore,
    asked: Mutex<HashSet<Handle>>,
    silent: AtomicBool,
    /// Requests for pages, and the longest of them.
    pub requests: AtomicU64,
    pub longest: AtomicU64,
}

impl ThirdStore {
    pub fn new(budget: Bytes) -> Self {
        Self {
            inner: NullStore::new(budget),
            asked: Mutex::default(),
            silent: AtomicBool::new(false),
            requests: AtomicU64::new(0),
            longest: AtomicU64::new(0),
        }
    }

    /// Returns whether this page was requested before.
    fn asked(&self, handle: Handle) -> bool {
        !self.asked.lock().expect("asked").insert(handle)
    }

    /// Sets whether it is silent: it then returns and takes no page.
    pub fn set_silent(&self, silent: bool) {
        self.silent.store(silent, Ordering::Release);
    }
}

impl Store for ThirdStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        // While it is silent, pages of other stores must not move here.
        if self.silent.load(Ordering::Acquire) {
            return PutOutcome::Busy;
        }
        self.inner.put(key, bytes)
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        self.requests.fetch_add(1, Ordering::AcqRel);
        if !self.asked(handle) || self.silent.load(Ordering::Acquire) {
            return GetOutcome::Busy;
        }
        self.inner.get(key, handle, out, context)
    }

    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        self.requests.fetch_add(1, Ordering::AcqRel);
        self.longest.fetch_max(pages.len() as u64, Ordering::AcqRel);
        let get = |((key, handle), out): (&(PageKey, Handle), &mut PageBytes)| {
            let is_tenth = key.page.0.is_multiple_of(10);
            let silent = self.silent.load(Ordering::Acquire) || is_tenth && !self.asked(*handle);
            if silent { GetOutcome::Busy } else { self.inner.get(*key, *handle, out, context) }
        };
        pages.iter().zip(out).map(get).collect()
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.inner.free(key, handle);
    }

    fn usage(&self) -> StoreUsage {
        self.inner.usage()
    }
}

impl DurableStore for ThirdStore {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.inner.recover(live)
    }
}

impl SlowStore for ThirdStore {}
