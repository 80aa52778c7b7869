//! Begun: reads of single blocks that were handed to the kernel, and whose bytes are taken later.
//!
//! Before: a fault worker met a page of the file. After: it takes the bytes when they are there ([`BegunReads::now`]),
//! and serves other faults meanwhile; or a slow worker waits for them ([`BegunReads::wait_for`]).
//! Threads: any; only `wait_for` waits for the device. Units: one block a read, each on a ring of its own.
//! Promise: a device that is not quick is not asked here until a slow worker, which reads its pages, finds it quick.
//! The reads under way are bounded, for a store and for the process; beyond that none is begun.
//!
//! The kernel posts the end of a read in the thread that submitted it. If that one is stuck in the memory of another
//! VM, or sleeps until the file system has found the block, the device looks slow from here.

use std::cell::RefCell;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_base::store::OnReply;
use ballast_sys::ring::{Buffer, Direction, Ring, Ticket, Transfer};

use super::disk::Disk;
use super::faults::Ordered;
use crate::{Handle, PageBytes, PageKey};

/// Reads under way at a time, of one store and of all.
const MOST: usize = 8;
const MOST_OF_ALL: usize = 256;
/// Most idle rings that one thread keeps for its next reads, and that all threads keep together: a large machine has
/// more fault workers than rings. Any thread may use the others.
const KEPT: usize = 4;
const KEPT_OF_ALL: usize = MOST_OF_ALL / 2;

/// A read that is not over after this is late: no thread waits for it any more, and the page is read once more.
const LATE: Duration = Duration::from_millis(10);
/// To hand a read to the kernel takes some 15 us. If it took this long, the thread slept.
const SLEPT: Duration = Duration::from_millis(2);
/// For how long nothing is begun after either, and until a slow worker's read was quick again.
const REST: Duration = Duration::from_secs(1);
/// A read that nobody came for in this time: its page came in another way just before it was begun.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(1);
/// How long a store that is closed waits for its reads. The buffer of one that is not over then is never freed.
const LAST_WAIT: Duration = Duration::from_millis(20);

/// How many rings there are.
static RINGS: AtomicUsize = AtomicUsize::new(0);
/// How many of them threads keep.
static KEPT_NOW: AtomicUsize = AtomicUsize::new(0);
static IDLE: Mutex<Vec<(OneRead, Buffer)>> = Mutex::new(Vec::new());

thread_local! {
    /// Those that this thread used last, if it begins reads: their descriptors are in its epoll set, and in few others.
    static OWN: RefCell<Option<Own>> = const { RefCell::new(None) };
}

/// Rings that a thread keeps.
#[derive(Default)]
struct Own(Vec<(OneRead, Buffer)>);

impl Own {
    fn pop(&mut self) -> Option<(OneRead, Buffer)> {
        self.0.pop().inspect(|_| _ = KEPT_NOW.fetch_sub(1, Ordering::AcqRel))
    }

    /// Keeps one more, if there may be one more.
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

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A ring for one read at a time.
#[derive(Debug)]
struct OneRead(Box<Ring>);

impl OneRead {
    /// An idle one, or a new one.
    ///
    /// # Errors
    /// `WouldBlock` if there may be none more; the kernel refuses.
    fn get() -> io::Result<(Self, Buffer)> {
        let own = OWN.with_borrow_mut(|own| own.get_or_insert_default().pop());
        if let Some(idle) = own.or_else(|| lock(&IDLE).pop()) {
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

    /// It is idle.
    fn put_back(self, buffer: Buffer) {
        let idle = (self, buffer);
        let kept = OWN.with_borrow_mut(|own| match own {
            Some(own) => own.keep(idle),
            None => Err(idle),
        });
        if let Err(idle) = kept {
            lock(&IDLE).push(idle);
        }
    }
}

impl Drop for OneRead {
    fn drop(&mut self) {
        RINGS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// The reads of one store.
#[derive(Debug, Default)]
pub(super) struct BegunReads {
    inner: Mutex<Reads>,
    /// How many there are: nearly always 0.
    count: AtomicUsize,
    /// The device was not quick, and has not been since.
    is_slow: AtomicBool,
}

#[derive(Debug, Default)]
struct Reads {
    under_way: Vec<UnderWay>,
    /// Threads that hand a read to the kernel, and since when the first of them does.
    starting: usize,
    starting_since: Option<Instant>,
    /// Nothing is begun before this.
    rests_until: Option<Instant>,
}

impl Reads {
    /// May one more be begun? Not while a thread sleeps over another one.
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
    /// A test ordered that it takes at least this long.
    takes: Duration,
    /// No thread waits for it.
    is_abandoned: bool,
}

impl UnderWay {
    /// What `check` makes of the bytes, if they are a whole block; the read itself if it is not over.
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
    /// The reads, with the number for those who look without the lock. To be called after each change.
    fn counted(&self, reads: &Reads) {
        self.count.store(reads.under_way.len(), Ordering::Release);
    }

    fn push(&self, read: UnderWay) {
        let mut reads = lock(&self.inner);
        reads.under_way.push(read);
        self.counted(&reads);
    }

    fn remove(&self, page: (PageKey, Handle)) -> Option<UnderWay> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut reads = lock(&self.inner);
        let at = reads.under_way.iter().position(|read| read.page == page && !read.is_abandoned)?;
        let read = reads.under_way.swap_remove(at);
        self.counted(&reads);
        Some(read)
    }

    fn rest(&self) {
        lock(&self.inner).rests_until = Some(Instant::now() + REST);
        self.is_slow.store(true, Ordering::Release);
    }

    /// A slow worker read a page, which took this long.
    pub fn took(&self, time: Duration) {
        if time < LATE && self.is_slow.load(Ordering::Acquire) {
            self.is_slow.store(false, Ordering::Release);
        }
    }

    /// Releases what was read for nobody.
    fn release(&self) {
        let mut reads = lock(&self.inner);
        let is_unwanted = |read: &mut UnderWay| read.is_abandoned || read.since.elapsed() > FORGOTTEN_AFTER;
        let unwanted: Vec<UnderWay> = reads.under_way.extract_if(.., is_unwanted).collect();
        self.counted(&reads);
        drop(reads);
        for read in unwanted {
            self.abandon(read);
        }
    }

    /// Nobody wants it: releases it, now or when it is over.
    fn abandon(&self, read: UnderWay) {
        if let Err(read) = read.take(|_| Some(())) {
            self.push(UnderWay { is_abandoned: true, ..read });
        }
    }

    /// Begins to read the block of this page. Before that `watch` gets the descriptor that has input when it is read.
    /// Returns whether it was begun, now or before. Does not wait for the device, unless the file system must ask it
    /// where the block is.
    pub fn begin(&self, disk: &Disk, page: (PageKey, Handle), block: u64, watch: OnReply<'_>) -> bool {
        if self.count.load(Ordering::Acquire) > 0 {
            self.release();
        }
        let now = Instant::now();
        {
            let mut reads = lock(&self.inner);
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
        let ring = disk.next_is(Direction::Read, (block, 1)).and_then(|ordered| Ok((ordered, OneRead::get()?)));
        // This says nothing about the device.
        let is_full = ring.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock);
        // Two threads that begin the same page read it twice.
        let started = ring.ok().and_then(|ring| Self::start(disk, page, block, ring, watch));
        let is_begun = started.is_some();
        let mut reads = lock(&self.inner);
        reads.under_way.extend(started);
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

    /// Hands it to the kernel, with what a test ordered of it.
    fn start(
        disk: &Disk,
        page: (PageKey, Handle),
        block: u64,
        (ordered, (mut ring, buffer)): (Ordered, (OneRead, Buffer)),
        watch: OnReply<'_>,
    ) -> Option<UnderWay> {
        let (file, offset) = (Arc::clone(&disk.file), block * PAGE_SIZE as u64);
        let transfer =
            Transfer { file, direction: Direction::Read, offset, buffer, done: 0, end: ordered.most.min(PAGE_SIZE) };
        // It has room: it has nothing else to do.
        let ticket = ring.0.start(transfer).ok()?;
        watch(ring.0.fd());
        let since = Instant::now();
        ring.0.submit().then_some(UnderWay { page, ring, ticket, since, takes: ordered.takes, is_abandoned: false })
    }

    /// What `check` makes of the bytes of a page that was begun, if they are there. Otherwise `watch` gets the
    /// descriptor again. Never waits.
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

    /// The same, and waits for them until they are late. `None` too if nothing was begun.
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

    /// The page was freed: it came in another way, or nobody wants it any more.
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
