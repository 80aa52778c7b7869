//! Guest RAM: a shared memory file, or pieces of several, mapped at a huge-page aligned address.
//!
//! Before: `sys::memfd` creates the file, or a pool gives pieces. After: workers read and write it. A pager takes pages
//! out at any time.
//! Threads: any. Units: offsets are bytes from the start of RAM, which is also the start of the file, if RAM is one.
//! Promise: file offset and address agree modulo 2 MiB, so the kernel can map every huge page of a file as one. There
//! is no Rust reference to non-atomic memory inside RAM.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use ballast_base::{Bytes, HUGE_SIZE};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// The RAM of a test VM, in the process that acts as the VMM.
#[derive(Debug)]
pub struct GuestRam {
    /// Files, offsets and lengths, in the order of RAM; at least one.
    pieces: Vec<(OwnedFd, u64, usize)>,
    /// The reserved address space, in which an aligned start fits.
    reserved: NonNull<u8>,
    reserved_len: usize,
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: this value owns the mapping until drop, at a fixed address. Nothing in it depends on a thread.
unsafe impl Send for GuestRam {}
// SAFETY: access through `&self` is by atomics or raw copies. Workers use volatile accesses to disjoint cells.
unsafe impl Sync for GuestRam {}

impl GuestRam {
    /// Create a sparse file, and map it.
    pub fn new(size: Bytes) -> io::Result<Self> {
        Self::of(ballast_sys::memfd::create("ballast-testvm-ram", size)?, size)
    }

    /// Create a file with huge pages of hugetlbfs, and map it. `size` must be a multiple of 2 MiB.
    pub fn huge(size: Bytes) -> io::Result<Self> {
        Self::of(ballast_sys::memfd::create_huge("ballast-testvm-ram", size)?, size)
    }

    /// Map pieces of files one after the other: files, offsets and lengths, multiples of 2 MiB.
    pub fn pieces(pieces: Vec<(OwnedFd, u64, usize)>) -> io::Result<Self> {
        let len = pieces.iter().try_fold(0usize, |sum, (_, _, len)| sum.checked_add(*len));
        let len = len.filter(|len| *len > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let reserved_len = len.checked_add(HUGE_SIZE).ok_or(io::ErrorKind::OutOfMemory)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range; nothing is replaced.
        let reserved =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved_len, ProtFlags::empty(), flags)? };
        let aligned = (reserved as usize).next_multiple_of(HUGE_SIZE);
        let (Some(reserved), Some(base)) = (NonNull::new(reserved.cast()), NonNull::new(aligned as *mut u8)) else {
            return Err(io::Error::other("mmap returned the null address"));
        };
        // From here on an error unmaps it with the rest.
        let ram = Self { pieces, reserved, reserved_len, base, len };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let mut at = 0;
        for (file, offset, len) in &ram.pieces {
            let place = ram.ptr(at, *len).cast();
            // SAFETY: the range is inside RAM, which is inside the reserved range (`aligned + len <= reserved + len +
            // HUGE_SIZE`). Nobody else uses that.
            unsafe { rustix::mm::mmap(place, *len, prot, flags | MapFlags::FIXED, file.as_fd(), *offset)? };
            at += len;
        }
        Ok(ram)
    }

    fn of(memfd: OwnedFd, size: Bytes) -> io::Result<Self> {
        Self::pieces(vec![(memfd, 0, usize::try_from(size.0).map_err(io::Error::other)?)])
    }

    /// Returns the files of RAM with offsets and lengths, in the order of RAM.
    pub fn files(&self) -> impl Iterator<Item = (BorrowedFd<'_>, u64, usize)> {
        self.pieces.iter().map(|(file, offset, len)| (file.as_fd(), *offset, *len))
    }

    /// Returns the memory file; the first one, if RAM is pieces of several.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.pieces[0].0.as_fd()
    }

    /// Returns the address of the first byte in this process, a multiple of 2 MiB.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// Returns the bytes of RAM.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns false: the kernel refuses an empty mapping.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn ptr(&self, offset: usize, len: usize) -> *mut u8 {
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(inside, "range {offset:#x}+{len:#x} is outside guest RAM of {:#x} bytes", self.len);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Returns one 64-bit word of RAM. Tests corrupt memory through it.
    ///
    /// # Panics
    /// If the word is outside RAM or `offset` is not a multiple of 8.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8), "word offset {offset:#x} is not aligned");
        let ptr = self.ptr(offset, 8).cast::<AtomicU64>();
        // SAFETY: in bounds and aligned (checked above), mapped as long as `self`; integers have no invalid values.
        unsafe { &*ptr }
    }

    /// Drop this process's page-table entries of a range. The data stays in the file.
    ///
    /// # Panics
    /// If the range is outside RAM.
    pub fn zap(&self, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.ptr(offset, len);
        // SAFETY: inside this shared file mapping, so the contents stay in the file, and the next touch maps them.
        unsafe { rustix::mm::madvise(ptr.cast(), len, Advice::LinuxDontNeed) }.map_err(io::Error::from)
    }

    /// Ask the kernel to swap a range out now. The contents do not change.
    ///
    /// # Panics
    /// If the range is outside RAM.
    pub fn page_out(&self, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.ptr(offset, len);
        // SAFETY: inside this mapping; the next touch restores the contents.
        unsafe { rustix::mm::madvise(ptr.cast(), len, Advice::LinuxPageOut) }.map_err(io::Error::from)
    }

    /// Copy `out.len()` bytes from `offset` out of RAM.
    ///
    /// # Panics
    /// If the range is outside RAM.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        let ptr = self.ptr(offset, out.len());
        // SAFETY: the source is in bounds and mapped as long as `self`. `out` is not in RAM, so the two do not overlap.
        // If a worker writes meanwhile, the copy has a mix of old and new bytes.
        unsafe { std::ptr::copy_nonoverlapping(ptr, out.as_mut_ptr(), out.len()) }
    }
}

impl Drop for GuestRam {
    fn drop(&mut self) {
        // SAFETY: the reserved range has RAM inside it and is unmapped exactly once. References into it borrow `self`.
        if let Err(error) = unsafe { rustix::mm::munmap(self.reserved.as_ptr().cast(), self.reserved_len) } {
            debug_assert!(false, "unmapping guest RAM: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn ram_is_huge_page_aligned_starts_as_holes_and_keeps_its_bytes_after_a_zap() {
        let ram = GuestRam::new(Bytes(3 << 20)).expect("ram");
        assert!(ram.addr().is_multiple_of(HUGE_SIZE));
        assert_eq!(ballast_sys::memfd::resident(ram.memfd()).expect("stat").0, 0);
        ram.word(4096).store(5, Relaxed);
        ram.zap(0, ram.len()).expect("zap");
        assert_eq!(ram.word(4096).load(Relaxed), 5);
        assert_eq!(ballast_sys::memfd::resident(ram.memfd()).expect("stat").0, 1);
    }

    #[test]
    fn pieces_of_files_are_one_range_in_their_order() {
        let file = || ballast_sys::memfd::create("ballast-testvm-ram", Bytes(4 << 20)).expect("file");
        let (first, second) = (file(), file());
        let ram = GuestRam::pieces(vec![(first, 2 << 20, 2 << 20), (second, 0, 4 << 20)]).expect("ram");
        ram.word(0).store(7, Relaxed);
        ram.word(2 << 20).store(8, Relaxed);
        let found = ram.files().map(|(file, offset, _)| {
            let mut word = [0; 8];
            rustix::io::pread(file, &mut word, offset).expect("read");
            u64::from_ne_bytes(word)
        });
        assert_eq!((found.collect::<Vec<_>>(), ram.len()), (vec![7, 8], 6 << 20));
        assert!(GuestRam::pieces(Vec::new()).is_err());
    }

    #[test]
    #[should_panic(expected = "outside guest RAM")]
    fn a_word_outside_ram_panics() {
        GuestRam::new(Bytes(4096)).expect("ram").word(4096);
    }
}
