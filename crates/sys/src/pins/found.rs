//! What the program of the pin check found of one page, and what that means.
//!
//! Before: `program` wrote it into a slot of the map. After: `check` returns the meaning.
//! Threads: any. Units: offsets are bytes from the start of what was found of this page; counts are the kernel's.
//! Promise: what is not as it must be is [`Pin::Unknown`].

use std::sync::atomic::{AtomicU64, Ordering};

use super::slot;

pub(super) const WHAT: i16 = 0;
pub(super) const ORDER: i16 = 4;
/// Eight bytes.
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

/// Who holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Nobody but its file. (Of a large folio, other pages may be mapped.)
    Free,
    /// It is not in memory: a hole, or swapped out by the kernel.
    Absent,
    /// It is mapped somewhere, and nobody else holds it. Told of pages of 4 KiB only.
    Mapped,
    /// Its memory failed (the kernel holds it for that), so that it cannot be read either.
    Failed,
    /// Somebody: this many references more than the page cache and the mappings have.
    Held(u32),
    /// It changed while it was looked at, or could not be looked at.
    Unknown,
}

impl Pin {
    /// Is it sure that nobody holds it, so that it can be freed?
    pub fn may_go(self) -> bool {
        matches!(self, Self::Free | Self::Absent)
    }
}

/// What the program found of one page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) what: i32,
    pub(super) order: u32,
    pub(super) index: u64,
    /// As the kernel has it: one less than there are.
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

    /// What that means for page number `page` of the file; of a large folio only if such a one was part of the
    /// self-test.
    pub(super) fn judge(&self, page: u64, knows_large: bool) -> Pin {
        /// Larger folios do not exist.
        const LARGEST_ORDER: u32 = 20;
        let beyond = |refs: i32, expected: i64| match i64::from(refs) - expected {
            0 => Pin::Free,
            more @ 1.. => Pin::Held(more as u32),
            _ => Pin::Unknown,
        };
        match self.what {
            ABSENT => Pin::Absent,
            // Of a large folio this is known of its first page; the others count as usual.
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
                    // Nobody has any of it mapped, nor holds it.
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
