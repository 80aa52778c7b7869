//! The tracking worker: finds out which memory of one VM is hot.
//!
//! Before: the VM has a limit, or tracking is on. After: `vm.heat` knows generations, ages and the working set; reclaim
//! picks by them, the API shows them, and `place` moves memory between two nodes by them.
//! Threads: one task per VM, which runs at the beginning and at the end of each cycle, at the pace of heat's budgets.
//! Promise: no cycle runs while the VM is held or stopping. A hold notifies the task, which ends a running cycle as
//! soon as it gets a thread, and maps everything that the cycle zapped as before.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_heat::{AccessSource, Cycle, Turn};

use super::place::Places;
use super::source::Scans;
use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::table::Table;
use crate::vm::{Track, Vm};

/// How often a VM that is not tracked is asked whether it is now. Any such change notifies as well.
const IDLE: Duration = Duration::from_secs(1);
/// Pause after a cycle that failed, because a VMM does not reply for instance.
const FAILED: Duration = Duration::from_secs(5);

/// State that is kept while a VM is tracked.
#[derive(Debug)]
struct Tracking {
    scans: Scans,
    /// `None` while its memory is not placed.
    places: Option<Places>,
    waits: Waits,
    until: Instant,
}

/// What the worker waits for.
#[derive(Debug)]
enum Waits {
    /// The next cycle.
    Rest,
    /// The end of this one.
    Cycle(Cycle),
}

/// The tracking worker of a VM.
#[derive(Debug)]
pub(crate) struct TrackWorker {
    vm: Arc<Vm>,
    failures: u64,
    /// `None` while the VM is not tracked.
    tracking: Option<Tracking>,
}

impl TrackWorker {
    /// The worker of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failures: 0, tracking: None }
    }

    /// Begins or finishes a cycle, if it is time; returns when the next piece of work is due.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        let is_tracked = vm.is_tracked() && !vm.views().is_empty();
        if let Some(Tracking { until, .. }) = self.tracking
            && is_tracked
            && now < until
        {
            // It was notified of something else.
            return Next::At(until);
        }
        let mut finished = Ok(());
        let parts = match self.tracking.take() {
            Some(Tracking { mut scans, mut places, waits: Waits::Cycle(cycle), .. }) => {
                let is_coarse = cycle.is_coarse();
                // This may wait for the client.
                finished = blocking(|| vm.heat.finish(&mut scans, cycle, is_tracked));
                if is_tracked
                    && finished.is_ok()
                    && let Some(places) = places.as_mut().filter(|places| places.is_due(is_coarse))
                {
                    let turned = blocking(|| places.turn());
                    self.placed(places, turned);
                }
                Some((scans, places))
            }
            tracking => tracking.map(|tracking| (tracking.scans, tracking.places)),
        };
        if !is_tracked {
            vm.heat.set_source(None);
            return match vm.track() {
                _ if vm.is_stopping() => Next::Done,
                Track::Off => Next::Idle,
                Track::On | Track::Auto => Next::about(now, IDLE),
            };
        }
        let begin = || (Scans::new(vm.clone()), vm.tuning.tiers.map(|tiers| Places::new(vm.clone(), tiers)));
        let (mut scans, mut places) = parts.unwrap_or_else(begin);
        if let Some(places) = places.as_mut().filter(|places| finished.is_ok() && places.has_work()) {
            let worked = blocking(|| places.work());
            self.placed(places, worked);
        }
        if places.as_ref().is_some_and(|places| finished.is_ok() && places.has_work()) {
            self.tracking = Some(Tracking { scans, places, waits: Waits::Rest, until: now });
            return Next::Again;
        }
        vm.heat.set_source(Some(scans.ability()));
        let begun = finished.and_then(|()| blocking(|| vm.heat.begin(&mut scans, &Table::of(&vm))));
        let begun = begun.unwrap_or_else(|error| self.failed(&error));
        let now = Instant::now();
        let (until, waits) = match begun {
            Turn::Rest(pause) => (now + pause, Waits::Rest),
            Turn::Watch(cycle) => (now + cycle.window, Waits::Cycle(cycle)),
        };
        self.tracking = Some(Tracking { scans, places, waits, until });
        Next::At(until)
    }

    /// Memory was moved, or could not be: then none is moved for some cycles, and tracking goes on.
    fn placed(&self, places: &mut Places, done: io::Result<()>) {
        if let Err(error) = done
            && places.rest()
        {
            tracing::warn!(vm = self.vm.state.name(), "Moving memory between the nodes of the host: {error}");
        }
    }

    /// A cycle failed: returns what to do next.
    fn failed(&mut self, error: &io::Error) -> Turn {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let failures = self.failures;
            tracing::warn!(vm = self.vm.state.name(), failures, "Tracking what the guest touches: {error}");
        }
        Turn::Rest(FAILED)
    }
}
