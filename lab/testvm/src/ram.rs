//! Guest RAM: a shared memory file, mapped at a huge-page aligned address.
//!
//! Before: `sys::memfd` creates the file. After: workers read and write it. A pager takes pages out at any time.
//! Threads: any. Units: offsets are bytes from the start of RAM, which is also the start of the file.
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
    memfd: OwnedFd,
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

    fn of(memfd: OwnedFd, size: Bytes) -> io::Result<Self> {
        let len = usize::try_from(size.0).map_err(io::Error::other)?;
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
        let ram = Self { memfd, reserved, reserved_len, base, len };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        // SAFETY: RAM is inside the reserved range (`aligned + len <= reserved + len + HUGE_SIZE`). No other user.
        unsafe { rustix::mm::mmap(ram.ptr(0, len).cast(), len, prot, flags | MapFlags::FIXED, &ram.memfd, 0)? };
        Ok(ram)
    }

    /// Returns the memory file.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
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
    #[should_panic(expected = "outside guest RAM")]
    fn a_word_outside_ram_panics() {
        GuestRam::new(Bytes(4096)).expect("ram").word(4096);
    }
}
