//! Restores all pages of a VM, and finishes punches that a dead engine had begun.
//!
//! Before: memory is about to be pinned, a foreign mapper was seen, or an engine took over. After: no page is far: each
//! is in its file, a hole that reads as zeros, or known to be lost.
//! Threads: any; it takes seconds for millions of pages.
//! Promise: no page is evicted while it runs. It ends: a page beyond the end of its file is an error, and all others
//! are restored. Pages in a disk or a cluster are requested by up to 64 at once; those that then fail, one by one.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::store::{IoContext, PageBytes};
use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageIdx};
use ballast_sys::uffd::FaultKind;

use super::Vm;
use crate::vm::region::Region;
use crate::vm::view::View;
use ballast_page::fault::{restore_some, serve};
use ballast_page::outcome::{Outcome, Served};
use ballast_page::page_state::{State, Word};
use ballast_page::punch::punch_left;

/// Most pages of a slow store in one request: they are all locked.
const TOGETHER: usize = 64;
/// Pause after a page that is not available: its store is busy, or a tmpfs of limited size is full, which may last.
const PAUSE: Duration = Duration::from_millis(1);
/// Pages that are not available and are retried by turns: before a store gives up a page, it must be read many times.
const SOME: usize = 1024;

impl Vm {
    /// Restores every page of a held VM. Returns when none is far.
    ///
    /// # Errors
    /// The first error. All other pages are restored.
    pub fn restore(&self) -> io::Result<()> {
        // Reclaim checks holds under the shared layout. After this exclusive hold, every batch has seen this VM's hold.
        drop(self.memory.change_layout());
        let (mut done, since) = (Ok(()), self.releases());
        for region in self.regions() {
            done = done.and(self.restore_region(&region, since));
        }
        done
    }

    /// Restores every page of a region: through the processes that map it, and otherwise through a mapping of our own.
    fn restore_region(&self, region: &Arc<Region>, since: u64) -> io::Result<()> {
        let regions = std::slice::from_ref(region);
        let is_back = || Ok::<_, io::Error>(region.is_removed() || self.far_in(regions)?.0 == 0);
        let tried = self.restore_all(region, since);
        if is_back()? {
            return Ok(());
        }
        self.must_still_come_back(since)?;
        let written = self.write_back(regions, &mut || self.must_come_back(since));
        if is_back()? {
            return Ok(());
        }
        self.must_still_come_back(since)?;
        let why = format!("pages of region {} stay far", region.number);
        tried.and(written.map(drop)).and(Err(io::Error::other(why)))
    }

    /// Finishes the punches of the last engine: these pages are far, and their file holds zeros in their place.
    pub fn expel(&self, zeroed: &[(u32, PageIdx)]) {
        for (number, page) in zeroed {
            let Some(region) = self.region(*number) else { continue };
            if let Err(error) = punch_left(*page, region.granule(*page), &*region) {
                tracing::warn!(vm = self.state.name(), number, %page, "Freeing far pages: {error}");
            }
        }
    }

    /// Restores every far or zero page of a region through its views.
    fn restore_all(&self, region: &Region, since: u64) -> io::Result<()> {
        let Some(record) = self.state.regions().into_iter().nth(region.number as usize) else { return Ok(()) };
        // Words that were never written say Resident; reading them would allocate memory for them.
        let written = self.state.written_words(&record)?;
        let pages = || written.iter().flat_map(|written| region.granules(*written));
        // Near pages first: they wait for no disk or cluster.
        let near = pages().filter(|page| !region.is_slow(*page));
        let all = near.chain(pages());
        self.restore_through(region, all, &|| self.views(), &mut || self.must_come_back(since))
    }

    fn must_still_come_back(&self, since: u64) -> io::Result<()> {
        let why = if self.is_stopping() { "the VM is being closed" } else { "it may be reclaimed again" };
        if self.must_come_back(since) { Ok(()) } else { Err(io::Error::new(io::ErrorKind::Interrupted, why)) }
    }

    /// Returns whether this restore is to go on. If the VM was released and is held again, another one does the work.
    fn must_come_back(&self, since: u64) -> bool {
        !self.is_stopping() && self.held().is_some() && self.releases() == since
    }

    /// Restores the far and zero pages among `pages` through one of these views. A page that is not available does not
    /// delay the others for long: after each of their batches two such pages are retried. `goes_on` is called before
    /// each batch, before each request to a slow store, and while a page is not available. Fails with the first error,
    /// after all pages were tried.
    pub(super) fn restore_through(
        &self,
        region: &Region,
        pages: impl Iterator<Item = PageIdx>,
        views: &dyn Fn() -> Vec<Arc<View>>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let (mut done, mut missing) = (Ok(()), None);
        // A thread that adds or removes RAM gets the layout after a batch of this size.
        let most = (PAGES_PER_UNIT / region.granule_pages()).max(1) as usize;
        // Returns the first page that is not available, and false if the restore must end.
        let mut tries = |pages: &mut dyn Iterator<Item = PageIdx>, goes_on: &mut dyn FnMut() -> bool| {
            let is_to_go_on = goes_on();
            if is_to_go_on {
                let tried = self.restore_batch(region, &mut pages.take(most), &views(), &mut missing);
                done = std::mem::replace(&mut done, Ok(())).and(tried);
            }
            (missing.take(), is_to_go_on)
        };
        // Pages of the next batch; pages that were not available: up to [`SOME`], retried more often, and the rest.
        let (mut next, mut some, mut rest) = (VecDeque::new(), VecDeque::new(), VecDeque::new());
        let (mut pages, mut buffer) = (pages.fuse(), Vec::new());
        loop {
            if next.is_empty() {
                next.extend(pages.by_ref().take(most));
                self.restore_together(region, next.iter().copied(), &views(), &mut buffer, goes_on);
            }
            if next.is_empty() && some.is_empty() && rest.is_empty() {
                return done;
            }
            for turn in 0..3 {
                let (missing, is_to_go_on) = match turn {
                    0 if !next.is_empty() => tries(&mut std::iter::from_fn(|| next.pop_front()), goes_on),
                    1 if !some.is_empty() => tries(&mut some.pop_front().into_iter(), goes_on),
                    2 if !rest.is_empty() => tries(&mut rest.pop_front().into_iter(), goes_on),
                    _ => continue,
                };
                if !is_to_go_on {
                    return done;
                }
                if some.len() < SOME { some.extend(missing) } else { rest.extend(missing) }
            }
        }
    }

    /// Restores pages of a slow store, up to [`TOGETHER`] of one unit by one request. Ends at a request that does not
    /// restore all of its pages, or when `goes_on`, called before each request, returns false.
    fn restore_together(
        &self,
        region: &Region,
        pages: impl Iterator<Item = PageIdx>,
        views: &[Arc<View>],
        buffer: &mut Vec<PageBytes>,
        goes_on: &mut dyn FnMut() -> bool,
    ) {
        if region.granule_pages() > 1 {
            return;
        }
        let slow: Vec<PageIdx> = pages.filter(|page| region.is_slow_and_free(*page)).collect();
        for run in slow.chunk_by(|a, b| a.unit() == b.unit()).flat_map(|of_unit| of_unit.chunks(TOGETHER)) {
            if !goes_on() {
                return;
            }
            // Held as in `restore_batch`.
            let layout = self.memory.layout();
            let Some(memory) = views.iter().find_map(|view| view.of_region(region)) else { return };
            if region.is_removed() {
                return;
            }
            buffer.resize(TOGETHER, [0; PAGE_SIZE]);
            let cells = run.iter().map(|page| (*page, region.granule(*page).cell()));
            let (key, stores) = (region.region_key(), self.stores.reads(layout.reads(IoContext::BACKGROUND)));
            // A page that this request does not restore is requested alone later, which tells the reason.
            let Ok(moves) = restore_some(key, cells, &memory, &stores, &mut buffer[..run.len()]) else { return };
            for (page, moved) in &moves {
                let outcome = Outcome { moved: Some(*moved), served: Ok(Served::Restored) };
                self.ledger().brought_in(region, *page, &outcome);
            }
            if moves.len() < run.len() {
                return;
            }
        }
    }

    /// Tries each page of a batch once, up to the first that is not available, which is then put into `missing`. Then
    /// the layout is released, because a store may take arbitrarily long.
    fn restore_batch(
        &self,
        region: &Region,
        pages: &mut dyn Iterator<Item = PageIdx>,
        views: &[Arc<View>],
        missing: &mut Option<PageIdx>,
    ) -> io::Result<()> {
        // Held so that the region cannot be unplugged: its addresses may belong to other RAM right afterwards.
        let layout = self.memory.layout();
        let in_region = views.iter().filter(|_| !region.is_removed()).filter_map(|view| view.of_region(region));
        let all: Vec<_> = in_region.collect();
        if all.is_empty() {
            pages.for_each(drop);
            return Ok(());
        }
        let stores = self.stores.reads(layout.reads(IoContext::BACKGROUND));
        let mut done = Ok(());
        for page in pages {
            let (granule, key) = (region.granule(page), region.key(page));
            let mut tried = 0;
            loop {
                let word = granule.cell().load();
                if !matches!(word.state(), State::Far | State::Restoring | State::Zero) {
                    break;
                }
                if word.state() == State::Zero && !word.is_locked() {
                    // For all other processes, too, a hole in the file reads as zeros.
                    if granule.cell().swap(word, Word::new(State::Resident, 0)) {
                        self.ledger().moved(State::Zero, State::Resident, granule.pages());
                    }
                    continue;
                }
                // As for a minor fault, `serve` then checks the file first: a foreign mapper may have filled it.
                let kind = FaultKind::Minor;
                let outcome = serve(granule, key, kind, &all[tried], region, &stores, |age| age);
                self.ledger().brought_in(region, page, &outcome);
                match outcome.served {
                    Ok(Served::Later) => {
                        region.check_table()?;
                        // Such a page cannot be restored, however often it is tried.
                        if region.ram.is_beyond(page, &region.ram.lengths()?) {
                            done = done.and(Err(region.is_shorter()));
                            break;
                        }
                        *missing = Some(page);
                        drop(layout);
                        std::thread::sleep(PAUSE);
                        return done;
                    }
                    // That process has ended, or no longer maps this part: try another one.
                    Ok(Served::Gone) if tried + 1 < all.len() => tried += 1,
                    Ok(Served::Gone) => {
                        let what = format!("no process of the VM maps page {page} any more");
                        done = done.and(Err(io::Error::other(what)));
                        break;
                    }
                    Err(error) => {
                        done = done.and(Err(error));
                        break;
                    }
                    Ok(_) => break,
                }
            }
        }
        done
    }
}
