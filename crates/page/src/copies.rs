//! Which store a far page's word names, and what of its copies is alive.
//!
//! Before: `evict` put a page into a store, and `shift` may have moved it on to another. After: the word alone
//! says where its copy is. Threads: any.
//! Promise: a word names a store by its number alone. A number that is not known resolves to nothing, and the page
//! waits.

use ballast_base::PageIdx;
use ballast_base::store::{Handle, PageKey, Store};

use crate::page_state::{State, Word};

/// Number of the compressed store in RAM: where evicted pages go.
pub const RAM_STORE: u8 = 1;
/// Number of the store in a file: where pages go that have been far for long.
pub const FILE_STORE: u8 = 2;

/// Finds the store a far page is in.
pub trait StoreOf {
    /// The store that this word (Far or Restoring) names. With `None` the page is served later, by a worker that has
    /// it.
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

/// Are this page's bytes in the file store?
pub fn is_in_file(word: Word) -> bool {
    matches!(word.state(), State::Far | State::Restoring) && word.store() == FILE_STORE
}
