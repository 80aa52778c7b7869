//! Fault injection, for tests of the file store and of its users.
//!
//! Before: a test says which transfers fail, and how. After: they fail, when they are submitted or when they complete.
//! Threads: any. Units: blocks of 4096 bytes of the file.
//! Promise: without an injected fault, nothing here is called.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use ballast_sys::lock::Lock;
use ballast_sys::ring::Direction;

/// The faults of a disk that a test injects.
#[derive(Debug, Default)]
pub struct DiskFaults {
    reads: Mutex<VecDeque<DiskFault>>,
    writes: Mutex<VecDeque<DiskFault>>,
    blocks: Mutex<HashMap<u64, Faulty>>,
    no_rings: AtomicBool,
}

#[derive(Debug, Default)]
struct Faulty {
    fault: Option<DiskFault>,
    reads: u64,
}

/// How one transfer fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// Fails with this error number, and moves nothing.
    Errno(i32),
    /// Moves this many bytes and ends there.
    Short(usize),
    /// Is not done in time. The next request for the bytes of a read finds it done.
    Late,
    /// Takes this long, in simulated time: a read completes when the timeouts of its callers add up to this.
    Takes(Duration),
    /// Takes this long, as above, and then fails with this error number.
    FailsAfter(Duration, i32),
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ordered {
    pub(crate) most: usize,
    pub(crate) takes: Duration,
    /// A read is late for the call that began it, and for no other.
    pub(crate) is_late_once: bool,
    /// The error number with which it then fails.
    pub(crate) errno: Option<i32>,
}

impl Ordered {
    /// Returns the error if the transfer fails at once.
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

    /// The next `n` reads fail like this, after those injected before.
    pub fn fail_reads(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Read, n, fault);
    }

    /// The next `n` writes fail like this, after those injected before.
    pub fn fail_writes(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Write, n, fault);
    }

    /// Each read of this block of the file fails like this; `None`: none fails. From now on its reads are counted.
    pub fn fail_reads_of(&self, block: u64, fault: Option<DiskFault>) {
        self.blocks().entry(block).or_default().fault = fault;
    }

    /// Reads of this block since it was first named.
    pub fn reads_of(&self, block: u64) -> u64 {
        self.blocks().get(&block).map_or(0, |faulty| faulty.reads)
    }

    /// Removes the faults that have not happened yet.
    pub fn forget(&self) {
        for direction in [Direction::Read, Direction::Write] {
            self.queue(direction).locked().clear();
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
        let mut queue = self.queue(direction).locked();
        queue.extend(std::iter::repeat_n(fault, n));
    }

    fn blocks(&self) -> MutexGuard<'_, HashMap<u64, Faulty>> {
        self.blocks.locked()
    }

    pub(crate) fn next(&self, direction: Direction, (first, blocks): (u64, usize)) -> Option<DiskFault> {
        let next = self.queue(direction).locked().pop_front();
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
