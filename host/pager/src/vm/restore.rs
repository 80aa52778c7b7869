//! Restore: brings back all pages of a VM, and finishes what a dead engine had begun.
//!
//! Before: memory is about to be pinned, or a foreign mapper was seen; or an engine took over. After: no page is far:
//! each is in its file, or zeros, or known to be lost. Threads: any; it takes seconds for millions of pages.
//! Promise: no page is evicted meanwhile. It ends: a page beyond the end of its file, which somebody made shorter, is
//! an error, and all others come back. Pages of a disk or a cluster are asked for by up to 64 at once, and what does
//! not come so, one by one.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::store::{IoContext, PageBytes};
use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT, PageIdx};
use ballast_sys::uffd::FaultKind;

use super::{Hold, Vm};
use crate::vm::region::Region;
use crate::vm::view::View;
use ballast_page::fault::{restore_some, serve};
use ballast_page::outcome::{Outcome, Served};
use ballast_page::page_state::{State, Word};
use ballast_page::punch::punch_left;

/// Pages restored before a thread that adds or removes RAM gets a turn.
const BATCH: u64 = PAGES_PER_UNIT;
/// Most pages of a slow store that are asked for at once: they are locked together.
const TOGETHER: usize = 64;
/// How long to leave a page alone that is not available: its store is busy, or a tmpfs of limited size is full, which
/// may last.
const PAUSE: Duration = Duration::from_millis(1);
/// Pages that are not available are asked for again and again, for up to [`OFTEN`], as many as this time suffices for.
/// So a store gives up what it cannot read, which it does only if it is asked often. As much time is all others'.
const TURN: Duration = Duration::from_secs(2);
const OFTEN: Duration = Duration::from_secs(30);

impl Vm {
    /// Holds reclaim for this reason and brings every page back. Returns when none is far.
    ///
    /// # Errors
    /// The first that was met. All other pages are back.
    pub fn restore_for(&self, kind: Hold, reason: String) -> io::Result<()> {
        self.hold(kind, Some(reason));
        self.restore()
    }

    /// Brings every page of a held VM back. Returns when none is far.
    pub fn restore(&self) -> io::Result<()> {
        // Reclaim looks at the holds under the shared lock, before each batch. Once this thread has had it exclusively,
        // every batch under way has seen this hold.
        drop(self.memory.change_layout());
        let (mut done, since) = (Ok(()), self.releases());
        for region in self.regions() {
            done = done.and(self.restore_region(&region, since));
        }
        done
    }

    /// Brings every page of a region back: through the processes that map it, and what these do not map through a
    /// mapping of our own, into its file.
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

    /// Finishes what the last engine left half done: these pages are far, and their file holds zeros in their place.
    pub fn expel(&self, zeroed: &[(u32, PageIdx)]) {
        for (number, page) in zeroed {
            let Some(region) = self.region(*number) else { continue };
            if let Err(error) = punch_left(*page, region.granule(*page), &*region) {
                tracing::warn!(vm = self.state.name(), number, %page, "Freeing what is far: {error}");
            }
        }
    }

    /// Brings every far or zero page of a region back.
    fn restore_all(&self, region: &Region, since: u64) -> io::Result<()> {
        let Some(record) = self.state.regions().into_iter().nth(region.number as usize) else { return Ok(()) };
        // Words that were never written say Resident; reading them would have the kernel allocate memory for them.
        let written = self.state.written_words(&record)?;
        let pages = || written.iter().flat_map(|written| region.granules(*written));
        // No disk or cluster need be waited for.
        let near = pages().filter(|page| !region.is_slow(*page));
        let all = near.chain(pages());
        self.restore_through(region, all, &|| self.views(), &mut || self.must_come_back(since))
    }

    fn must_still_come_back(&self, since: u64) -> io::Result<()> {
        let why = if self.is_stopping() { "the VM is being closed" } else { "it may be reclaimed again" };
        if self.must_come_back(since) { Ok(()) } else { Err(io::Error::new(io::ErrorKind::Interrupted, why)) }
    }

    /// Is all of it still to come back? Another restore does that if it was released meanwhile and is held again.
    fn must_come_back(&self, since: u64) -> bool {
        !self.is_stopping() && self.held().is_some() && self.releases() == since
    }

    /// Brings every far or zero page of these back through one of these views. A page that is not available keeps no
    /// other one waiting for long: some of those have their turn again and again, beside all others. `goes_on` is
    /// called before each [`BATCH`], before each request of a slow store, and while a page is not available.
    ///
    /// # Errors
    /// The first that was met, after all pages were tried.
    pub(super) fn restore_through(
        &self,
        region: &Region,
        pages: impl Iterator<Item = PageIdx>,
        views: &dyn Fn() -> Vec<Arc<View>>,
        goes_on: &mut dyn FnMut() -> bool,
    ) -> io::Result<()> {
        let (mut done, mut missing) = (Ok(()), None);
        let most = (BATCH / region.granule_pages()).max(1) as usize;
        // Returns the first of these that is not available, and false if this is to end.
        let mut tries = |pages: &mut dyn Iterator<Item = PageIdx>, goes_on: &mut dyn FnMut() -> bool| {
            let is_to_go_on = goes_on();
            if is_to_go_on {
                let tried = self.restore_batch(region, &mut pages.take(most), &views(), &mut missing);
                done = std::mem::replace(&mut done, Ok(())).and(tried);
            }
            (missing.take(), is_to_go_on)
        };
        // Those that are asked for often, each since when; those that wait.
        let (mut often, mut waiting) = (VecDeque::<(PageIdx, Instant)>::new(), VecDeque::new());
        // The next of all pages.
        let (mut pages, mut next, mut buffer) = (pages.fuse(), VecDeque::new(), Vec::new());
        let mut fill = |next: &mut VecDeque<PageIdx>, goes_on: &mut dyn FnMut() -> bool| {
            if next.is_empty() {
                next.extend(pages.by_ref().take(most));
                self.restore_together(region, next.iter().copied(), &views(), &mut buffer, goes_on);
            }
            !next.is_empty()
        };
        while fill(&mut next, goes_on) || !often.is_empty() || !waiting.is_empty() {
            let mut began = Instant::now();
            for (page, since) in std::mem::take(&mut often) {
                if began.elapsed() >= TURN {
                    waiting.push_back(page);
                    continue;
                }
                match tries(&mut std::iter::once(page), goes_on) {
                    (_, false) => return done,
                    (Some(page), _) if since.elapsed() < OFTEN => often.push_back((page, since)),
                    (missing, _) => waiting.extend(missing),
                }
            }
            let (mut spent, mut left) = (began.elapsed(), waiting.len());
            began = Instant::now();
            while (fill(&mut next, goes_on) || left > 0) && (often.is_empty() || began.elapsed() < TURN) {
                let begun = Instant::now();
                let (missing, is_to_go_on) = if !next.is_empty() {
                    tries(&mut std::iter::from_fn(|| next.pop_front()), goes_on)
                } else {
                    left -= 1;
                    tries(&mut waiting.pop_front().into_iter(), goes_on)
                };
                if !is_to_go_on {
                    return done;
                }
                let Some(page) = missing else { continue };
                if spent < TURN {
                    often.push_back((page, begun))
                } else {
                    waiting.push_back(page)
                }
                spent += begun.elapsed();
            }
        }
        done
    }

    /// Brings pages of a slow store back, up to [`TOGETHER`] of a unit by one request, until one does not bring all, or
    /// `goes_on`, which is called before each, says no.
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
            // Held as below.
            let layout = self.layout();
            let Some(memory) = views.iter().find_map(|view| view.of_region(region)) else { return };
            if region.is_removed() {
                return;
            }
            buffer.resize(TOGETHER, [0; PAGE_SIZE]);
            let cells = run.iter().map(|page| (*page, region.granule(*page).cell()));
            let (key, stores) = (region.region_key(), self.stores.reads(layout.reads(IoContext::BACKGROUND)));
            // A page that does not come is asked for alone, where it is found out why.
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

    /// The same of a batch, once and up to the first page that is not available now, which `missing` is then. The
    /// layout may change after that, as a store may take for ever.
    fn restore_batch(
        &self,
        region: &Region,
        pages: &mut dyn Iterator<Item = PageIdx>,
        views: &[Arc<View>],
        missing: &mut Option<PageIdx>,
    ) -> io::Result<()> {
        // Held so that the region is not unplugged meanwhile: its addresses may belong to other RAM right afterwards.
        let layout = self.layout();
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
                    // To all other processes, a hole in the file reads as zeros, too.
                    if granule.cell().swap(word, Word::new(State::Resident, 0)) {
                        self.ledger().moved(State::Zero, State::Resident, granule.pages());
                    }
                    continue;
                }
                // As if it were in the file: then the file is checked first. A foreign mapper may be why we are here.
                let kind = FaultKind::Minor;
                let outcome = serve(granule, key, kind, &all[tried], region, &stores, |age| age);
                self.ledger().brought_in(region, page, &outcome);
                match outcome.served {
                    Ok(Served::Later) => {
                        region.check_table()?;
                        // It has no place to go to, however often it is tried.
                        if region.is_beyond(page, &region.lengths()?) {
                            done = done.and(Err(region.is_shorter()));
                            break;
                        }
                        *missing = Some(page);
                        drop(layout);
                        std::thread::sleep(PAUSE);
                        return done;
                    }
                    // That process is gone, or does not map this part any more: try another one.
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
