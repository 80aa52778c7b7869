//! Probe: whether the device returns bytes at this moment.
//!
//! Before: a read of a block failed, in the background. After: another block was read at the same time, or
//! could not be. Threads: any, one at a time; for others there is no answer.
//! Units: the block is the spare one behind all areas, which holds a pattern.
//! Promise: a hole is no answer: to return zeros, a file system asks no device. It waits for a tenth of a second for
//! the block; where that is a hole, as long again for the pattern to be written, and once more for the block.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ballast_base::PAGE_SIZE;

use super::batch::Wait;
use super::disk::{Disk, Moved};
use super::errors::BESIDE;
use super::reading::{Came, Reading};
use crate::{IoContext, PageBytes};

const PATTERN: PageBytes = [0xa5; PAGE_SIZE];

/// The probe of a store.
#[derive(Debug, Default)]
pub(super) struct Probe {
    one: Mutex<()>,
    /// The pattern is on its way.
    is_written: Arc<AtomicBool>,
}

/// It is not on its way any more.
struct Written(Arc<AtomicBool>);

impl Drop for Written {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Probe {
    /// Reads the spare block. Was that quick, and are its bytes right?
    pub fn is_good(&self, disk: &Disk, reading: &Reading, spare: u64, context: IoContext<'_>) -> bool {
        let Ok(_one) = self.one.try_lock() else { return false };
        let begun = Instant::now();
        // What was read before says nothing of now. If it is still under way, none is begun.
        if !reading.drop_if_over(disk, spare) {
            return false;
        }
        let read = || {
            let mut is_pattern = None;
            let take = |_, pages: &[PageBytes]| *is_pattern.insert(pages[0] == PATTERN);
            let came = reading.read(disk, &[(spare, 1)], Wait { timeout: BESIDE, context }, |_| true, take);
            is_pattern.filter(|_| matches!(came[..], [Came::Done { is_new: true }]))
        };
        match read() {
            Some(true) => begun.elapsed() <= BESIDE,
            // It is a hole: at first, and after a recovery. A write that is late goes on; none is begun beside it.
            Some(false) if self.write(disk, spare) => read() == Some(true) && begun.elapsed() <= BESIDE,
            _ => false,
        }
    }

    fn write(&self, disk: &Disk, spare: u64) -> bool {
        if disk.read_only || self.is_written.swap(true, Ordering::AcqRel) {
            return false;
        }
        let written = Mutex::new(Some(Written(self.is_written.clone())));
        let when_late = |_| {
            let written = written.lock().ok().and_then(|mut written| written.take());
            move || drop(written)
        };
        let moved = disk.write(&[(spare, &[PATTERN])], BESIDE, when_late, || ());
        matches!(moved[..], [Moved::Done])
    }
}
