//! Memory of which each access is counted, by page.
//!
//! Before: a program has memory, and counts of 0. After: it works with the memory, and others may read the counts.
//! Threads: one works and writes the counts. Units: words of 8 bytes, halves of 4.
//! Promise: each read of a word or a half is one access. No cache is modelled.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Words of a page, as a power of two.
const PAGE_BITS: u32 = 9;

/// Memory whose accesses are counted.
pub struct Counted<'a, W> {
    /// Returns the word at this offset in bytes.
    pub word: W,
    /// How many words there are.
    pub words: usize,
    /// Accesses of each page, modulo 2^32.
    pub pages: &'a [AtomicU32],
}

impl<'a, W: Fn(usize) -> &'a AtomicU64> Counted<'a, W> {
    /// Counts an access.
    fn count(&self, word: usize) {
        let page = &self.pages[word >> PAGE_BITS];
        // Only this thread writes it.
        page.store(page.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
    }

    /// Reads a word.
    pub fn get(&self, word: usize) -> u64 {
        self.count(word);
        (self.word)(word * 8).load(Ordering::Relaxed)
    }

    /// Reads a half of a word.
    pub fn half(&self, half: usize) -> u32 {
        (self.get(half / 2) >> (half % 2 * 32)) as u32
    }

    /// Writes a word and counts nothing: what a program does before its work.
    pub fn put(&self, word: usize, value: u64) {
        (self.word)(word * 8).store(value, Ordering::Relaxed);
    }
}
