//! What serves a descriptor, and what a visit of it came to.
//!
//! Before: [`super::servers::Servers::add`] is given one. After: a worker visits it whenever there is input; what a
//! visit returns tells `set` when it is visited again, where, and what it is charged.
//! Threads: the worker that visits it, one at a time. Units: nanoseconds of visits. Promise: none; it is what `set`
//! asks of others.

use std::time::{Duration, Instant};

use super::queue::{Next, USUAL_SHARES, charge};

/// What a group (a VM) is visited for each time its turn comes, and how long one visit may go on with new things: some
/// ten faults.
pub const BATCH: Duration = Duration::from_micros(100);

/// Who serves a descriptor.
pub trait Serve: Send {
    /// There is input, or it was notified, or the time has come that it asked for. `now` is now; what is begun after
    /// `until` keeps others waiting.
    fn serve(&mut self, now: Instant, until: Instant) -> After;
    /// A visit panicked, for the `times`th time. Returns whether it is to be visited again.
    fn panicked(&mut self, times: u32) -> bool;
    /// It is not visited any more.
    fn end(&mut self);
}

/// What a visit came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// When it is visited again, if there is no input before.
    pub next: Next,
    /// It waits for another thread, which may want this CPU.
    pub is_eager: bool,
    /// Where it would rather be.
    pub placement: Placement,
    /// Its weight: a visit is charged the usual shares for these.
    pub shares: u32,
}

/// Where a slot would rather be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where it is.
    Stay,
    /// With the worker of this CPU.
    Cpu(usize),
    /// With the worker that is on no CPU in particular.
    Roam,
    /// With any that has nothing else to do.
    Any,
}

impl After {
    /// The rest is as usual.
    pub const fn next(next: Next) -> Self {
        Self { next, is_eager: false, placement: Placement::Stay, shares: USUAL_SHARES }
    }

    /// What is charged for a visit that took so long.
    pub fn charge(&self, spent: Duration) -> Duration {
        charge(spent, self.shares)
    }
}
