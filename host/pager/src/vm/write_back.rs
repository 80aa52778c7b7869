//! Write-back: the processes of a VM are gone, and its RAM files are not.
//!
//! Before: the last view is gone and the workers have ended. After: far pages are in the RAM files again, for the next
//! process that opens the files: the program that the VMM executed, or the next VMM of a file in a tmpfs.
//! Threads: the caller's one; it takes seconds for millions of pages. Units: pages of a region.
//! Promise: holes are filled, each at once (`UFFDIO_COPY` into a mapping of this process): bytes in the file are valid
//! (invariant 1), also those that another process writes meanwhile. Zeros in the place of a far page come from a read
//! that was too early, and are replaced as `fault` does it. Write-back may stop at any page and be begun again.

use std::io;
use std::sync::Arc;

use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_base::wire::Span;
use ballast_base::{Bytes, Hva, PageCount, PageRange};
use ballast_sys::Uffd;
use ballast_sys::uffd::{HUGETLB_FEATURES, REQUIRED_FEATURES, feature};

use super::Vm;
use crate::vm::process_peer::ProcessPeer;
use crate::vm::region::Region;
use crate::vm::shard::Shards;
use crate::vm::view::View;
use ballast_page::page_state::{State, Word};

/// The result of writing back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WrittenBack {
    /// Pages that were far and are not any more.
    pub pages: PageCount,
    /// It was told to stop.
    pub stopped: bool,
}

impl Vm {
    /// Pages of these regions whose bytes are in a store only.
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

    /// Brings every far page of these regions back into its file. `go_on` is called before each 512 pages, and while a
    /// page is not available; it may wait.
    ///
    /// # Errors
    /// The kernel refuses a userfaultfd; or the first page that could not be brought back, after all were tried: one
    /// beyond the end of its file, say, which somebody made shorter.
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
                // Its page tables are not needed any more, and this process must not appear to use the memory.
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

    /// No process can reach these regions any more: stops serving them, and forgets their words.
    ///
    /// # Errors
    /// If the kernel does not give the memory of words back.
    pub fn give_up(&self, regions: &[Arc<Region>]) -> io::Result<()> {
        let records = self.state.regions();
        // All of them first: a page that is brought back without words would read zeros.
        regions.iter().for_each(|region| self.state.give_up_region(region.number));
        let record = |region: &Arc<Region>| records.get(region.number as usize);
        regions.iter().filter_map(record).try_for_each(|record| self.state.forget_words(record))
    }

    /// Forgets the words of a region without workers, if all they say is that pages are in their file, or zeros.
    ///
    /// # Errors
    /// If the kernel does not say which words were written, or does not give their memory back.
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

    /// Calls this with every chunk that has far pages, and how many, until it returns false.
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

/// Pages of these whose bytes are in a store only.
fn far_of(region: &Region, pages: PageRange) -> u64 {
    region.granules(pages).filter(|page| region.is_far(*page)).count() as u64 * region.granule_pages()
}

/// A mapping of a region in this process, under a userfaultfd of its own. No thread touches it.
struct OwnView {
    view: Arc<View>,
    map: ballast_sys::Mapping,
}

impl OwnView {
    fn of(region: &Region) -> io::Result<Self> {
        let (uffd, features) = Uffd::create(REQUIRED_FEATURES | HUGETLB_FEATURES | feature::POISON)?;
        let map = region.map()?;
        let shards = Shards::new(vec![uffd]).ok_or_else(|| io::Error::other("no userfaultfd"))?;
        let peer = Arc::new(ProcessPeer::open(std::process::id())?);
        let view = View::new(std::process::id(), shards, features, peer);
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
