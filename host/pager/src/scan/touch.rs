//! Touch: reports a fault to the tracker, and maps a unit again that was zapped to track it.
//!
//! Before: the zap scan zapped units and flagged them. After: the fault worker has marked the touched page (`touches`),
//! and has mapped a huge unit as a whole, or a block of base pages as one run, so that tracking leaves no slow mapping.
//! Threads: fault workers. Units: pages of a region; nanoseconds.
//! Promise: a fault on a unit that is neither tracked nor zapped costs one load. No fault waits for the tracker.

use ballast_base::{HUGE_SIZE, PAGES_PER_UNIT, PageIdx, PageRange};
use ballast_heat::UnitId;
use ballast_heat::source::BLOCK;
use ballast_sys::remote::Collapsed;
use ballast_sys::uffd::FaultKind;

use crate::vm::Vm;
use crate::vm::huge::unit_addr;
use crate::vm::region::Region;
use crate::vm::serve::resolve::Target;
use crate::vm::serve::stall::PendingFault;
use crate::vm::units::UnitState;
use crate::vm::view::{RegionView, View};
use ballast_page::ahead::lock_run;
use ballast_page::memory::Mapped;
use ballast_page::page_state::State;
use ballast_page::unit::Mapping;

/// How to serve a fault on a unit that is not quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Touch {
    /// Put the fault aside: the unit is being mapped.
    Aside,
    /// The unit is mapped as a whole, and its waiting threads were woken.
    Mapped,
    /// Serve the page, then call [`served`].
    Serve {
        /// Tracking caused the fault: its cost counts.
        tracked: bool,
        /// Only tracking zapped the neighbours: map them, too.
        around: bool,
    },
}

pub(crate) fn touched(vm: &Vm, view: &View, target: &Target<'_>, unit: &UnitState, pending: &PendingFault) -> Touch {
    let Target { region, page, .. } = target;
    if unit.as_whole().is_mapping() {
        return Touch::Aside;
    }
    let id = UnitId { region: region.number, unit: page.unit() as u32 };
    let (mut fine, mut tracked) = (false, unit.is_tracked());
    if tracked {
        // The touch is recorded before the unit is mapped, because later touches are not seen.
        fine = vm.mail.touches.mark(id, *page);
        if !fine {
            unit.touch(*page);
        }
        // A page that reclaim has taken, or was about to take, would have faulted without the scan, too. If its cost
        // counted, a VM that refaults much would seem costly to track, and would not be tracked when needed most.
        tracked = pending.fault.kind == FaultKind::Minor && region.word(*page).state() == State::Resident;
    }
    if pending.fault.kind == FaultKind::Minor
        && let Some(mapping) = unit.as_whole().enter()
    {
        if map_huge(view, region, &[(page.unit(), mapping)]) {
            vm.mail.touches.charge(pending.since);
            return Touch::Mapped;
        }
        unit.tear();
    }
    Touch::Serve { tracked, around: unit.is_zapped() && !fine && region.granule_pages() == 1 }
}

/// Ends a fault for which [`touched`] returned [`Touch::Serve`].
pub(crate) fn served(vm: &Vm, target: &Target<'_>, pending: &PendingFault, tracked: bool, around: bool) {
    let Target { region, page, memory } = target;
    if around && let Err(error) = map_around(region, memory, *page) {
        // A thread that touches these pages faults, and that fault reports the error.
        tracing::debug!(vm = vm.state.name(), "Mapping pages around page {page}: {error}");
    }
    if tracked {
        vm.mail.touches.charge(pending.since);
    }
}

/// Maps neighbouring units huge in one view, and wakes the threads that wait there. Returns whether it succeeded.
pub(crate) fn map_huge(view: &View, region: &Region, units: &[(u64, Mapping<'_>)]) -> bool {
    let Some((first, _)) = units.first() else { return true };
    let Some((remote, addr)) = view.remote().zip(unit_addr(view, region, *first)) else { return false };
    let len = (units.len() * HUGE_SIZE) as u64;
    let done = remote.collapse(addr, len).is_ok_and(|outcome| outcome == Collapsed::Done);
    if done {
        units.iter().filter_map(|(unit, _)| region.units().get(*unit)).for_each(UnitState::seen_huge);
        let pages = PageRange::of(PageIdx::first_of_unit(*first), units.len() as u64 * PAGES_PER_UNIT);
        let _ = view.of_region(region).map(|memory| memory.wake_run(pages));
    }
    done
}

/// Maps the Resident pages of the block around a touched page: at most eight touches for each unit, of some 15 us. So
/// the tracker also learns which blocks were touched.
pub(crate) fn map_around(region: &Region, memory: &RegionView<'_>, page: PageIdx) -> std::io::Result<()> {
    let block = PageRange::of(PageIdx(page.0 - page.0 % BLOCK), BLOCK);
    map_resident(region, memory, block.before(region.range().end()))
}

/// Maps the Resident pages of a range of base pages, under their locks. Never waits for a lock.
pub(crate) fn map_resident(region: &Region, memory: &RegionView<'_>, pages: PageRange) -> std::io::Result<()> {
    let (mut at, end) = (pages.start(), pages.end());
    while at < end {
        let cells = PageRange::new(at, end).iter().map(|page| region.granule(page).cell());
        let locks = lock_run(cells, |state| state == State::Resident, |word| word);
        memory.map_run(PageRange::of(at, locks.len() as u64))?;
        // Continues behind the page that cannot be mapped here.
        at = PageIdx(at.0 + locks.len() as u64 + 1);
    }
    Ok(())
}
