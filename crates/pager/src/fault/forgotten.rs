//! Forgotten faults: a thread that waits although no worker has its fault is woken, and operators are told.
//!
//! Before: a fault worker read faults. After: each thread that waits has its fault with a worker, or faults again.
//! Threads: whoever serves the userfaultfd. Units: faults.
//! Promise: whatever took a fault away from us (another program that reads the userfaultfd, a wake that came too soon),
//! its thread waits for about [`EVERY`], not for ever, as long as fewer faults wait for a disk; for [`RARELY`] where no
//! fault was seen for as long. Those of one CPU are checked at the same moments, so that a VM more costs no wake-up.
//!
//! Nothing is known to cause it. The kernel returns how many faults were read and not resolved, in some microseconds,
//! and nothing else would report such a thread. A wake is always safe: a thread that has no reason to go on faults
//! again.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ballast_sys::Uffd;

use crate::vm::Vm;
use crate::vm::view::View;

/// How often it is checked while there are faults, and when there is none.
const EVERY: Duration = Duration::from_secs(1);
const RARELY: Duration = Duration::from_secs(8);
/// How often it is reported, at most.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// What is remembered of it.
#[derive(Debug)]
pub(crate) struct Forgotten {
    next: Instant,
    interval: Duration,
    reported: Option<Instant>,
}

/// The first whole second after this, the same for all.
fn whole(then: Instant) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = *FIRST.get_or_init(|| then);
    let seconds = then.saturating_duration_since(first).as_nanos().div_ceil(EVERY.as_nanos());
    first + EVERY * u32::try_from(seconds).unwrap_or(u32::MAX)
}

impl Forgotten {
    /// Not at once: what an earlier engine had read is raised anew when the workers have begun.
    pub fn new(now: Instant) -> Self {
        Self { next: whole(now + EVERY), interval: EVERY, reported: None }
    }

    /// There was a fault, or the kernel said so.
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
        // A VM that was told to stop has a fault that cannot be answered, and said so. What another engine has in hand
        // is not known here.
        if vm.halted().is_some() || vm.state.leaving().is_some() {
            return;
        }
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
