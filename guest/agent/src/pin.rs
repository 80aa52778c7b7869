//! Pinning: memory of this process that stays at its physical place, by io_uring's registered buffers.
//!
//! Before: memory is mapped and filled. After: the kernel neither moves nor frees its pages until it is unpinned, or
//! the process ends.
//! `mlock` is not enough: compaction migrates locked pages. A registered buffer is a long-term pin, for which the
//! kernel first moves the pages out of movable zones.

use std::io;

use io_uring::IoUring;

/// Buffers that one ring may have.
pub const MOST: u32 = 1 << 14;

/// A ring whose table of buffers pins them.
pub struct Pins(IoUring);

impl std::fmt::Debug for Pins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pins")
    }
}

fn doing<T>(what: &str, done: io::Result<T>) -> io::Result<T> {
    done.map_err(|error| io::Error::new(error.kind(), format!("{what}: {error}")))
}

impl Pins {
    /// An empty table. Fails if the kernel has no io_uring (or it is switched off), or is older than 5.19.
    pub fn new() -> io::Result<Self> {
        let ring = doing("making an io_uring to pin memory by", IoUring::new(1))?;
        doing("pinning memory by io_uring", ring.submitter().register_buffers_sparse(MOST))?;
        Ok(Self(ring))
    }

    /// Pins this memory at this index of the table; a length of zero unpins the memory there.
    pub fn set(&self, slot: u32, start: usize, len: usize) -> io::Result<()> {
        let buffer = libc::iovec { iov_base: start as *mut libc::c_void, iov_len: len };
        // SAFETY: no operation on the buffer is ever submitted, so the kernel neither reads nor writes it.
        let done = unsafe { self.0.submitter().register_buffers_update(slot, &[buffer], None) };
        doing("pinning memory by io_uring", done)
    }
}
