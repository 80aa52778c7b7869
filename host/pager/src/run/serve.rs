//! The trait of servers of a descriptor, and the result of a visit.
//!
//! Before: [`super::servers::Servers::add`] gets a server. After: a worker visits it whenever there is input; the
//! result of a visit tells `set` when and where to visit it next, and what to charge.
//! Threads: the worker that visits it, one at a time. Units: nanoseconds of visits.

use std::time::{Duration, Instant};

use super::queue::{Next, USUAL_SHARES, charge};

/// Quantum of a group (a VM), and time after which a visit must begin nothing new: some ten faults.
pub const BATCH: Duration = Duration::from_micros(100);

pub trait Serve: Send {
    /// Visits it: there is input, it was notified, or its timer is due. Work begun after `until` delays others.
    fn serve(&mut self, now: Instant, until: Instant) -> After;
    /// A visit panicked, for the `times`th time. Returns whether it is to be visited again.
    fn panicked(&mut self, times: u32) -> bool;
    fn end(&mut self);
    /// Returns whether it must never be served by a worker that is bound to a CPU, because a visit may wait for what
    /// its VMM sent, or serves no fault. A visit that is stuck then blocks no fault worker.
    fn roams(&self) -> bool {
        false
    }
}

/// The result of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    pub next: Next,
    /// It waits for another thread, which may need this CPU.
    pub is_eager: bool,
    pub placement: Placement,
    /// Weight of its group, by which the visit is charged.
    pub shares: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    Stay,
    Cpu(usize),
    /// The worker that is bound to no CPU.
    Roam,
    /// Any worker without other work.
    Any,
}

impl After {
    pub const fn next(next: Next) -> Self {
        Self { next, is_eager: false, placement: Placement::Stay, shares: USUAL_SHARES }
    }

    pub fn charge(&self, spent: Duration) -> Duration {
        charge(spent, self.shares)
    }
}
