//! Verdicts: when errors of a block mean a bad medium, so that its page is given up.
//!
//! Before: reads of a block failed, for a guest's thread or in the background ([`crate::Reader`]). After: the read is
//! repeated, or the page is lost.
//! Threads: none of its own; `unread` has the lock. Units: times.
//! Promise: an error that was reported to one kind of reader does not count for the other. A device that fails as a
//! whole for a while costs no page that is read in the background.
//!
//! | Reader | An error counts | The page is given up |
//! |---|---|---|
//! | a guest's thread waits | always | after 6 errors that span 10 s |
//! | background | if others could be read within 0.1 s before its read began, and within 0.1 s after it | likewise |
//! | background | if nothing of the device could be read in 2 minutes of tries | likewise |
//!
//! A time without reads, of a block or of the device, counts as at most 2 s.
//!
//! A good read of the block resets its errors. A device that works for a second and fails for nine returns an error
//! beside a good read only at the moment when it fails or recovers. So good reads are required on both sides.

use std::time::{Duration, Instant};

/// Fewer errors than this never give a page up.
pub(super) const QUICK: u8 = 6;
/// The most that a gap between reads of the block, or of the device, counts as a time of failure. Reads of a block may
/// be rare: many of a VM's threads may wait for such blocks, or each error may take seconds.
const MOST_UNSEEN: Duration = Duration::from_secs(2);
/// After a gap this long between reads of a block, its earlier errors say nothing about the next read. Callers that
/// wait for blocks repeat their reads sooner, even for many blocks.
const FORGOTTEN: Duration = Duration::from_secs(600);
/// If all reads of the device failed for this long, the outage is not short. A background reader need not give a page
/// up sooner.
pub(super) const GONE: Duration = Duration::from_secs(120);
/// A good read of another block counts as simultaneous with an error if they are at most this far apart.
pub(super) const BESIDE: Duration = Duration::from_millis(100);

#[derive(Clone, Copy, Debug)]
pub(super) struct FailedRead {
    pub(super) begun: Instant,
    pub(super) over: Instant,
    /// At `begun`, other blocks could be read.
    pub(super) began_beside_good: bool,
}

/// Errors without a good read between them: of a block, for one kind of reader; or of the device.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Errors {
    pub(super) count: u8,
    /// The time that they span.
    pub(super) lasted: Duration,
    pub(super) last: Option<Instant>,
}

impl Errors {
    pub(super) fn add(&mut self, FailedRead { begun, over, .. }: FailedRead) {
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

    pub(super) fn are_final(&self, lasts: Duration) -> bool {
        self.count >= QUICK && self.lasted >= lasts
    }
}

/// Tells a failed device from failed blocks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Device {
    /// The last good read while some blocks could not be read, and the errors after it.
    pub(super) read: Option<Instant>,
    pub(super) errors: Errors,
}

impl Device {
    /// Whether blocks could be read just before this time.
    pub(super) fn was_there(&self, at: Instant) -> bool {
        self.read.is_some_and(|read| read + BESIDE >= at)
    }

    /// Whether all reads have failed for long.
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
    /// Those errors in the background that came beside good reads of other blocks.
    pub(super) beside_good: Errors,
}

impl Verdict {
    /// An error was reported to a guest's thread. Returns whether to give the page up.
    pub(super) fn of_guest(&mut self, read: FailedRead, lasts: Duration) -> bool {
        self.guests.add(read);
        self.guests.are_final(lasts)
    }

    /// An error was reported to a background reader. Returns whether to give the page up.
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
