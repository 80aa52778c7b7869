//! Coalesce: maps a 2 MiB unit huge again that was mapped huge before, once all its pages are back.
//!
//! Before: reclaim zapped pages of a unit, and the guest touched them all again. After: one entry maps the unit.
//! Threads: one task per VM. A fault on the one unit that is being mapped is put aside meanwhile; no other waits.
//! Units: 512 pages, aligned in the file and in a view's addresses. Promise: a unit with a page that is not Resident,
//! or with a hole, is left alone; `unit.rs` says why no byte can be lost. It uses [`SHARE`] of one CPU at most.
//!
//! While each of them lacks a page it rests, and a page that becomes resident notifies it: an idle VM costs no passes.
//! It looks only at units that were mapped huge before. Where there were no huge pages, making them is not our
//! decision; and a page that was punched out of a huge page has split it, so that joining it again copies 2 MiB.

use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{HUGE_SIZE, PageRange};
use ballast_sys::clock::cpu_time;
use ballast_sys::remote::Collapsed;

use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::huge::unit_addr;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::units::pages_of;
use ballast_page::page_state::State;

/// Collapsing takes at most 1/N of the time.
const SHARE: u32 = 20;
/// It looks this many times as rarely while no broken unit is resident, unless a page becomes resident. So a missed
/// notification, or memory that comes in without a fault, delays a unit by some seconds.
const RARELY: u32 = 16;
/// Pause after the host had no huge page.
const SHORT_OF_MEMORY: Duration = Duration::from_secs(10);

/// Maps a VM's units huge again.
#[derive(Debug)]
pub(crate) struct CoalesceWorker {
    vm: Arc<Vm>,
    /// Where the pass under way continues: region and unit.
    at: (u32, u64),
    begun: bool,
    /// The last pass had no broken unit that is resident.
    rests: bool,
}

impl CoalesceWorker {
    /// The worker of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, at: (0, 0), begun: false, rests: false }
    }

    /// Maps the next unit that can be mapped huge; returns when to look for another one.
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
            // Once more, for a page that became resident just before.
            passed = pass(vm, &mut self.at);
            self.rests = matches!(passed, Ok(Passed::AllAway));
            vm.mail.rest_coalesce(self.rests);
        }
        if matches!(passed, Ok(Passed::Later | Passed::AllAway)) {
            self.at = (0, 0);
        }
        // After a failure the next pass begins behind its unit: others may succeed.
        let pause = match passed {
            // Its share of a CPU.
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

/// How far a pass came.
enum Passed {
    /// One unit was tried, which took this long. The place after it is where the next pass begins.
    Tried(Duration),
    /// To the end. A broken unit is resident, and may be mapped huge soon.
    Later,
    /// To the end. There is no broken unit, or each lacks a page.
    AllAway,
}

/// Why a pass ended early.
enum Stopped {
    NoMemory,
    Failed(std::io::Error),
}

/// Looks at units from this place on, until one was tried.
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
            // CPU time: on a busy host the wait for a CPU is no cost of this.
            return Ok(Passed::Tried(cpu_time().saturating_sub(before)));
        }
    }
    Ok(end)
}

/// Returns whether all words of a unit are Resident, so that every page of it is the guest's.
pub(crate) fn is_resident(region: &Region, unit: u64) -> bool {
    pages_of(unit).all(|page| region.word(page).state() == State::Resident)
}

/// Maps one unit huge in every process that maps it aligned. `None` if it is not to be done now.
pub(crate) fn coalesce(vm: &Vm, region: &Region, number: u64) -> std::io::Result<Option<Collapsed>> {
    // Held so that the region is not unplugged meanwhile: its addresses may belong to other RAM right afterwards.
    let _layout = vm.layout();
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
