//! Pages to blocks and back: the block of a page, extents that are written as one, and the handling of failures.
//!
//! Before: `file` has pages to store, or handles to read. After: `disk` and `reading` moved the bytes; the index says
//! which page is where.
//! Threads: any. Units: a block is 4096 bytes; a piece is up to 64 consecutive pages in consecutive blocks.
//! Promise: a header matches a handle only while its block holds that page; a block that failed is never used again.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_base::store::OnReply;
use ballast_handover::arena::WORD_TODAY;

use super::batch::Wait;
use super::begun::BegunReads;
use super::disk::{self, Disk, Moved, PIECE_BLOCKS};
use super::layout::AREA_BLOCKS;
use super::limits::{Limits, Refusal};
use super::reading::{Came, Reading};
use super::unread::Unread;
use crate::alloc::{Allocator, Place};
use crate::codec::{self, BlobHeader, Encoding, HEADER_BYTES};
use crate::handle::{self, Named};
use crate::{GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, Reader};

/// Pages of a long run get areas of their own, which single pages do not fragment.
const CLASS_SINGLE: usize = 0;
const CLASS_RUN: usize = 1;
const LONG_RUN: usize = 64;

/// Emptied areas that stay allocated (and charged), because overwriting them changes no metadata of the file system.
const EMPTY_AREAS_KEPT: usize = 8;

/// `BlobHeader::encoding` of a block under write: it matches no handle. Its checksum is the number of the write.
pub(super) const BEING_WRITTEN: u8 = 0;
/// `BlobHeader::encoding` of a block that the device could not write or read: it is never used again.
pub(super) const BAD: u8 = 0xbd;

/// Sleep of a get that may not read a block now: without it, the caller would repeat the get at once.
const PAUSE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy)]
pub(super) enum Counter {
    LiveBlocks,
    LiveSameFilled,
    BadBlocks,
    WrittenBlocks,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) allocator: Allocator,
    pub(super) disk: Disk,
    pub(super) limits: Limits,
    begun: BegunReads,
    reading: Reading,
    unread: Unread,
    /// Blocks of late writes in flight. Briefly below zero if a write ends before it is counted.
    late: AtomicIsize,
    /// The number of the next write of a block: random at first, so that no two openings have equal numbers.
    next_write: AtomicU64,
}

struct Taken {
    index: usize,
    place: Place,
    header: BlobHeader,
}

struct Wanted {
    index: usize,
    block: u64,
    header: BlobHeader,
}

pub(super) fn block_of(place: Place) -> u64 {
    u64::from(place.slab) * AREA_BLOCKS as u64 + place.slot as u64
}

pub(super) fn page_after(first: PageKey, index: usize) -> PageKey {
    PageKey { page: PageIdx(first.page.0.wrapping_add(index as u64)), ..first }
}

impl Inner {
    pub(super) fn new(allocator: Allocator, disk: Disk, limits: Limits, unreadable_for: Duration) -> Self {
        let (begun, reading, late) = Default::default();
        let (unread, next_write) = (Unread::new(unreadable_for), RandomState::new().hash_one(0).into());
        Self { allocator, disk, limits, begun, reading, unread, late, next_write }
    }

    /// Drops bytes that were read and not asked for in a while.
    pub(super) fn drop_forgotten(&self) {
        self.reading.drop_forgotten(&self.disk);
    }

    pub(super) fn count(&self, counter: Counter) {
        self.allocator.arena().count(counter as usize, 1);
    }

    pub(super) fn uncount(&self, counter: Counter) {
        self.allocator.arena().uncount(counter as usize);
    }

    pub(super) fn sum(&self, counter: Counter) -> u64 {
        self.allocator.arena().sum(counter as usize)
    }

    pub(super) fn header(&self, place: Place) -> BlobHeader {
        let mut bytes = [0; HEADER_BYTES];
        self.allocator.arena().copy_out(place.slab, place.slot * HEADER_BYTES, &mut bytes);
        BlobHeader::from_bytes(bytes)
    }

    fn set_header(&self, place: Place, header: BlobHeader) {
        self.allocator.arena().copy_in(place.slab, place.slot * HEADER_BYTES, &header.to_bytes());
    }

    pub(super) fn taken(&self) -> impl Iterator<Item = Place> + '_ {
        let areas = 0..self.allocator.arena().fresh();
        areas
            .flat_map(|slab| (0..AREA_BLOCKS).map(move |slot| Place { slab, slot }))
            .filter(|place| self.allocator.occupied(*place).is_some())
    }

    /// A block for one page; its header does not match a handle yet.
    fn take(&self, class: usize) -> Option<(Place, BlobHeader)> {
        let allocated = self.allocator.alloc(class)?;
        let tag = handle::next_tag(self.header(allocated.place).tag, allocated.generation);
        let checksum = self.next_write.fetch_add(1, Ordering::Relaxed);
        let header = BlobHeader { checksum, key_check: 0, len: 0, encoding: BEING_WRITTEN, tag };
        self.set_header(allocated.place, header);
        Some((allocated.place, header))
    }

    /// Never uses this block again. Its bit stays set; it is not counted as live.
    fn retire_block(&self, place: Place) {
        self.set_header(place, BlobHeader { checksum: 0, key_check: 0, len: 0, encoding: BAD, tag: 0 });
        self.count(Counter::BadBlocks);
    }

    /// How long to wait for pieces that are read together. A background reader serves others before it repeats its get.
    fn read_timeout(&self, pieces: &[&[Wanted]], context: IoContext<'_>) -> Duration {
        let blocks = pieces.iter().flat_map(|piece| piece.iter().map(|wanted| wanted.block));
        let timeout = match context.reader {
            Reader::Background => disk::READ_TIMEOUT,
            Reader::Guest => disk::read_timeout(self.unread.most_late(blocks)),
        };
        context.until.map_or(timeout, |until| timeout.min(until.saturating_duration_since(Instant::now())))
    }

    /// The outcome of a put whose write failed; frees or retires its block.
    fn write_failed(&self, place: Place, error: &io::Error) -> PutOutcome {
        let (outcome, block_is_bad) = self.limits.write_failed(error);
        if block_is_bad {
            self.retire_block(place);
        } else {
            self.allocator.free(place);
        }
        outcome
    }

    /// A late write is done. If `recover` has freed the block, another page may have it: the header then differs.
    fn was_late(&self, place: Place, header: BlobHeader) {
        self.late.fetch_sub(1, Ordering::AcqRel);
        if self.header(place) == header {
            self.allocator.free(place);
        }
    }

    /// The writes of this block are done, and the block will be freed: `was_late` must not free it again.
    pub(super) fn disown(&self, place: Place) {
        let tag = self.header(place).tag;
        self.set_header(place, BlobHeader { checksum: 0, key_check: 0, len: 0, encoding: BEING_WRITTEN, tag });
    }

    pub(super) fn has_late(&self) -> bool {
        self.late.load(Ordering::Acquire) != 0
    }

    /// Takes blocks for those pages that need one; the others get their outcome. At most one extent.
    fn take_for(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut [PutOutcome]) -> Vec<Taken> {
        let class = if pages.len() < LONG_RUN { CLASS_SINGLE } else { CLASS_RUN };
        let today = &self.allocator.arena().own_words()[WORD_TODAY];
        let mut taken = Vec::with_capacity(pages.len());
        for (index, (page, outcome)) in pages.iter().zip(outcomes).enumerate() {
            let filled = codec::fill_pattern(page);
            if let Some(handle) = filled.and_then(|pattern| handle::of_same_filled(page_after(first, index), pattern)) {
                self.count(Counter::LiveSameFilled);
                *outcome = PutOutcome::Stored(handle);
            } else if let Some(refused) = self.limits.may_write(today) {
                *outcome = refused;
            } else if let Some((place, header)) = self.take(class) {
                taken.push(Taken { index, place, header });
            } else {
                *outcome = self.limits.refuse(Refusal::Budget);
            }
        }
        taken
    }

    pub(super) fn put_extent(inner: &Arc<Self>, first: PageKey, pages: &[PageBytes], outcomes: &mut [PutOutcome]) {
        if inner.disk.read_only {
            return outcomes.fill(inner.limits.refuse(Refusal::ReadOnly));
        }
        inner.allocator.settle(EMPTY_AREAS_KEPT);
        let taken = inner.take_for(first, pages, outcomes);
        // Consecutive pages in consecutive blocks are written together.
        let runs: Vec<&[Taken]> = taken
            .chunk_by(|a, b| a.index + 1 == b.index && block_of(a.place) + 1 == block_of(b.place))
            .flat_map(|extent| extent.chunks(PIECE_BLOCKS))
            .collect();
        let pieces: Vec<(u64, &[PageBytes])> =
            runs.iter().map(|run| (block_of(run[0].place), &pages[run[0].index..][..run.len()])).collect();
        let when_late = |run: usize| {
            let inner = Arc::clone(inner);
            let blocks: Vec<_> = runs[run].iter().map(|taken| (taken.place, taken.header)).collect();
            move || blocks.into_iter().for_each(|(place, header)| inner.was_late(place, header))
        };
        let mut headers = Vec::with_capacity(taken.len());
        let moved = inner.disk.write(&pieces, disk::WRITE_TIMEOUT, when_late, || {
            let header = |taken: &Taken| codec::raw_header(page_after(first, taken.index), &pages[taken.index]);
            headers.extend(taken.iter().map(header));
        });
        let moved_of = runs.iter().zip(&moved).flat_map(|(run, moved)| run.iter().map(move |_| moved));
        for ((number, taken), moved) in taken.iter().enumerate().zip(moved_of) {
            outcomes[taken.index] = match (moved, headers.get(number)) {
                (Moved::Done, Some(header)) => inner.keep(taken, *header),
                (Moved::Failed(error), _) => inner.write_failed(taken.place, error),
                (Moved::Late, _) => {
                    inner.late.fetch_add(1, Ordering::AcqRel);
                    inner.limits.refuse(Refusal::Late)
                }
                (Moved::Unbegun, _) => {
                    inner.allocator.free(taken.place);
                    inner.limits.refuse(Refusal::Late)
                }
                (Moved::Done, _) => inner.limits.refuse(Refusal::Late),
            };
        }
    }

    /// The block is written: makes the page readable.
    fn keep(&self, taken: &Taken, header: BlobHeader) -> PutOutcome {
        let tag = taken.header.tag;
        self.set_header(taken.place, BlobHeader { tag, ..header });
        self.count(Counter::LiveBlocks);
        self.count(Counter::WrittenBlocks);
        self.limits.wrote();
        handle::of_blob(taken.place, tag).map_or(PutOutcome::Full, PutOutcome::Stored)
    }

    /// The header of the block of a handle, if the block holds this page.
    fn find(&self, key: PageKey, place: Place, tag: u8) -> Result<BlobHeader, GetOutcome> {
        if self.allocator.occupied(place).is_none() {
            return Err(GetOutcome::Absent);
        }
        let header = self.header(place);
        if tag == 0 || header.tag != tag || header.encoding != Encoding::Raw as u8 {
            return Err(GetOutcome::Absent);
        }
        if header.key_check == codec::key_check(key) { Ok(header) } else { Err(GetOutcome::Corrupt) }
    }

    /// Reads pages (`handles`, `out` and `outcomes` have equal lengths): consecutive blocks in pieces, several at once.
    pub(super) fn get_run(
        &self,
        first: PageKey,
        handles: &[Handle],
        out: &mut [PageBytes],
        outcomes: &mut [GetOutcome],
        context: IoContext<'_>,
    ) {
        let mut wanted: Vec<Wanted> = Vec::with_capacity(handles.len());
        for (index, handle) in handles.iter().enumerate() {
            let key = page_after(first, index);
            match Named::by(*handle) {
                Named::SameFilled(filled) => outcomes[index] = filled.get(key, &mut out[index]),
                Named::Blob { place, tag } => match self.find(key, place, tag) {
                    Ok(header) => wanted.push(Wanted { index, block: block_of(place), header }),
                    Err(outcome) => outcomes[index] = outcome,
                },
            }
        }
        // The caller needs all pages, or repeats the request for fewer: while one block rests, others need not be read.
        if wanted.iter().any(|wanted| self.unread.is_to_rest(wanted.block, context.reader)) {
            return std::thread::sleep(PAUSE);
        }
        let bad = |wanted: &Wanted| self.unread.has_failed(wanted.block);
        // Late or kept blocks are taken in the pieces in which they were read.
        let known = self.reading.known(&self.disk);
        let of = |wanted: &Wanted| known.iter().position(|known| known.has(wanted.block));
        let follows = |a: &Wanted, b: &Wanted| {
            let is_next = a.index + 1 == b.index && a.block + 1 == b.block;
            is_next && (known.is_empty() || of(a) == of(b)) && !bad(a) && !bad(b)
        };
        let pieces: Vec<&[Wanted]> = wanted.chunk_by(follows).flat_map(|piece| piece.chunks(PIECE_BLOCKS)).collect();
        for (piece, came) in pieces.iter().zip(self.read(first, &pieces, out, outcomes, context)) {
            // One bad block, or a corrupted transfer, must not cost the other pages of a piece: each is read again.
            let again = |wanted: &&Wanted| match &came {
                Came::Done { .. } => outcomes[wanted.index] == GetOutcome::Corrupt,
                Came::Unsure => true,
                Came::Failed(..) | Came::Late | Came::Unbegun => false,
            };
            let again: Vec<&[Wanted]> = piece.iter().filter(again).map(std::slice::from_ref).collect();
            if !again.is_empty() {
                self.read(first, &again, out, outcomes, context);
            }
        }
    }

    fn read(
        &self,
        first: PageKey,
        pieces: &[&[Wanted]],
        out: &mut [PageBytes],
        outcomes: &mut [GetOutcome],
        context: IoContext<'_>,
    ) -> Vec<Came> {
        let sizes: Vec<(u64, usize)> = pieces.iter().map(|piece| (piece[0].block, piece.len())).collect();
        let (timeout, begun) = (self.read_timeout(pieces, context), Instant::now());
        let came = self.reading.read(&self.disk, &sizes, Wait { timeout, context }, |number, pages| {
            let mut are_right = true;
            for (wanted, page) in pieces[number].iter().zip(pages) {
                let found = codec::is_raw_page(page_after(first, wanted.index), wanted.header, page);
                outcomes[wanted.index] = if found { GetOutcome::Found } else { GetOutcome::Corrupt };
                out[wanted.index] = *page;
                are_right &= found;
            }
            are_right
        });
        if came.iter().any(|came| matches!(came, Came::Done { is_new: true })) {
            self.begun.took(begun.elapsed());
        }
        // A huge page needs all its blocks at once. So after one late block, the next wait is longer for all of them.
        let is_late = came.iter().any(|came| matches!(came, Came::Late));
        for (piece, came) in pieces.iter().zip(&came) {
            for wanted in *piece {
                if is_late {
                    self.unread.late(wanted.block);
                }
                match came {
                    Came::Done { .. } if is_late => {}
                    Came::Done { .. } => drop(self.unread.forget(wanted.block)),
                    Came::Failed(error, read) => {
                        outcomes[wanted.index] = self.unread.failed(wanted.block, error, *read, context.reader);
                    }
                    Came::Unsure | Came::Late | Came::Unbegun => outcomes[wanted.index] = GetOutcome::Busy,
                }
            }
        }
        came
    }

    pub(super) fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        let Named::Blob { place, tag } = Named::by(handle) else { return false };
        // A block that never answers must not fill the few places for such reads.
        let may_begin = self.find(key, place, tag).is_ok() && !self.reading.has(block_of(place));
        may_begin && self.begun.begin(&self.disk, (key, handle), block_of(place), watch)
    }

    pub(super) fn get_begun(
        &self,
        key: PageKey,
        handle: Handle,
        out: &mut PageBytes,
        watch: OnReply<'_>,
    ) -> GetOutcome {
        let found = self.begun.now((key, handle), watch, |page| self.check(key, handle, page, out));
        found.map_or(GetOutcome::Busy, |()| GetOutcome::Found)
    }

    /// Waits for a read that was begun. Returns whether it brought the page.
    pub(super) fn wait_for_begun(&self, key: PageKey, handle: Handle, out: &mut PageBytes) -> bool {
        self.begun.wait_for((key, handle), |page| self.check(key, handle, page, out)).is_some()
    }

    /// Copies these bytes to `out` if they are the page in the file now: the block may have been another's at the read.
    fn check(&self, key: PageKey, handle: Handle, page: &PageBytes, out: &mut PageBytes) -> Option<()> {
        let Named::Blob { place, tag } = Named::by(handle) else { return None };
        self.find(key, place, tag).ok().filter(|header| codec::is_raw_page(key, *header, page))?;
        self.unread.forget(block_of(place));
        self.reading.forget(&self.disk, (block_of(place), 1));
        *out = *page;
        Some(())
    }

    pub(super) fn free(&self, key: PageKey, handle: Handle) {
        match Named::by(handle) {
            Named::SameFilled(filled) => {
                if filled.may_be_of(key) {
                    self.uncount(Counter::LiveSameFilled);
                }
            }
            Named::Blob { place, tag } => {
                if self.find(key, place, tag).is_err() {
                    return;
                }
                self.begun.forget((key, handle));
                self.reading.forget(&self.disk, (block_of(place), 1));
                if self.unread.forget(block_of(place)) {
                    self.uncount(Counter::LiveBlocks);
                    self.retire_block(place);
                } else if self.allocator.free(place) {
                    self.uncount(Counter::LiveBlocks);
                }
            }
        }
    }
}
