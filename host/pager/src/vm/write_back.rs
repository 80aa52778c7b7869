//! Write-back: puts far pages back into RAM files that outlive the processes of their VM.
//!
//! Before: the last view was removed, and the workers have ended. After: the RAM files have all pages, for the next
//! process that opens them: the program that the VMM executed, or the next VMM of a file in a tmpfs.
//! Threads: the caller's; it takes seconds for millions of pages. Units: pages of a region.
//! Promise: each hole is filled atomically (`UFFDIO_COPY` into a mapping of this process). Bytes in the file are valid
//! (invariant 1), also those that another process writes at the same time. Zeros in the place of a far page come from a
//! read that was too early, and are replaced as `fault` does it. Write-back may stop at any page and be called again.

use std::io;
use std::sync::Arc;

use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_base::wire::Span;
use ballast_base::{Bytes, Hva, PageCount, PageRange};
use ballast_sys::uffd::{HUGETLB_FEATURES, REQUIRED_FEATURES, feature};
use ballast_sys::{Uffd, scm};

use super::Vm;
use crate::vm::client_peer::ClientPeer;
use crate::vm::region::Region;
use crate::vm::view::View;
use ballast_page::page_state::{State, Word};

/// The result of write-back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Pages written back.
    pub pages: PageCount,
    /// Whether `go_on` ended it.
    pub stopped: bool,
}

impl Vm {
    /// Number of far pages of these regions.
    pub fn far_in(&self, regions: &[Arc<Region>]) -> io::Result<PageCount> {
        let mut far = 0;
        for region in regions {
            self.far_chunks(region, |_, pages| {
                far += pages;
                Ok(true)
            })?;
        }
        Ok(PageCount(far))
    }

    /// Writes every far page of these regions back into its file. `go_on` is called before each 512 pages, and while a
    /// page is not available; it may wait; false ends the write-back.
    ///
    /// # Errors
    /// The kernel refuses a userfaultfd; or the first page that could not be written back, for example beyond the end
    /// of a file that was made shorter. All other pages were tried.
    pub fn write_back(&self, regions: &[Arc<Region>], go_on: &mut dyn FnMut() -> bool) -> io::Result<WrittenBack> {
        let (mut done, mut failed) = (WrittenBack::default(), Ok(()));
        for region in regions {
            let own = OwnView::of(region)?;
            let views = vec![own.view.clone()];
            let completed = self.far_chunks(region, |chunk, far| {
                own.cover(region, chunk)?;
                let mut stopped = false;
                let restored = self.restore_through(region, region.granules(chunk), &|| views.clone(), &mut || {
                    stopped = stopped || !go_on();
                    !stopped
                });
                failed = std::mem::replace(&mut failed, Ok(())).and(restored);
                // Unmapped at once: the memory must not count as this process's, and its page tables are not needed.
                own.uncover(chunk)?;
                done.pages.0 += far.saturating_sub(far_of(region, chunk)) * u64::from(!stopped);
                Ok(!stopped)
            })?;
            if !completed {
                done.stopped = true;
                break;
            }
        }
        failed.map(|()| done)
    }

    /// Gives up regions that no process can reach any more: stops serving them, and frees their words.
    ///
    /// # Errors
    /// The memory of words could not be freed.
    pub fn give_up(&self, regions: &[Arc<Region>]) -> io::Result<()> {
        let records = self.state.regions();
        // All regions are given up first: a page restored after its words were freed would read as zeros.
        regions.iter().for_each(|region| self.state.give_up_region(region.number));
        let record = |region: &Arc<Region>| records.get(region.number as usize);
        regions.iter().filter_map(record).try_for_each(|record| self.state.forget_words(record))
    }

    /// Frees the words of a region without workers if they only say that pages are in their file or zeros.
    ///
    /// # Errors
    /// The kernel does not say which words were written, or does not free them.
    pub fn forget_resident(&self, region: &Region) -> io::Result<()> {
        let Some(record) = self.state.regions().into_iter().nth(region.number as usize) else { return Ok(()) };
        let in_file = |word: Word| {
            let state = matches!(word.state(), State::Resident | State::Zero | State::Quarantine | State::Evicting);
            state && !word.is_locked()
        };
        let written = self.state.written_words(&record)?;
        if written.iter().flat_map(|pages| pages.iter()).all(|page| in_file(region.word(page))) {
            self.state.forget_words(&record)?;
        }
        Ok(())
    }

    /// Calls `each` with every chunk with far pages, and their number, until it returns false. Returns whether it did
    /// not.
    fn far_chunks(
        &self,
        region: &Region,
        mut each: impl FnMut(PageRange, u64) -> io::Result<bool>,
    ) -> io::Result<bool> {
        let Some(record) = self.state.regions().into_iter().nth(region.number as usize) else { return Ok(true) };
        for written in self.state.written_words(&record)? {
            for chunk in written.pieces(PAGES_PER_CHUNK) {
                let far = far_of(region, chunk);
                if far > 0 && !each(chunk, far)? {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }
}

fn far_of(region: &Region, pages: PageRange) -> u64 {
    region.granules(pages).filter(|page| region.is_far(*page)).count() as u64 * region.granule_pages()
}

/// A mapping of a region in this process, with a userfaultfd. No thread touches it.
struct OwnView {
    view: Arc<View>,
    map: ballast_sys::Mapping,
}

impl OwnView {
    fn of(region: &Region) -> io::Result<Self> {
        let (uffd, features) = Uffd::create(REQUIRED_FEATURES | HUGETLB_FEATURES | feature::POISON)?;
        let map = region.ram.map()?;
        // No client runs in this process: a message to it is an error.
        let (control, _) = scm::pair()?;
        let view = View::new(std::process::id(), vec![uffd], features, Arc::new(ClientPeer::new(control, 0)));
        view.add_span(Span { hva: Hva(map.addr() as u64), len: Bytes(map.len() as u64) }, region.number);
        Ok(Self { view: Arc::new(view), map })
    }

    fn cover(&self, region: &Region, pages: PageRange) -> io::Result<()> {
        let Some(memory) = self.view.of_region(region) else { return Ok(()) };
        memory.register(pages)
    }

    fn uncover(&self, pages: PageRange) -> io::Result<()> {
        self.map.zap(pages.start().offset() as usize, pages.bytes().0 as usize)
    }
}
