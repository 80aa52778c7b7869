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

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Memory of a test, and the counts of its pages.
    pub struct Plain(Vec<AtomicU64>, Vec<AtomicU32>);

    impl Plain {
        pub fn new(pages: usize) -> Self {
            let zeros = (0..pages << PAGE_BITS).map(|_| AtomicU64::new(0)).collect();
            Self(zeros, (0..pages).map(|_| AtomicU32::new(0)).collect())
        }

        pub fn counted<'a>(&'a self) -> Counted<'a, impl Fn(usize) -> &'a AtomicU64> {
            Counted { word: |offset: usize| &self.0[offset / 8], words: self.0.len(), pages: &self.1 }
        }

        /// Accesses of these words, which are whole pages.
        pub fn accesses(&self, words: std::ops::Range<usize>) -> u64 {
            let pages = &self.1[words.start >> PAGE_BITS..words.end >> PAGE_BITS];
            pages.iter().map(|page| u64::from(page.load(Ordering::Relaxed))).sum()
        }
    }

    #[test]
    fn halves_of_a_word_are_apart_and_each_access_counts_once() {
        let plain = Plain::new(2);
        let memory = plain.counted();
        memory.put(512, 7 << 32 | 9);
        assert_eq!((memory.half(1025), memory.half(1024), memory.get(512)), (7, 9, 7 << 32 | 9));
        assert_eq!((plain.accesses(0..512), plain.accesses(512..1024)), (0, 3));
    }
}
