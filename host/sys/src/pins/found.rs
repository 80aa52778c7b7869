//! The findings of the pin check's program for one page, and their meaning.
//!
//! Before: `program` wrote the findings into a slot of the map. After: `check` returns their meaning.
//! Threads: any. Units: offsets are bytes from the start of the findings for this page; counts are the kernel's.
//! Promise: a page in an unexpected state is [`Pin::Unknown`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::slot;

pub(super) const WHAT: i16 = 0;
pub(super) const ORDER: i16 = 4;
pub(super) const INDEX: i16 = 8;
pub(super) const MAPCOUNT: i16 = 16;
pub(super) const REFS: i16 = 20;
/// Mappings and references of a large folio, in turn.
pub(super) const AGAIN: i16 = 24;
pub(super) const READINGS: i16 = 5;
/// 1 if the memory of the page, or of the first page of a large folio, failed.
pub(super) const FAILED: i16 = 44;

// `WHAT`.
pub(super) const NOTHING: i32 = 0;
pub(super) const ABSENT: i32 = 1;
pub(super) const PAGE: i32 = 2;
pub(super) const LARGE: i32 = 3;

/// The holders of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Its file alone holds the page. (Other pages of a large folio may be mapped.)
    Free,
    /// The page is not in memory: a hole, or swapped out by the kernel.
    Absent,
    /// The page is mapped, and has no other reference. Only pages of 4 KiB get this result.
    Mapped,
    /// The memory of the page failed (the kernel holds a reference for that), so that it cannot be read either.
    Failed,
    /// The page has this number of references beyond those of the page cache and the mappings.
    Held(u32),
    /// The page changed during the check, or could not be checked.
    Unknown,
}

impl Pin {
    /// Is it certain that it has no other holder, so that it can be freed?
    pub fn may_go(self) -> bool {
        matches!(self, Self::Free | Self::Absent)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) what: i32,
    pub(super) order: u32,
    pub(super) index: u64,
    /// The kernel's encoding: the number of mappings, minus one.
    pub(super) mapcount: i32,
    pub(super) refs: [i32; 3],
    pub(super) mappings: [i32; 3],
    pub(super) failed: bool,
}

impl Found {
    pub(super) fn read(words: &[AtomicU64]) -> Self {
        let words: [u64; slot::FOUND_BYTES as usize / 8] = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        let half = |byte: i16| (words[byte as usize / 8] >> (byte % 8 * 8)) as i32;
        let again = |reading: i16| half(AGAIN + 4 * reading);
        Self {
            what: half(WHAT),
            order: half(ORDER) as u32,
            index: words[INDEX as usize / 8],
            mapcount: half(MAPCOUNT),
            refs: [half(REFS), again(1), again(3)],
            mappings: [again(0), again(2), again(4)],
            failed: half(FAILED) != 0,
        }
    }

    /// The meaning for page number `page` of the file; for a large folio only if the self-test included one.
    pub(super) fn judge(&self, page: u64, knows_large: bool) -> Pin {
        /// Order of the largest folio that can exist.
        const LARGEST_ORDER: u32 = 20;
        let beyond = |refs: i32, expected: i64| match i64::from(refs) - expected {
            0 => Pin::Free,
            more @ 1.. => Pin::Held(more as u32),
            _ => Pin::Unknown,
        };
        match self.what {
            ABSENT => Pin::Absent,
            // The flag of a large folio is about its first page; the other pages are judged as usual.
            PAGE | LARGE if self.failed && self.index == page => Pin::Failed,
            PAGE if self.index == page => {
                let mapped = i64::from(self.mapcount) + 1;
                match beyond(self.refs[0], 1 + mapped) {
                    _ if mapped < 0 => Pin::Unknown,
                    Pin::Free if mapped > 0 => Pin::Mapped,
                    pin => pin,
                }
            }
            LARGE if knows_large && (1..=LARGEST_ORDER).contains(&self.order) => {
                let pages = 1 << self.order;
                let mapped = i64::from(self.mappings[0]) + 1;
                if !(self.index..self.index.saturating_add(pages)).contains(&page) || mapped < 0 {
                    Pin::Unknown
                } else if i64::from(self.refs[0]) == pages as i64 {
                    // No page of it is mapped or held.
                    Pin::Free
                } else if self.refs.iter().any(|refs| *refs != self.refs[0])
                    || self.mappings.iter().any(|mappings| *mappings != self.mappings[0])
                {
                    Pin::Unknown
                } else {
                    beyond(self.refs[0], pages as i64 + mapped)
                }
            }
            _ => Pin::Unknown,
        }
    }
}
