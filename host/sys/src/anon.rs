//! A private anonymous mapping: the memory of an ordinary program, which the kernel itself can swap out.
//!
//! Before: nothing. After: `doctor` and benches measure the kernel's swap on it.
//! Threads: any; access is through atomics. Units: offsets are bytes from the start.
//! Promise: 4 KiB pages only, and no Rust reference to plain memory inside.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::Mapping;

/// An owned anonymous mapping; unmapped when dropped.
#[derive(Debug)]
pub struct Anon(Mapping);

impl Anon {
    /// Map `len` bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range; nothing is replaced.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned the null address"))?;
        let map = Self(Mapping { base, len });
        match map.advise(Advice::LinuxNoHugepage) {
            // A kernel without huge pages does not know the advice.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            _ => Ok(map),
        }
    }

    /// Bytes mapped.
    #[expect(clippy::len_without_is_empty, reason = "the kernel refuses an empty mapping")]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.0.addr()
    }

    /// One 64-bit word.
    ///
    /// # Panics
    /// If the word is outside or `offset` is not a multiple of 8.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        &self.0.words(offset, 1)[0]
    }

    /// Let the kernel use huge pages for it from now on (`MADV_HUGEPAGE`); khugepaged then makes some.
    pub fn huge(&self) -> io::Result<()> {
        self.advise(Advice::LinuxHugepage)
    }

    /// Have the kernel reclaim all of the mapping now (`MADV_PAGEOUT`), on the calling thread.
    pub fn page_out(&self) -> io::Result<()> {
        self.advise(Advice::LinuxPageOut)
    }

    fn advise(&self, advice: Advice) -> io::Result<()> {
        // SAFETY: the whole of our own mapping; the advice used here (no huge pages, page out) changes no bytes.
        unsafe { rustix::mm::madvise(self.0.ptr(0, self.0.len).cast(), self.0.len, advice) }.map_err(io::Error::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn words_keep_their_value_when_the_kernel_is_asked_to_page_out() {
        let map = Anon::new(8 * 4096).expect("map");
        (0..8).for_each(|page| map.word(page * 4096 + 8).store(page as u64 + 1, Relaxed));
        map.page_out().expect("page out");
        (0..8).for_each(|page| assert_eq!(map.word(page * 4096 + 8).load(Relaxed), page as u64 + 1));
    }
}
