//! Verdicts: when the errors of a block are those of its medium, so that its page is given up.
//!
//! Before: reads of a block failed, each at a time, for a guest's thread or in the background ([`crate::Reader`]).
//! After: the block is asked for again, or its page is lost.
//! Threads: none of its own; `unread` has the lock. Units: times.
//! Promise: no error that was reported to one kind of reader counts for the other. A device that fails as a whole for a
//! while costs no page that is read in the background.
//!
//! | Who asks | An error counts | The page is given up |
//! |---|---|---|
//! | a guest's thread waits | always | after 6 errors and 10 s of them |
//! | nobody waits | if others could be read within 0.1 s before its read began, and within 0.1 s after it | the same |
//! | nobody waits | if nothing of the device could be read in 2 minutes of tries | the same |
//!
//! A time in which nobody read counts as 2 s at most, of a block and of the device.
//!
//! A good read of the block ends all of this. A disk that is there for a second and gone for nine returns an error of a
//! good block beside a good read only in the moment in which it goes, or comes: so one of either side is not enough.

use std::time::{Duration, Instant};

/// Errors that come quickly; fewer never give a page up.
pub(super) const QUICK: u8 = 6;
/// How much of a time in which nobody read the block, or the device, counts as one in which it failed. Where many of a
/// VM's threads wait for such blocks, or an error takes seconds, each block has its turn rarely.
const MOST_UNSEEN: Duration = Duration::from_secs(2);
/// If nobody read a block for this long, what failed before says nothing about its next read. Who waits for blocks asks
/// more often, also if there are many of them.
const FORGOTTEN: Duration = Duration::from_secs(600);
/// Reads of the device have failed for this long, and none went well: then it is not gone for a moment. A background
/// reader need not give a page up before.
pub(super) const GONE: Duration = Duration::from_secs(120);
/// A good read of another block that is no further from an error than this is one at the same time.
pub(super) const BESIDE: Duration = Duration::from_millis(100);

/// A read that failed.
#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRead {
    pub(super) begun: Instant,
    pub(super) over: Instant,
    /// Other blocks could be read when it began.
    pub(super) began_beside_good: bool,
}

/// Errors without a read that went well between them: of a block, reported to one kind of caller, or of the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Errors {
    pub(super) count: u8,
    /// How long they have lasted.
    pub(super) lasted: Duration,
    pub(super) last: Option<Instant>,
}

impl Errors {
    /// One more.
    pub(super) fn add(&mut self, FailedRead { begun, over, .. }: FailedRead) {
        let unseen = |last: Instant| begun.saturating_duration_since(last);
        match self.last.filter(|last| unseen(*last) < FORGOTTEN) {
            Some(last) => {
                self.lasted += unseen(last).min(MOST_UNSEEN) + over.saturating_duration_since(begun.max(last));
                self.count = self.count.saturating_add(1);
            }
            None => (self.lasted, self.count) = (Duration::ZERO, 1),
        }
        // One that was kept for who asked may have been over before the last.
        self.last = self.last.max(Some(over));
    }

    pub(super) fn are_final(&self, lasts: Duration) -> bool {
        self.count >= QUICK && self.lasted >= lasts
    }
}

/// Whether the device fails, or some of its blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Device {
    /// The last read that went well while there were blocks that could not be read, and the errors after it.
    pub(super) read: Option<Instant>,
    pub(super) errors: Errors,
}

impl Device {
    /// Could blocks be read just before this time?
    pub(super) fn was_there(&self, at: Instant) -> bool {
        self.read.is_some_and(|read| read + BESIDE >= at)
    }

    /// Could none be read for long, though it was tried?
    pub(super) fn is_gone(&self) -> bool {
        self.errors.lasted >= GONE
    }
}

/// The errors of a block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Verdict {
    /// Reported to guests' threads.
    pub(super) guests: Errors,
    /// Reported to background readers.
    pub(super) background: Errors,
    /// Those of them beside good reads of other blocks.
    pub(super) beside_good: Errors,
}

impl Verdict {
    /// An error was reported to a guest's thread. Is the page to be given up?
    pub(super) fn of_guest(&mut self, read: FailedRead, lasts: Duration) -> bool {
        self.guests.add(read);
        self.guests.are_final(lasts)
    }

    /// The same for a background reader.
    pub(super) fn of_background(
        &mut self,
        read: FailedRead,
        lasts: Duration,
        (is_beside_good, is_gone): (bool, bool),
    ) -> bool {
        self.background.add(read);
        if is_beside_good {
            self.beside_good.add(read);
        }
        is_beside_good && self.beside_good.are_final(lasts) || is_gone && self.background.are_final(lasts)
    }
}
