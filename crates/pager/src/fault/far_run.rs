//! Far runs: neighbouring far pages that are restored together, before the guest touches them.
//!
//! Before: readahead or a prefetch request says which. After: they are in memory and mapped, and counted.
//! Threads: fault workers and the prefetch worker. Units: base pages of a region.
//! Promise: pages are restored under their locks, from near stores only. A page that another thread holds, or that is
//! not available now, is left to its fault.

use ballast_base::{PageIdx, PageRange};
use ballast_store::PageBytes;

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::RegionView;
use ballast_page::fault::restore_run;

/// The pages of a range that are in a near store.
pub(crate) fn far_pages(region: &Region, pages: PageRange) -> impl Iterator<Item = PageIdx> {
    pages.iter().filter(|page| region.is_near_and_free(*page))
}

/// Restores the first neighbouring far pages of these, as many as fit the buffer. Returns which, or `None` if none is
/// far.
pub(crate) fn restore_next_run(
    vm: &Vm,
    region: &Region,
    memory: &RegionView<'_>,
    pages: PageRange,
    buffer: &mut [PageBytes],
) -> std::io::Result<Option<PageRange>> {
    let Some(first) = far_pages(region, pages).next() else { return Ok(None) };
    let cells = pages.from(first).iter().map(|page| region.granule(page).cell());
    let moves = restore_run(region.key(first), cells, memory, &vm.stores.near(), buffer)?;
    vm.ledger().prefetched(region, first, &moves);
    let back = moves.len() as u64;
    if back == 0 {
        // Another thread was first, or the page is not available now. The thread that wants it will fault.
        return Ok(Some(PageRange::of(PageIdx(first.0 + 1), 0)));
    }
    Ok(Some(PageRange::of(first, back)))
}
