//! Stores: where a far page's word says that its bytes are.
//!
//! Before: `evict` put a page into the RAM store, and `spill` may have moved it on to the file store. After: whoever has
//! the word has the store. Threads: any.
//! Promise: a word names a store by its number alone. A number nobody knows resolves to nothing, and the page waits.

use std::sync::Arc;

use ballast_base::PageIdx;
use ballast_store::{GetOutcome, Handle, PageBytes, PageKey, PutOutcome, Store, StoreUsage};

use crate::page_state::{State, Word};

/// Number of the compressed store in RAM: where evicted pages go.
pub const RAM_STORE: u8 = 1;
/// Number of the store in a file: where pages go that have been far for long.
pub const FILE_STORE: u8 = 2;

/// Finds the store a far page is in.
pub trait StoreOf {
    /// The store that this word (Far or Restoring) names. With `None` the page is served later, by somebody who has it.
    fn store_of(&self, word: Word) -> Option<&dyn Store>;
}

/// The handle a word keeps alive in its store, if any: what `recover` tells the store not to sweep.
pub fn live_handle(word: Word) -> Option<Handle> {
    matches!(word.state(), State::Far | State::Restoring).then(|| word.handle())
}

/// Free the copies that these words keep alive, of pages from `first` on.
pub fn free_copies(stores: &impl StoreOf, first: PageKey, words: impl IntoIterator<Item = Word>) {
    for (page, word) in (first.page.0..).zip(words) {
        if let Some(handle) = live_handle(word)
            && let Some(store) = stores.store_of(word)
        {
            store.free(PageKey { page: PageIdx(page), ..first }, handle);
        }
    }
}

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

    /// Only what answers at once: what the lane resolves with that must not wait for a disk.
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

/// Are this page's bytes in the file store?
pub fn is_in_file(word: Word) -> bool {
    matches!(word.state(), State::Far | State::Restoring) && word.store() == FILE_STORE
}

/// Stands in for a store that is there and cannot be opened: whoever wants a page of it waits, and nothing is lost.
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
