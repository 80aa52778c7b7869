//! The layout of a region's table in the state file: registration flags, then page-state words.
//!
//! Before: the keeper adds a region, or a file is opened whose regions must fit it. After: the engine maps the table
//! (`ballast_pager::vm::region_table`). Units: lengths are bytes.
//! Promise: a change here raises the version of the state file.

use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_base::{PAGE_SIZE, PageCount};

/// The values that replace eight flags, or a word, after a memory error. The engine sets them, because only it knows
/// their meaning.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    /// Eight flags.
    pub flags: u64,
    /// A word.
    pub word: u64,
}

/// Number of chunks of a region, each with one flag.
pub const fn chunks(pages: PageCount) -> u64 {
    pages.0.div_ceil(PAGES_PER_CHUNK)
}

/// Bytes of the flags, in whole pages. The words follow.
pub const fn flags_len(pages: PageCount) -> u64 {
    chunks(pages).next_multiple_of(PAGE_SIZE as u64)
}

/// Bytes of flags and words, each in whole pages.
pub const fn table_len(pages: PageCount) -> u64 {
    flags_len(pages) + (pages.0 * 8).next_multiple_of(PAGE_SIZE as u64)
}
