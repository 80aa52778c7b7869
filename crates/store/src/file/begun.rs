//! Begun: reads of single blocks that were handed to the kernel, and whose bytes are taken later.
//!
//! Before: a fault worker met a page of the file. After: it has the bytes when they are there ([`Begun::now`]), and
//! serves other faults meanwhile; or a slow worker waits for them ([`Begun::end`]) and reads nothing twice.
//! Threads: any; only `end` waits. Units: one block a read, each on a ring of its own, so that no thread waits for
//! another's.
//! Promise: a read that nobody takes, or that never ends, costs its ring and its buffer. All of them together are
//! bounded, for a store and for the process; beyond that nothing is begun.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_base::store::OnReply;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::disk::{Disk, DiskFault};
use crate::{Handle, PageBytes, PageKey};

/// Reads under way at a time, of one store and of all.
const MOST: usize = 8;
const MOST_OF_ALL: usize = 256;
/// Readers that wait for their next read.
const MOST_IDLE: usize = 32;

/// How long a slow worker waits for a read that a fault worker began: a disk's seek. A thread that is stuck in another
/// VM's memory notes no end, so after this the block is read once more.
const SEEK: Duration = Duration::from_millis(20);

/// Readers that exist, and those of them that are idle.
static READERS: AtomicUsize = AtomicUsize::new(0);
static IDLE: Mutex<Vec<(Reader, Buffer)>> = Mutex::new(Vec::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A ring for one read at a time.
#[derive(Debug)]
struct Reader(Ring);

impl Reader {
    /// An idle one, or a new one if there may be one more.
    fn get() -> io::Result<(Self, Buffer)> {
        if let Some(idle) = lock(&IDLE).pop() {
            return Ok(idle);
        }
        let full = |readers| (readers < MOST_OF_ALL).then_some(readers + 1);
        if READERS.fetch_update(Ordering::AcqRel, Ordering::Acquire, full).is_err() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let made = Ring::for_any_thread(1).and_then(|ring| Ok((ring, Buffer::new(PAGE_SIZE)?)));
        let (ring, buffer) = made.inspect_err(|_| _ = READERS.fetch_sub(1, Ordering::AcqRel))?;
        Ok((Self(ring), buffer))
    }

    fn put_back(self, buffer: Buffer) {
        let mut idle = lock(&IDLE);
        if idle.len() < MOST_IDLE {
            idle.push((self, buffer));
        }
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        READERS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The reads of one store.
#[derive(Debug, Default)]
pub(super) struct Begun {
    reads: Mutex<Vec<Read>>,
    /// Their number: nearly always 0.
    count: AtomicUsize,
}

#[derive(Debug)]
struct Read {
    page: (PageKey, Handle),
    reader: Reader,
    ticket: Ticket,
    since: Instant,
    /// A test ordered that it takes at least this long.
    takes: Duration,
    /// No thread waits for it.
    is_abandoned: bool,
}

impl Read {
    /// Its bytes, or `None` if they are not what was asked for; the read itself if it is not over.
    fn take<T>(mut self, read: impl FnOnce(&PageBytes) -> Option<T>) -> Result<Option<T>, Self> {
        if self.since.elapsed() < self.takes {
            return Err(self);
        }
        let Some((transfer, result)) = self.reader.0.now(&self.ticket) else { return Err(self) };
        let is_whole = result.is_ok_and(|bytes| bytes == PAGE_SIZE);
        let taken = transfer.buffer.as_slice().as_chunks().0.first().filter(|_| is_whole).and_then(read);
        self.reader.put_back(transfer.buffer);
        Ok(taken)
    }
}

impl Begun {
    fn push(&self, reads: &mut Vec<Read>, read: Read) {
        reads.push(read);
        self.count.store(reads.len(), Ordering::Release);
    }

    fn remove(&self, page: (PageKey, Handle)) -> Option<Read> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut reads = lock(&self.reads);
        let at = reads.iter().position(|read| read.page == page && !read.is_abandoned)?;
        let read = reads.swap_remove(at);
        self.count.store(reads.len(), Ordering::Release);
        Some(read)
    }

    /// Begins to read the block of this page. Before that `watch` gets the descriptor that has input when it is read.
    /// Returns whether it was begun, now or before. Never waits: what the kernel cannot do at once it does elsewhere.
    pub fn begin(&self, disk: &Disk, page: (PageKey, Handle), block: u64, watch: OnReply<'_>) -> bool {
        let mut reads = lock(&self.reads);
        for read in std::mem::take(&mut *reads) {
            // A page whose thread is gone: nobody came for it, and nobody will.
            let is_abandoned = read.is_abandoned || read.since.elapsed() > SEEK;
            if !is_abandoned {
                reads.push(read);
            } else if let Err(read) = read.take(|_| Some(())) {
                reads.push(Read { is_abandoned, ..read });
            }
        }
        self.count.store(reads.len(), Ordering::Release);
        if let Some(read) = reads.iter().find(|read| read.page == page && !read.is_abandoned) {
            watch(read.reader.0.fd());
            return true;
        }
        let is_full = reads.len() >= MOST;
        drop(reads);
        // Two threads that begin the same page read it twice.
        !is_full && self.start(disk, page, block, watch).is_some()
    }

    fn start(&self, disk: &Disk, page: (PageKey, Handle), block: u64, watch: OnReply<'_>) -> Option<()> {
        if disk.has_no_rings() {
            return None;
        }
        let (end, takes) = match disk.fault(Direction::Read) {
            None => (PAGE_SIZE, Duration::ZERO),
            Some(DiskFault::Short(bytes)) => (bytes.min(PAGE_SIZE), Duration::ZERO),
            Some(DiskFault::Late) => (PAGE_SIZE, Duration::MAX),
            Some(DiskFault::Takes(time)) => (PAGE_SIZE, time),
            Some(DiskFault::Errno(_)) => return None,
        };
        let (mut reader, buffer) = Reader::get().ok()?;
        let (file, offset) = (Arc::clone(&disk.file), block * PAGE_SIZE as u64);
        let transfer = Transfer { file, direction: Direction::Read, offset, buffer, done: 0, end };
        // It has room: it has nothing else to do.
        let ticket = reader.0.start(transfer).ok()?;
        watch(reader.0.fd());
        reader.0.submit();
        let read = Read { page, reader, ticket, since: Instant::now(), takes, is_abandoned: false };
        self.push(&mut lock(&self.reads), read);
        Some(())
    }

    /// What `read` makes of the bytes of a page that was begun, if they are there. Otherwise `watch` gets the descriptor
    /// again. Never waits.
    pub fn now<T>(
        &self,
        page: (PageKey, Handle),
        watch: OnReply<'_>,
        read: impl FnOnce(&PageBytes) -> Option<T>,
    ) -> Option<T> {
        match self.remove(page)?.take(read) {
            Ok(taken) => taken,
            Err(read) => {
                watch(read.reader.0.fd());
                self.push(&mut lock(&self.reads), read);
                None
            }
        }
    }

    /// The same, and waits for them for a while. `None` too if nothing was begun.
    pub fn end<T>(&self, page: (PageKey, Handle), read: impl FnOnce(&PageBytes) -> Option<T>) -> Option<T> {
        let mut under_way = self.remove(page)?;
        if under_way.takes < SEEK {
            under_way.reader.0.wait_until_over(&under_way.ticket, SEEK);
            std::thread::sleep(under_way.takes.saturating_sub(under_way.since.elapsed()));
        }
        match under_way.take(read) {
            Ok(taken) => taken,
            Err(read) => {
                self.push(&mut lock(&self.reads), Read { is_abandoned: true, ..read });
                None
            }
        }
    }
}

impl Drop for Begun {
    /// Waits a moment for reads that are under way: the memory of one that is not over then is not freed any more.
    fn drop(&mut self) {
        let until = Instant::now() + SEEK;
        for read in self.reads.get_mut().unwrap_or_else(PoisonError::into_inner) {
            read.reader.0.wait_until_over(&read.ticket, until.saturating_duration_since(Instant::now()));
        }
    }
}
