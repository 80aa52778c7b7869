//! The store that a far page's word names, and the copies that words keep alive.
//!
//! Before: `evict` put a page into a store, and `shift` may have moved it. After: only the word says where its copy is.
//! Threads: any.
//! Promise: a word names a store only by its number. An unknown number resolves to no store, and the page waits.

use ballast_base::PageIdx;
use ballast_base::store::{Ends, GetOutcome, Handle, IoContext, PageBytes, PageKey, Store};

use crate::page_state::{State, Word};

/// Finds the store of a far page.
pub trait StoreOf {
    /// The store that this word (Far or Restoring) names. After `None`, another worker serves the page later.
    fn store_of(&self, word: Word) -> Option<Source<'_>>;
}

/// A store, as one caller reads it.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// The store.
    pub store: &'a dyn Store,
    /// Purpose and end of the reads.
    pub context: IoContext<'a>,
    /// For a store that may wait: records how long its pages are waited for.
    pub watch: Option<&'a dyn Watch>,
}

/// Records which pages of a store are waited for.
pub trait Watch: std::fmt::Debug {
    /// A thread waited for this page, or for a run that begins with it; a run is `Busy` if one of its pages was.
    fn was_asked(&self, key: PageKey, handle: Handle, outcome: GetOutcome);

    /// These pages were read together, some of them ahead of the thread that will touch them.
    fn were_asked(&self, pages: &[(PageKey, Handle)], outcomes: &[GetOutcome]);

    /// This page was freed.
    fn was_freed(&self, key: PageKey, handle: Handle);
}

impl Source<'_> {
    /// See [`Store::get`].
    pub fn get(self, key: PageKey, handle: Handle, out: &mut PageBytes) -> GetOutcome {
        let outcome = self.store.get(key, handle, out, self.context);
        if let Some(watch) = self.watch
            && (outcome != GetOutcome::Busy || !matches!(self.context.ends, Ends::AtOnce(_)))
        {
            watch.was_asked(key, handle, outcome);
        }
        outcome
    }

    /// See [`Store::get_run`]: a thread waits for all of the pages.
    pub fn get_run(self, pages: &[(PageKey, Handle)], out: &mut [PageBytes]) -> Vec<GetOutcome> {
        let outcomes = self.store.get_run(pages, out, self.context);
        let worst = outcomes.iter().find(|outcome| **outcome == GetOutcome::Busy).or(outcomes.first());
        if let (Some(watch), Some((key, handle)), Some(outcome)) = (self.watch, pages.first(), worst) {
            watch.was_asked(*key, *handle, *outcome);
        }
        outcomes
    }

    /// Like [`Source::get_run`], but no thread waits for some of the pages yet.
    pub fn get_ahead(self, pages: &[(PageKey, Handle)], out: &mut [PageBytes]) -> Vec<GetOutcome> {
        let outcomes = self.store.get_run(pages, out, self.context);
        if let Some(watch) = self.watch {
            watch.were_asked(pages, &outcomes);
        }
        outcomes
    }

    /// See [`Store::free`].
    pub fn free(self, key: PageKey, handle: Handle) {
        self.store.free(key, handle);
        if let Some(watch) = self.watch {
            watch.was_freed(key, handle);
        }
    }
}

/// The handle that a word keeps alive in its store, if any: `recover` tells the store not to sweep it.
pub fn live_handle(word: Word) -> Option<Handle> {
    matches!(word.state(), State::Far | State::Restoring).then(|| word.handle())
}

/// Frees the copies that these words, of pages from `first` on, keep alive.
pub fn free_copies(stores: &impl StoreOf, first: PageKey, words: impl IntoIterator<Item = Word>) {
    for (page, word) in (first.page.0..).zip(words) {
        if let Some(handle) = live_handle(word)
            && let Some(store) = stores.store_of(word)
        {
            store.free(PageKey { page: PageIdx(page), ..first }, handle);
        }
    }
}

/// Number of the store that has this page's bytes, if one has.
pub fn store_number(word: Word) -> Option<u8> {
    live_handle(word).map(|_| word.store())
}
