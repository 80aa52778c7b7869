//! The memory of a pool's state: words of 64 bits.
//!
//! Before: the owner of the state maps a file, or has a vector. After: `table` reads and writes it, and nothing else.
//! Threads: one writer. Promise asked of an implementation: a reader that sees a store sees all stores before it. A
//! mapping of shared memory keeps that for a reader after the death of the writer's process, if it stores with
//! `Release` and loads with `Acquire`; the state does not survive the host.

use std::io;
use std::ops::Range;

/// Words at fixed places.
pub trait Words {
    /// Number of words.
    fn count(&self) -> usize;
    /// Reads the word at `at`, which is below the count.
    fn load(&self, at: usize) -> u64;
    /// Writes the word at `at`, which is below the count.
    fn store(&mut self, at: usize, value: u64);
    /// Allocates memory for these words before their first use: a touch of a hole in a full file may end the process.
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
