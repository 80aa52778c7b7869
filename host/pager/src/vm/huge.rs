//! Which units of a VM are mapped huge in a view, and where.
//!
//! Before: a chunk is about to be registered. After: its units that are mapped huge are marked, and coalescing maps
//! them huge again when they are whole.
//! Threads: any. Units: 2 MiB.
//! Promise: an unmarked unit stays in base pages.

use ballast_base::{HUGE_SIZE, Hva, PageIdx, PageRange};
use ballast_sys::remote::is_unit_aligned;

use crate::vm::region::Region;
use crate::vm::view::View;

/// Address of a unit in a view; `None` unless both it and the unit's offset in the file are aligned to 2 MiB.
pub(crate) fn unit_addr(view: &View, region: &Region, unit: u64) -> Option<Hva> {
    let addr = view.base(region.number)? + PageIdx::first_of_unit(unit).offset();
    (is_unit_aligned(addr) && region.is_unit_aligned()).then_some(addr)
}

/// Marks the units of these pages that are mapped huge in a view, before a zap splits them. A failure is no error:
/// unmarked units stay in base pages.
pub(crate) fn learn(view: &View, region: &Region, pages: PageRange) {
    let Some(base) = view.base(region.number).filter(|base| is_unit_aligned(*base) && region.is_unit_aligned()) else {
        return;
    };
    let Some(remote) = view.remote() else { return };
    let pieces = remote.huge(base + pages.start().offset(), pages.bytes().0).unwrap_or_else(|error| {
        tracing::debug!(pid = view.pid, "Looking for huge mappings: {error}");
        Vec::new()
    });
    for (start, end) in pieces {
        let (from, to) = (start.0 - base.0, end.0 - base.0);
        for unit in from.div_ceil(HUGE_SIZE as u64)..to / HUGE_SIZE as u64 {
            if let Some(unit) = region.units().get(unit) {
                unit.seen_huge();
            }
        }
    }
}
