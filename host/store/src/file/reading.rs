//! Reads of blocks, including those that outlast the wait for them.
//!
//! Before: `blocks` wants pieces of the file. After: their bytes or errors. Late reads stay in flight, and the next
//! call that wants one of their blocks waits for that read.
//! Threads: any. The reads of a call are on a ring that any thread may use: it belongs to the thread until one of its
//! reads is late, and then to the store, even if the thread ends. Nobody waits with the lock held. Units: a block is
//! 4096 bytes; a piece is 1 to 64 consecutive blocks.
//! Promise: while a read of a block is late, no second read of it begins. Late reads are bounded, per store and per
//! process; beyond that none is begun. No memory is freed that the kernel may write to.
//!
//! | State of a block | Owner | How it ends |
//! |---|---|---|
//! | idle | none | a call begins a read of it: *reading* |
//! | reading | the call, on its thread's ring | it is done, and none of the call is late: idle; else *late* or *kept* |
//! | late | the store | it is done: *kept*; its page is no longer wanted: *unwanted* |
//! | kept (bytes or an error) | the store | a call that got all it wanted, or the error, takes it: idle |
//! | | | its page was freed, its bytes are wrong, nobody asked, or there is no room: idle |
//! | unwanted | the store; the block may be written and read again | it is done: idle |
//!
//! A call's pieces are kept until all are there, because a huge page needs all at once. Each later call of the store
//! notes which late reads are done.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_sys::lock::Lock;

use super::batch::{Batch, Piece, State, Wait};
use super::disk::{AT_ONCE, Disk, READ_TIMEOUT, Transfers};
use super::errors::FailedRead;
use crate::{PageBytes, Reader};

/// Most late reads of a store with which it still begins reads, in the background and for guests.
const MOST_BACKGROUND: usize = 64;
const MOST: usize = 96;
/// If all stores have this many late reads, each may only have 1/FEWER of the above: a late read may hold a ring, and
/// so a descriptor. Stores with a healthy disk need few.
const MANY: usize = 2048;
const FEWER: usize = 6;
/// Most blocks for which buffers are kept for the next call: 16 MiB. Beyond that, a call drops the oldest buffers; a
/// background reader drops only those not asked for in A_WHILE.
const MOST_KEPT: usize = 4096;
const A_WHILE: Duration = Duration::from_secs(10);
const FORGOTTEN: Duration = Duration::from_secs(120);
/// Sleep of a call that has nothing to wait for.
const PAUSE: Duration = Duration::from_millis(5);

/// Late reads of all stores, including closed ones.
static LATE_OF_ALL: AtomicUsize = AtomicUsize::new(0);
/// Late reads of closed stores.
static UNWANTED: Mutex<Vec<Batch>> = Mutex::new(Vec::new());
static UNWANTED_COUNT: AtomicUsize = AtomicUsize::new(0);

#[derive(Debug)]
pub(super) enum Came {
    /// The bytes of a read that began in this call, or before.
    Done {
        is_new: bool,
    },
    Late,
    /// Not begun: an earlier read is late, or too many are.
    Unbegun,
    /// The error of its one block.
    Failed(io::Error, FailedRead),
    /// An error of several blocks, which must be read one by one.
    Unsure,
}

/// Blocks of an earlier read that nobody has taken.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    first: u64,
    wanted: u64,
}

impl Known {
    pub fn has(self, block: u64) -> bool {
        block.checked_sub(self.first).is_some_and(|at| at < 64 && self.wanted >> at & 1 == 1)
    }
}

/// The late reads of a store, and the reads that are kept.
#[derive(Debug, Default)]
pub(super) struct Reading {
    batches: Mutex<Vec<Batch>>,
    /// Pieces in the batches, nearly always 0; and those of them that are late.
    count: AtomicUsize,
    late: AtomicUsize,
}

/// Most late reads of a store, if all stores together have `of_all`.
fn most(reader: Reader, of_all: usize) -> usize {
    let most = if reader == Reader::Guest { MOST } else { MOST_BACKGROUND };
    if of_all < MANY { most } else { most / FEWER }
}

fn under_way(batches: &[Batch]) -> usize {
    batches.iter().flat_map(|batch| &batch.pieces).filter(|piece| piece.is_under_way()).count()
}

fn find(batches: &mut [Batch], blocks: (u64, usize)) -> Option<(&mut Batch, usize)> {
    let has = |batch: &Batch| batch.pieces.iter().position(|piece| piece.bits(blocks).is_some());
    batches.iter_mut().find_map(|batch| has(batch).map(|at| (batch, at)))
}

impl Reading {
    fn lock(&self) -> Option<MutexGuard<'_, Vec<Batch>>> {
        (self.count.load(Ordering::Acquire) > 0).then(|| self.batches.locked())
    }

    /// Drops pieces that are done and unwanted. Called after each change.
    fn settle(&self, batches: &mut Vec<Batch>, disk: Option<&Disk>) {
        let mut count = 0;
        batches.retain_mut(|batch| {
            batch.reap(disk);
            let is_forgotten = batch.asked.elapsed() > FORGOTTEN;
            batch.pieces.retain(|piece| piece.is_under_way() || piece.wanted != 0 && !is_forgotten);
            drop(batch.idle_ring());
            count += batch.pieces.len();
            !batch.pieces.is_empty()
        });
        self.count.store(count, Ordering::Release);
        let late = under_way(batches);
        // Wraps around if there are fewer now, and so does the sum.
        let more = late.wrapping_sub(self.late.swap(late, Ordering::AcqRel));
        LATE_OF_ALL.fetch_add(more, Ordering::AcqRel);
    }

    /// Drops buffers that were not asked for in a while, even in a store without reads.
    pub fn drop_forgotten(&self, disk: &Disk) {
        if let Some(mut batches) = self.lock() {
            self.settle(&mut batches, Some(disk));
        }
        release_unwanted();
    }

    /// Late and kept blocks. A caller must split its pieces so that each lies in one of these, or in none.
    pub fn known(&self, disk: &Disk) -> Vec<Known> {
        let Some(mut batches) = self.lock() else { return Vec::new() };
        self.settle(&mut batches, Some(disk));
        let pieces = batches.iter().flat_map(|batch| &batch.pieces);
        pieces.map(|piece| Known { first: piece.first, wanted: piece.wanted }).collect()
    }

    /// Whether this many more reads may begin. Drops old buffers to make room for them.
    fn may_begin(&self, disk: &Disk, more: usize, reader: Reader) -> bool {
        let Some(mut batches) = self.lock() else { return true };
        let now = Instant::now();
        let kept = |batch: &Batch| batch.pieces.iter().map(Piece::room).sum::<usize>();
        let mut all: usize = batches.iter().map(kept).sum();
        while all > MOST_KEPT {
            let oldest = batches.iter_mut().filter(|batch| kept(batch) > 0).min_by_key(|batch| batch.asked);
            let is_spare =
                |batch: &&mut Batch| reader == Reader::Guest || now.saturating_duration_since(batch.asked) >= A_WHILE;
            let Some(oldest) = oldest.filter(is_spare) else { return false };
            all -= kept(oldest);
            oldest.pieces.retain(Piece::is_under_way);
        }
        self.settle(&mut batches, Some(disk));
        self.late.load(Ordering::Acquire) + more <= most(reader, LATE_OF_ALL.load(Ordering::Acquire))
    }

    /// Reads pieces, and waits for them. One outcome each, in order. For each `Done` piece, `take` was called with its
    /// index and pages, and returned whether they are right.
    pub fn read(
        &self,
        disk: &Disk,
        pieces: &[(u64, usize)],
        wait: Wait<'_>,
        mut take: impl FnMut(usize, &[PageBytes]) -> bool,
    ) -> Vec<Came> {
        let since = Instant::now();
        // Protects the pieces that this call wants, when room is made for its own reads.
        let ask = |(batch, _): (&mut Batch, usize)| batch.asked = since;
        let is_known = |piece| self.lock().is_some_and(|mut batches| find(&mut batches, piece).map(ask).is_some());
        let (known, new): (Vec<usize>, Vec<usize>) = (0..pieces.len()).partition(|at| is_known(pieces[*at]));
        let mut came: Vec<Came> = pieces.iter().map(|_| Came::Unbegun).collect();
        let (mut batches, mut is_late) = (Vec::new(), false);
        for group in new.chunks(AT_ONCE) {
            if is_late {
                break;
            }
            if !self.may_begin(disk, group.len(), wait.context.reader) {
                std::thread::sleep(PAUSE);
                is_late = true;
                break;
            }
            let begun = if disk.has_no_rings() {
                Err(io::ErrorKind::PermissionDenied.into())
            } else {
                let these = group.iter().map(|at| pieces[*at]);
                Transfers::of_this_thread(|with| Batch::begin(disk, with, these))
            };
            match begun {
                Ok(mut batch) => {
                    for (index, at) in group.iter().enumerate() {
                        // A piece is copied and checked while the device works on the others.
                        batch.wait_for(disk, index, wait);
                        let (piece, read) = ((*at, pieces[*at]), (true, batch.read()));
                        came[*at] = Self::came(&mut batch.pieces[index], piece, read, &mut take);
                        is_late |= matches!(came[*at], Came::Late);
                    }
                    Transfers::of_this_thread(|with| with.reads = batch.idle_ring());
                    batches.push(batch);
                }
                Err(error) => {
                    for at in group {
                        came[*at] = Self::without_ring(disk, pieces[*at], &error, |pages| take(*at, pages));
                    }
                }
            }
        }
        if !known.is_empty() {
            let known: Vec<_> = known.iter().map(|at| (*at, pieces[*at])).collect();
            let wait = Wait { timeout: wait.timeout.saturating_sub(since.elapsed()), ..wait };
            is_late |= self.take_known(disk, &known, wait, &mut came, &mut take);
        }
        if is_late {
            self.keep(disk, batches);
        } else {
            let state = |piece: Piece| piece.state;
            let states = batches.into_iter().flat_map(|batch| batch.pieces).map(state);
            Transfers::of_this_thread(|with| {
                for state in states {
                    if let State::Kept(buffer) = state {
                        with.put_back(buffer);
                    }
                }
            });
            known.iter().for_each(|at| self.forget(disk, pieces[*at]));
        }
        came
    }

    /// The outcome of this piece, or of some of its blocks. An error is taken.
    fn came(
        piece: &mut Piece,
        (at, blocks): (usize, (u64, usize)),
        (is_new, mut read): (bool, FailedRead),
        take: &mut impl FnMut(usize, &[PageBytes]) -> bool,
    ) -> Came {
        if let Some(pages) = piece.pages(blocks) {
            if !take(at, pages) {
                piece.wanted = 0;
            }
            return Came::Done { is_new };
        }
        if piece.is_under_way() {
            return Came::Late;
        }
        piece.wanted = 0;
        match std::mem::replace(&mut piece.state, State::Failed(io::ErrorKind::Other.into(), read.begun)) {
            State::Failed(error, over) if piece.blocks == 1 => {
                read.over = over;
                Came::Failed(error, read)
            }
            _ => Came::Unsure,
        }
    }

    fn without_ring(
        disk: &Disk,
        piece: (u64, usize),
        error: &io::Error,
        take: impl FnOnce(&[PageBytes]) -> bool,
    ) -> Came {
        let begun = Instant::now();
        let failed = || FailedRead { begun, over: Instant::now() };
        // No ring for lack of memory: the caller repeats the read later.
        if !matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported) {
            return Came::Failed(io::Error::new(error.kind(), error.to_string()), failed());
        }
        match disk.read_without_ring(piece) {
            Ok(buffer) => {
                take(buffer.as_slice().as_chunks().0);
                Came::Done { is_new: true }
            }
            Err(error) if piece.1 == 1 => Came::Failed(error, failed()),
            Err(_) => Came::Unsure,
        }
    }

    /// Waits for pieces of earlier reads. Returns whether some are late.
    fn take_known(
        &self,
        disk: &Disk,
        pieces: &[(usize, (u64, usize))],
        wait: Wait<'_>,
        came: &mut [Came],
        take: &mut impl FnMut(usize, &[PageBytes]) -> bool,
    ) -> bool {
        let (since, mut is_first) = (Instant::now(), true);
        let mut batches = loop {
            let mut batches = self.batches.locked();
            // An error in another batch must not appear later than it came.
            batches.iter_mut().for_each(|batch| batch.reap(Some(disk)));
            let (mut watch, mut is_under_way) = (None, false);
            for (_, blocks) in pieces {
                let Some((batch, at)) = find(&mut batches, *blocks) else { continue };
                batch.asked = since;
                let may_be_over = !is_first || batch.pieces[at].is_waited_for(wait.timeout);
                batch.reap(Some(disk));
                let is_ordered = batch.pieces[at].lasts();
                if may_be_over && !is_ordered && batch.pieces[at].is_under_way() {
                    is_under_way = true;
                    watch = watch.or_else(|| batch.ring.as_ref()?.watch().ok());
                }
            }
            let left = wait.timeout.saturating_sub(since.elapsed());
            if !is_under_way || left.is_zero() || !is_first && wait.context.is_wanted() {
                break batches;
            }
            is_first = false;
            drop(batches);
            match watch {
                // This wakeup may be meant for another thread, so the wait is short.
                Some(watch) => watch.wait(left.min(READ_TIMEOUT)),
                None => std::thread::sleep(left.min(PAUSE)),
            }
        };
        let mut is_late = false;
        for (at, blocks) in pieces {
            came[*at] = match find(&mut batches, *blocks) {
                Some((batch, piece)) => {
                    let read = batch.read();
                    Self::came(&mut batch.pieces[piece], (*at, *blocks), (false, read), take)
                }
                // Another thread has taken it.
                None => Came::Late,
            };
            is_late |= matches!(came[*at], Came::Late);
        }
        self.settle(&mut batches, Some(disk));
        is_late
    }

    /// Keeps the late reads of a call, and the others of their batches.
    fn keep(&self, disk: &Disk, mut late: Vec<Batch>) {
        let mut batches = self.batches.locked();
        batches.append(&mut late);
        self.settle(&mut batches, Some(disk));
        drop(batches);
        release_unwanted();
    }

    /// These blocks are no longer wanted: their bytes were taken, or their pages were freed.
    pub fn forget(&self, disk: &Disk, blocks: (u64, usize)) {
        let Some(mut batches) = self.lock() else { return };
        let pieces = batches.iter_mut().flat_map(|batch| &mut batch.pieces);
        for piece in pieces {
            if let Some(bits) = piece.bits(blocks) {
                piece.wanted &= !bits;
            }
        }
        self.settle(&mut batches, Some(disk));
    }

    pub fn has(&self, block: u64) -> bool {
        self.lock().is_some_and(|mut batches| find(&mut batches, (block, 1)).is_some())
    }
}

/// Releases those reads of closed stores that are done.
pub(super) fn release_unwanted() {
    if UNWANTED_COUNT.load(Ordering::Acquire) == 0 {
        return;
    }
    let mut unwanted = UNWANTED.locked();
    let before = under_way(&unwanted);
    unwanted.retain_mut(|batch| {
        batch.reap(None);
        batch.pieces.iter().any(Piece::is_under_way)
    });
    LATE_OF_ALL.fetch_sub(before - under_way(&unwanted), Ordering::AcqRel);
    UNWANTED_COUNT.store(unwanted.len(), Ordering::Release);
}

impl Drop for Reading {
    /// Buffers that the kernel may still write to outlive the store.
    fn drop(&mut self) {
        let mut batches = std::mem::take(self.batches.get_mut().unwrap_or_else(PoisonError::into_inner));
        batches.iter_mut().flat_map(|batch| &mut batch.pieces).for_each(|piece| piece.wanted = 0);
        self.settle(&mut batches, None);
        if !batches.is_empty() {
            UNWANTED.locked().append(&mut batches);
            UNWANTED_COUNT.fetch_add(1, Ordering::AcqRel);
        }
        release_unwanted();
    }
}

#[cfg(test)]
mod tests;
