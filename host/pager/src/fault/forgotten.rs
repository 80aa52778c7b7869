//! Forgotten faults: wakes a thread that waits although no worker has its fault, and tells operators.
//!
//! Before: a fault worker read faults. After: each waiting thread has its fault with a worker, or faults again.
//! Threads: the worker that serves the userfaultfd. Units: faults.
//! Promise: if a fault is lost (another program reads the userfaultfd, a wake came too early), its thread waits for
//! about [`EVERY`] while there are faults, otherwise for [`RARELY`]; longer only while other faults wait for a disk.
//! All userfaultfds of a CPU are checked at the same times, so one more VM costs no wake-up.
//!
//! No cause of lost faults is known, and no other code would report one. The kernel returns the number of faults read
//! and not resolved within microseconds. A wake is always safe: a thread whose page is still missing faults again.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ballast_sys::Uffd;

use crate::vm::Vm;
use crate::vm::view::View;

/// Time between checks while there are faults, and while there are none.
const EVERY: Duration = Duration::from_secs(1);
const RARELY: Duration = Duration::from_secs(8);
/// Least time between two reports of the server of a userfaultfd.
pub(super) const REPORT_EVERY: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Forgotten {
    next: Instant,
    interval: Duration,
    reported: Option<Instant>,
}

/// The first whole second after `then`, counted from a common start.
fn whole(then: Instant) -> Instant {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    let first = *FIRST.get_or_init(|| then);
    let seconds = then.saturating_duration_since(first).as_nanos().div_ceil(EVERY.as_nanos());
    first + EVERY * u32::try_from(seconds).unwrap_or(u32::MAX)
}

impl Forgotten {
    /// The first check comes after a period: faults that an earlier engine had read are raised again before it.
    pub fn new(now: Instant) -> Self {
        Self { next: whole(now + EVERY), interval: EVERY, reported: None }
    }

    /// A fault was read, or the kernel reported one.
    pub fn seen(&mut self, now: Instant) {
        if self.interval > EVERY {
            self.interval = EVERY;
            self.next = self.next.min(whole(now + EVERY));
        }
    }

    pub fn due(&self) -> Instant {
        self.next
    }

    /// Checks, if a check is due. The caller has read `in_hand` faults of this userfaultfd that are not resolved, and
    /// reads no others until this returns.
    pub fn check(&mut self, vm: &Vm, view: &View, uffd: &Uffd, in_hand: usize, now: Instant) {
        if now < self.next {
            return;
        }
        self.next = whole(now + self.interval);
        self.interval = (self.interval * 2).min(RARELY);
        // A VM that was told to stop has a fault that cannot be resolved, which was reported. While another engine
        // serves the VM, too, its faults are not known here.
        if vm.halted().is_some() || vm.state.leaving().is_some() {
            return;
        }
        // The kernel's number is read first. A fault that waits for a disk counts until its thread is woken, so that
        // number is too high by one at most.
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
