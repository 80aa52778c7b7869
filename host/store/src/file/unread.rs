//! Blocks that could not be read, or were late: how long to wait for them, and when their pages are given up.
//!
//! Before: a read failed, or was late. After: the page is read again, or is lost.
//! Threads: any; takes a lock only while there are such blocks.
//! Promise: a page is given up only if the device reported an error of the medium each time, for a while, because a
//! disk whose paths are all gone for seconds reports the same error as a damaged sector. `errors` has the rules.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use ballast_sys::lock::Lock;

use super::errors::{FailedRead, QUICK, Verdict};
use super::limits;
use crate::{GetOutcome, Reader};

/// Pause between reads of a block that has failed often.
const REST: Duration = Duration::from_millis(100);

/// The failed and late reads of a block since its last good one.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    verdict: Verdict,
    late: u8,
    is_lost: bool,
}

#[derive(Debug)]
pub(super) struct Unread {
    blocks: Mutex<HashMap<u64, Block>>,
    /// The number of these blocks: nearly always 0.
    count: AtomicUsize,
    /// How long the device must report errors before a page is given up.
    lasts: Duration,
}

impl Unread {
    pub fn new(lasts: Duration) -> Self {
        Self { blocks: Mutex::default(), count: AtomicUsize::new(0), lasts }
    }

    fn blocks(&self) -> Option<MutexGuard<'_, HashMap<u64, Block>>> {
        (self.count.load(Ordering::Acquire) > 0).then(|| self.blocks.locked())
    }

    /// Notes that a read of this block failed or was late.
    fn note<T>(&self, block: u64, note: impl FnOnce(&mut Block) -> T) -> T {
        let mut blocks = self.blocks.locked();
        let noted = note(blocks.entry(block).or_default());
        self.count.store(blocks.len(), Ordering::Release);
        noted
    }

    pub fn late(&self, block: u64) {
        self.note(block, |of| of.late = of.late.saturating_add(1));
    }

    /// The outcome of a get whose read failed.
    pub fn failed(&self, block: u64, error: &io::Error, read: FailedRead, reader: Reader) -> GetOutcome {
        if !limits::is_of_the_medium(error) {
            return GetOutcome::Busy;
        }
        let is_lost = self.note(block, |of| {
            let is_lost = of.verdict.add(read, reader, self.lasts);
            of.is_lost |= is_lost;
            is_lost
        });
        if is_lost { GetOutcome::Corrupt } else { GetOutcome::Busy }
    }

    /// Whether this block must not be read now, because it failed often and just before.
    pub fn is_to_rest(&self, block: u64, reader: Reader) -> bool {
        let verdict = self.blocks().and_then(|blocks| Some(blocks.get(&block)?.verdict));
        verdict.is_some_and(|of| {
            let errors = of.errors_of(reader);
            errors.count >= QUICK && errors.last.is_some_and(|last| last.elapsed() < REST)
        })
    }

    pub fn has_failed(&self, block: u64) -> bool {
        let verdict = self.blocks().and_then(|blocks| Some(blocks.get(&block)?.verdict));
        verdict.is_some_and(|of| of.guests.count > 0 || of.background.count > 0)
    }

    /// The largest number of late reads of one of these blocks.
    pub fn most_late(&self, these: impl Iterator<Item = u64>) -> u8 {
        let Some(blocks) = self.blocks() else { return 0 };
        these.filter_map(|block| blocks.get(&block)).map(|of| of.late).max().unwrap_or(0)
    }

    /// A read of this block brought bytes, or its page is not wanted. Returns true if the page was given up.
    pub fn forget(&self, block: u64) -> bool {
        let Some(mut blocks) = self.blocks() else { return false };
        let was = blocks.remove(&block);
        self.count.store(blocks.len(), Ordering::Release);
        was.is_some_and(|of| of.is_lost)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::super::errors::Errors;
    use super::*;

    const LASTS: Duration = Duration::from_secs(10);

    /// Reads that begin now and fail at once.
    fn fail(unread: &Unread, times: u8, reader: Reader) -> GetOutcome {
        let eio = io::Error::from_raw_os_error(5);
        let read = || {
            let now = Instant::now();
            FailedRead { begun: now, over: now }
        };
        (0..times).map(|_| unread.failed(1, &eio, read(), reader)).last().expect("some")
    }

    /// As if the errors had lasted for `lasted`, and nobody had read the block for `unseen`.
    fn set(unread: &Unread, lasted: Duration, unseen: Duration) {
        let last = Some(Instant::now().checked_sub(unseen).expect("the machine is up for longer"));
        let mut blocks = unread.blocks().expect("one block");
        let of = &mut blocks.get_mut(&1).expect("it").verdict;
        for errors in [&mut of.guests, &mut of.background].into_iter().filter(|errors| errors.count > 0) {
            *errors = Errors { lasted, last, ..*errors };
        }
    }

    #[test]
    fn a_page_is_given_up_only_after_enough_errors_over_a_long_enough_time_and_later_in_the_background() {
        for (reader, lasts) in [(Reader::Guest, LASTS), (Reader::Background, LASTS * 30)] {
            let unread = Unread::new(LASTS);
            let fail = |times| fail(&unread, times, reader);
            assert_eq!(fail(QUICK), GetOutcome::Busy);
            set(&unread, lasts, REST);
            assert!(!unread.forget(1), "its block is as good as any");
            assert_eq!(fail(QUICK), GetOutcome::Busy);
            set(&unread, lasts - LASTS / 2, REST);
            assert_eq!(fail(1), GetOutcome::Busy, "they have not lasted");
            set(&unread, lasts, REST);
            assert_eq!(fail(1), GetOutcome::Corrupt);
            assert!(unread.forget(1), "its block is not used again");
        }
    }

    #[test]
    fn errors_of_background_readers_do_not_count_for_guests_nor_the_reverse() {
        let unread = Unread::new(Duration::ZERO);
        fail(&unread, 1, Reader::Guest);
        assert_eq!(fail(&unread, QUICK - 1, Reader::Background), GetOutcome::Busy);
        assert_eq!(fail(&unread, QUICK - 2, Reader::Guest), GetOutcome::Busy);
        assert_eq!(fail(&unread, 1, Reader::Background), GetOutcome::Corrupt);
        assert_eq!(fail(&unread, 1, Reader::Guest), GetOutcome::Corrupt);
    }

    #[test]
    fn a_block_that_is_read_rarely_is_given_up_after_more_errors_but_never_after_one() {
        let fail = |unread: &Unread, times| fail(unread, times, Reader::Guest);
        let unread = Unread::new(LASTS);
        let (rarely, mut errors) = (9 * REST.max(Duration::from_secs(1)), 0);
        while fail(&unread, 1) == GetOutcome::Busy {
            errors += 1;
            assert!(errors < 20, "a thread waits for it");
            let lasted = unread.blocks().expect("one block")[&1].verdict.guests.lasted;
            set(&unread, lasted, rarely);
        }
        assert!(errors >= 5, "{errors} before the last");
        let unread = Unread::new(LASTS);
        assert_eq!(fail(&unread, QUICK), GetOutcome::Busy);
        set(&unread, Duration::ZERO, rarely * 100);
        assert_eq!(fail(&unread, 1), GetOutcome::Busy, "nobody knows what was in between");
    }
}
