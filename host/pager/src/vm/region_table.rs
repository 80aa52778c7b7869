//! A region's table in the state file, mapped: one flag for each registration chunk, one word for each page.
//!
//! Before: `ballast_handover::state_file` knows where it is. After: `region` has its words and flags.
//! Threads: any. Units: pages from the start of the region.
//! Promise: if its memory fails, safe values replace it until recovery: words that no worker can lock ([`Word::LOST`]),
//! and flags of chunks that may be registered.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicU64};

use ballast_base::{PAGE_SIZE, PageCount, PageIdx};
use ballast_handover::state_file::{RegionRecord, StateFile};
use ballast_handover::table::{Lost, chunks, flags_len};
use ballast_page::page_state::Word;
use ballast_sys::memory_error::{Losses, Surviving};

/// Safe values in the place of lost ones.
pub const LOST: Lost = Lost { flags: u64::MAX, word: Word::LOST.bits() };

/// Words and registration flags of one region.
#[derive(Debug)]
pub struct RegionTable {
    mapping: Surviving,
    pages: PageCount,
}

impl RegionTable {
    /// Maps the table of a region.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn map(state: &StateFile, record: &RegionRecord) -> io::Result<Self> {
        Ok(Self { mapping: state.map_table(record, LOST)?, pages: record.pages() })
    }

    /// The words of `count` pages from `first` on.
    ///
    /// # Panics
    /// If a page is not in the region.
    pub fn words(&self, first: PageIdx, count: u64) -> &[AtomicU64] {
        let fits = first.0.checked_add(count).is_some_and(|end| end <= self.pages.0);
        assert!(fits, "{count} pages from {first} on are outside a region of {} pages", self.pages.0);
        self.mapping.words(flags_len(self.pages) as usize + first.0 as usize * 8, count as usize)
    }

    /// Pages of the table lost to memory errors since it was mapped.
    pub fn lost(&self) -> u64 {
        self.mapping.lost()
    }

    /// Losses not reported yet: offsets in the file, and the pages whose words were there.
    pub fn losses(&self, record: &RegionRecord) -> (Losses, Vec<Range<u64>>) {
        let losses = self.mapping.losses();
        let words = record.words_at();
        let first = |offset: &u64| offset.saturating_sub(words) / 8;
        let of_words = |offset: &&u64| **offset >= words;
        let ranges = losses
            .offsets
            .iter()
            .filter(of_words)
            .map(|offset| first(offset)..(first(offset) + PAGE_SIZE as u64 / 8).min(self.pages.0));
        let ranges = ranges.collect();
        (losses, ranges)
    }

    /// One byte per chunk: 1 if it is registered with the userfaultfds of every view, otherwise 0.
    pub fn chunk_flags(&self) -> &[AtomicU8] {
        self.mapping.bytes(0, chunks(self.pages) as usize)
    }
}
