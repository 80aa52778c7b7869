//! The stores of one VM, by the numbers that words name them by.
//!
//! Before: the engine opened them. After: `evict` puts pages into the RAM store, `spill` moves them on to the file
//! store, and faults bring them back from either. Threads: any.
//! Promise: a store that cannot be opened loses nothing: its pages wait.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use ballast_store::{GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage};

use ballast_page::copies::{FILE_STORE, RAM_STORE, StoreOf};
use ballast_page::page_state::Word;

/// The stores of one VM.
#[derive(Clone, Debug)]
pub struct Stores {
    /// In RAM.
    pub ram: Arc<dyn Store>,
    /// In a file, if the VM has one.
    pub file: Option<Arc<dyn Store>>,
}

impl Stores {
    /// The RAM store and nothing else.
    pub fn ram_only(ram: Arc<dyn Store>) -> Self {
        Self { ram, file: None }
    }

    /// Only stores that return at once: for workers that must not wait for a disk.
    pub fn near(&self) -> Near<'_> {
        Near(&*self.ram)
    }
}

impl StoreOf for Stores {
    fn store_of(&self, word: Word) -> Option<&dyn Store> {
        match word.store() {
            RAM_STORE => Some(&*self.ram),
            FILE_STORE => self.file.as_deref(),
            _ => None,
        }
    }
}

/// See [`Stores::near`].
#[derive(Clone, Copy, Debug)]
pub struct Near<'a>(&'a dyn Store);

impl StoreOf for Near<'_> {
    fn store_of(&self, word: Word) -> Option<&dyn Store> {
        (word.store() == RAM_STORE).then_some(self.0)
    }
}

/// A store that is opened beside everything else, because its disk may not answer. Until it is there, whoever wants a
/// page of it waits, and nothing is lost.
#[derive(Debug, Default)]
pub struct LateStore {
    store: OnceLock<Arc<dyn Store>>,
    /// What was freed before it was there.
    freed: Mutex<Vec<(PageKey, Handle)>>,
}

impl LateStore {
    /// Nothing is there yet.
    pub const fn new() -> Self {
        Self { store: OnceLock::new(), freed: Mutex::new(Vec::new()) }
    }

    /// The store is there, and has in it all that the words named when this one was made.
    pub fn arrive(&self, store: Arc<dyn Store>) {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        for (key, handle) in std::mem::take(&mut *freed) {
            store.free(key, handle);
        }
        // With the lock, so that nobody notes anything more.
        let _ = self.store.set(store);
    }

    fn store(&self) -> Option<&dyn Store> {
        self.store.get().map(|store| &**store)
    }
}

impl Store for LateStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        self.store().map_or(PutOutcome::Busy, |store| store.put(key, bytes))
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        self.store().map_or(GetOutcome::Busy, |store| store.get(key, handle, out))
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        match self.store() {
            Some(store) => store.put_run(first, pages, outcomes),
            None => outcomes.resize(outcomes.len() + pages.len(), PutOutcome::Busy),
        }
    }

    fn get_run(&self, first: PageKey, handles: &[Handle], out: &mut [PageBytes], outcomes: &mut Vec<GetOutcome>) {
        match self.store() {
            Some(store) => store.get_run(first, handles, out, outcomes),
            None => outcomes.resize(outcomes.len() + handles.len().min(out.len()), GetOutcome::Busy),
        }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        let mut freed = self.freed.lock().unwrap_or_else(PoisonError::into_inner);
        match self.store() {
            Some(store) => {
                drop(freed);
                store.free(key, handle);
            }
            None => freed.push((key, handle)),
        }
    }

    fn tidy(&self) {
        if let Some(store) = self.store() {
            store.tidy();
        }
    }

    fn takes_room(&self, handle: Handle) -> bool {
        self.store().is_none_or(|store| store.takes_room(handle))
    }

    fn is_short(&self) -> bool {
        self.store().is_some_and(|store| store.is_short())
    }

    fn last_refusal(&self) -> Option<String> {
        self.store().map_or_else(|| Some("its disk does not answer".into()), |store| store.last_refusal())
    }

    fn usage(&self) -> StoreUsage {
        self.store().map_or_else(StoreUsage::default, |store| store.usage())
    }
}
