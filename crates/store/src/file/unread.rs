//! Blocks that could not be read, and when their pages are given up.
//!
//! Before: a read failed, or was not over in time. After: the page is asked for again, or is lost.
//! Threads: any; a lock is taken only while there are such blocks. Promise: a page is given up only if the device
//! reported an error of the medium each time, for a while: where all paths to a disk are gone for some seconds, and at
//! each read of a damaged sector, the error is the same.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::limits;
use crate::GetOutcome;

/// Reads of a block that must fail before its page is given up, and that are tried without a rest.
const QUICK: u8 = 5;
/// Time between further reads of it.
const REST: Duration = Duration::from_millis(100);

/// How reads of a block went wrong since the last that did not.
#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// How often the device reported an error.
    failed: u8,
    /// When it did so first, and last.
    since: Option<(Instant, Instant)>,
    /// How often it was not over in time.
    late: u8,
}

/// All such blocks of a store.
#[derive(Debug)]
pub(super) struct Unread {
    blocks: Mutex<HashMap<u64, Block>>,
    /// Their number: nearly always 0.
    count: AtomicUsize,
    /// How long the device must report errors before a page is given up.
    lasts: Duration,
}

impl Unread {
    pub fn new(lasts: Duration) -> Self {
        Self { blocks: Mutex::default(), count: AtomicUsize::new(0), lasts }
    }

    fn blocks(&self) -> Option<MutexGuard<'_, HashMap<u64, Block>>> {
        (self.count.load(Ordering::Acquire) > 0).then(|| self.blocks.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn count<T>(&self, block: u64, count: impl FnOnce(&mut Block) -> T) -> T {
        let mut blocks = self.blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let counted = count(blocks.entry(block).or_default());
        self.count.store(blocks.len(), Ordering::Release);
        counted
    }

    /// A read of this block was not over in time.
    pub fn late(&self, block: u64) {
        self.count(block, |of| of.late = of.late.saturating_add(1));
    }

    /// The outcome of a get whose read failed.
    pub fn failed(&self, block: u64, error: &io::Error) -> GetOutcome {
        if !limits::is_of_the_medium(error) {
            return GetOutcome::Busy;
        }
        let now = Instant::now();
        let is_lost = self.count(block, |of| {
            of.failed = of.failed.saturating_add(1);
            let first = of.since.map_or(now, |(first, _)| first);
            of.since = Some((first, now));
            of.failed > QUICK && now.duration_since(first) >= self.lasts
        });
        if is_lost { GetOutcome::Corrupt } else { GetOutcome::Busy }
    }

    /// Must this block not be read now, because it failed often and a moment ago?
    pub fn is_to_rest(&self, block: u64) -> bool {
        let of = self.blocks().and_then(|blocks| blocks.get(&block).copied()).unwrap_or_default();
        of.failed > QUICK && of.since.is_some_and(|(_, last)| last.elapsed() < REST.min(self.lasts))
    }

    /// How often the block of these that was late most often was late.
    pub fn most_late(&self, mut of: impl Iterator<Item = u64>) -> u8 {
        let Some(blocks) = self.blocks() else { return 0 };
        let late = of.by_ref().filter_map(|block| blocks.get(&block)).map(|of| of.late).max();
        late.unwrap_or(0)
    }

    /// A read of this block brought its page, or nobody wants it. Returns true if the device had reported an error.
    pub fn forget(&self, block: u64) -> bool {
        let Some(mut blocks) = self.blocks() else { return false };
        let was = blocks.remove(&block);
        self.count.store(blocks.len(), Ordering::Release);
        was.is_some_and(|of| of.failed > 0)
    }
}
