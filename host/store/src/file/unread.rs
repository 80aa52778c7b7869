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
use std::time::{Duration, Instant};

use ballast_sys::lock::Lock;

use super::errors::{BESIDE, Device, Errors, FailedRead, QUICK, Verdict};
use super::limits;
use crate::{GetOutcome, Reader};

/// Pause between reads of a block that has failed often.
const REST: Duration = Duration::from_millis(100);

/// The failed and late reads of a block since its last good one.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    verdict: Verdict,
    /// How often it was late.
    late: u8,
    is_lost: bool,
}

/// All such blocks of a store.
#[derive(Debug)]
pub(super) struct Unread {
    blocks: Mutex<HashMap<u64, Block>>,
    /// The number of blocks: nearly always 0.
    count: AtomicUsize,
    device: Mutex<Device>,
    /// How long the device must report errors before a page is given up.
    lasts: Duration,
}

impl Unread {
    pub fn new(lasts: Duration) -> Self {
        Self { blocks: Mutex::default(), count: AtomicUsize::new(0), device: Mutex::default(), lasts }
    }

    fn blocks(&self) -> Option<MutexGuard<'_, HashMap<u64, Block>>> {
        (self.count.load(Ordering::Acquire) > 0).then(|| self.blocks.locked())
    }

    fn device(&self) -> MutexGuard<'_, Device> {
        self.device.locked()
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

    /// The outcome of a get whose read failed. For a background reader, `probe` reads another block, and returns
    /// whether that succeeded quickly.
    pub fn failed(
        &self,
        block: u64,
        error: &io::Error,
        read: FailedRead,
        reader: Reader,
        probe: impl FnOnce() -> bool,
    ) -> GetOutcome {
        if !limits::is_of_the_medium(error) {
            return GetOutcome::Busy;
        }
        // A probe now says nothing about the disk at the time of an older error.
        let is_new = read.over.elapsed() <= BESIDE;
        let is_gone = {
            let mut device = self.device();
            // Older errors are void: since then, every block could be read.
            if self.count.load(Ordering::Acquire) == 0 {
                device.errors = Errors::default();
            }
            device.errors.add(read);
            device.is_gone()
        };
        let is_lost = match reader {
            Reader::Background => {
                // Another read may only count as good beside this error if this block is noted first.
                self.note(block, |_| ());
                let is_beside_good = probe() && is_new && read.began_beside_good;
                let sure = (is_beside_good, is_gone);
                self.note(block, |of| of.verdict.of_background(read, self.lasts, sure))
            }
            Reader::Guest => self.note(block, |of| of.verdict.of_guest(read, self.lasts)),
        };
        if !is_lost {
            return GetOutcome::Busy;
        }
        self.note(block, |of| of.is_lost = true);
        GetOutcome::Corrupt
    }

    /// Whether this block must not be read now, because it failed often and just before.
    pub fn is_to_rest(&self, block: u64, reader: Reader) -> bool {
        let verdict = self.blocks().and_then(|blocks| Some(blocks.get(&block)?.verdict));
        verdict.is_some_and(|of| {
            let errors = if reader == Reader::Guest { of.guests } else { of.background };
            errors.count >= QUICK && errors.last.is_some_and(|last| last.elapsed() < REST)
        })
    }

    /// Whether a read of this block has failed.
    pub fn has_failed(&self, block: u64) -> bool {
        let verdict = self.blocks().and_then(|blocks| Some(blocks.get(&block)?.verdict));
        verdict.is_some_and(|of| of.guests.count > 0 || of.background.count > 0)
    }

    /// Whether other blocks could be read just before this time. Only noted while some block cannot be read.
    pub fn was_there(&self, at: Instant) -> bool {
        self.device().was_there(at)
    }

    /// Whether an error of a read that begins now would count (see `errors`).
    pub fn was_read_just_now(&self) -> bool {
        // Allows some time until the read begins.
        self.was_there(Instant::now() + REST / 2)
    }

    /// The largest number of late reads of one of these blocks.
    pub fn most_late(&self, these: impl Iterator<Item = u64>) -> u8 {
        let Some(blocks) = self.blocks() else { return 0 };
        these.filter_map(|block| blocks.get(&block)).map(|of| of.late).max().unwrap_or(0)
    }

    /// A read brought bytes, just now.
    pub fn read(&self) {
        if self.count.load(Ordering::Acquire) > 0 {
            *self.device() = Device { read: Some(Instant::now()), errors: Errors::default() };
        }
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
    use super::super::errors::GONE;
    use super::*;

    const LASTS: Duration = Duration::from_secs(10);

    /// Background reads that begin now and fail at once, while another block can be read, or not.
    fn fail_beside(unread: &Unread, times: u8, is_good: bool) -> GetOutcome {
        fail_for(unread, times, (Reader::Background, is_good))
    }

    fn fail_for(unread: &Unread, times: u8, (reader, is_good): (Reader, bool)) -> GetOutcome {
        let eio = io::Error::from_raw_os_error(5);
        let probe = || {
            if is_good {
                unread.read();
            }
            is_good
        };
        let read = || {
            let now = Instant::now();
            FailedRead { begun: now, over: now, began_beside_good: unread.was_there(now) }
        };
        (0..times).map(|_| unread.failed(1, &eio, read(), reader, probe)).last().expect("some")
    }

    /// Reads for a guest's thread that fail, without a read of another block.
    fn fail(unread: &Unread, times: u8) -> GetOutcome {
        fail_for(unread, times, (Reader::Guest, false))
    }

    fn with(unread: &Unread, change: impl FnOnce(&mut Verdict)) {
        change(&mut unread.blocks().expect("one block").get_mut(&1).expect("it").verdict);
    }

    fn long_ago(time: Duration) -> Option<Instant> {
        Some(Instant::now().checked_sub(time).expect("the machine is up for longer"))
    }

    /// As if the errors had lasted for `lasted`, and nobody had read the block for `unseen`.
    fn set(unread: &Unread, lasted: Duration, unseen: Duration) {
        let set = |errors: &mut Errors| {
            if errors.count > 0 {
                *errors = Errors { lasted, last: long_ago(unseen), ..*errors };
            }
        };
        with(unread, |of| [&mut of.guests, &mut of.background, &mut of.beside_good].into_iter().for_each(set));
    }

    #[test]
    fn a_page_is_given_up_only_after_enough_errors_over_a_long_enough_time() {
        let unread = Unread::new(LASTS);
        assert_eq!(fail(&unread, QUICK), GetOutcome::Busy);
        set(&unread, LASTS, REST);
        assert!(!unread.forget(1), "its block is as good as any");
        assert_eq!(fail(&unread, QUICK), GetOutcome::Busy);
        set(&unread, LASTS, REST);
        assert_eq!(fail(&unread, 1), GetOutcome::Corrupt);
        assert!(unread.forget(1), "its block is not used again");
    }

    #[test]
    fn in_the_background_a_block_is_given_up_if_its_device_works_and_not_if_it_is_gone() {
        let unread = Unread::new(LASTS);
        fail_beside(&unread, QUICK, false);
        set(&unread, LASTS, REST);
        assert_eq!(fail_beside(&unread, QUICK, false), GetOutcome::Busy);
        unread.read();
        assert_eq!(
            fail_beside(&unread, QUICK, false),
            GetOutcome::Busy,
            "another block could be read before, and not since"
        );
        assert_eq!(fail_beside(&unread, QUICK + 1, true), GetOutcome::Busy, "they have not lasted");
        set(&unread, LASTS, REST);
        assert_eq!(fail_beside(&unread, 1, true), GetOutcome::Corrupt, "another could be read before and after");
        let unread = Unread::new(LASTS);
        fail_beside(&unread, QUICK, false);
        set(&unread, LASTS, REST);
        unread.device().errors.lasted = GONE;
        assert_eq!(fail_beside(&unread, 1, false), GetOutcome::Corrupt, "nothing could be read for long");
    }

    #[test]
    fn in_the_background_an_error_without_a_good_read_before_it_does_not_count() {
        let unread = Unread::new(Duration::ZERO);
        for _ in 0..3 * QUICK {
            assert_eq!(fail_beside(&unread, 1, true), GetOutcome::Busy, "the device has come back just now");
            unread.device().read = long_ago(2 * BESIDE);
        }
        unread.read();
        assert_eq!(fail_beside(&unread, QUICK, true), GetOutcome::Corrupt);
    }

    #[test]
    fn two_outages_with_a_time_without_reads_between_them_are_not_one_long_outage() {
        let unread = Unread::new(Duration::ZERO);
        for _ in 0..20 {
            assert_eq!(fail_beside(&unread, QUICK, false), GetOutcome::Busy);
            unread.device().errors.last = long_ago(2 * GONE);
        }
        unread.device().errors.lasted = GONE;
        assert_eq!(fail_beside(&unread, 1, false), GetOutcome::Corrupt, "nothing could be read in 2 minutes of tries");
    }

    #[test]
    fn in_the_background_an_error_kept_until_the_device_works_again_does_not_count() {
        let unread = Unread::new(Duration::ZERO);
        let over = long_ago(2 * BESIDE).expect("a time");
        let kept = FailedRead { begun: over, over, began_beside_good: true };
        let eio = || io::Error::from_raw_os_error(5);
        for _ in 0..3 * QUICK {
            assert_eq!(unread.failed(1, &eio(), kept, Reader::Background, || true), GetOutcome::Busy);
        }
        unread.read();
        assert_eq!(fail_beside(&unread, QUICK, true), GetOutcome::Corrupt);
    }

    #[test]
    fn errors_of_background_readers_do_not_count_for_guests_nor_the_reverse() {
        let unread = Unread::new(Duration::ZERO);
        let restore = |times| {
            unread.read();
            fail_beside(&unread, times, true)
        };
        fail(&unread, 1);
        assert_eq!(restore(QUICK - 1), GetOutcome::Busy);
        assert_eq!(fail(&unread, QUICK - 2), GetOutcome::Busy);
        assert_eq!(restore(1), GetOutcome::Corrupt);
        assert_eq!(fail(&unread, 1), GetOutcome::Corrupt);
    }

    #[test]
    fn a_block_that_is_read_rarely_is_given_up_after_more_errors_but_never_after_one() {
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
