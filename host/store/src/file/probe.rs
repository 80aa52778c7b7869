//! Probe: whether the device returns bytes now.
//!
//! Before: a read of a block failed in the background. After: at about that time, another block could be read, or could
//! not.
//! Threads: any, one at a time; the others get no answer. Units: the block is the spare one after all areas, which
//! holds a pattern.
//! Promise: a hole is not taken for an answer, because a file system returns its zeros without the device. The probe
//! waits 0.1 s for the block; if that is a hole, 0.1 s for the write of the pattern, and 0.1 s for the block again.

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

#[derive(Debug, Default)]
pub(super) struct Probe {
    one: Mutex<()>,
    /// A write of the pattern is in flight.
    is_written: Arc<AtomicBool>,
}

/// Ends the write of the pattern.
struct Written(Arc<AtomicBool>);

impl Drop for Written {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl Probe {
    /// Whether a read of the spare block was quick and returned the pattern.
    pub fn is_good(&self, disk: &Disk, reading: &Reading, spare: u64, context: IoContext<'_>) -> bool {
        let Ok(_one) = self.one.try_lock() else { return false };
        let begun = Instant::now();
        // An earlier read says nothing about now. While it is in flight, no other is begun.
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
            // A hole: at first, and after a recovery. A late write stays in flight; no second one is begun.
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
