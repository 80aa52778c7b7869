//! Blocks on their way to a disk and back, past the page cache, through the calling thread's ring.
//!
//! Before: `file` has taken blocks for pages, or looks for a page. After: the bytes are on the device, or in the
//! caller's buffers, or the failure is known.
//! Threads: any; each has a ring of its own, so that one that waits for a slow block delays no other thread.
//! Units: a block is 4096 bytes; a piece is 1 to 64 blocks that follow one another.
//! Promise: bytes are first copied to a buffer of our own, so the kernel holds no caller's memory when we give up
//! waiting. Short transfers are continued. A thread that gets no ring (`kernel.io_uring_disabled`) reads all the same,
//! with no limit to the wait, and writes nothing.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_sys::direct::DirectFile;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use crate::{PageBytes, held};

/// Most blocks of one transfer: 256 KiB. A longer extent goes in pieces, all of them under way at once, so that one is
/// copied and checked while the device works on the others: 2 MiB are read in 0.47 ms and not 0.64 (XFS on a loop
/// device).
pub(crate) const PIECE_BLOCKS: usize = 64;
/// Pieces under way at once: 2 MiB. Transfers that a thread gave up waiting for are not counted.
const AT_ONCE: usize = 8;
const RING_TRANSFERS: u32 = 2 * AT_ONCE as u32;
/// Sizes of buffers, and how many of each a thread keeps for reuse: a little over 2 MiB.
const BUFFERS: [(usize, usize); 2] = [(PAGE_SIZE, AT_ONCE), (PIECE_BLOCKS * PAGE_SIZE, AT_ONCE)];
/// How long a worker waits for a page before it serves others and asks again. A healthy device is faster.
const READ_TIMEOUT: Duration = Duration::from_millis(100);
/// A read that is given up begins anew, so the wait for a block doubles each time, this often: up to 6.4 s. With one
/// limit for all, no page would come from a device that is slow for long, such as a throttled volume.
const DOUBLINGS: u8 = 6;
/// Reclaim has time, and an abandoned write blocks its block until it is over. After one that is late, a call waits for
/// none of its others, and begins no more.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How often the kernel may return "interrupted" or "not now" before that is an error.
const TRIES: usize = 16;

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

/// Faults of a disk on command: for tests of the file store and of its users.
#[derive(Debug, Default)]
pub struct DiskFaults {
    reads: Mutex<VecDeque<DiskFault>>,
    writes: Mutex<VecDeque<DiskFault>>,
    no_rings: AtomicBool,
}

/// How one transfer goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskFault {
    /// It fails with this error number and moves nothing.
    Errno(i32),
    /// It moves this many bytes and ends there.
    Short(usize),
    /// It is not over in time.
    Late,
    /// It takes this long: it is over in time for those who wait longer.
    Takes(Duration),
}

/// How long to wait for a read of a block that was `late` this many times.
pub(crate) fn read_timeout(late: u8) -> Duration {
    READ_TIMEOUT * (1 << late.min(DOUBLINGS))
}

impl DiskFaults {
    fn queue(&self, direction: Direction) -> &Mutex<VecDeque<DiskFault>> {
        match direction {
            Direction::Read => &self.reads,
            Direction::Write => &self.writes,
        }
    }

    /// The next `n` reads fail like this, after those ordered before.
    pub fn fail_reads(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Read, n, fault);
    }

    /// The next `n` writes fail like this, after those ordered before.
    pub fn fail_writes(&self, n: usize, fault: DiskFault) {
        self.order(Direction::Write, n, fault);
    }

    /// The reads and writes ordered to fail that have not come yet do not.
    pub fn forget(&self) {
        for direction in [Direction::Read, Direction::Write] {
            self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner).clear();
        }
    }

    /// From now on no thread gets a ring.
    pub fn refuse_rings(&self) {
        self.no_rings.store(true, Ordering::Relaxed);
    }

    fn order(&self, direction: Direction, n: usize, fault: DiskFault) {
        let mut queue = self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner);
        queue.extend(std::iter::repeat_n(fault, n));
    }

    fn next(&self, direction: Direction) -> Option<DiskFault> {
        self.queue(direction).lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }
}

/// The file's data side.
#[derive(Debug)]
pub(crate) struct Disk {
    pub(crate) file: Arc<DirectFile>,
    pub(crate) faults: Option<Arc<DiskFaults>>,
    /// It can be read only.
    pub(crate) read_only: bool,
}

/// The ring and buffers of a thread.
struct Transfers {
    ring: Ring,
    /// For each size in `BUFFERS`.
    spares: [Vec<Buffer>; BUFFERS.len()],
}

thread_local! {
    /// Made at the first use. A thread's transfers of all its file stores share it.
    static TRANSFERS: RefCell<Option<Transfers>> = const { RefCell::new(None) };
}

impl Transfers {
    /// A buffer for this many bytes, at most a piece's.
    fn buffer(&mut self, bytes: usize) -> io::Result<Buffer> {
        let class = BUFFERS.partition_point(|(size, _)| *size < bytes).min(BUFFERS.len() - 1);
        self.spares[class].pop().map_or_else(|| Buffer::new(BUFFERS[class].0), Ok)
    }

    fn put_back(&mut self, buffer: Buffer) {
        let class = BUFFERS.iter().position(|(size, _)| *size == buffer.as_slice().len());
        if let Some(class) = class.filter(|class| self.spares[*class].len() < BUFFERS[*class].1) {
            self.spares[class].push(buffer);
        }
    }
}

/// Are there writes that this thread gave up waiting for, and that it does not know to be over?
pub fn has_late_writes() -> bool {
    TRANSFERS.with_borrow(|transfers| transfers.as_ref().is_some_and(|transfers| transfers.ring.has_late_writes()))
}

/// Notice which of these writes are over, and free their blocks. The kernel tells no other thread, so one that has such
/// writes must come here now and then, and not end.
pub fn notice_late_writes() {
    TRANSFERS.with_borrow_mut(|transfers| transfers.iter_mut().for_each(|transfers| transfers.ring.reap()));
}

/// Can this thread have a ring?
pub(crate) fn ready() -> io::Result<()> {
    with_transfers(|_| ())
}

fn with_transfers<R>(work: impl FnOnce(&mut Transfers) -> R) -> io::Result<R> {
    TRANSFERS.with_borrow_mut(|transfers| {
        if transfers.is_none() {
            let ring = Ring::new(RING_TRANSFERS).map_err(|error| {
                io::Error::new(error.kind(), format!("setting up io_uring (see kernel.io_uring_disabled): {error}"))
            })?;
            *transfers = Some(Transfers { ring, spares: Default::default() });
        }
        // It was just made, if it did not exist.
        transfers.as_mut().map(work).ok_or_else(|| io::Error::other("no ring"))
    })
}

/// A piece that was begun.
struct Begun {
    ticket: Ticket,
    /// A test ordered that it takes at least this long.
    takes: Duration,
}

/// Wait for a piece, or until it is late. A read is late after the first wait for a page if the lock of the thread is
/// wanted.
fn wait(
    ring: &mut Ring,
    direction: Direction,
    begun: &Begun,
    timeout: Duration,
) -> Option<(Transfer, io::Result<usize>)> {
    if begun.takes > timeout {
        return None;
    }
    let mut left = timeout;
    loop {
        let now = left.min(READ_TIMEOUT);
        let over = ring.wait(&begun.ticket, now);
        left -= now;
        if over.is_some() || left.is_zero() || direction == Direction::Read && held::is_wanted() {
            return over;
        }
    }
}

impl Disk {
    /// What a test ordered of the next transfer: the most bytes that it moves, and how long it takes at least.
    pub(crate) fn next_is(&self, direction: Direction) -> io::Result<(usize, Duration)> {
        match self.faults.as_ref().and_then(|faults| faults.next(direction)) {
            Some(DiskFault::Errno(errno)) => Err(io::Error::from_raw_os_error(errno)),
            Some(DiskFault::Short(bytes)) => Ok((bytes, Duration::ZERO)),
            Some(DiskFault::Late) => Ok((usize::MAX, Duration::MAX)),
            Some(DiskFault::Takes(time)) => Ok((usize::MAX, time)),
            None => Ok((usize::MAX, Duration::ZERO)),
        }
    }

    /// Did a test order that there are none?
    pub(crate) fn has_no_rings(&self) -> bool {
        self.faults.as_ref().is_some_and(|faults| faults.no_rings.load(Ordering::Relaxed))
    }

    fn begin(
        &self,
        transfers: &mut Transfers,
        direction: Direction,
        mut transfer: Transfer,
    ) -> Result<Begun, io::Error> {
        let takes = match self.next_is(direction) {
            Ok((most, takes)) => {
                transfer.end = transfer.end.min(transfer.done.saturating_add(most));
                takes
            }
            Err(error) => {
                transfers.put_back(transfer.buffer);
                return Err(error);
            }
        };
        transfers.ring.reap();
        match transfers.ring.start(transfer) {
            Ok(ticket) => Ok(Begun { ticket, takes }),
            Err(transfer) => {
                transfers.put_back(transfer.buffer);
                Err(io::ErrorKind::WouldBlock.into())
            }
        }
    }

    /// Wait until `bytes` are moved, or until it is late. Returns the buffer, unless it was late.
    fn finish(
        &self,
        transfers: &mut Transfers,
        direction: Direction,
        begun: Result<Begun, io::Error>,
        (bytes, timeout): (usize, Duration),
        when_late: impl FnOnce() + Send + 'static,
    ) -> Result<Buffer, Moved> {
        let mut begun = begun.map_err(Moved::Failed)?;
        for _ in 0..TRIES {
            let over = wait(&mut transfers.ring, direction, &begun, timeout);
            let Some((mut transfer, result)) = over else {
                transfers.ring.abandon(begun.ticket, when_late);
                return Err(Moved::Late);
            };
            match result {
                Ok(moved) if moved > 0 && transfer.done + moved >= bytes => return Ok(transfer.buffer),
                // The end of the file, or a device that writes nothing and reports success.
                Ok(0) => {
                    transfers.put_back(transfer.buffer);
                    return Err(Moved::Failed(io::ErrorKind::UnexpectedEof.into()));
                }
                Ok(moved) => transfer.done += moved,
                Err(error) if matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
                Err(error) => {
                    transfers.put_back(transfer.buffer);
                    return Err(Moved::Failed(error));
                }
            }
            // Direct I/O continues at block borders only: the moved part of a block is moved again.
            transfer.done -= transfer.done % PAGE_SIZE;
            transfer.end = bytes;
            begun = self.begin(transfers, direction, transfer).map_err(Moved::Failed)?;
        }
        // It was continued or restarted too often without progress.
        transfers.ring.abandon(begun.ticket, when_late);
        Err(Moved::Late)
    }

    /// Write pieces, each given by its first block and its pages. One outcome each, in order. For a `Late` piece, the
    /// function that `when_late` returned for its index is called when the write is over. `meanwhile` is called once,
    /// while the device works.
    pub(crate) fn write<L: FnOnce() + Send + 'static>(
        &self,
        pieces: &[(u64, &[PageBytes])],
        when_late: impl Fn(usize) -> L,
        meanwhile: impl FnOnce(),
    ) -> Vec<Moved> {
        let sizes: Vec<(u64, usize)> = pieces.iter().map(|(block, pages)| (*block, pages.len())).collect();
        let fill = |index: usize, buffer: &mut [u8]| buffer.copy_from_slice(pieces[index].1.as_flattened());
        let timeout = |_, after_late| if after_late { Duration::ZERO } else { WRITE_TIMEOUT };
        self.all(Direction::Write, &sizes, (fill, timeout), when_late, meanwhile, |_, _| ())
    }

    /// Read pieces, each given by its first block and a number of pages, and wait for each as long as `timeout` says of
    /// its index. One outcome each, in order; for each `Done` piece, `take` was called with its index and its pages.
    pub(crate) fn read(
        &self,
        pieces: &[(u64, usize)],
        timeout: impl Fn(usize) -> Duration,
        mut take: impl FnMut(usize, &[PageBytes]),
    ) -> Vec<Moved> {
        let done = |index: usize, bytes: &[u8]| take(index, bytes.as_chunks().0);
        let timeout = |index, _| timeout(index);
        self.all(Direction::Read, pieces, (|_, _: &mut [u8]| (), timeout), |_| || (), || (), done)
    }

    fn read_without_ring(&self, (block, pages): (u64, usize), done: impl FnOnce(&[u8])) -> Moved {
        let (bytes, offset) = (pages * PAGE_SIZE, block * PAGE_SIZE as u64);
        let read = || {
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
        };
        match read() {
            Ok(buffer) => {
                done(buffer.as_slice());
                Moved::Done
            }
            Err(error) => Moved::Failed(error),
        }
    }

    fn all<L: FnOnce() + Send + 'static>(
        &self,
        direction: Direction,
        pieces: &[(u64, usize)],
        (fill, timeout): (impl Fn(usize, &mut [u8]), impl Fn(usize, bool) -> Duration),
        when_late: impl Fn(usize) -> L,
        meanwhile: impl FnOnce(),
        mut done: impl FnMut(usize, &[u8]),
    ) -> Vec<Moved> {
        let mut meanwhile = Some(meanwhile);
        let mut moved = Vec::with_capacity(pieces.len());
        for group in pieces.chunks(AT_ONCE) {
            let first = moved.len();
            if moved.iter().any(|moved| matches!(moved, Moved::Late)) {
                moved.resize_with(pieces.len(), || Moved::Unbegun);
                break;
            }
            let ring = if self.has_no_rings() { Err(io::ErrorKind::PermissionDenied.into()) } else { Ok(()) };
            let with_ring = |transfers: &mut Transfers| {
                let begin = |(index, (block, pages)): (usize, &(u64, usize))| {
                    let bytes = pages * PAGE_SIZE;
                    let mut buffer = transfers.buffer(bytes)?;
                    fill(first + index, &mut buffer.as_mut_slice()[..bytes]);
                    let offset = block * PAGE_SIZE as u64;
                    let file = Arc::clone(&self.file);
                    let transfer = Transfer { file, direction, offset, buffer, done: 0, end: bytes };
                    let begun = self.begin(transfers, direction, transfer);
                    if *pages > 1 {
                        // The device begins while the next piece is copied. Single pages go to it together.
                        transfers.ring.submit();
                    }
                    begun
                };
                let begun: Vec<_> = group.iter().enumerate().map(begin).collect();
                transfers.ring.submit();
                let submitted = Instant::now();
                if let Some(meanwhile) = meanwhile.take() {
                    meanwhile();
                }
                let mut outcomes = Vec::with_capacity(group.len());
                let mut after_late = false;
                for (index, (begun, (_, pages))) in begun.into_iter().zip(group).enumerate() {
                    let bytes = pages * PAGE_SIZE;
                    let when_late = when_late(first + index);
                    // All are under way at once, so the waits for them do not add up.
                    let left = timeout(first + index, after_late).saturating_sub(submitted.elapsed());
                    let limits = (bytes, left);
                    outcomes.push(match self.finish(transfers, direction, begun, limits, when_late) {
                        Ok(buffer) => {
                            done(first + index, &buffer.as_slice()[..bytes]);
                            transfers.put_back(buffer);
                            Moved::Done
                        }
                        Err(moved) => moved,
                    });
                    after_late |= matches!(outcomes.last(), Some(Moved::Late));
                }
                outcomes
            };
            match ring.and_then(|()| with_transfers(with_ring)) {
                Ok(outcomes) => moved.extend(outcomes),
                // No ring is allowed any more. One for which there is no memory now is tried again.
                Err(error)
                    if direction == Direction::Read
                        && matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::Unsupported) =>
                {
                    moved.extend(
                        (first..)
                            .zip(group)
                            .map(|(index, piece)| self.read_without_ring(*piece, |bytes| done(index, bytes))),
                    );
                }
                Err(error) => {
                    let again = || Moved::Failed(io::Error::new(error.kind(), error.to_string()));
                    moved.extend(group.iter().map(|_| again()));
                }
            }
        }
        moved
    }
}
