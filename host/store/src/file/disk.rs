//! Direct I/O of blocks through the calling thread's ring, and what reads (`reading`) and writes share.
//!
//! Before: `file` has taken blocks for pages. After: the bytes are on the device, or the failure is known.
//! Threads: any; each has its own ring, so that a thread that waits for a slow block delays no other. Units: a block is
//! 4096 bytes; a piece is 1 to 64 consecutive blocks.
//! Promise: bytes are first copied to a buffer of our own, so that the kernel holds no memory of the caller when the
//! wait is given up. Short transfers are continued. A thread that gets no ring (`kernel.io_uring_disabled`) still
//! reads, without a limit to the wait, but writes nothing.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_sys::direct;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};
use ballast_sys::slow_fd::SlowFd;

use super::faults::{DiskFaults, Ordered};
use crate::PageBytes;

/// Most blocks of one transfer: 256 KiB. A longer extent is transferred in pieces, all in flight at once, so that one
/// is copied and checked while the device works on others: 2 MiB are read in 0.47 ms, not 0.64 (XFS on a loop device).
pub(crate) const PIECE_BLOCKS: usize = 64;
/// Pieces in flight at once: 2 MiB. Late transfers are not counted.
pub(crate) const AT_ONCE: usize = 8;
const RING_TRANSFERS: u32 = 2 * AT_ONCE as u32;
/// Sizes of buffers, and the number of each that a thread keeps for reuse: 2.7 MiB. A read of a huge page keeps all
/// pieces until the last one is there, so a short piece gets a smaller buffer.
const BUFFERS: [(usize, usize); 4] =
    [(PAGE_SIZE, AT_ONCE), (PAGE_SIZE * 4, AT_ONCE), (PAGE_SIZE * 16, AT_ONCE), (PAGE_SIZE * PIECE_BLOCKS, AT_ONCE)];
/// How long a worker waits for a page before it serves others and repeats the request. A healthy device is faster.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// A guest's wait for a block doubles each time that the block was late, this often: up to 6.4 s. So even on a device
/// that is slow for long, such as a throttled volume, few reads are late and have to be kept.
const DOUBLINGS: u8 = 6;
/// Longer than that of reads: reclaim can wait, and a late write blocks its block. After a late write, a call waits for
/// none of its others and begins no more.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the kernel may return EINTR or EAGAIN before that is an error.
pub(crate) const TRIES: usize = 16;

#[derive(Debug)]
pub(crate) enum Moved {
    Done,
    /// Not done in time; the ring keeps the transfer.
    Late,
    /// Not begun, because an earlier transfer was late.
    Unbegun,
    Failed(io::Error),
}

/// How long to wait for a read of a block that was late this many times.
pub(crate) fn read_timeout(late: u8) -> Duration {
    READ_TIMEOUT * (1 << late.min(DOUBLINGS))
}

/// The file, without its index.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) file: Arc<SlowFd>,
    pub(crate) faults: Option<Arc<DiskFaults>>,
    pub(crate) read_only: bool,
}

#[derive(Default)]
pub(crate) struct Transfers {
    writes: Option<Ring>,
    /// For a call's reads. A late read keeps it.
    pub(crate) reads: Option<Ring>,
    /// For each size in `BUFFERS`.
    spares: [Vec<Buffer>; BUFFERS.len()],
}

thread_local! {
    /// Shared by all file stores. The rings are made at first use.
    static TRANSFERS: RefCell<Transfers> = RefCell::default();
}

fn no_ring(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("setting up io_uring (see kernel.io_uring_disabled): {error}"))
}

impl Transfers {
    pub(crate) fn of_this_thread<R>(work: impl FnOnce(&mut Self) -> R) -> R {
        TRANSFERS.with_borrow_mut(work)
    }

    fn for_writes(&mut self) -> io::Result<&mut Ring> {
        if self.writes.is_none() {
            self.writes = Some(Ring::new(RING_TRANSFERS).map_err(|error| no_ring(&error))?);
        }
        self.writes.as_mut().ok_or_else(|| io::Error::other("no ring"))
    }

    /// A ring that may move to another thread later.
    pub(crate) fn for_reads(&mut self) -> io::Result<Ring> {
        self.reads.take().map_or_else(|| Ring::for_any_thread(AT_ONCE).map_err(|error| no_ring(&error)), Ok)
    }

    /// A buffer for this many bytes, at most one piece.
    pub(crate) fn buffer(&mut self, bytes: usize) -> io::Result<Buffer> {
        let class = BUFFERS.partition_point(|(size, _)| *size < bytes).min(BUFFERS.len() - 1);
        self.spares[class].pop().map_or_else(|| Buffer::new(BUFFERS[class].0), Ok)
    }

    pub(crate) fn put_back(&mut self, buffer: Buffer) {
        let class = BUFFERS.iter().position(|(size, _)| *size == buffer.as_slice().len());
        if let Some(class) = class.filter(|class| self.spares[*class].len() < BUFFERS[*class].1) {
            self.spares[class].push(buffer);
        }
    }
}

/// Whether this thread has late writes that it has not seen complete.
pub fn has_late_writes() -> bool {
    Transfers::of_this_thread(|transfers| transfers.writes.as_ref().is_some_and(Ring::has_late_writes))
}

/// Notes which late writes of this thread are done, and frees their blocks. The kernel tells no other thread, so a
/// thread with late writes must call this from time to time, and not end.
pub fn notice_late_writes() {
    Transfers::of_this_thread(|transfers| transfers.writes.iter_mut().for_each(Ring::reap));
}

pub(crate) fn ready() -> io::Result<()> {
    Transfers::of_this_thread(|transfers| transfers.for_writes().map(drop))
}

pub(crate) enum Returned {
    Done(Buffer),
    Failed(Buffer, io::Error),
    /// The rest must be submitted.
    Rest(Transfer),
}

impl Returned {
    /// `bytes`: the whole length of the transfer.
    pub(crate) fn of(mut transfer: Transfer, result: io::Result<usize>, bytes: usize) -> Self {
        match result {
            Ok(moved) if moved > 0 && transfer.done + moved >= bytes => return Self::Done(transfer.buffer),
            // The end of the file, or a device that writes nothing and reports success.
            Ok(0) => return Self::Failed(transfer.buffer, io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => transfer.done += moved,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Self::Failed(transfer.buffer, error),
        }
        // Direct I/O continues only at a block boundary, so a part of a block is moved again.
        transfer.done -= transfer.done % PAGE_SIZE;
        transfer.end = bytes;
        Self::Rest(transfer)
    }
}

struct Begun {
    ticket: Ticket,
    takes: Duration,
}

impl Disk {
    /// The fault that a test injects into the next transfer of these blocks.
    pub(crate) fn next_is(&self, direction: Direction, blocks: (u64, usize)) -> io::Result<Ordered> {
        Ordered::of(self.faults.as_ref().and_then(|faults| faults.next(direction, blocks)))
    }

    pub(crate) fn has_no_rings(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.has_no_rings())
    }

    /// Begins or continues a transfer on this ring, with the injected fault. An error comes with the buffer.
    pub(crate) fn begin(
        &self,
        ring: &mut Ring,
        direction: Direction,
        mut transfer: Transfer,
    ) -> Result<(Ticket, Ordered), (Buffer, io::Error)> {
        let first = transfer.offset / PAGE_SIZE as u64;
        let ordered = match self.next_is(direction, (first, transfer.end.div_ceil(PAGE_SIZE))) {
            Ok(ordered) => ordered,
            Err(error) => return Err((transfer.buffer, error)),
        };
        transfer.end = transfer.end.min(transfer.done.saturating_add(ordered.most));
        let started = ring.start(transfer).map(|ticket| (ticket, ordered));
        started.map_err(|transfer| (transfer.buffer, io::ErrorKind::WouldBlock.into()))
    }

    fn begin_write(&self, transfers: &mut Transfers, transfer: Transfer) -> io::Result<Begun> {
        let ring = transfers.for_writes()?;
        ring.reap();
        let begun = self.begin(ring, Direction::Write, transfer);
        begun.map(|(ticket, ordered)| Begun { ticket, takes: ordered.takes }).map_err(|(buffer, error)| {
            transfers.put_back(buffer);
            error
        })
    }

    fn finish(
        &self,
        transfers: &mut Transfers,
        begun: io::Result<Begun>,
        (bytes, timeout): (usize, Duration),
        when_late: impl FnOnce() + Send + 'static,
    ) -> io::Result<Moved> {
        let mut begun = begun?;
        for _ in 0..TRIES {
            let ring = transfers.for_writes()?;
            let over = if begun.takes > timeout { None } else { ring.wait(&begun.ticket, timeout) };
            let Some((transfer, result)) = over else {
                ring.abandon(begun.ticket, when_late);
                return Ok(Moved::Late);
            };
            begun = match Returned::of(transfer, result, bytes) {
                Returned::Done(buffer) => {
                    transfers.put_back(buffer);
                    return Ok(Moved::Done);
                }
                Returned::Failed(buffer, error) => {
                    transfers.put_back(buffer);
                    return Err(error);
                }
                Returned::Rest(transfer) => self.begin_write(transfers, transfer)?,
            };
        }
        // The transfer was continued or restarted too often without progress.
        transfers.for_writes()?.abandon(begun.ticket, when_late);
        Ok(Moved::Late)
    }

    /// Writes pieces, each given by its first block and its pages, and waits for at most `timeout` for each 2 MiB. One
    /// outcome each, in order. For a `Late` piece, the function that `when_late` returned for its index is called at
    /// the end of the write. `meanwhile` is called once, while the device works.
    pub(crate) fn write<L: FnOnce() + Send + 'static>(
        &self,
        pieces: &[(u64, &[PageBytes])],
        timeout: Duration,
        when_late: impl Fn(usize) -> L,
        meanwhile: impl FnOnce(),
    ) -> Vec<Moved> {
        let mut meanwhile = Some(meanwhile);
        let mut moved = Vec::with_capacity(pieces.len());
        for group in pieces.chunks(AT_ONCE) {
            let first = moved.len();
            if moved.iter().any(|moved| matches!(moved, Moved::Late)) {
                moved.resize_with(pieces.len(), || Moved::Unbegun);
                break;
            }
            let outcomes: io::Result<_> = Transfers::of_this_thread(|transfers| {
                if self.has_no_rings() {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                transfers.for_writes()?;
                let begin = |(block, pages): &(u64, &[PageBytes])| {
                    let bytes = pages.as_flattened();
                    let mut buffer = transfers.buffer(bytes.len())?;
                    buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
                    let (file, offset) = (Arc::clone(&self.file), block * PAGE_SIZE as u64);
                    let transfer =
                        Transfer { file, direction: Direction::Write, offset, buffer, done: 0, end: bytes.len() };
                    let begun = self.begin_write(transfers, transfer);
                    if pages.len() > 1 {
                        // The device begins while the next piece is copied. Single pages are submitted together.
                        transfers.for_writes()?.submit();
                    }
                    begun
                };
                let begun: Vec<_> = group.iter().map(begin).collect();
                transfers.for_writes()?.submit();
                let submitted = Instant::now();
                if let Some(meanwhile) = meanwhile.take() {
                    meanwhile();
                }
                let mut outcomes = Vec::with_capacity(group.len());
                let mut after_late = false;
                for (index, (begun, (_, pages))) in begun.into_iter().zip(group).enumerate() {
                    // All are in flight at once, so the waits do not add up.
                    let most = if after_late { Duration::ZERO } else { timeout };
                    let limits = (pages.len() * PAGE_SIZE, most.saturating_sub(submitted.elapsed()));
                    let outcome = self.finish(transfers, begun, limits, when_late(first + index));
                    outcomes.push(outcome.unwrap_or_else(Moved::Failed));
                    after_late |= matches!(outcomes.last(), Some(Moved::Late));
                }
                Ok(outcomes)
            });
            match outcomes {
                Ok(outcomes) => moved.extend(outcomes),
                Err(error) => {
                    let again = || Moved::Failed(io::Error::new(error.kind(), error.to_string()));
                    moved.extend(group.iter().map(|_| again()));
                }
            }
        }
        moved
    }

    /// Reads a piece, however long that takes.
    pub(crate) fn read_without_ring(&self, (block, pages): (u64, usize)) -> io::Result<Buffer> {
        let (bytes, offset) = (pages * PAGE_SIZE, block * PAGE_SIZE as u64);
        let mut buffer = Buffer::new(bytes)?;
        let (mut from, mut short) = (0, 0);
        while from < bytes {
            match direct::read_at(&*self.file, offset + from as u64, &mut buffer.as_mut_slice()[from..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                // Direct I/O continues only at a block boundary.
                read if from + read < bytes => {
                    from += read - read % PAGE_SIZE;
                    short += 1;
                    if short > TRIES {
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                }
                read => from += read,
            }
        }
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_room_for_its_piece_and_for_less_than_four_times_as_much() {
        let mut transfers = Transfers::default();
        for blocks in 1..=PIECE_BLOCKS {
            for _ in 0..2 {
                let buffer = transfers.buffer(blocks * PAGE_SIZE).expect("memory");
                assert!((blocks..4 * blocks).contains(&(buffer.as_slice().len() / PAGE_SIZE)));
                transfers.put_back(buffer);
            }
        }
    }
}
