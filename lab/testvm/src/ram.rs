//! Guest RAM: a shared memory file and its mapping.
//!
//! Before: `sys` creates and maps the file. After: workers read and write it. A pager takes pages out at any time.
//! Threads: any. Units: offsets are bytes from the start of RAM, which is also the start of the file.
//! Promise: that of [`Mapping`]: huge pages of the file can be mapped as such, and no Rust reference to non-atomic
//! memory inside RAM exists. A function panics if its range is outside RAM.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicU64;

use ballast_base::Bytes;
use ballast_sys::{Mapping, memfd};
use rustix::mm::Advice;

/// The RAM of a test VM, in the process that acts as the VMM.
#[derive(Debug)]
pub struct GuestRam {
    memfd: OwnedFd,
    map: Mapping,
}

impl GuestRam {
    /// Create a sparse file, and map it.
    pub fn new(size: Bytes) -> io::Result<Self> {
        Self::of(memfd::create("ballast-testvm-ram", size)?, size)
    }

    /// Create a file with huge pages of hugetlbfs, and map it. `size` must be a multiple of 2 MiB.
    pub fn huge(size: Bytes) -> io::Result<Self> {
        Self::of(memfd::create_huge("ballast-testvm-ram", size)?, size)
    }

    fn of(memfd: OwnedFd, size: Bytes) -> io::Result<Self> {
        let map = Mapping::shared(&memfd, 0, size.0 as usize)?;
        Ok(Self { memfd, map })
    }

    /// Returns the memory file.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// Returns the address of the first byte in this process.
    pub fn addr(&self) -> usize {
        self.map.addr()
    }

    /// Returns the bytes of RAM.
    pub fn len(&self) -> usize {
        self.map.len()
    }

    /// Returns false: the kernel refuses an empty mapping.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Returns one 64-bit word of RAM. Tests corrupt memory through it.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        &self.map.words(offset, 1)[0]
    }

    /// Drop this process's page-table entries of a range. The data stays in the file.
    pub fn zap(&self, offset: usize, len: usize) -> io::Result<()> {
        self.map.zap(offset, len)
    }

    /// Ask the kernel to swap a range out now. The contents do not change.
    pub fn page_out(&self, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.map.ptr(offset, len);
        // SAFETY: inside this mapping; the next touch restores the contents.
        unsafe { rustix::mm::madvise(ptr.cast(), len, Advice::LinuxPageOut) }.map_err(io::Error::from)
    }

    /// Copy `out.len()` bytes from `offset` out of RAM.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        self.map.copy_out(offset, out);
    }
}
