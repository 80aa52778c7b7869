//! The tracking worker: finds out what is hot in one VM.
//!
//! Before: the VM has a limit, or tracking is on. After: `vm.heat` knows generations, ages and the working set, by
//! which reclaim picks and which the API shows.
//! Threads: one task per VM, which keeps a thread while the VM is tracked, at the pace of heat's budgets. Promise: no
//! cycle runs while the VM is held or stopping; one that does is ended within [`LOOK`], and everything it zapped is
//! mapped as it was.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_heat::AccessSource;

use super::source::Scans;
use crate::run::pool::blocking;
use crate::run::queue::Next;
use crate::vm::table::Table;
use crate::vm::{Track, Vm};

/// How often a cycle that runs is asked whether it still may.
const LOOK: Duration = Duration::from_millis(20);
/// How often a VM that is not tracked is asked whether it is now.
const IDLE: Duration = Duration::from_millis(200);
/// Pause after a cycle that failed: a VMM that does not answer, say.
const FAILED: Duration = Duration::from_secs(5);

/// The tracking worker of a VM.
#[derive(Debug)]
pub(crate) struct TrackWorker {
    vm: Arc<Vm>,
    failures: u64,
}

impl TrackWorker {
    /// Of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failures: 0 }
    }

    /// Track the VM for as long as it is to be tracked; returns when to look whether it is again.
    pub fn run(&mut self, now: Instant) -> Next {
        let vm = self.vm.clone();
        if vm.is_tracked() && !vm.views().is_empty() {
            // It sleeps nearly all the time.
            blocking(|| self.track(&vm));
        }
        vm.heat.set_source(None);
        match vm.track() {
            _ if vm.is_stopping() => Next::Done,
            Track::Off => Next::Idle,
            Track::On | Track::Auto => Next::about(now, IDLE),
        }
    }

    fn track(&mut self, vm: &Vm) {
        let mut source = Scans::new(vm);
        while vm.is_tracked() && !vm.views().is_empty() {
            vm.heat.set_source(Some(source.ability()));
            let mut wait = |time: Duration| {
                let end = Instant::now() + time;
                loop {
                    let left = end.saturating_duration_since(Instant::now());
                    if left.is_zero() || !vm.is_tracked() {
                        return vm.is_tracked();
                    }
                    vm.sleep(left.min(LOOK));
                }
            };
            if let Err(error) = vm.heat.turn(&mut source, &Table::of(vm), &mut wait) {
                self.failures += 1;
                if self.failures.is_power_of_two() {
                    let failures = self.failures;
                    tracing::warn!(vm = vm.state.name(), failures, "Tracking what the guest touches: {error}");
                }
                vm.sleep(FAILED);
            }
        }
    }
}
