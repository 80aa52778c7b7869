//! The layout of a region's table in the state file: registration flags, then page-state words.
//!
//! Before: the keeper adds a region, or a file is opened whose regions must fit it. After: the engine maps the table
//! (`ballast_pager::vm::region_table`).
//! Units: lengths are bytes. Promise: a change here raises the version of the state file.

use ballast_base::units::MIB;
use ballast_base::{Bytes, PAGE_SIZE, PageCount};

/// A chunk of guest RAM that is registered with userfaultfd as one. Picked so that a 1 TiB guest needs at most 32768
/// mappings (the kernel's default cap is 65530) while memory that is not reclaimed stays unregistered.
pub const CHUNK: Bytes = Bytes(32 * MIB);
/// Pages in a chunk.
pub const PAGES_PER_CHUNK: u64 = CHUNK.pages_floor().0;

/// The replacement of eight flags, or of a word, whose memory failed. The engine sets it, because only it knows their
/// meaning.
#[derive(Clone, Copy, Debug)]
pub struct Lost {
    /// Eight flags.
    pub flags: u64,
    /// A word.
    pub word: u64,
}

/// How many chunks, each with one flag, a region has.
pub const fn chunks(pages: PageCount) -> u64 {
    pages.0.div_ceil(PAGES_PER_CHUNK)
}

/// Bytes of the flags, in whole pages. The words begin there.
pub const fn flags_len(pages: PageCount) -> u64 {
    chunks(pages).next_multiple_of(PAGE_SIZE as u64)
}

/// Bytes of flags and words, each in whole pages.
pub const fn table_len(pages: PageCount) -> u64 {
    flags_len(pages) + (pages.0 * 8).next_multiple_of(PAGE_SIZE as u64)
}
