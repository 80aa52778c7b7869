//! What the pager asks of guest memory: a narrow face over the kernel, so that the model checker can stand in for it.
//! A granule is named by its first page; how many pages it has, both sides know.
//!
//! Before: `fault` and `evict` decide. After: [`crate::view`] does it with userfaultfd and the region's file.

use std::io;

use ballast_base::PageIdx;
use ballast_store::PageBytes;
use ballast_sys::uffd::FillOutcome;

/// What punching came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Punched {
    /// There is a hole.
    Gone,
    /// Some of the pages are still in the file and **hold zeros now**. The kernel frees a part of a huge page only if it
    /// can split that; while somebody has it pinned, or is just mapping another page of it, it writes zeros instead.
    Stuck,
}

/// The file that holds one region.
pub trait Backing {
    /// Read as many pages as `out` holds, from `first`. A hole reads as zeros.
    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<()>;

    /// Free `count` pages from `first`. Every mapping of them in every process goes, too.
    fn punch(&self, first: PageIdx, count: u64) -> io::Result<Punched>;

    /// Put bytes into one page of the file.
    fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()>;
}

/// One process's mapping of the region, whose faults we serve.
pub trait Mapped {
    /// Fill the hole with these bytes, a whole granule's, and map it.
    fn install(&self, page: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome>;

    /// The same with a run of granules of one page each, all in one unit, as one if the kernel can. Answers how many
    /// were filled, from the first on.
    fn install_run(&self, first: PageIdx, bytes: &[PageBytes]) -> io::Result<usize> {
        for (done, page) in (first.0..first.0 + bytes.len() as u64).map(PageIdx).enumerate() {
            if self.install(page, &bytes[done..=done])? != FillOutcome::Done {
                return Ok(done);
            }
        }
        Ok(bytes.len())
    }

    /// Fill the hole with zeros and map the granule.
    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Map the granule that is in the file.
    fn map(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Make every touch of the granule a memory error, or stop the VM where the kernel cannot.
    fn poison(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Wake whoever waits for the granule.
    fn wake(&self, page: PageIdx) -> io::Result<()>;
}
