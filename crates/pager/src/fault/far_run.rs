//! Far runs: neighbouring far pages that come back together, before they are touched.
//!
//! Before: readahead or a prefetch request says which. After: they are in memory and mapped, and counted.
//! Threads: fault workers and the prefetch worker. Units: base pages of a region.
//! Promise: pages come back under their locks, from near stores only. What another thread holds, or what cannot be
//! had now, is left to the fault that wants it.

use ballast_base::{PageIdx, PageRange};
use ballast_store::PageBytes;

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::RegionView;
use ballast_page::fault::restore_run;
use ballast_page::page_state::State;

/// Is a page far, in a near store, and unlocked? A page on a disk has not been wanted for long, and a guess is not
/// worth its time.
pub(crate) fn is_near(region: &Region, page: PageIdx) -> bool {
    let word = region.word(page);
    word.state() == State::Far && !word.is_locked() && !region.is_slow(page)
}

/// The pages of a range that are in a near store.
pub(crate) fn far_pages(region: &Region, pages: PageRange) -> impl Iterator<Item = PageIdx> {
    pages.iter().filter(|page| is_near(region, *page))
}

/// Bring back the first far pages of these that are neighbours, as many as fit the buffer. Returns which were restored,
/// or `None` if none is far.
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
        // Another thread was quicker, or it cannot be had now, and the thread that wants it will fault.
        return Ok(Some(PageRange::of(PageIdx(first.0 + 1), 0)));
    }
    Ok(Some(PageRange::of(first, back)))
}
