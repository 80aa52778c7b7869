//! A granule: the pages that move as one: a base page, or the 512 pages of a huge page of hugetlbfs, whose mapping the
//! kernel can neither split nor fill in part (the strict 2 MiB paging of Maestro, §3).
//!
//! Before: `region` knows the size of its granules. After: `fault`, `evict` and `recover` move them.
//! Threads: as for the word. Units: pages.
//! Promise: the truth table of `page_state` holds for granules as for pages.
//!
//! **The word of a granule is that of its first page**: its state, its lock, its age, its ticket. The words of the
//! other pages only name their copies: they are Far with a handle while the granule is Far or Restoring, mean nothing
//! while it is locked, and are otherwise [`Word::INITIAL`]. So each page of a granule has a copy of its own in the
//! store, and recovery, sweep and spill find handles in words as they do for base pages. The order of writes makes a
//! death at any instant harmless:
//!
//! - eviction: copies; the word says Far (locked); the other words; the punch; the unlock;
//! - restore and discard: the file; the word says Resident (locked); the other words; the unlock. While the word says
//!   Resident, the others mean nothing.

use ballast_base::store::{PageBytes, StoreSet};

use crate::copies::store_number;
use crate::page_state::{Cell, Word};
use crate::sync::AtomicU64;

/// The words of one granule.
#[derive(Clone, Copy, Debug)]
pub struct Granule<'a> {
    word: &'a AtomicU64,
    rest: &'a [AtomicU64],
}

impl<'a> Granule<'a> {
    /// The granule of these words; the first one is the granule's.
    ///
    /// # Panics
    /// `words` is empty.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        let (word, rest) = words.split_first().expect("a granule has at least one page");
        Self { word, rest }
    }

    /// The granule's word.
    pub fn cell(self) -> Cell<'a> {
        Cell::new(self.word)
    }

    /// Number of pages.
    pub fn pages(self) -> u64 {
        1 + self.rest.len() as u64
    }

    /// Returns whether it is far, with a copy in one of these stores.
    pub fn is_in(self, stores: StoreSet) -> bool {
        let is_in = |word| store_number(word).is_some_and(|number| stores.contains(number));
        let word = self.cell().load();
        store_number(word).is_some() && (is_in(word) || self.rest().any(is_in))
    }

    /// The words of the pages after the first.
    pub fn rest(self) -> impl Iterator<Item = Word> {
        self.rest.iter().map(|word| Cell::new(word).load())
    }

    /// The word of page `index`, counted from 0.
    pub fn word_of(self, index: usize) -> Word {
        index.checked_sub(1).map_or(self.cell(), |index| Cell::new(&self.rest[index])).load()
    }

    /// Writes the word of page `index`, which is not 0. The caller holds the lock.
    pub fn set_word_of(self, index: usize, word: Word) {
        Cell::new(&self.rest[index - 1]).reset(word);
    }

    /// Writes the words of the pages after the first. The caller holds the lock.
    pub fn set_rest(self, words: &[Word]) {
        for (cell, word) in self.rest.iter().zip(words) {
            Cell::new(cell).reset(*word);
        }
    }

    /// Clears the words of the pages after the first, and returns the old ones. The caller holds the lock, and the
    /// granule's word says Resident or Poisoned.
    pub fn take_rest(self) -> Vec<Word> {
        let words = self.rest().collect();
        for cell in self.rest {
            let cell = Cell::new(cell);
            // A clear word is not written: a page of words that was never written needs no memory.
            if cell.load() != Word::INITIAL {
                cell.reset(Word::INITIAL);
            }
        }
        words
    }

    /// Lends a buffer for the bytes of all its pages.
    #[cfg(not(loom))]
    pub fn with_buffer<R>(self, body: impl FnOnce(&mut [PageBytes]) -> R) -> R {
        use std::cell::RefCell;
        thread_local! {
            // A page for each thread that restores, 2 MiB for one that ever restored a huge page. Kept, because
            // allocating memory costs more than the copy.
            static BUFFER: RefCell<Vec<PageBytes>> = const { RefCell::new(Vec::new()) };
        }
        BUFFER.with_borrow_mut(|buffer| {
            let pages = self.pages() as usize;
            if buffer.len() < pages {
                buffer.resize(pages, [0; _]);
            }
            body(&mut buffer[..pages])
        })
    }

    /// The model checker runs all threads on one thread.
    #[cfg(loom)]
    pub fn with_buffer<R>(self, body: impl FnOnce(&mut [PageBytes]) -> R) -> R {
        body(&mut vec![[0; _]; self.pages() as usize])
    }
}
