//! Ahead: brings in the pages that a thread with sequential faults touches next, each as its own fault would have.
//!
//! Before: readahead has decided how many pages, and from which range. After: far pages are restored, pages in
//! quarantine are mapped, zero holes are filled; each is counted.
//! Threads: fault workers. Units: base pages of a region.
//! Promise: each page is moved under its lock, and copies come from near stores only. A page that another thread has
//! locked, or that is not available now, is left to its fault. No page comes in without a credit of the fault throttle.

use std::io;

use ballast_base::{PageIdx, PageRange};
use ballast_page::ahead::{map_ahead, zero_ahead};
use ballast_page::fault::restore_run;
use ballast_page::page_state::State;
use ballast_store::PageBytes;

use crate::vm::Vm;
use crate::vm::region::Region;
use crate::vm::view::RegionView;

/// Brings in up to `ahead` of these pages. With `is_fresh` they were never touched, and come from the first one on.
/// Returns the page after the last one brought in. Fails only if the kernel fails in a way that it should not.
pub(crate) fn bring_ahead(
    vm: &Vm,
    region: &Region,
    memory: &RegionView<'_>,
    (mut pages, mut ahead): (PageRange, u64),
    is_fresh: bool,
    buffer: &mut [PageBytes],
) -> io::Result<PageIdx> {
    let mut credits = vm.readahead_credits();
    let cells = |from: PageIdx, count: u64| {
        PageRange::of(from, count).before(region.range().end()).iter().map(|page| region.granule(page).cell())
    };
    let zero = |first: PageIdx, most: u64| {
        let moves = zero_ahead(first, cells(first, most), memory);
        vm.ledger().zeroed_ahead(&moves);
        moves
    };
    if is_fresh {
        let moves = zero(pages.start(), ahead.min(credits).min(pages.count()));
        return Ok(PageIdx(pages.start().0 + moves.len() as u64));
    }
    let mut end = pages.start();
    while ahead > 0
        && let Some(first) = pages.iter().find(|page| region.is_out_and_free(*page))
    {
        let most = ahead.min(pages.from(first).count());
        let moves = match region.word(first).state() {
            State::Quarantine | State::Evicting => {
                let moves = map_ahead(first, cells(first, most), memory, ballast_heat::touched);
                vm.ledger().mapped_ahead(&moves);
                moves
            }
            State::Zero => {
                let moves = zero(first, most.min(credits));
                credits -= moves.len() as u64;
                moves
            }
            _ => {
                let buffer = &mut buffer[..most.min(credits) as usize];
                let moves =
                    restore_run(region.key(first), cells(first, most), memory, &vm.stores.reads_near(), buffer)?;
                vm.ledger().prefetched(region, first, &moves);
                credits -= moves.len() as u64;
                moves
            }
        };
        if moves.is_empty() {
            break;
        }
        end = PageIdx(first.0 + moves.len() as u64);
        (pages, ahead) = (pages.from(end), ahead - moves.len() as u64);
    }
    Ok(end)
}
