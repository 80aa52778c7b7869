//! Writes of pages of one chunk: sent first, and known to be stored later.
//!
//! Before: the store has pages to keep. After: the chunk's primary and replicas have them, or it is known that they may
//! not. Threads: one for each write; it waits in [`RemoteStore::begin_chunk`] only if the server does not take the
//! bytes, and in [`Write::end`] for its reply. Units: pages of one chunk, all or none.
//! Promise: a write that ends in any other way than `Stored` leaves nothing in the cluster for good: what it may have
//! left is garbage. So do the pages of a write that nobody ends.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use ballast_store::{Handle, PageBytes, PageKey, PutOutcome, blob};

use super::{PART, RemoteStore, plus};
use crate::name;
use crate::request::{self, Failed, Sent, Values};

/// A write that was sent.
pub(super) struct Write {
    first: PageKey,
    count: u64,
    generation: Handle,
    names: Vec<Vec<u8>>,
    values: Values,
    sent: Sent,
}

impl RemoteStore {
    /// Sends pages of one chunk. `blobs` is empty, or has each page's form in another store.
    pub(super) fn begin_chunk(
        &self,
        first: PageKey,
        pages: &[PageBytes],
        blobs: &[Vec<u8>],
    ) -> Result<Write, PutOutcome> {
        let count = pages.len() as u64;
        let seal = self.seal();
        if !seal.works() {
            return Err(self.refuse("the key that its pages are sealed with is lost".into(), PutOutcome::Busy));
        }
        if !self.share.has_room(count, self.garbage.waiting_briefly()) {
            let limit = self.share.budget().limit();
            return Err(self.refuse(format!("its budget of {limit} is used"), PutOutcome::Full));
        }
        self.ensure_lease().map_err(|why| self.refuse(why, PutOutcome::Busy))?;
        // Otherwise each put that fails would leave more.
        let unlinked = self.garbage.unlink_failed(&self.cluster, first);
        unlinked.map_err(|why| self.refuse(format!("what a failed write left: {why}"), PutOutcome::Busy))?;
        let Some(generation) = self.draw() else {
            return Err(self.refuse("the host has run for so long that no generation is left".into(), PutOutcome::Full));
        };
        let keys: Vec<PageKey> = (0..pages.len()).map(|page| plus(first, page)).collect();
        let names = name::keys(keys.iter().map(|key| (*key, generation)));
        let mut values = Values::default();
        let mut make = |values: &mut Values| {
            let from = values.len();
            for (at, (key, bytes)) in keys.iter().zip(pages).enumerate().skip(from).take(PART) {
                values.add(|values| {
                    let start = values.len();
                    let kept = blobs.get(at).map_or(&[][..], Vec::as_slice);
                    blob::reseal(*key, generation, bytes, kept, self.codec, values);
                    seal.seal(*key, generation, values, start);
                });
            }
        };
        let replicas = self.cluster.options().replicas;
        match request::send_as_made(&self.cluster, replicas, &names, &mut values, &mut make) {
            Ok(sent) => Ok(Write { first, count, generation, names, values, sent }),
            Err(failed) => Err(self.failed((first, count, generation), failed)),
        }
    }

    /// Waits until the chunk is stored.
    fn end_chunk(&self, write: Write) -> Result<Handle, PutOutcome> {
        let Write { first, count, generation, names, values, sent } = write;
        let replicas = self.cluster.options().replicas;
        sent.end(&self.cluster, replicas, &names, &values)
            .map_err(|failed| self.failed((first, count, generation), failed))?;
        // A node that belongs to another cluster may have brought that one's map meanwhile.
        if let Err(why) = self.home.takes(&self.cluster) {
            self.garbage.failed(first, count, generation);
            return Err(self.refuse(why, PutOutcome::Busy));
        }
        self.used.store(true, Relaxed);
        self.share.put(count, values.bytes() as u64);
        Ok(generation)
    }

    fn failed(&self, (first, count, generation): (PageKey, u64, Handle), failed: Failed) -> PutOutcome {
        if failed.unknown {
            self.garbage.failed(first, count, generation);
        }
        self.refuse(failed.why, if failed.full { PutOutcome::Full } else { PutOutcome::Busy })
    }

    /// Sends pages of one chunk, and waits until they are stored: all or none.
    pub(super) fn put_chunk(&self, first: PageKey, pages: &[PageBytes], blobs: &[Vec<u8>]) -> PutOutcome {
        let stored = self.begin_chunk(first, pages, blobs).and_then(|write| self.end_chunk(write));
        stored.map_or_else(|outcome| outcome, PutOutcome::Stored)
    }
}

/// A write under way. Its pages are garbage if it is dropped.
pub(super) struct UnderWay {
    store: Arc<RemoteStore>,
    write: Option<Write>,
}

impl UnderWay {
    pub(super) fn new(store: Arc<RemoteStore>, write: Write) -> Self {
        Self { store, write: Some(write) }
    }

    /// Waits for its outcome, which is that of each of its pages.
    pub(super) fn end(mut self) -> PutOutcome {
        let Some(write) = self.write.take() else { return PutOutcome::Busy };
        self.store.end_chunk(write).map_or_else(|outcome| outcome, PutOutcome::Stored)
    }
}

/// Only a panic drops one that was not ended. The pages are waited for: keys that are unlinked before the server has
/// read all of the write would be stored afterwards.
impl Drop for UnderWay {
    fn drop(&mut self) {
        let Some(write) = self.write.take() else { return };
        let (first, count) = (write.first, write.count);
        if let Ok(handle) = self.store.end_chunk(write) {
            (0..count as usize).for_each(|page| self.store.garbage.free(plus(first, page), handle));
        }
    }
}
