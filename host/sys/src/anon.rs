//! A private anonymous mapping: the memory of an ordinary program, which the kernel itself can swap out.
//!
//! Before: nothing. After: `doctor` and benches measure the kernel's swap on it.
//! Threads: any; access is through atomics. Units: offsets are bytes from the start.
//! Promise: 4 KiB pages only, and no Rust reference to plain memory inside.

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// An owned anonymous mapping; unmapped when dropped.
#[derive(Debug)]
pub struct Anon {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is memory owned by this value until drop, at a fixed address; nothing in it is thread-bound.
unsafe impl Send for Anon {}
// SAFETY: access through `&self` is by atomics only.
unsafe impl Sync for Anon {}

impl Anon {
    /// Map `len` bytes.
    pub fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range; nothing is replaced.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, prot, flags)? };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned the null address"))?;
        let map = Self { base, len };
        match map.advise(Advice::LinuxNoHugepage) {
            // A kernel without huge pages does not know the advice.
            Err(error) if error.raw_os_error() != Some(libc::EINVAL) => Err(error),
            _ => Ok(map),
        }
    }

    /// Let the kernel merge its pages with equal ones (KSM).
    ///
    /// # Errors
    /// For example `EINVAL`: the kernel has no KSM.
    pub fn mergeable(&self) -> io::Result<()> {
        self.advise(Advice::LinuxMergeable)
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never empty: the kernel refuses such a mapping.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// One 64-bit word.
    ///
    /// # Panics
    /// If the word is outside or `offset` is not a multiple of 8.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        let inside = offset.checked_add(8).is_some_and(|end| end <= self.len);
        assert!(inside && offset.is_multiple_of(8), "no word at {offset:#x} of {:#x} bytes", self.len);
        // SAFETY: in bounds and aligned (checked above), mapped as long as `self`; integers have no invalid values.
        unsafe { &*self.base.as_ptr().add(offset).cast::<AtomicU64>() }
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
        // SAFETY: the whole of our own mapping; the advice used here (no huge pages, merge, page out) changes no bytes.
        unsafe { rustix::mm::madvise(self.base.as_ptr().cast(), self.len, advice) }.map_err(io::Error::from)
    }
}

impl Drop for Anon {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping made in `new`, unmapped once; references into it borrow `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            debug_assert!(false, "unmapping {:#x}+{:#x}: {error}", self.addr(), self.len);
        }
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

    #[test]
    #[should_panic(expected = "no word at")]
    fn a_word_outside_panics() {
        Anon::new(4096).expect("map").word(4096);
    }
}
