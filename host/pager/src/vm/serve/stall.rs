//! Pending faults, and the time for which guest threads wait for them.
//!
//! Before: a fault worker read faults. After: the stall counters have the time for which some, and all, threads waited.
//! Threads: all fault workers of a view, and the slow workers, share one clock. Units: nanoseconds.
//! Promise: the time runs from the read of a fault to its resolution. The wait before the read is not seen.

use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Instant;

use ballast_sys::uffd::Fault;

use crate::vm::stats::{Counter, Stats};

#[derive(Clone, Copy, Debug)]
pub(crate) struct PendingFault {
    pub fault: Fault,
    pub since: Instant,
    /// The fault throttle delays it.
    pub throttled: bool,
    /// Since when its page is being read from a disk or a network without a slow worker.
    pub begun: Option<Instant>,
    /// A slow worker has waited for its page in vain.
    pub is_late: bool,
}

/// Adds up the time in which some, and all, of the threads of one view wait.
#[derive(Debug)]
pub(crate) struct Stall(Mutex<Waiters>);

#[derive(Debug)]
pub(crate) struct Waiters {
    /// Threads that ever faulted here, which are "all"; the last one of them.
    threads: HashSet<u32>,
    last: u32,
    since: Instant,
    /// Pending faults of each fault worker, and of the slow workers.
    pub here: Vec<usize>,
    pub slow: usize,
}

impl Waiters {
    /// Most threads remembered; in a VMM that keeps replacing threads, only "full" becomes wrong.
    const MAX_THREADS: usize = 4096;

    pub fn add_threads(&mut self, threads: impl Iterator<Item = u32>) {
        for thread in threads {
            if thread != self.last && self.threads.len() < Self::MAX_THREADS {
                self.threads.insert(thread);
            }
            self.last = thread;
        }
    }
}

impl Stall {
    pub fn new(workers: usize) -> Self {
        Self(Mutex::new(Waiters {
            threads: HashSet::new(),
            last: 0,
            since: Instant::now(),
            here: vec![0; workers],
            slow: 0,
        }))
    }

    /// Number of faults that wait for slow workers.
    pub fn on_disk(&self) -> usize {
        self.0.lock().expect("no panic while held").slow
    }

    /// Adds the time from the last change to `now`, then applies the change.
    pub fn update(&self, stats: Stats<'_>, now: Instant, change: impl FnOnce(&mut Waiters)) {
        let mut waiters = self.0.lock().expect("no panic while held");
        let elapsed = now.saturating_duration_since(waiters.since).as_nanos() as u64;
        let waiting = waiters.here.iter().sum::<usize>() + waiters.slow;
        if waiting > 0 {
            stats.add(Counter::StallSomeNs, elapsed);
            if waiting >= waiters.threads.len() {
                stats.add(Counter::StallFullNs, elapsed);
            }
        }
        // Another worker may have set `since` after `now` was read.
        waiters.since = waiters.since.max(now);
        change(&mut waiters);
    }
}
