//! Verdicts: when errors of a block mean a bad medium, so that its page is given up.
//!
//! Before: reads of a block failed, for a guest's thread or in the background ([`crate::Reader`]). After: the read is
//! repeated, or the page is lost.
//! Threads: none of its own; `unread` has the lock. Units: times.
//! Promise: an error that was reported to one kind of reader does not count for the other.
//!
//! | Reader | The page is given up |
//! |---|---|
//! | a guest's thread waits | after 6 errors that span 10 s |
//! | background | after 6 errors that span 5 minutes |
//!
//! A good read of the block resets its errors. A time without reads of it counts as at most 2 s.
//!
//! In the background no thread waits for the page. So a disk that fails as a whole for minutes costs no page there, nor
//! does one that works for a second in ten: five minutes have thirty of these seconds, and one good read is enough.

use std::time::{Duration, Instant};

use crate::Reader;

/// Fewer errors than this never give a page up.
pub(super) const QUICK: u8 = 6;
/// Errors in the background must span this many times the time that is long enough for a guest's thread.
const PATIENCE: u32 = 30;
/// The most that a gap between reads of the block counts as a time of failure. Reads of a block may be rare: many of a
/// VM's threads may wait for such blocks, or each error may take seconds.
const MOST_UNSEEN: Duration = Duration::from_secs(2);
/// After a gap this long between reads of a block, its earlier errors say nothing about the next read. Callers that
/// wait for blocks repeat their reads sooner, even for many blocks.
const FORGOTTEN: Duration = Duration::from_secs(600);

#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRead {
    pub(super) begun: Instant,
    pub(super) over: Instant,
}

/// Errors of a block without a good read between them, for one kind of reader.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Errors {
    pub(super) count: u8,
    pub(super) lasted: Duration,
    pub(super) last: Option<Instant>,
}

impl Errors {
    fn add(&mut self, FailedRead { begun, over }: FailedRead) {
        let unseen = |last: Instant| begun.saturating_duration_since(last);
        match self.last.filter(|last| unseen(*last) < FORGOTTEN) {
            Some(last) => {
                self.lasted += unseen(last).min(MOST_UNSEEN) + over.saturating_duration_since(begun.max(last));
                self.count = self.count.saturating_add(1);
            }
            None => (self.lasted, self.count) = (Duration::ZERO, 1),
        }
        // An error that was kept for the next caller may be older than the last one.
        self.last = self.last.max(Some(over));
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdict {
    pub(super) guests: Errors,
    pub(super) background: Errors,
}

impl Verdict {
    pub(super) fn errors_of(&self, reader: Reader) -> &Errors {
        if reader == Reader::Guest { &self.guests } else { &self.background }
    }

    /// Counts an error for this reader. Returns whether to give the page up. `lasts`: the time for a guest's thread.
    pub(super) fn add(&mut self, read: FailedRead, reader: Reader, lasts: Duration) -> bool {
        let (errors, lasts) = match reader {
            Reader::Guest => (&mut self.guests, lasts),
            Reader::Background => (&mut self.background, lasts * PATIENCE),
        };
        errors.add(read);
        errors.count >= QUICK && errors.lasted >= lasts
    }
}
