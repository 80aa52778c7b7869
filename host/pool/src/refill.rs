//! Filling slices with zeros, outside of the path on which VMs start.
//!
//! Before: [`crate::Reserve::next_job`] returns a dirty slice. After: [`crate::Reserve::finish`] takes the result, and
//! the slice can be handed out. Threads: a worker's; the pool is not locked while it works.
//! Promise: the kernel zeroes each slice, because it allocates another page for it: see the head of the crate.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use crate::map::{Dirty, Zeroed};
use ballast_base::Bytes;

use crate::files;

/// A slice to fill.
#[derive(Debug)]
#[must_use = "the slice is out of use until it is given back"]
pub struct Job {
    pub(crate) dirty: Dirty,
    pub(crate) file: Arc<OwnedFd>,
    pub(crate) brick: Bytes,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// The node of its pages, if the host has several nodes.
    pub(crate) node: Option<u32>,
}

/// Result of a job.
#[derive(Debug)]
#[must_use = "the slice is out of use until it is given back"]
pub struct Done(pub(crate) Result<Zeroed, (Dirty, std::io::Error)>);

impl Job {
    /// Runs the job.
    pub fn run(self) -> Done {
        let Self { dirty, file, brick, offset, len, node } = self;
        Done(dirty.zero(|_| files::refill(&file, brick, offset, len, node)))
    }
}
