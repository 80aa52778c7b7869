//! The tracking worker: finds out what is hot in one VM.
//!
//! Before: the VM has a limit, or tracking is on. After: `vm.heat` knows generations, ages and the working set, by
//! which reclaim picks and which the API shows.
//! Threads: one worker per VM, at the pace of heat's budgets. Promise: no cycle runs while the VM is held or stopping;
//! one that does is ended within [`LOOK`], and everything it zapped is mapped as it was.

use std::time::{Duration, Instant};

use ballast_heat::AccessSource;

use super::source::Scans;
use crate::vm::Vm;
use crate::vm::table::Table;

/// How often a cycle that runs is asked whether it still may.
const LOOK: Duration = Duration::from_millis(20);
/// How often a VM that is not tracked is asked whether it is now.
const IDLE: Duration = Duration::from_millis(200);
/// Pause after a cycle that failed: a VMM that does not answer, say.
const FAILED: Duration = Duration::from_secs(5);

/// Track the VM until it is stopped.
pub fn run(vm: &Vm) {
    let mut source = Scans::new(vm);
    let mut failures = 0u64;
    let mut goes_on = true;
    while goes_on {
        if !vm.is_tracked() || vm.views().is_empty() {
            vm.heat.set_source(None);
            goes_on = vm.sleep(IDLE);
            continue;
        }
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
            failures += 1;
            if failures.is_power_of_two() {
                tracing::warn!(vm = vm.state.name(), failures, "Tracking what the guest touches: {error}");
            }
            vm.sleep(FAILED);
        }
        goes_on = !vm.is_stopping();
    }
    vm.heat.set_source(None);
}
