//! Discards of the VMM: a balloon, free page reporting, or an unplug frees guest RAM.
//!
//! Before: a client asks, and waits. After: copies and memory are freed, so touches read zeros; an unplug frees copies.
//! Threads: any; an unplug, and the punch of pages without words, exclude all threads that move pages.
//! Promise: a range is rounded inward, so nothing else is discarded. Words of pages that never moved are not touched: a
//! discard of terabytes (virtio-mem, as it starts) needs no memory, and no time for each page.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::store::IoContext;
use ballast_base::wire;
use ballast_base::{Hva, PAGE_SIZE, PageIdx, PageRange};
use ballast_sys::uffd::FillOutcome;

use super::{Hold, Vm};
use crate::run::pool::pause;
use crate::vm::region::Region;
use crate::vm::stats::Counter;
use crate::vm::view::View;
use ballast_page::discard::{Discarded, discard};
use ballast_page::memory::{Backing, Mapped};
use ballast_page::page_state::State;

/// Longest wait of a discard for a locked page while another engine serves the VM, too. A killed engine may have left
/// the lock, which goes when this engine closes the VM and opens it again: a discard must not prevent that.
const LOCKED_FOR: Duration = Duration::from_millis(20);
/// Longest wait for a locked page without another engine: the page is being read from a disk or a cluster. The discard
/// is then retried, and its client's faults on the pages before are served. (An unplug always waits this long.)
const LOCKED_FOR_LONG: Duration = Duration::from_secs(2);
/// A discard of at least this many pages (32 MiB) first punches the pages whose words were never written.
const LARGE: u64 = 1 << 13;
/// Pages that such a discard punches under one exclusive hold of the layout: 1 GiB takes up to some 50 ms.
const STRETCH: u64 = 1 << 18;
/// Longest wait for free memory when zeros replace a poisoned page.
const HEALS_FOR: Duration = Duration::from_secs(1);

/// RAM is about to be unplugged: reclaim is held until this guard is dropped.
#[derive(Debug)]
#[must_use = "reclaim is held only as long as this lives"]
pub struct Unplugging<'a>(&'a Vm);

impl Drop for Unplugging<'_> {
    fn drop(&mut self) {
        self.0.hold(Hold::Unplug, None);
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Frees {
    /// Memory and copies.
    Memory,
    /// Copies only.
    Copies,
}

impl Vm {
    /// Discards ranges of addresses of `view`: frees their copies and their memory. Ranges outside the VM's RAM are
    /// ignored; ends are rounded inward to whole granules, as the kernel's punch does.
    ///
    /// # Errors
    /// `Interrupted`: the VM is to be closed. `WouldBlock`: a page stayed locked; try again. Otherwise memory could not
    /// be freed. In each case some of the ranges may have been discarded.
    pub fn discard(&self, view: &View, ranges: &[wire::Range]) -> io::Result<()> {
        for (start, len) in ranges {
            let layout = self.memory.layout();
            let Some((number, first)) = view.find(*start) else { continue };
            let Some(region) = self.region(number) else { continue };
            let end = first.0.saturating_add(len / PAGE_SIZE as u64).min(region.pages().0);
            let first = (first.0 + u64::from(start.page_start() != *start)).next_multiple_of(region.granule_pages());
            let pages = PageRange::new(PageIdx(first), region.first_of(PageIdx(end)));
            if pages.count() < LARGE {
                self.discard_run(&region, pages, Frees::Memory)?;
                continue;
            }
            drop(layout);
            pages.pieces(STRETCH).try_for_each(|stretch| self.discard_stretch(&region, stretch))?;
        }
        Ok(())
    }

    /// Discards a part of a large range. A page whose word was never written has no copy, and no worker moves it while
    /// the layout is held exclusively: these pages are punched first, and their words stay unwritten. A touch finds the
    /// old page or zeros.
    fn discard_stretch(&self, region: &Region, stretch: PageRange) -> io::Result<()> {
        let records = self.state.regions();
        let Some(record) = records.get(region.number as usize) else { return Ok(()) };
        {
            let _layout = self.memory.change_layout();
            if region.is_removed() {
                return Ok(());
            }
            let written = self.state.written_words_within(record, stretch)?;
            let ends = written.iter().map(|pages| pages.start()).chain([stretch.end()]);
            let starts = [stretch.start()].into_iter().chain(written.iter().map(|pages| pages.end()));
            for unwritten in starts.zip(ends).map(|(start, end)| PageRange::new(start, end)) {
                self.punch_unwritten(region, unwritten)?;
            }
        }
        let _layout = self.memory.layout();
        if region.is_removed() {
            return Ok(());
        }
        // Read again: after the exclusive hold, a fault may have met a failed page and written its word.
        let written = self.state.written_words_within(record, stretch)?;
        written.into_iter().try_for_each(|pages| self.discard_run(region, pages, Frees::Memory))
    }

    fn punch_unwritten(&self, region: &Region, pages: PageRange) -> io::Result<()> {
        if self.is_stopping() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if pages.is_empty() {
            return Ok(());
        }
        let begun = Instant::now();
        region.units().disturb(pages, || pause(begun));
        region.punch(pages)?;
        region.take_back(pages);
        let mut done = Discarded::default();
        done.counts[State::Resident as usize] = pages.count();
        self.ledger().discarded(&done);
        Ok(())
    }

    fn discard_run(&self, region: &Region, pages: PageRange, frees: Frees) -> io::Result<()> {
        const BATCH: u64 = 512;
        let views = self.views();
        let heal = |page| {
            if frees == Frees::Copies {
                return Ok(());
            }
            let mut memories = views.iter().filter_map(|view| view.of_region(region));
            memories.try_for_each(|memory| {
                let begun = Instant::now();
                loop {
                    let filled = memory.install_zero(page)?;
                    // If another view has filled the hole, that page replaces this view's poison mark.
                    let there = filled == FillOutcome::AlreadyThere;
                    match if there { memory.map(page)? } else { filled } {
                        // The address space is changing, or memory is short. If that lasts, the page stays poisoned.
                        FillOutcome::Retry if begun.elapsed() > HEALS_FOR || self.is_stopping() => {
                            return Err(io::ErrorKind::OutOfMemory.into());
                        }
                        FillOutcome::Retry => pause(begun),
                        _ => return Ok(()),
                    }
                }
            })
        };
        let mut not_healed = None;
        for first in pages.step_by(BATCH) {
            if self.is_stopping() {
                // A range of terabytes takes minutes, and the thread that closes this VM waits for it.
                return Err(io::ErrorKind::Interrupted.into());
            }
            let run = PageRange::of(first, BATCH).before(pages.end());
            // The punch splits huge mappings. Coalescing must not map one of these units now, and no page lock is held.
            let begun = Instant::now();
            region.units().disturb(run, || pause(begun));
            let granule_of = |page| region.granule(page);
            let begun = Instant::now();
            let wait = || {
                pause(begun);
                if self.is_stopping() {
                    return Err(io::ErrorKind::Interrupted.into());
                }
                // An unplug is not retried.
                let short = frees == Frees::Memory && !self.life.is_alone();
                let limit = if short { LOCKED_FOR } else { LOCKED_FOR_LONG };
                if begun.elapsed() > limit {
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                region.check_table()
            };
            let punch = |run| match frees {
                Frees::Memory => region.punch(run).map(drop),
                Frees::Copies => Ok(()),
            };
            let stores = self.stores.reads(IoContext::BACKGROUND);
            let done = discard(region.region_key(), run, granule_of, punch, &stores, wait, heal)?;
            region.take_back(run);
            self.ledger().discarded(&done);
            not_healed = done.not_healed.or(not_healed);
        }
        not_healed.map_or(Ok(()), Err)
    }

    /// Holds reclaim until the guard is dropped: RAM is about to be unplugged, and its far pages must not grow before.
    pub fn begin_unplug(&self) -> Unplugging<'_> {
        self.hold(Hold::Unplug, Some("RAM of it is about to be unplugged".into()));
        let unplugging = Unplugging(self);
        // Waits for the batches that began before the hold.
        drop(self.memory.change_layout());
        unplugging
    }

    /// Forgets where `view` maps a region: its process is about to unmap it, and the region stays a part of the VM.
    pub fn forget_span(&self, view: &View, start: Hva) {
        let _layout = self.memory.change_layout();
        view.remove_span(start);
    }

    /// Forgets a region's far pages, and where `view` maps it: its RAM is about to be unplugged. The bytes in its file
    /// stay: another process may have the file, and the kernel frees it after the last one. `number` is the region's
    /// number, for a view that was added without it.
    ///
    /// Returns the number if no process of the VM maps the region any more; otherwise see [`Vm::left_unplugged`].
    ///
    /// # Errors
    /// A page stays locked, or a table is lost. The region stays a part of the VM, without this view.
    pub fn remove_region(&self, view: &View, start: Hva, number: Option<u32>) -> io::Result<Option<u32>> {
        let _layout = self.memory.change_layout();
        let Some(number) = view.remove_span(start).or(number) else { return Ok(None) };
        if self.views().iter().any(|other| other.base(number).is_some()) {
            if let Some(region) = self.region(number) {
                region.set_unplugged(true);
            }
            return Ok(None);
        }
        self.forget_region(number)?;
        Ok(Some(number))
    }

    /// Regions that one process unplugged while others still mapped them, and that no process maps now.
    pub fn left_unplugged(&self) -> Vec<Arc<Region>> {
        let views = self.views();
        let is_left = |region: &Arc<Region>| {
            let is_mapped = || views.iter().any(|view| view.base(region.number).is_some());
            region.is_unplugged() && !region.is_removed() && !is_mapped()
        };
        self.regions().into_iter().filter(is_left).collect()
    }

    /// Removes a region that is in [`Vm::left_unplugged`]; no effect if a process maps it again.
    ///
    /// # Errors
    /// Those of [`Vm::remove_region`].
    pub fn remove_left(&self, number: u32) -> io::Result<()> {
        let _layout = self.memory.change_layout();
        if self.left_unplugged().iter().all(|region| region.number != number) {
            return Ok(());
        }
        self.forget_region(number)
    }

    /// Makes a region that no process maps no part of the VM.
    fn forget_region(&self, number: u32) -> io::Result<()> {
        if let Some(region) = self.region(number).filter(|region| !region.is_removed()) {
            let records = self.state.regions();
            let record = &records[number as usize];
            let written = self.state.written_words(record)?;
            written.into_iter().try_for_each(|pages| self.discard_run(&region, pages, Frees::Copies))?;
            self.stats().sub(Counter::RegisteredBytes, region.registered().0);
            region.remove();
            self.state.remove_region(number);
            drop(region);
            let vm = self.state.name();
            if let Err(error) = self.close_files(number) {
                tracing::warn!(vm, "The files of region {number} stay open until the VM ends: {error}");
            }
            if let Err(error) = self.state.forget_words(record) {
                tracing::warn!(vm, "The words of region {number} keep their memory until the VM ends: {error}");
            }
        }
        Ok(())
    }
}
