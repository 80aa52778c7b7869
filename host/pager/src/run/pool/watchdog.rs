//! The watchdog of the pool: finds threads that wait in the kernel without announcing it.
//!
//! Before: a task runs. After: a thread that sleeps counts as blocked, so that a spare takes its place, and a timer for
//! which no thread waits is not late for long.
//! Threads: one for each pool; it sleeps while no task runs.
//! Promise: a task that waits delays others by at most `TICK` and `LONG`.
//!
//! Threads that run are not counted as blocked: where all CPUs are busy a run takes long, and more threads would only
//! divide the CPUs. So the watchdog asks the kernel whether a thread that has run for long sleeps.

use std::time::{Duration, Instant};

use super::{Pool, Worker};

/// Time between checks while tasks run; length of a run from which on it is checked.
const TICK: Duration = Duration::from_millis(20);
const LONG: Duration = Duration::from_millis(10);
/// Ticks without a run, or without a visit of a fault worker, after which a watchdog sleeps until there is one: further
/// ticks cost an idle host more than the wake-up.
pub(in crate::run) const QUIET_TICKS: u32 = 2;

impl Pool {
    pub(super) fn watch(self) {
        let (mut runs, mut quiet) = (0, 0);
        let mut inner = self.lock();
        loop {
            quiet = if inner.runs == runs && inner.threads.values().all(|worker| worker.runs.is_none()) {
                quiet + 1
            } else {
                0
            };
            runs = inner.runs;
            if quiet > QUIET_TICKS {
                inner.is_watched = false;
                inner = self.0.watch.wait_while(inner, |inner| !inner.is_watched).expect("no panic while held");
                quiet = 0;
                continue;
            }
            inner = self.0.watch.wait_timeout(inner, TICK).expect("no panic while held").0;
            let now = Instant::now();
            let takes_long = |worker: &&mut Worker| {
                !worker.is_blocked && worker.runs.is_some_and(|run| now.saturating_duration_since(run.since) >= LONG)
            };
            for worker in inner.threads.values_mut().filter(takes_long) {
                worker.is_blocked = sleeps(worker.number);
            }
            self.make_up(&mut inner);
            let is_late = inner.queue.next_due().is_some_and(|due| due <= now);
            if inner.queue.is_ready() || is_late {
                self.dispatch(&mut inner);
            }
        }
    }
}

/// Returns whether a thread of this process sleeps, so that it would not run on a free CPU.
pub(in crate::run) fn sleeps(thread: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['S', 'D']))
}
