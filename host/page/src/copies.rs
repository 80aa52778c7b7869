//! The store that a far page's word names, and the copies that words keep alive.
//!
//! Before: `evict` put a page into a store, and `shift` may have moved it on to another. After: the word alone
//! says where its copy is. Threads: any.
//! Promise: a word names a store by its number alone. An unknown number resolves to no store, and the page waits.

use ballast_base::PageIdx;
use ballast_base::store::{Handle, PageKey, Store};

use crate::page_state::{State, Word};

/// Finds the store of a far page.
pub trait StoreOf {
    /// The store that this word (Far or Restoring) names. With `None` a worker that has it serves the page later.
    fn store_of(&self, word: Word) -> Option<&dyn Store>;
}

/// The handle that a word keeps alive in its store, if any; `recover` tells the store not to sweep it.
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

/// The number of the store that has this page's bytes, if one has.
pub fn store_number(word: Word) -> Option<u8> {
    live_handle(word).map(|_| word.store())
}
