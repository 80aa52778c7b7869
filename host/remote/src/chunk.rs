//! Chunks: the parts of a run of pages that one request can carry, and a write of one that was sent.
//!
//! Before: the store has pages to keep. After: each part is of one chunk, and so of one slot.
//! Threads: any; only the end of a write waits. Units: pages.
//! Promise: the parts are the run, in order and without gaps. The cluster keeps no page of a write of one chunk that
//! nobody ended.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use ballast_base::PageIdx;
use ballast_store::{Handle, PageKey, PutOutcome, Store};

use crate::name::CHUNK_PAGES;
use crate::request::{Sent, Values};

/// A write of pages of one chunk that was sent: all of them are stored, or none.
pub struct Write {
    /// The first page, and how many there are.
    pub first: PageKey,
    pub count: u64,
    pub generation: Handle,
    /// Time since the host started when the VM's lease was known to last.
    pub since: Duration,
    pub names: Vec<Vec<u8>>,
    pub values: Values,
    pub sent: Sent,
}

/// Returns the key of the page that is this many after the first.
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

/// Returns the blobs of a part of a run, if there are any.
pub fn of_part<'a>(blobs: &'a [Vec<u8>], part: &Range<usize>) -> &'a [Vec<u8>] {
    blobs.get(part.clone()).unwrap_or_default()
}

/// Waits until the pages of a write are stored.
type End = Box<dyn FnOnce(Write) -> Result<Handle, PutOutcome> + Send>;

/// A write under way. If it is dropped, its pages are freed.
pub struct UnderWay {
    store: Arc<dyn Store>,
    write: Option<(Write, End)>,
}

impl UnderWay {
    /// A write to this store, which `end` waits for.
    pub fn new(
        store: Arc<dyn Store>,
        write: Write,
        end: impl FnOnce(Write) -> Result<Handle, PutOutcome> + Send + 'static,
    ) -> Self {
        Self { store, write: Some((write, Box::new(end))) }
    }

    /// Waits for its outcome, which is that of each of its pages.
    pub fn end(mut self) -> PutOutcome {
        let Some((write, end)) = self.write.take() else { return PutOutcome::Busy };
        end(write).map_or_else(|outcome| outcome, PutOutcome::Stored)
    }
}

/// Only a panic drops one that was not ended. The pages are waited for: keys that are unlinked before the server has
/// read all of the write would be stored afterwards.
impl Drop for UnderWay {
    fn drop(&mut self) {
        let Some((write, end)) = self.write.take() else { return };
        let (first, count) = (write.first, write.count);
        if let Ok(handle) = end(write) {
            (0..count as usize).for_each(|page| self.store.free(plus(first, page), handle));
        }
    }
}
