//! Memory pinned for I/O: buffers registered with an io_uring stand in for VFIO's pages of a device.
//!
//! Before: memory is mapped. After: the kernel holds every page of it (`FOLL_LONGTERM`, as for a device), until the
//! value is dropped. Only the IOMMU's mapping is missing.
//! Threads: the bench's one. Units: microseconds.

use std::marker::PhantomData;
use std::time::Instant;

use anyhow::{Context, Result};
use ballast_base::GIB;
use ballast_sys::Mapping;
use io_uring::IoUring;

pub(super) struct Pinned<'a>(IoUring, PhantomData<&'a Mapping>);

impl<'a> Pinned<'a> {
    /// Pins all of it; returns the time that this took.
    pub(super) fn new(map: &'a Mapping) -> Result<(f64, Self)> {
        let ring = IoUring::new(1).context("Making an io_uring")?;
        let buffer = |at: usize| {
            let len = (map.len() - at).min(GIB as usize);
            libc::iovec { iov_base: map.ptr(at, len).cast(), iov_len: len }
        };
        let buffers: Vec<_> = (0..map.len()).step_by(GIB as usize).map(buffer).collect();
        let start = Instant::now();
        // SAFETY: the buffers are in a mapping that outlives the ring, and nothing is ever read into them.
        unsafe { ring.submitter().register_buffers(&buffers) }.context("Pinning memory by an io_uring")?;
        Ok((start.elapsed().as_secs_f64() * 1e6, Self(ring, PhantomData)))
    }
}

impl Drop for Pinned<'_> {
    fn drop(&mut self) {
        // Closing the ring alone would release the pages later, on a thread of the kernel.
        if let Err(error) = self.0.submitter().unregister_buffers() {
            eprintln!("ballast bench: releasing pinned memory: {error}");
        }
    }
}
