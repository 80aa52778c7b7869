//! Forgotten faults: a thread that waits although no worker has its fault is woken, and operators are told.
//!
//! Before: a fault worker read faults. After: each waiting thread has its fault with a worker, or faults again.
//! Threads: the worker that serves the userfaultfd. Units: faults.
//! Promise: if a fault is lost (another program reads the userfaultfd, a wake came too soon), its thread waits for
//! about [`EVERY`], as long as fewer faults wait for a disk, or for [`RARELY`] if there was no fault for as long. All
//! userfaultfds of one CPU are checked at the same moments, so that one more VM costs no wake-up.
//!
//! No cause of lost faults is known. The kernel returns in some microseconds how many faults were read and not
//! resolved, and nothing else would report such a thread. A wake is always safe: a thread whose page is still missing
//! faults again.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ballast_sys::Uffd;

use crate::vm::Vm;
use crate::vm::view::View;

/// Time between checks while there are faults, and when there is none.
const EVERY: Duration = Duration::from_secs(1);
const RARELY: Duration = Duration::from_secs(8);
/// Least time between two reports.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// What is remembered between checks.
#[derive(Debug)]
pub(crate) struct Forgotten {
    next: Instant,
    interval: Duration,
    reported: Option<Instant>,
}

/// The first whole second after `then`, the same for all.
fn whole(then: Instant) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = *FIRST.get_or_init(|| then);
    let seconds = then.saturating_duration_since(first).as_nanos().div_ceil(EVERY.as_nanos());
    first + EVERY * u32::try_from(seconds).unwrap_or(u32::MAX)
}

impl Forgotten {
    /// The first check is later: the workers have yet to raise the faults again that an earlier engine had read.
    pub fn new(now: Instant) -> Self {
        Self { next: whole(now + EVERY), interval: EVERY, reported: None }
    }

    /// There was a fault, or the kernel reported one.
    pub fn seen(&mut self, now: Instant) {
        if self.interval > EVERY {
            self.interval = EVERY;
            self.next = self.next.min(whole(now + EVERY));
        }
    }

    /// When the next check is due.
    pub fn due(&self) -> Instant {
        self.next
    }

    /// Check, if it is time. The caller has `in_hand` faults of this userfaultfd, and reads no other one meanwhile.
    pub fn check(&mut self, vm: &Vm, view: &View, uffd: &Uffd, in_hand: usize, now: Instant) {
        if now < self.next {
            return;
        }
        self.next = whole(now + self.interval);
        self.interval = (self.interval * 2).min(RARELY);
        // A VM that was told to stop has a fault that cannot be resolved; that was reported. Faults that another engine
        // has in hand are not known here.
        if vm.halted().is_some() || vm.state.leaving().is_some() {
            return;
        }
        // The number is read first. A fault that waits for a disk counts until its thread is woken, so the number is
        // one too high at most.
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
            let text = format!("{forgotten} threads of process {pid} waited for faults that no worker had; {woken}");
            vm.report("fault-forgotten", text);
        }
    }
}
