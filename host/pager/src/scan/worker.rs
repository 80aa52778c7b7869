//! The tracking worker: finds out which memory of one VM is hot.
//!
//! Before: tracking is on. After: `vm.heat` has generations, ages and the working set; reclaim picks pages by them, the
//! API shows them, and `place` moves pages between two NUMA nodes by them.
//! Threads: one task per VM, which runs at the beginning and end of each cycle, as often as heat's budgets allow.
//! Promise: no cycle runs while the VM is held or stopping. A hold notifies the task, which ends a running cycle as
//! soon as it gets a thread, and maps all that the cycle zapped.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_heat::{Cycle, Turn};

use super::place::Places;
use super::source::Scans;
use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::table::Table;

/// Time between checks whether a VM is tracked again; a change of the setting also notifies the task.
const IDLE: Duration = Duration::from_secs(1);
/// Pause after a cycle that failed, for example because a VMM does not reply.
const FAILED: Duration = Duration::from_secs(5);

#[derive(Debug)]
struct Tracking {
    scans: Scans,
    /// `None` if its pages are not placed on NUMA nodes.
    places: Option<Places>,
    waits: Waits,
    until: Instant,
}

#[derive(Debug)]
enum Waits {
    /// It waits for the next cycle.
    Rest,
    /// It waits for the end of this cycle.
    Cycle(Cycle),
}

#[derive(Debug)]
pub(crate) struct TrackWorker {
    vm: Arc<Vm>,
    failures: u64,
    /// `None` while the VM is not tracked.
    tracking: Option<Tracking>,
}

impl TrackWorker {
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failures: 0, tracking: None }
    }

    /// Begins or ends a cycle, if one is due; returns when the next run is due.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        let is_tracked = vm.is_tracked() && !vm.views().is_empty();
        if let Some(Tracking { until, .. }) = self.tracking
            && is_tracked
            && now < until
        {
            // The notification had another reason.
            return Next::At(until);
        }
        let mut finished = Ok(());
        let parts = match self.tracking.take() {
            Some(Tracking { mut scans, mut places, waits: Waits::Cycle(cycle), .. }) => {
                let is_coarse = cycle.is_coarse();
                // This may wait for the client's zaps.
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
            vm.heat.set_tracked(false);
            return match vm.track() {
                _ if vm.is_stopping() => Next::Done,
                false => Next::Idle,
                true => Next::about(now, IDLE),
            };
        }
        let begin = || (Scans::new(vm.clone()), vm.tuning.tiers.map(|tiers| Places::new(vm.clone(), tiers)));
        let (mut scans, places) = parts.unwrap_or_else(begin);
        vm.heat.set_tracked(true);
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

    /// Handles an error of `place`: no pages are moved for some turns, and tracking goes on.
    fn placed(&self, places: &mut Places, done: io::Result<()>) {
        if let Err(error) = done
            && places.rest()
        {
            tracing::warn!(vm = self.vm.state.name(), "Moving memory between the nodes of the host: {error}");
        }
    }

    /// Logs a failed cycle; returns the pause before the next one.
    fn failed(&mut self, error: &io::Error) -> Turn {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            let failures = self.failures;
            tracing::warn!(vm = self.vm.state.name(), failures, "Tracking what the guest touches: {error}");
        }
        Turn::Rest(FAILED)
    }
}
