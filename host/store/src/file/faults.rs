//! Faults of a disk on command: for tests of the file store and of its users.
//!
//! Before: a test says which transfers go wrong, and how. After: they do, at the moment at which they are handed to the
//! kernel, or when they are over. Threads: any. Units: blocks of 4096 bytes of the file.
//! Promise: without such orders nothing of this is asked.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ballast_sys::ring::Direction;

/// Faults of a disk on command: for tests of the file store and of its users.
#[derive(Debug, Default)]
pub struct DiskFaults {
    reads: Mutex<VecDeque<DiskFault>>,
    writes: Mutex<VecDeque<DiskFault>>,
    blocks: Mutex<HashMap<u64, Faulty>>,
    no_rings: AtomicBool,
}

/// A block of such a disk.
#[derive(Debug, Default)]
struct Faulty {
    fault: Option<DiskFault>,
    reads: u64,
}

/// How one transfer goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It fails with this error number and moves nothing.
    Errno(i32),
    /// It moves this many bytes and ends there.
    Short(usize),
    /// It is not over in time. A read is over when it is asked for again.
    Late,
    /// It takes this long: a read is over for those who wait longer, all their waits taken together. None sleeps.
    Takes(Duration),
    /// It takes this long, in the same way, and then fails with this error number.
    FailsAfter(Duration, i32),
}

/// What a test ordered of a transfer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ordered {
    /// The most bytes that it moves.
    pub(crate) most: usize,
    /// How long it takes at least.
    pub(crate) takes: Duration,
    /// A read takes no longer than who began it waits.
    pub(crate) is_late_once: bool,
    /// With which error number it fails then.
    pub(crate) errno: Option<i32>,
}

impl Ordered {
    /// What this means for a transfer.
    ///
    /// # Errors
    /// It fails at once.
    pub(crate) fn of(fault: Option<DiskFault>) -> io::Result<Self> {
        let nothing = Self { most: usize::MAX, takes: Duration::ZERO, is_late_once: false, errno: None };
        Ok(match fault {
            Some(DiskFault::Errno(errno)) => return Err(io::Error::from_raw_os_error(errno)),
            Some(DiskFault::Short(most)) => Self { most, ..nothing },
            Some(DiskFault::Late) => Self { takes: Duration::MAX, is_late_once: true, ..nothing },
            Some(DiskFault::Takes(takes)) => Self { takes, ..nothing },
            Some(DiskFault::FailsAfter(takes, errno)) => Self { takes, errno: Some(errno), ..nothing },
            None => nothing,
        })
    }
}

impl DiskFaults {
    fn queue(&self, direction: Direction) -> &Mutex<VecDeque<DiskFault>> {
        match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        }
    }

    /// The next `n` reads fail like this, after those ordered before.
    pub fn fail_reads(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Read, n, fault);
    }

    /// The next `n` writes fail like this, after those ordered before.
    pub fn fail_writes(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Write, n, fault);
    }

    /// Each read of this block of the file fails like this, or none any more. From now on its reads are counted.
    pub fn fail_reads_of(&self, block: u64, fault: Option<DiskFault>) {
        self.blocks().entry(block).or_default().fault = fault;
    }

    /// How many reads of this block have begun since it was named first.
    pub fn reads_of(&self, block: u64) -> u64 {
        self.blocks().get(&block).map_or(0, |faulty| faulty.reads)
    }

    /// The reads and writes ordered to fail that have not come yet do not.
    pub fn forget(&self) {
        for direction in [Direction::Read, Direction::Write] {
            self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
        self.blocks().values_mut().for_each(|faulty| faulty.fault = None);
    }

    /// From now on no thread gets a ring.
    pub fn refuse_rings(&self) {
        self.no_rings.store(true, Ordering::Relaxed);
    }

    pub(crate) fn has_no_rings(&self) -> bool {
        self.no_rings.load(Ordering::Relaxed)
    }

    fn order(&self, direction: Direction, n: usize, fault: DiskFault) {
        let mut queue = self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner);
        queue.extend(std::iter::repeat_n(fault, n));
    }

    fn blocks(&self) -> MutexGuard<'_, HashMap<u64, Faulty>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What goes wrong with the next transfer of these blocks.
    pub(crate) fn next(&self, direction: Direction, (first, blocks): (u64, usize)) -> Option<DiskFault> {
        let next = self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner).pop_front();
        if direction == Direction::Write {
            return next;
        }
        let mut faulty = self.blocks();
        let those = faulty.iter_mut().filter(|(block, _)| (first..first + blocks as u64).contains(block));
        let of_block = those.fold(None, |fault, (_, faulty)| {
            faulty.reads += 1;
            faulty.fault.or(fault)
        });
        next.or(of_block)
    }
}
