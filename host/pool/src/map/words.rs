//! The memory of a pool's state: words of 64 bits.
//!
//! Before: the owner of the state maps a file, or has a vector. After: `table` reads and writes it, and nothing else.
//! Threads: one writer. Promise asked of an implementation: a reader that finds a store finds all stores before it. A
//! mapping of shared memory keeps it for the death of a process when it stores with `Release` and loads with `Acquire`;
//! the state does not survive the host.

use std::io;
use std::ops::Range;

/// Words at fixed places.
pub trait Words {
    /// Number of words.
    fn count(&self) -> usize;
    /// Reads one; `at` is below the count.
    fn load(&self, at: usize) -> u64;
    /// Writes one; `at` is below the count.
    fn store(&mut self, at: usize, value: u64);
    /// Has memory for these words, which are about to be used for the first time. In a file without it, a touch may end
    /// the process.
    ///
    /// # Errors
    /// There is no memory for them.
    fn back(&mut self, _words: Range<usize>) -> io::Result<()> {
        Ok(())
    }
}

impl Words for Vec<u64> {
    fn count(&self) -> usize {
        self.len()
    }

    fn load(&self, at: usize) -> u64 {
        self[at]
    }

    fn store(&mut self, at: usize, value: u64) {
        self[at] = value;
    }
}
