//! Guest memory as the pager uses it: a narrow trait over the kernel, which the model checker implements, too. A
//! granule is named by its first page; both sides know its size.
//!
//! Before: `fault` and `evict` decide. After: the view acts by userfaultfd and the region's file.
//! Threads: the holder of the granule's lock.
//! Promise: an outcome says what the file holds now.

use std::io;

use ballast_base::fill::FillOutcome;
use ballast_base::store::PageBytes;
use ballast_base::{PageIdx, PageRange};

/// The result of a punch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Punched {
    /// There is a hole.
    Gone,
    /// Some of the pages are still in the file and **hold zeros**. The kernel frees a part of a huge page only if it
    /// can split that; while the huge page is pinned, or another page of it is being mapped, it writes zeros instead.
    Stuck,
}

/// What the file has at a granule's offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holds {
    /// A hole.
    Nothing,
    /// Memory that is all zeros, which are never the bytes of a Far granule: a granule of zeros is Zero.
    Zeros,
    /// Memory that failed: it cannot be read.
    Failed,
    /// Anything else.
    Bytes,
}

/// The result of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadOutcome {
    /// The bytes are there.
    Done,
    /// Memory under some of the pages failed: they cannot be read, and the others' bytes in the buffer are not valid.
    Failed,
}

/// The file that holds one region.
pub trait Backing {
    /// Those of these granules, in order, that are pinned or may be: a device may write to them without a fault. Called
    /// when they are zapped and claimed, and before they are read. Returns none where the kernel cannot tell; then only
    /// the time since the zap protects them.
    fn held(&self, granules: &[PageIdx]) -> Vec<PageIdx> {
        let _ = granules;
        Vec::new()
    }

    /// Reads as many pages as `out` holds, from `first` on. A hole reads as zeros.
    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome>;

    /// What the file holds at these pages, which are one granule.
    fn holds(&self, pages: PageRange) -> io::Result<Holds>;

    /// Frees these pages. The kernel unmaps them in every process.
    ///
    /// # Errors
    /// The kernel refused. Some of the pages may be freed, or hold zeros.
    fn punch(&self, pages: PageRange) -> io::Result<Punched>;

    /// Writes bytes into one base page of the file. (Files of huge pages cannot be written to.)
    fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()>;
}

/// One process's mapping of the region, whose faults the engine serves.
pub trait Mapped {
    /// Fills the hole of a granule with these bytes, and maps it.
    fn install(&self, page: PageIdx, bytes: &[PageBytes]) -> io::Result<FillOutcome>;

    /// Like [`Mapped::install`], for a run of granules of one page each, all in one unit; by one call if the kernel
    /// can. Returns how many were filled, from the first on.
    fn install_run(&self, first: PageIdx, bytes: &[PageBytes]) -> io::Result<usize> {
        for (done, page) in (first.0..first.0 + bytes.len() as u64).map(PageIdx).enumerate() {
            if self.install(page, &bytes[done..=done])? != FillOutcome::Done {
                return Ok(done);
            }
        }
        Ok(bytes.len())
    }

    /// Fills the hole with zeros and maps the granule.
    fn install_zero(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Like [`Mapped::install_zero`], for base pages, up to the first that is present. Returns how many were filled.
    fn zero_run(&self, pages: PageRange) -> io::Result<u64> {
        for (done, page) in pages.iter().enumerate() {
            if self.install_zero(page)? != FillOutcome::Done {
                return Ok(done as u64);
            }
        }
        Ok(pages.count())
    }

    /// Maps a granule that is in the file.
    fn map(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Maps those of these base pages that are in the file.
    fn map_run(&self, pages: PageRange) -> io::Result<()> {
        pages.iter().try_for_each(|page| self.map(page).map(drop))
    }

    /// Makes every touch of the granule a memory error, or stops the VM where the kernel cannot.
    fn poison(&self, page: PageIdx) -> io::Result<FillOutcome>;

    /// Wakes the threads that wait for the granule.
    fn wake(&self, page: PageIdx) -> io::Result<()>;
}

/// Punches until a hole is seen. `punch` frees the pages, or has the kernel write zeros where it cannot free them.
///
/// # Errors
/// The first `punch` failed. Errors of later ones are ignored, because the bytes may be zeros by then.
pub fn punch_until_gone(
    mut punch: impl FnMut() -> io::Result<()>,
    is_hole: impl Fn() -> io::Result<bool>,
) -> io::Result<Punched> {
    /// The kernel can mostly split the huge page a moment later.
    const TRIES: u32 = 3;
    punch()?;
    for _ in 1..TRIES {
        if is_hole().unwrap_or(false) {
            return Ok(Punched::Gone);
        }
        std::thread::yield_now();
        if punch().is_err() {
            return Ok(Punched::Stuck);
        }
    }
    Ok(if is_hole().unwrap_or(false) { Punched::Gone } else { Punched::Stuck })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_error_after_a_punch_that_may_have_left_zeros_is_not_one_before_it() {
        let refused = || Err(io::Error::from_raw_os_error(5));
        assert!(punch_until_gone(refused, || Ok(false)).is_err(), "nothing has happened");
        for fails_at in 2..5 {
            let mut tries = 0;
            let punch = || {
                tries += 1;
                if tries == fails_at { refused() } else { Ok(()) }
            };
            let punched = punch_until_gone(punch, || Ok(false)).expect("the first try left zeros");
            assert_eq!(punched, Punched::Stuck, "failing at try {fails_at}");
        }
        assert_eq!(punch_until_gone(|| Ok(()), || Ok(true)).expect("no error"), Punched::Gone);
        assert_eq!(punch_until_gone(|| Ok(()), || Err(io::ErrorKind::Other.into())).expect("none"), Punched::Stuck);
    }
}
