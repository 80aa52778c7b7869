//! When a file store refuses to write: the day's bytes are used up, the disk is full, or it fails.
//!
//! Before: `file` is about to take a block, or a write failed. After: it writes, or returns this outcome; an operator
//! can read the reason.
//! Threads: any; atomics, and a lock only for the last refusal. Units: bytes; a day is in UTC, counted from 1970.
//! Promise: the day's bytes are counted in the shared index, so a successor continues the count.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::lock::Lock;

use crate::PutOutcome;

/// After this number of failed writes in a row, the device counts as bad, instead of single blocks.
const FAILURES_MAX: u64 = 16;

/// Why a put was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The byte budget, or the largest size of the file.
    #[error("the byte budget is used up")]
    Budget,
    /// The file system.
    #[error("the file system has no space left: {0}")]
    DiskFull(String),
    /// The limit of bytes written in a day.
    #[error("{written} bytes were written today, {limit} are allowed; puts are taken again after midnight UTC")]
    WritesPerDay {
        /// Bytes written today.
        written: u64,
        /// The limit.
        limit: u64,
    },
    /// The file system was read-only when the store was opened.
    #[error("its file system is read-only")]
    ReadOnly,
    /// A write that did not end in time.
    #[error("the device is slow: a write takes longer than 10 s")]
    Late,
    /// A write that failed.
    #[error("a write failed: {0}")]
    Failed(String),
}

/// The word "today" has the day above these bits, and in them the blocks written on that day.
const BLOCK_BITS: u32 = 40;
const BLOCK_MASK: u64 = (1 << BLOCK_BITS) - 1;

fn day() -> u64 {
    const SECONDS: u64 = 24 * 60 * 60;
    // A clock before 1970 is one long day.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / SECONDS) & (u64::MAX >> BLOCK_BITS)
}

fn written_on(day: u64, word: u64) -> u64 {
    if word >> BLOCK_BITS == day { word & BLOCK_MASK } else { 0 }
}

/// Whether this is an error of the medium under the block, so that another block may work.
pub(crate) fn is_of_the_medium(error: &io::Error) -> bool {
    // EIO, EBADMSG, EILSEQ, EUCLEAN, EREMOTEIO, ENODATA: block layers and file systems return these for a bad sector.
    matches!(error.raw_os_error(), Some(5 | 61 | 74 | 84 | 117 | 121)) || error.kind() == io::ErrorKind::UnexpectedEof
}

#[derive(Debug)]
pub(crate) struct Limits {
    writes_per_day: AtomicU64,
    failures_in_a_row: AtomicU64,
    last: Mutex<Option<Refusal>>,
}

impl Limits {
    pub(crate) fn new(writes_per_day: Bytes) -> Self {
        Self {
            writes_per_day: AtomicU64::new(writes_per_day.0),
            failures_in_a_row: AtomicU64::new(0),
            last: Mutex::new(None),
        }
    }

    pub(crate) fn set_writes_per_day(&self, limit: Bytes) {
        self.writes_per_day.store(limit.0, Ordering::Relaxed);
    }

    fn blocks_per_day(&self) -> u64 {
        match self.writes_per_day.load(Ordering::Relaxed) {
            0 => u64::MAX,
            limit => limit / PAGE_SIZE as u64,
        }
    }

    pub(crate) fn last_refusal(&self) -> Option<Refusal> {
        self.last.locked().clone()
    }

    pub(crate) fn written_today(&self, today: &AtomicU64) -> Bytes {
        Bytes(written_on(day(), today.load(Ordering::Relaxed)) * PAGE_SIZE as u64)
    }

    /// Whether the day's bytes are used up, or the device is bad. Counts nothing.
    pub(crate) fn refuses(&self, today: &AtomicU64) -> bool {
        let is_used_up = written_on(day(), today.load(Ordering::Relaxed)) >= self.blocks_per_day();
        is_used_up || self.failures_in_a_row.load(Ordering::Relaxed) >= FAILURES_MAX
    }

    /// Records a refusal and returns its outcome: `Full` if a short wait does not help.
    pub(crate) fn refuse(&self, why: Refusal) -> PutOutcome {
        let outcome = match why {
            Refusal::Budget | Refusal::DiskFull(_) | Refusal::WritesPerDay { .. } => PutOutcome::Full,
            Refusal::ReadOnly | Refusal::Late | Refusal::Failed(_) => PutOutcome::Busy,
        };
        *self.last.locked() = Some(why);
        outcome
    }

    /// Counts one block if it may be written, and returns the outcome if not. A failed write counts, too.
    pub(crate) fn may_write(&self, today: &AtomicU64) -> Option<PutOutcome> {
        self.count_write(today, day())
    }

    fn count_write(&self, today: &AtomicU64, day: u64) -> Option<PutOutcome> {
        let limit = self.blocks_per_day();
        let counted = today.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |word| {
            let written = written_on(day, word);
            (written < limit.min(BLOCK_MASK)).then_some(day << BLOCK_BITS | (written + 1))
        });
        let word = counted.err()?;
        let bytes = |blocks: u64| blocks.saturating_mul(PAGE_SIZE as u64);
        Some(self.refuse(Refusal::WritesPerDay { written: bytes(written_on(day, word)), limit: bytes(limit) }))
    }

    pub(crate) fn wrote(&self) {
        if self.failures_in_a_row.load(Ordering::Relaxed) > 0 {
            self.failures_in_a_row.store(0, Ordering::Relaxed);
        }
    }

    /// Returns the outcome of a failed write, and whether to retire the block.
    pub(crate) fn write_failed(&self, error: &io::Error) -> (PutOutcome, bool) {
        match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                return (self.refuse(Refusal::DiskFull(error.to_string())), false);
            }
            // The ring is full of late transfers, or memory is short.
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => {
                return (self.refuse(Refusal::Failed(error.to_string())), false);
            }
            _ => {}
        }
        let before = self.failures_in_a_row.fetch_add(1, Ordering::Relaxed);
        let block_is_bad = before < FAILURES_MAX && is_of_the_medium(error);
        (self.refuse(Refusal::Failed(error.to_string())), block_is_bad)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_days_bytes_are_counted_and_a_new_day_starts_at_zero() {
        let limits = Limits::new(Bytes(3 * PAGE_SIZE as u64 + 1));
        let today = AtomicU64::new(0);
        for _ in 0..3 {
            assert_eq!(limits.count_write(&today, 20_000), None);
        }
        assert_eq!(limits.count_write(&today, 20_000), Some(PutOutcome::Full));
        assert_eq!(limits.last_refusal(), Some(Refusal::WritesPerDay { written: 12288, limit: 12288 }));
        assert_eq!(limits.count_write(&today, 20_001), None);
        assert!(!limits.refuses(&today), "it is another day");
        today.store(day() << BLOCK_BITS | 3, Ordering::Relaxed);
        assert!(limits.refuses(&today));
        today.store(20_001 << BLOCK_BITS | 1, Ordering::Relaxed);
        limits.set_writes_per_day(Bytes(0));
        for _ in 0..10 {
            assert_eq!(limits.count_write(&today, 20_001), None);
        }
        assert_eq!(written_on(20_001, today.load(Ordering::Relaxed)), 11);
    }

    #[test]
    fn many_failures_are_the_devices_until_one_write_succeeds() {
        let limits = Limits::new(Bytes(0));
        let (today, eio) = (AtomicU64::new(0), io::Error::from_raw_os_error(5));
        for failure in 0..20 {
            assert_eq!(limits.write_failed(&eio), (PutOutcome::Busy, failure < FAILURES_MAX), "failure {failure}");
        }
        assert!(limits.refuses(&today));
        assert_eq!(limits.may_write(&today), None, "it is tried again");
        limits.wrote();
        assert!(!limits.refuses(&today));
        assert_eq!(limits.write_failed(&io::Error::from_raw_os_error(28)), (PutOutcome::Full, false), "ENOSPC");
    }
}
