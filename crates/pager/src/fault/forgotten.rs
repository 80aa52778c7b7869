//! Forgotten: a thread that waits although nobody has its fault in hand is woken, and operators are told.
//!
//! Before: a fault lane read faults. After: whoever waits has its fault with a lane, or touches again and raises it anew.
//! Threads: each fault lane looks after its own userfaultfd. Units: faults.
//! Promise: whatever took a fault away from us (another program that reads the userfaultfd, a wake that came too soon), its
//! thread stands still for about [`EVERY`], not for ever, as long as fewer faults wait for a disk.
//!
//! Nothing is known to cause it. The kernel says for the asking how many faults were read and not answered, which takes some
//! microseconds, and this is the one fault whose victim could not even be told of. A wake is always safe: a thread that has no
//! reason to go on faults again.

use std::time::{Duration, Instant};

use ballast_sys::Uffd;

use crate::view::View;
use crate::vm::Vm;

/// How often a lane looks.
const EVERY: Duration = Duration::from_secs(1);
/// How often operators are told, at most.
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// What a lane remembers of it.
#[derive(Debug)]
pub(crate) struct Forgotten {
    next: Instant,
    told: Option<Instant>,
}

impl Forgotten {
    /// Not at once: what an earlier engine had read is raised anew when the lanes have begun.
    pub fn new(now: Instant) -> Self {
        Self { next: now + EVERY, told: None }
    }

    /// Look, if it is time. The caller has so many faults of this userfaultfd in hand, and reads no other one meanwhile.
    pub fn look(&mut self, vm: &Vm, view: &View, uffd: &Uffd, in_hand: usize, now: Instant) {
        // A VM that was told to stop has a fault that cannot be answered, and said so.
        if now < self.next || vm.halted().is_some() {
            return;
        }
        self.next = now + EVERY;
        // The number first. A fault that waits for a disk is counted until its thread was woken, so one too many at most.
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
        if self.told.is_none_or(|told| now.saturating_duration_since(told) >= TOLD_EVERY) {
            self.told = Some(now);
            let pid = view.pid;
            let text =
                format!("{forgotten} threads of process {pid} waited for faults that nobody had in hand; {woken}");
            vm.report("fault-forgotten", text);
        }
    }
}
