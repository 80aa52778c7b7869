//! Blocks that could not be read, and when their pages are given up.
//!
//! Before: a read failed, or was not over in time. After: the page is asked for again, or is lost.
//! Threads: any; a lock is taken only while there are such blocks. Promise: a page is given up only if the device
//! reported an error of the medium each time, for a while: where all paths to a disk are gone for some seconds, and at
//! each read of a damaged sector, the error is the same. Who has time gives none up unless the device returned others.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::limits;
use crate::{GetOutcome, held};

/// Reads of a block that fail without a rest between them; fewer never give a page up.
const QUICK: u8 = 6;
/// Time between further reads of it.
const REST: Duration = Duration::from_millis(100);
/// How much of a time in which nobody read the block counts as one in which it failed. Where many of a VM's threads
/// wait for such blocks, or an error takes seconds, each block has its turn rarely.
const MOST_UNSEEN: Duration = Duration::from_secs(2);
/// If nobody read a block for this long, what failed before says nothing about its next read. Who waits for blocks asks
/// more often, also if there are many of them.
const FORGOTTEN: Duration = Duration::from_secs(600);

/// Nothing of the device could be read for this long: then it is not gone for a moment. Who waits for all pages of a VM
/// need not give one up before.
const GONE: Duration = Duration::from_secs(120);

/// Errors of a block, without a read that went well between them.
#[derive(Clone, Copy, Debug)]
struct Errors {
    count: u8,
    /// How long they have lasted.
    lasted: Duration,
    first: Instant,
    last: Instant,
}

/// Whether the device fails, or some of its blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Device {
    /// The last read that went well while there were blocks that could not be read, and the first error after it.
    read: Option<Instant>,
    failing: Option<Instant>,
}

/// How reads of a block went wrong since the last that did not.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    errors: Option<Errors>,
    /// How often it was not over in time.
    late: u8,
    /// Its page was given up.
    is_lost: bool,
}

/// All such blocks of a store.
#[derive(Debug)]
pub(super) struct Unread {
    blocks: Mutex<HashMap<u64, Block>>,
    /// Their number: nearly always 0.
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
        (self.count.load(Ordering::Acquire) > 0).then(|| self.blocks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Notes that a read of this block went wrong.
    fn note<T>(&self, block: u64, note: impl FnOnce(&mut Block) -> T) -> T {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let noted = note(blocks.entry(block).or_default());
        self.count.store(blocks.len(), Ordering::Release);
        noted
    }

    /// A read of this block was not over in time.
    pub fn late(&self, block: u64) {
        self.note(block, |of| of.late = of.late.saturating_add(1));
    }

    /// The outcome of a get whose read began at this time and failed.
    pub fn failed(&self, block: u64, error: &io::Error, begun: Instant) -> GetOutcome {
        if !limits::is_of_the_medium(error) {
            return GetOutcome::Busy;
        }
        let now = Instant::now();
        let device = {
            let mut device = self.device.lock().unwrap_or_else(PoisonError::into_inner);
            // What was before is over: every block could be read.
            if self.count.load(Ordering::Acquire) == 0 {
                *device = Device::default();
            }
            device.failing.get_or_insert(now);
            *device
        };
        let is_lost = self.note(block, |of| {
            let unseen = |errors: &Errors| begun.saturating_duration_since(errors.last);
            let before = of.errors.filter(|errors| unseen(errors) < FORGOTTEN);
            let (count, lasted, first) = before.map_or((0, Duration::ZERO, now), |errors| {
                let read = now.saturating_duration_since(begun.max(errors.last));
                (errors.count, errors.lasted + unseen(&errors).min(MOST_UNSEEN) + read, errors.first)
            });
            let count = count.saturating_add(1);
            of.errors = Some(Errors { count, lasted, first, last: now });
            let is_gone = device.failing.is_some_and(|since| now.saturating_duration_since(since) >= GONE);
            let is_sure = is_gone || device.read.is_some_and(|read| read > first) || !held::has_time();
            of.is_lost = count >= QUICK && lasted >= self.lasts && is_sure;
            of.is_lost
        });
        if is_lost { GetOutcome::Corrupt } else { GetOutcome::Busy }
    }

    /// Must this block not be read now, because it failed often and a moment ago?
    pub fn is_to_rest(&self, block: u64) -> bool {
        let errors = self.blocks().and_then(|blocks| blocks.get(&block)?.errors);
        errors.is_some_and(|errors| errors.count >= QUICK && errors.last.elapsed() < REST)
    }

    /// How often the block of these that was late most often was late.
    pub fn most_late(&self, these: impl Iterator<Item = u64>) -> u8 {
        let Some(blocks) = self.blocks() else { return 0 };
        these.filter_map(|block| blocks.get(&block)).map(|of| of.late).max().unwrap_or(0)
    }

    /// A read brought bytes.
    pub fn read(&self) {
        if self.count.load(Ordering::Acquire) > 0 {
            *self.device.lock().unwrap_or_else(PoisonError::into_inner) =
                Device { read: Some(Instant::now()), failing: None };
        }
    }

    /// A read of this block brought bytes, or nobody wants its page. Returns true if that was given up.
    pub fn forget(&self, block: u64) -> bool {
        let Some(mut blocks) = self.blocks() else { return false };
        let was = blocks.remove(&block);
        self.count.store(blocks.len(), Ordering::Release);
        was.is_some_and(|of| of.is_lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LASTS: Duration = Duration::from_secs(10);

    /// Reads that begin now and fail at once.
    fn fail(unread: &Unread, times: u8) -> GetOutcome {
        let eio = io::Error::from_raw_os_error(5);
        (0..times).map(|_| unread.failed(1, &eio, Instant::now())).last().expect("some")
    }

    /// The errors have lasted this long, and nobody has read the block for that long.
    fn set(unread: &Unread, lasted: Duration, unseen: Duration) {
        let mut blocks = unread.blocks().expect("one block");
        let errors = blocks.get_mut(&1).expect("it").errors.as_mut().expect("errors");
        errors.lasted = lasted;
        errors.last = Instant::now().checked_sub(unseen).expect("the machine is up for longer");
    }

    #[test]
    fn only_errors_without_a_good_read_for_long_enough_give_a_page_up() {
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
    fn who_has_time_gives_up_no_block_of_a_device_that_is_gone_for_a_while_and_one_of_a_device_that_works() {
        let unread = Unread::new(LASTS);
        let _time = held::WithTime::begin();
        fail(&unread, QUICK);
        set(&unread, LASTS, REST);
        assert_eq!(fail(&unread, QUICK), GetOutcome::Busy);
        unread.read();
        assert_eq!(fail(&unread, 1), GetOutcome::Corrupt, "others could be read since");
        let unread = Unread::new(LASTS);
        fail(&unread, QUICK);
        set(&unread, LASTS, REST);
        unread.device.lock().expect("no panic").failing = Instant::now().checked_sub(GONE);
        assert_eq!(fail(&unread, 1), GetOutcome::Corrupt, "nothing could be read for long");
    }

    #[test]
    fn a_block_that_is_read_rarely_is_given_up_after_some_more_errors_and_never_after_one() {
        let unread = Unread::new(LASTS);
        let (rarely, mut errors) = (9 * REST.max(Duration::from_secs(1)), 0);
        while fail(&unread, 1) == GetOutcome::Busy {
            errors += 1;
            assert!(errors < 20, "a thread waits for it");
            let lasted = unread.blocks().expect("one block")[&1].errors.expect("errors").lasted;
            set(&unread, lasted, rarely);
        }
        assert!(errors >= 5, "{errors} before the last");
        let unread = Unread::new(LASTS);
        assert_eq!(fail(&unread, QUICK), GetOutcome::Busy);
        set(&unread, Duration::ZERO, rarely * 100);
        assert_eq!(fail(&unread, 1), GetOutcome::Busy, "nobody knows what was in between");
    }
}
