//! Asynchronous reads of single blocks: submitted by one call, and their bytes taken by a later one.
//!
//! Before: a fault worker meets a page that is in the file. After: it serves other faults, and takes the bytes when
//! they are there ([`BegunReads::now`]); or a slow worker waits for them ([`BegunReads::wait_for`]).
//! Threads: any; only `wait_for` waits for the device. Units: one block per read, each on a ring of its own.
//! Promise: after the device was slow, nothing is begun until a slow worker's read of a page was quick. The reads in
//! flight are bounded, per store and per process; beyond that, none is begun.
//!
//! The kernel completes a read in the thread that submitted it. While that thread is stuck in the memory of another VM,
//! or sleeps in the file system, the device looks slow from here.

use std::cell::RefCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_base::store::OnReply;
use ballast_sys::lock::Lock;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::disk::Disk;
use crate::{Handle, PageBytes, PageKey};

/// Most reads in flight, of one store and of all.
const MOST: usize = 8;
const MOST_OF_ALL: usize = 256;
/// Most idle rings that one thread keeps for its next reads, and that all threads keep together, because a large
/// machine has more fault workers than rings. The other idle rings are for any thread.
const KEPT: usize = 4;
const KEPT_OF_ALL: usize = MOST_OF_ALL / 2;

/// A read that takes longer is late: no thread waits for it, and the page is read again.
const LATE: Duration = Duration::from_millis(10);
/// To submit a read takes about 15 us. If it took this long, the thread slept.
const SLEPT: Duration = Duration::from_millis(2);
/// For this time after a late read or a sleep, nothing is begun; then not before a slow worker's read was quick.
const REST: Duration = Duration::from_secs(1);
/// A read not taken in this time is dropped: its page was restored in another way just before it was begun.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(1);
/// How long a closing store waits for its reads. The buffer of a read that is still in flight then is leaked.
const LAST_WAIT: Duration = Duration::from_millis(20);

/// Rings of this module in the process.
static RINGS: AtomicUsize = AtomicUsize::new(0);
/// Number of rings that threads keep.
static KEPT_NOW: AtomicUsize = AtomicUsize::new(0);
static IDLE: Mutex<Vec<(OneRead, Buffer)>> = Mutex::new(Vec::new());

thread_local! {
    /// The rings that this thread used last: their descriptors are in its epoll set, and in few others.
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

#[derive(Default)]
struct Own(Vec<(OneRead, Buffer)>);

impl Own {
    fn pop(&mut self) -> Option<(OneRead, Buffer)> {
        self.0.pop().inspect(|_| _ = KEPT_NOW.fetch_sub(1, Ordering::AcqRel))
    }

    /// Keeps one more idle ring, if both limits allow it.
    fn keep(&mut self, idle: (OneRead, Buffer)) -> Result<(), (OneRead, Buffer)> {
        let one_more = |kept| (self.0.len() < KEPT && kept < KEPT_OF_ALL).then_some(kept + 1);
        if KEPT_NOW.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            return Err(idle);
        }
        self.0.push(idle);
        Ok(())
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        KEPT_NOW.fetch_sub(self.0.len(), Ordering::AcqRel);
    }
}

#[derive(Debug)]
struct OneRead(Box<Ring>);

impl OneRead {
    /// An idle ring, or a new one; `WouldBlock` at the limit.
    fn get() -> io::Result<(Self, Buffer)> {
        let own = OWN.with_borrow_mut(|own| own.get_or_insert_default().pop());
        if let Some(idle) = own.or_else(|| IDLE.locked().pop()) {
            return Ok(idle);
        }
        let one_more = |rings| (rings < MOST_OF_ALL).then_some(rings + 1);
        if RINGS.fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).is_err() {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let made = Ring::for_any_thread(1).and_then(|ring| Ok((ring, Buffer::new(PAGE_SIZE)?)));
        let (ring, buffer) = made.inspect_err(|_| _ = RINGS.fetch_sub(1, Ordering::AcqRel))?;
        Ok((Self(Box::new(ring)), buffer))
    }

    fn put_back(self, buffer: Buffer) {
        let idle = (self, buffer);
        let kept = OWN.with_borrow_mut(|own| match own {
            Some(own) => own.keep(idle),
            None => Err(idle),
        });
        if let Err(idle) = kept {
            IDLE.locked().push(idle);
        }
    }
}

impl Drop for OneRead {
    fn drop(&mut self) {
        RINGS.fetch_sub(1, Ordering::AcqRel);
    }
}

#[derive(Debug, Default)]
pub(super) struct BegunReads {
    inner: Mutex<Reads>,
    /// Reads in flight, for a look without the lock: nearly always 0.
    count: AtomicUsize,
    /// The device was slow, and no read was quick since.
    is_slow: AtomicBool,
}

#[derive(Debug, Default)]
struct Reads {
    under_way: Vec<UnderWay>,
    /// Threads that submit a read, and since when the first of them does.
    starting: usize,
    starting_since: Option<Instant>,
    rests_until: Option<Instant>,
}

impl Reads {
    /// Whether one more read may be begun: none is begun while a thread sleeps in the submission of another.
    fn may_begin(&self, now: Instant) -> bool {
        let sleeps = self.starting_since.is_some_and(|since| now.saturating_duration_since(since) > SLEPT);
        !sleeps && self.rests_until.is_none_or(|until| until <= now) && self.under_way.len() + self.starting < MOST
    }
}

#[derive(Debug)]
struct UnderWay {
    page: (PageKey, Handle),
    ring: OneRead,
    ticket: Ticket,
    since: Instant,
    takes: Duration,
    is_abandoned: bool,
}

impl UnderWay {
    /// The result of `check` for a whole block; the read itself if it is still in flight.
    fn take<T>(mut self, check: impl FnOnce(&PageBytes) -> Option<T>) -> Result<Option<T>, Self> {
        if self.since.elapsed() < self.takes {
            return Err(self);
        }
        let Some((transfer, result)) = self.ring.0.now(&self.ticket) else { return Err(self) };
        let is_whole = result.is_ok_and(|bytes| bytes == PAGE_SIZE);
        let taken = transfer.buffer.as_slice().as_chunks().0.first().filter(|_| is_whole).and_then(check);
        self.ring.put_back(transfer.buffer);
        Ok(taken)
    }
}

impl BegunReads {
    /// Updates the count that is read without the lock, after each change.
    fn counted(&self, reads: &Reads) {
        self.count.store(reads.under_way.len(), Ordering::Release);
    }

    fn push(&self, read: UnderWay) {
        let mut reads = self.inner.locked();
        reads.under_way.push(read);
        self.counted(&reads);
    }

    fn remove(&self, page: (PageKey, Handle)) -> Option<UnderWay> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut reads = self.inner.locked();
        let at = reads.under_way.iter().position(|read| read.page == page && !read.is_abandoned)?;
        let read = reads.under_way.swap_remove(at);
        self.counted(&reads);
        Some(read)
    }

    fn rest(&self) {
        self.inner.locked().rests_until = Some(Instant::now() + REST);
        self.is_slow.store(true, Ordering::Release);
    }

    /// A slow worker's read of a page took this long.
    pub fn took(&self, time: Duration) {
        if time < LATE && self.is_slow.load(Ordering::Acquire) {
            self.is_slow.store(false, Ordering::Release);
        }
    }

    /// Releases the reads that nobody will take.
    fn release(&self) {
        let mut reads = self.inner.locked();
        let is_unwanted = |read: &mut UnderWay| read.is_abandoned || read.since.elapsed() > FORGOTTEN_AFTER;
        let unwanted: Vec<UnderWay> = reads.under_way.extract_if(.., is_unwanted).collect();
        self.counted(&reads);
        drop(reads);
        for read in unwanted {
            self.abandon(read);
        }
    }

    /// Releases a read, now or when it is done.
    fn abandon(&self, read: UnderWay) {
        if let Err(read) = read.take(|_| Some(())) {
            self.push(UnderWay { is_abandoned: true, ..read });
        }
    }

    /// Begins to read the block of this page. Before that, `watch` gets the descriptor that becomes readable at the
    /// end. Returns whether a read is in flight, from now or before. Waits for the device only if its file system must.
    pub fn begin(&self, disk: &Disk, page: (PageKey, Handle), block: u64, watch: OnReply<'_>) -> bool {
        if self.count.load(Ordering::Acquire) > 0 {
            self.release();
        }
        let now = Instant::now();
        {
            let mut reads = self.inner.locked();
            if let Some(read) = reads.under_way.iter().find(|read| read.page == page && !read.is_abandoned) {
                watch(read.ring.0.fd());
                return true;
            }
            if self.is_slow.load(Ordering::Acquire) || disk.has_no_rings() || !reads.may_begin(now) {
                return false;
            }
            reads.starting += 1;
            reads.starting_since.get_or_insert(now);
        }
        // Two threads that begin a read of one page both read it.
        let started = Self::start(disk, page, block, watch);
        // `WouldBlock` is the limit of reads: it says nothing about the device.
        let is_full = started.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        let is_begun = started.is_ok();
        let mut reads = self.inner.locked();
        reads.under_way.extend(started.ok());
        reads.starting -= 1;
        if reads.starting == 0 {
            reads.starting_since = None;
        }
        self.counted(&reads);
        drop(reads);
        if !is_begun && !is_full || now.elapsed() > SLEPT {
            self.rest();
        }
        is_begun
    }

    /// Submits the read, with the fault that a test injects.
    fn start(disk: &Disk, page: (PageKey, Handle), block: u64, watch: OnReply<'_>) -> io::Result<UnderWay> {
        let ordered = disk.next_is(Direction::Read, (block, 1))?;
        let (mut ring, buffer) = OneRead::get()?;
        let (file, offset) = (Arc::clone(&disk.file), block * PAGE_SIZE as u64);
        let transfer =
            Transfer { file, direction: Direction::Read, offset, buffer, done: 0, end: ordered.most.min(PAGE_SIZE) };
        // The ring has room, because nothing else is on it.
        let ticket = ring.0.start(transfer).map_err(|_| io::Error::other("the ring is full"))?;
        watch(ring.0.fd());
        let since = Instant::now();
        if !ring.0.submit() {
            return Err(io::Error::other("the kernel takes no read"));
        }
        Ok(UnderWay { page, ring, ticket, since, takes: ordered.takes, is_abandoned: false })
    }

    /// The result of `check` for the bytes of a begun page. If they are not there, `watch` gets the descriptor again.
    pub fn now<T>(
        &self,
        page: (PageKey, Handle),
        watch: OnReply<'_>,
        check: impl FnOnce(&PageBytes) -> Option<T>,
    ) -> Option<T> {
        match self.remove(page)?.take(check) {
            Ok(taken) => taken,
            Err(read) => {
                watch(read.ring.0.fd());
                self.push(read);
                None
            }
        }
    }

    /// Like `now`, but waits until the read is late. `None` also if nothing was begun.
    pub fn wait_for<T>(&self, page: (PageKey, Handle), check: impl FnOnce(&PageBytes) -> Option<T>) -> Option<T> {
        let mut read = self.remove(page)?;
        if read.takes < LATE {
            read.ring.0.wait_until_over(&read.ticket, LATE.saturating_sub(read.since.elapsed()));
            std::thread::sleep(read.takes.saturating_sub(read.since.elapsed()));
        }
        match read.take(check) {
            Ok(taken) => taken,
            Err(read) => {
                self.rest();
                self.push(UnderWay { is_abandoned: true, ..read });
                None
            }
        }
    }

    /// The page was freed: it was restored in another way, or nobody needs it.
    pub fn forget(&self, page: (PageKey, Handle)) {
        while let Some(read) = self.remove(page) {
            self.abandon(read);
        }
    }
}

impl Drop for BegunReads {
    fn drop(&mut self) {
        let until = Instant::now() + LAST_WAIT;
        for read in &mut self.inner.get_mut().unwrap_or_else(PoisonError::into_inner).under_way {
            read.ring.0.wait_until_over(&read.ticket, until.saturating_duration_since(Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::skip;
    use std::sync::Barrier;

    #[test]
    fn threads_that_keep_their_rings_leave_some_for_any_number_of_others() {
        let rings: io::Result<Vec<_>> = (0..KEPT_OF_ALL + KEPT).map(|_| Ring::for_any_thread(1)).collect();
        if let Err(error) = rings {
            return skip("io_uring", error);
        }
        let some = || -> Vec<_> { (0..KEPT).map_while(|_| OneRead::get().ok()).collect() };
        let all = MOST_OF_ALL / KEPT + 1;
        let (kept, over) = (Barrier::new(all + 1), Barrier::new(all + 1));
        std::thread::scope(|scope| {
            for _ in 0..all {
                scope.spawn(|| {
                    some().into_iter().for_each(|(ring, buffer)| ring.put_back(buffer));
                    kept.wait();
                    over.wait();
                });
            }
            kept.wait();
            let got = some().len();
            over.wait();
            assert_eq!(got, KEPT);
        });
    }
}
