//! The stores of one VM, by the numbers that words name them by.
//!
//! Before: the engine opened them. After: `evict` puts pages into the RAM store, `spill` moves them on to the file
//! store, and faults bring them back from either. Threads: any.
//! Promise: a store that cannot be opened loses nothing: its pages wait.

use std::sync::Arc;

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

/// Stands in for a store that is there and cannot be opened: a fault on a page of it waits, and nothing is lost.
#[derive(Clone, Copy, Debug, Default)]
pub struct AwayStore;

impl Store for AwayStore {
    fn put(&self, _: PageKey, _: &PageBytes) -> PutOutcome {
        PutOutcome::Busy
    }

    fn get(&self, _: PageKey, _: Handle, _: &mut PageBytes) -> GetOutcome {
        GetOutcome::Busy
    }

    /// What is freed here stays in the file until an engine that can open it sweeps it.
    fn free(&self, _: PageKey, _: Handle) {}

    fn usage(&self) -> StoreUsage {
        StoreUsage::default()
    }
}
