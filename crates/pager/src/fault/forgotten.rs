//! Forgotten faults: a thread that waits although no worker has its fault is woken, and operators are told.
//!
//! Before: a fault worker read faults. After: each thread that waits has its fault with a worker, or faults again.
//! Threads: each fault worker checks its own userfaultfd. Units: faults.
//! Promise: whatever took a fault away from us (another program that reads the userfaultfd, a wake that came too soon),
//! its thread waits for about [`EVERY`], not for ever, as long as fewer faults wait for a disk.
//!
//! Nothing is known to cause it. The kernel returns how many faults were read and not resolved, in some microseconds,
//! and nothing else would report such a thread. A wake is always safe: a thread that has no reason to go on faults
//! again.

use std::time::{Duration, Instant};

use ballast_sys::Uffd;

use crate::vm::Vm;
use crate::vm::view::View;

/// How often a worker checks.
const EVERY: Duration = Duration::from_secs(1);
/// How often it is reported, at most.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// What a fault worker remembers of it.
#[derive(Debug)]
pub(crate) struct Forgotten {
    next: Instant,
    reported: Option<Instant>,
}

impl Forgotten {
    /// Not at once: what an earlier engine had read is raised anew when the workers have begun.
    pub fn new(now: Instant) -> Self {
        Self { next: now + EVERY, reported: None }
    }

    /// Check, if it is time. The caller has `in_hand` faults of this userfaultfd, and reads no other one meanwhile.
    pub fn check(&mut self, vm: &Vm, view: &View, uffd: &Uffd, in_hand: usize, now: Instant) {
        // A VM that was told to stop has a fault that cannot be answered, and said so.
        if now < self.next || vm.halted().is_some() {
            return;
        }
        self.next = now + EVERY;
        // The number first. A fault that waits for a disk is counted until its thread was woken, so one too many at
        // most.
        let waiting = match uffd.unanswered() {
            Ok(waiting) => waiting as usize,
            Err(error) => return tracing::debug!(pid = view.pid, "Looking for forgotten faults: {error}"),
        };
        let forgotten = waiting.saturating_sub(in_hand + view.stall.on_disk());
        if forgotten == 0 {
            return;
        }
        let woken = match view.wake_all() {
            Ok(()) => "they touch again now".to_owned(),
            Err(error) => format!("waking them failed: {error}"),
        };
        if self.reported.is_none_or(|reported| now.saturating_duration_since(reported) >= REPORT_EVERY) {
            self.reported = Some(now);
            let pid = view.pid;
            let text =
                format!("{forgotten} threads of process {pid} waited for faults that nobody had in hand; {woken}");
            vm.report("fault-forgotten", text);
        }
    }
}
