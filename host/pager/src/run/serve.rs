//! The trait of what serves a descriptor, and the result of a visit.
//!
//! Before: [`super::servers::Servers::add`] is given one. After: a worker visits it whenever there is input; what a
//! visit returns tells `set` when it is visited again, where, and what it is charged.
//! Threads: the worker that visits it, one at a time. Units: nanoseconds of visits. Promise: none; it is what `set`
//! requires of others.

use std::time::{Duration, Instant};

use super::queue::{Next, USUAL_SHARES, charge};

/// What a group (a VM) is visited for at each turn, and how long one visit may begin new things: some ten faults.
pub const BATCH: Duration = Duration::from_micros(100);

/// Serves a descriptor.
pub trait Serve: Send {
    /// There is input, or it was notified, or the time has come that it asked for. `now` is the present time; anything
    /// begun after `until` delays others.
    fn serve(&mut self, now: Instant, until: Instant) -> After;
    /// A visit panicked, for the `times`th time. Returns whether it is to be visited again.
    fn panicked(&mut self, times: u32) -> bool;
    /// It is not visited any more.
    fn end(&mut self);
    /// Is it served by no worker of a CPU at any time, because a visit may wait for what its VMM sent, or is for no
    /// fault? Then a visit that is stuck keeps no fault worker.
    fn roams(&self) -> bool {
        false
    }
}

/// The result of a visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct After {
    /// When it is visited again, if there is no input before.
    pub next: Next,
    /// It waits for another thread, which may want this CPU.
    pub is_eager: bool,
    /// Where it prefers to be served.
    pub placement: Placement,
    /// Its weight; a visit is charged in usual shares.
    pub shares: u32,
}

/// Where a slot prefers to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// Where it is.
    Stay,
    /// With the worker of this CPU.
    Cpu(usize),
    /// With the worker that is on no CPU in particular.
    Roam,
    /// With any worker that has nothing else to do.
    Any,
}

impl After {
    /// With this `next`, and the usual values of the rest.
    pub const fn next(next: Next) -> Self {
        Self { next, is_eager: false, placement: Placement::Stay, shares: USUAL_SHARES }
    }

    /// The charge for a visit that took this long.
    pub fn charge(&self, spent: Duration) -> Duration {
        charge(spent, self.shares)
    }
}
