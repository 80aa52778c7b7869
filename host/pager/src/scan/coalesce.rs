//! Coalesce: maps a 2 MiB unit huge again that was mapped huge before, once all its pages are resident.
//!
//! Before: reclaim zapped pages of a unit, and the guest touched them all again. After: one PMD maps the unit.
//! Threads: one task per VM. A fault on the unit that is being mapped is put aside until it is mapped; no other fault
//! waits. Units: 512 pages, aligned in the file and in a view's addresses.
//! Promise: a unit with a hole, or with a page that is not Resident, is left alone; `unit.rs` says why no byte can be
//! lost. It uses at most 1/[`SHARE`] of one CPU.
//!
//! While each broken unit lacks a page, the worker rests, and a page that becomes resident notifies it: an idle VM
//! costs no passes. Only units that were mapped huge before are candidates. Where there were no huge pages, making them
//! is not our decision; and a page punched out of a huge page has split it, so that collapsing it copies 2 MiB.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{HUGE_SIZE, PageRange};
use ballast_sys::clock::cpu_time;
use ballast_sys::remote::Collapsed;

use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::account::SHARE;
use crate::vm::huge::unit_addr;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use ballast_page::page_state::State;

/// Passes are this many times as rare while no broken unit is resident, unless a page becomes resident. A missed
/// notification, or memory that comes in without a fault, delays a unit by some seconds.
const RARELY: u32 = 16;
/// Pause when the host has no free huge page.
const SHORT_OF_MEMORY: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(crate) struct CoalesceWorker {
    vm: Arc<Vm>,
    /// Start of the next part of the pass: region and unit.
    at: (u32, u64),
    begun: bool,
    /// In the last pass, no broken unit was resident.
    rests: bool,
}

impl CoalesceWorker {
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, at: (0, 0), begun: false, rests: false }
    }

    pub fn run(&mut self, now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_stopping() {
            return Next::Done;
        }
        let every = vm.tuning.coalesce_every;
        if !std::mem::replace(&mut self.begun, true) {
            return Next::about(now, every);
        }
        if std::mem::take(&mut self.rests) {
            vm.mail.rest_coalesce(false);
            return Next::about(now, every);
        }
        let mut passed = pass(vm, &mut self.at);
        if let Ok(Passed::AllAway) = passed {
            vm.mail.rest_coalesce(true);
            self.at = (0, 0);
            // A second pass, for a page that became resident just before the first.
            passed = pass(vm, &mut self.at);
            self.rests = matches!(passed, Ok(Passed::AllAway));
            vm.mail.rest_coalesce(self.rests);
        }
        if matches!(passed, Ok(Passed::Later | Passed::AllAway)) {
            self.at = (0, 0);
        }
        // After a failure the next pass begins behind that unit, because others may succeed.
        let pause = match passed {
            Ok(Passed::Tried(took)) => return Next::after(Instant::now(), took * (SHARE - 1)),
            Ok(Passed::Later) => every,
            Ok(Passed::AllAway) => every * RARELY,
            Err(Stopped::NoMemory) => SHORT_OF_MEMORY.max(every),
            Err(Stopped::Failed(error)) => {
                tracing::warn!(vm = vm.state.name(), "Mapping memory huge again: {error}");
                SHORT_OF_MEMORY.max(every)
            }
        };
        if pause < Duration::from_millis(100) { Next::after(now, pause) } else { Next::about(now, pause) }
    }
}

enum Passed {
    /// One unit was tried, for this time. The next pass begins behind it.
    Tried(Duration),
    /// All units were checked. A broken unit is resident, and may be mapped huge soon.
    Later,
    /// All units were checked. Each broken unit lacks a page.
    AllAway,
}

enum Stopped {
    NoMemory,
    Failed(std::io::Error),
}

/// Checks units from this place on, until one was tried.
fn pass(vm: &Vm, at: &mut (u32, u64)) -> Result<Passed, Stopped> {
    let mut end = if *at == (0, 0) { Passed::AllAway } else { Passed::Later };
    for region in vm.regions().iter().skip(at.0 as usize) {
        let first = if region.number == at.0 { at.1 } else { 0 };
        for number in first..region.units().len() {
            let Some(unit) = region.units().get(number).filter(|unit| unit.is_broken()) else { continue };
            if !is_resident(region, number) {
                continue;
            }
            end = Passed::Later;
            if unit.is_tracked() || vm.held().is_some() || !unit.found_whole() {
                continue;
            }
            *at = (region.number, number + 1);
            let before = cpu_time();
            let outcome = coalesce(vm, region, number).map_err(Stopped::Failed)?;
            match outcome {
                Some(Collapsed::Done) => vm.stats().add(Counter::Coalesced, 1),
                Some(_) => vm.stats().add(Counter::CoalesceRefused, 1),
                None => {}
            }
            match outcome {
                Some(Collapsed::Never) => unit.give_up(),
                Some(Collapsed::NoMemory) => return Err(Stopped::NoMemory),
                _ => {}
            }
            // CPU time: waiting for a CPU on a busy host is no cost of coalescing.
            return Ok(Passed::Tried(cpu_time().saturating_sub(before)));
        }
    }
    Ok(end)
}

/// Returns whether all words of a unit are Resident, so that each of its pages is the guest's.
pub(crate) fn is_resident(region: &Region, unit: u64) -> bool {
    PageRange::of_unit(unit).iter().all(|page| region.word(page).state() == State::Resident)
}

/// Maps a unit huge in each process that maps it aligned. `None` if that must not be done now.
pub(crate) fn coalesce(vm: &Vm, region: &Region, number: u64) -> std::io::Result<Option<Collapsed>> {
    // Held so that the region cannot be unplugged: its addresses may belong to other RAM right afterwards.
    let _layout = vm.memory.layout();
    let pages = PageRange::of_unit(number);
    let Some(unit) = region.units().get(number).filter(|_| !region.is_removed()) else { return Ok(None) };
    if region.next_present(pages)? != Some(pages) {
        return Ok(None);
    }
    let Some(_mapping) = unit.as_whole().map(|| is_resident(region, number)) else { return Ok(None) };
    let mut result = None;
    for view in vm.views() {
        let Some((remote, addr)) = view.remote().zip(unit_addr(&view, region, number)) else { continue };
        let outcome = remote.collapse(addr, HUGE_SIZE as u64)?;
        if outcome == Collapsed::Done {
            unit.seen_huge();
        }
        result = result.filter(|result| *result != Collapsed::Done).or(Some(outcome));
    }
    Ok(result)
}
