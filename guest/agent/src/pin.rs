//! Pinning: memory of this process that stays at its physical place, by io_uring's registered buffers.
//!
//! Before: memory is mapped and filled. After: the kernel neither moves nor frees its pages until it is unpinned, or
//! the process ends.
//! `mlock` is not enough: compaction migrates locked pages. A registered buffer is a long-term pin, for which the
//! kernel first moves the pages out of movable zones.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::files::last_error;

/// Buffers that one ring may have.
pub const MOST: u32 = 1 << 14;

const SETUP: libc::c_long = 425;
const REGISTER: libc::c_long = 427;
const REGISTER_BUFFERS: libc::c_long = 15;
const UPDATE_BUFFERS: libc::c_long = 16;
const SPARSE: u32 = 1;

/// `struct io_uring_rsrc_register`.
#[repr(C)]
struct Register {
    count: u32,
    flags: u32,
    zero: u64,
    data: u64,
    tags: u64,
}

/// `struct io_uring_rsrc_update2`.
#[repr(C)]
struct Update {
    offset: u32,
    zero: u32,
    data: u64,
    tags: u64,
    count: u32,
    zero_too: u32,
}

/// A ring whose table of buffers pins them.
#[derive(Debug)]
pub struct Pins(OwnedFd);

impl Pins {
    /// An empty table.
    ///
    /// # Errors
    /// The kernel has no io_uring (or it is switched off), or is older than 5.19.
    pub fn new() -> io::Result<Self> {
        let mut params = [0u32; 30];
        // SAFETY: a ring of one entry; the parameters are 120 bytes, all zero, and the kernel fills them.
        let fd = unsafe { libc::syscall(SETUP, 1, params.as_mut_ptr()) };
        if fd < 0 {
            return last_error("making an io_uring to pin memory by");
        }
        // SAFETY: the kernel has just given it to us.
        let ring = Self(unsafe { OwnedFd::from_raw_fd(fd as i32) });
        let table = Register { count: MOST, flags: SPARSE, zero: 0, data: 0, tags: 0 };
        ring.register(REGISTER_BUFFERS, (&raw const table).cast(), size_of::<Register>())?;
        Ok(ring)
    }

    fn register(&self, what: libc::c_long, argument: *const u8, size: usize) -> io::Result<()> {
        // SAFETY: the argument is a structure of this size, which the kernel reads.
        let done = unsafe { libc::syscall(REGISTER, self.0.as_raw_fd(), what, argument, size) };
        if done < 0 { last_error("pinning memory by io_uring") } else { Ok(()) }
    }

    /// Pins this memory at this index of the table; a length of zero unpins the memory there.
    ///
    /// # Errors
    /// The kernel does not pin it.
    pub fn set(&self, slot: u32, start: usize, len: usize) -> io::Result<()> {
        let buffer = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len };
        let update = Update { offset: slot, zero: 0, data: (&raw const buffer) as u64, tags: 0, count: 1, zero_too: 0 };
        self.register(UPDATE_BUFFERS, (&raw const update).cast(), size_of::<Update>())
    }
}
