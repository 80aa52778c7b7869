//! Chunks: the parts of a run of pages that one request can carry, and the write of a chunk that was sent.
//!
//! Before: the store has pages to keep. After: each part is of one chunk, and so of one slot.
//! Threads: any. Units: pages. Promise: the parts are the run, in order and without gaps.

use std::ops::Range;
use std::time::Duration;

use ballast_base::PageIdx;
use ballast_store::{Handle, PageKey};

use crate::name::CHUNK_PAGES;
use crate::request::{Sent, Values};

/// A write of pages of one chunk that was sent: all of them are stored, or none.
pub struct Write {
    pub first: PageKey,
    pub count: u64,
    pub generation: Handle,
    /// A time, since the host started, at which the VM's lease was known to last.
    pub since: Duration,
    pub names: Vec<Vec<u8>>,
    pub values: Values,
    pub sent: Sent,
}

pub fn plus(first: PageKey, pages: usize) -> PageKey {
    first.region.page(PageIdx(first.page.0 + pages as u64))
}

/// Returns the parts of a run, each of which is in one chunk.
pub fn parts(first: PageKey, len: usize) -> impl Iterator<Item = Range<usize>> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let page = first.page.0 + from as u64;
        let part = from..len.min(from + (CHUNK_PAGES - page % CHUNK_PAGES) as usize);
        from = part.end;
        (!part.is_empty()).then_some(part)
    })
}

pub fn of_part<'a>(blobs: &'a [Vec<u8>], part: &Range<usize>) -> &'a [Vec<u8>] {
    blobs.get(part.clone()).unwrap_or_default()
}
