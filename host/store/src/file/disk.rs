//! Blocks on their way to a disk, past the page cache, through the calling thread's ring; and what reads (`reading`)
//! and writes have in common.
//!
//! Before: `file` has taken blocks for pages. After: the bytes are on the device, or the failure is known.
//! Threads: any; each has a ring of its own, so that one that waits for a slow block delays no other thread.
//! Units: a block is 4096 bytes; a piece is 1 to 64 blocks that follow one another.
//! Promise: bytes are first copied to a buffer of our own, so the kernel holds no caller's memory when we give up
//! waiting. Short transfers are continued. A thread that gets no ring (`kernel.io_uring_disabled`) reads all the same,
//! with no limit to the wait, and writes nothing.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_sys::direct::DirectFile;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::faults::{DiskFaults, Ordered};
use crate::PageBytes;

/// Most blocks of one transfer: 256 KiB. A longer extent goes in pieces, all of them under way at once, so that one is
/// copied and checked while the device works on the others: 2 MiB are read in 0.47 ms and not 0.64 (XFS on a loop
/// device).
pub(crate) const PIECE_BLOCKS: usize = 64;
/// Pieces under way at once: 2 MiB. Transfers that a thread gave up waiting for are not counted.
pub(crate) const AT_ONCE: usize = 8;
const RING_TRANSFERS: u32 = 2 * AT_ONCE as u32;
/// Sizes of buffers, and how many of each a thread keeps for reuse: 2.7 MiB. A call that reads a huge page keeps all of
/// its pieces until the last is there, so the buffer of a short piece is not as large as that of a long one.
const BUFFERS: [(usize, usize); 4] =
    [(PAGE_SIZE, AT_ONCE), (PAGE_SIZE * 4, AT_ONCE), (PAGE_SIZE * 16, AT_ONCE), (PAGE_SIZE * PIECE_BLOCKS, AT_ONCE)];
/// How long a worker waits for a page before it serves others and asks again. A healthy device is faster.
pub(crate) const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// A guest's wait for a block that was late doubles each time, this often: up to 6.4 s. So of a device that is slow for
/// long, such as a throttled volume, few reads are late, and have to be kept for who asks next.
const DOUBLINGS: u8 = 6;
/// Reclaim has time, and an abandoned write blocks its block until it is over. After one that is late, a call waits for
/// none of its others, and begins no more.
pub(crate) const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the kernel may return "interrupted" or "not now" before that is an error.
pub(crate) const TRIES: usize = 16;

/// The result of a piece.
#[derive(Debug)]
pub(crate) enum Moved {
    /// All of it was written, or read.
    Done,
    /// It was not over in time. Its completion was left with the ring.
    Late,
    /// It was not begun, because one before it was late.
    Unbegun,
    /// The kernel refused, with this error.
    Failed(io::Error),
}

/// How long to wait for a read of a block that was `late` this many times.
pub(crate) fn read_timeout(late: u8) -> Duration {
    READ_TIMEOUT * (1 << late.min(DOUBLINGS))
}

/// The file's data side.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) file: Arc<DirectFile>,
    pub(crate) faults: Option<Arc<DiskFaults>>,
    /// It can be read only.
    pub(crate) read_only: bool,
}

/// The rings and buffers of a thread.
#[derive(Default)]
pub(crate) struct Transfers {
    writes: Option<Ring>,
    /// For a call's reads. Those that are late take it with them.
    pub(crate) reads: Option<Ring>,
    /// For each size in `BUFFERS`.
    spares: [Vec<Buffer>; BUFFERS.len()],
}

thread_local! {
    /// A thread's transfers of all its file stores share it. The rings are made at the first use.
    static TRANSFERS: RefCell<Transfers> = RefCell::default();
}

/// Adds what the kernel did not say.
fn no_ring(error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("setting up io_uring (see kernel.io_uring_disabled): {error}"))
}

impl Transfers {
    /// What this makes of those of the calling thread.
    pub(crate) fn of_this_thread<R>(work: impl FnOnce(&mut Self) -> R) -> R {
        TRANSFERS.with_borrow_mut(work)
    }

    fn for_writes(&mut self) -> io::Result<&mut Ring> {
        if self.writes.is_none() {
            self.writes = Some(Ring::new(RING_TRANSFERS).map_err(|error| no_ring(&error))?);
        }
        // It was just made, if it did not exist.
        self.writes.as_mut().ok_or_else(|| io::Error::other("no ring"))
    }

    /// A ring that any thread may have after this one.
    pub(crate) fn for_reads(&mut self) -> io::Result<Ring> {
        self.reads.take().map_or_else(|| Ring::for_any_thread(AT_ONCE).map_err(|error| no_ring(&error)), Ok)
    }

    /// A buffer for this many bytes, at most a piece's.
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

/// Are there writes that this thread gave up waiting for, and that it does not know to be over?
pub fn has_late_writes() -> bool {
    Transfers::of_this_thread(|transfers| transfers.writes.as_ref().is_some_and(Ring::has_late_writes))
}

/// Notice which of these writes are over, and free their blocks. The kernel tells no other thread, so one that has such
/// writes must come here now and then, and not end.
pub fn notice_late_writes() {
    Transfers::of_this_thread(|transfers| transfers.writes.iter_mut().for_each(Ring::reap));
}

/// Can this thread have a ring?
pub(crate) fn ready() -> io::Result<()> {
    Transfers::of_this_thread(|transfers| transfers.for_writes().map(drop))
}

/// What is to be done about a transfer that the kernel has returned.
pub(crate) enum Returned {
    /// All of it is done.
    Done(Buffer),
    /// It failed.
    Failed(Buffer, io::Error),
    /// The rest is to be begun.
    Rest(Transfer),
}

impl Returned {
    /// What follows for a transfer of this many bytes in all.
    pub(crate) fn of(mut transfer: Transfer, result: io::Result<usize>, bytes: usize) -> Self {
        match result {
            Ok(moved) if moved > 0 && transfer.done + moved >= bytes => return Self::Done(transfer.buffer),
            // The end of the file, or a device that writes nothing and reports success.
            Ok(0) => return Self::Failed(transfer.buffer, io::ErrorKind::UnexpectedEof.into()),
            Ok(moved) => transfer.done += moved,
            Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            Err(error) => return Self::Failed(transfer.buffer, error),
        }
        // Direct I/O continues at block borders only: the moved part of a block is moved again.
        transfer.done -= transfer.done % PAGE_SIZE;
        transfer.end = bytes;
        Self::Rest(transfer)
    }
}

/// A piece that was begun.
struct Begun {
    ticket: Ticket,
    /// A test ordered that it takes at least this long.
    takes: Duration,
}

impl Disk {
    /// What a test ordered of the next transfer of these blocks.
    pub(crate) fn next_is(&self, direction: Direction, blocks: (u64, usize)) -> io::Result<Ordered> {
        Ordered::of(self.faults.as_ref().and_then(|faults| faults.next(direction, blocks)))
    }

    /// Did a test order that there are none?
    pub(crate) fn has_no_rings(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.has_no_rings())
    }

    /// Begins a transfer on this ring, or the rest of one, as a test ordered.
    ///
    /// # Errors
    /// A test ordered that it fails; `WouldBlock` if the ring is full. Either comes with the buffer.
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

    /// Wait until `bytes` are written, or until it is late.
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
        // It was continued or restarted too often without progress.
        transfers.for_writes()?.abandon(begun.ticket, when_late);
        Ok(Moved::Late)
    }

    /// Write pieces, each given by its first block and its pages, and wait for `timeout` at most for each 2 MiB. One
    /// outcome each, in order. For a `Late` piece, the function that `when_late` returned for its index is called when
    /// the write is over. `meanwhile` is called once, while the device works.
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
                        // The device begins while the next piece is copied. Single pages go to it together.
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
                    // All are under way at once, so the waits for them do not add up.
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

    /// Reads a piece and waits for it however long it takes.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn read_without_ring(&self, (block, pages): (u64, usize)) -> io::Result<Buffer> {
        let (bytes, offset) = (pages * PAGE_SIZE, block * PAGE_SIZE as u64);
        let mut buffer = Buffer::new(bytes)?;
        let (mut from, mut short) = (0, 0);
        while from < bytes {
            match self.file.read_at(offset + from as u64, &mut buffer.as_mut_slice()[from..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                // Direct I/O continues at block borders only.
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
