//! Which units of a VM are mapped huge in a view, and where.
//!
//! Before: a chunk is about to be registered. After: each unit of it that is mapped huge is known as such, and is
//! mapped huge again when it is whole. Threads: any. Units: 2 MiB. Promise: what is not known stays in base pages.

use ballast_base::{HUGE_SIZE, Hva, PageIdx, PageRange};
use ballast_sys::remote::is_unit_aligned;

use crate::vm::region::Region;
use crate::vm::view::View;

/// The address of a unit in a view, if it may be mapped huge there: aligned in file and address.
pub(crate) fn unit_addr(view: &View, region: &Region, unit: u64) -> Option<Hva> {
    let addr = view.base(region.number)? + PageIdx::first_of_unit(unit).offset();
    (is_unit_aligned(addr) && region.is_unit_aligned()).then_some(addr)
}

/// Notes which units of these pages are mapped huge in a view, before pages of them are zapped. If that fails it is no
/// error: the units then stay in base pages.
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
