//! Reads and writes of files through io_uring, with a limit on the wait.
//!
//! Before: `store` has an extent to write, or one to read, and a buffer of its own. After: the caller has the buffer
//! again, and the kernel's result. If it gave up the wait, the buffer stays here until the kernel is done with it.
//! Threads: a ring belongs to the thread that made it, or any thread may have it ([`Ring::for_any_thread`]). Units:
//! offsets and lengths are bytes.
//! Promise: memory that the kernel may still read or write is never freed: transfers own their buffer and their file,
//! and a ring that is dropped while the kernel works leaks those buffers instead, and closes the files.

use std::alloc::Layout;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode};
use rustix::event::{PollFd, PollFlags};

use crate::slow_fd::SlowFd;

/// Page-aligned memory, as direct I/O needs it.
#[derive(Debug)]
pub struct Buffer {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer is the only owner of its memory, which is not bound to a thread.
unsafe impl Send for Buffer {}

impl Buffer {
    const ALIGN: usize = 4096;

    /// A buffer of zeros.
    ///
    /// # Errors
    /// `InvalidInput` if `len` is 0 or larger than a layout can be, `OutOfMemory` if there is no memory for it.
    pub fn new(len: usize) -> io::Result<Self> {
        let layout = Layout::from_size_align(len, Self::ALIGN).ok().filter(|layout| layout.size() > 0);
        let layout = layout
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, format!("a buffer cannot have {len} bytes")))?;
        // SAFETY: the layout is not of size 0 (checked above).
        let start = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
        Ok(Self { start: start.ok_or(io::ErrorKind::OutOfMemory)?, layout })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: the memory is ours, initialised (zeroed, then only written), and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// The bytes, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { std::alloc::dealloc(self.start.as_ptr(), self.layout) }
    }
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file into the buffer.
    Read,
    /// From the buffer into the file.
    Write,
}

/// One read or write.
#[derive(Debug)]
pub struct Transfer {
    /// The file.
    pub file: Arc<SlowFd>,
    /// Its direction.
    pub direction: Direction,
    /// Offset in the file of `buffer[0]`.
    pub offset: u64,
    /// The buffer.
    pub buffer: Buffer,
    /// Bytes at the start of the buffer that an earlier, short transfer has done.
    pub done: usize,
    /// Offset in the buffer where the transfer ends.
    pub end: usize,
}

/// A transfer under way.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(usize);

/// The action for the end of an abandoned transfer.
type Late = Box<dyn FnOnce() + Send>;

struct Flight {
    /// Freed only when the kernel is done.
    transfer: ManuallyDrop<Transfer>,
    result: Option<i32>,
    late: Option<Late>,
}

/// A descriptor to wait on: see [`Ring::watch`].
#[derive(Debug)]
pub struct RingWatch(OwnedFd);

impl RingWatch {
    /// Wait until a transfer is over, for `timeout` at most. If several threads wait, another one may take the result.
    pub fn wait(&self, timeout: Duration) {
        let time = timeout.try_into().ok();
        // An error, such as an interruption, ends the wait.
        let _ = rustix::event::poll(&mut [PollFd::new(&self.0, PollFlags::IN)], time.as_ref());
    }
}

/// An io_uring with its transfers.
pub struct Ring {
    uring: IoUring,
    flights: Vec<Option<Flight>>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let under_way = self.flights.iter().flatten().count();
        f.debug_struct("Ring").field("under_way", &under_way).finish_non_exhaustive()
    }
}

impl Ring {
    /// A ring for up to `transfers` transfers at once.
    ///
    /// # Errors
    /// The kernel refuses: switched off (`kernel.io_uring_disabled`), a seccomp filter, no memory, no descriptors.
    pub fn new(transfers: u32) -> io::Result<Self> {
        // From Linux 6.1 on, the kernel handles completions only while this thread waits for them, else at any time.
        let uring = IoUring::builder()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .build(transfers)
            .or_else(|_| IoUring::new(transfers))?;
        Ok(Self { uring, flights: (0..transfers).map(|_| None).collect() })
    }

    /// A ring for up to `transfers` transfers at once, 32 at most, for any thread, and several after each other. The
    /// kernel posts the end of a transfer in the thread that submitted it, when that waits or leaves the kernel.
    pub fn for_any_thread(transfers: usize) -> io::Result<Self> {
        // The kernel limits the worker threads of a thread's rings by the entries of its first ring. 32 entries fit in
        // the pages that one entry needs.
        Ok(Self { uring: IoUring::new(32)?, flights: (0..transfers).map(|_| None).collect() })
    }

    /// A descriptor that has input when a transfer is over. Only for a ring for any thread.
    pub fn fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the ring, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.uring.as_raw_fd()) }
    }

    /// A value to wait on while another thread has the ring. Only for a ring for any thread.
    pub fn watch(&self) -> io::Result<RingWatch> {
        self.fd().try_clone_to_owned().map(RingWatch)
    }

    /// Begin a transfer; the kernel learns of it at the next `submit` or `wait`.
    ///
    /// # Errors
    /// Returns the transfer if the ring is full.
    ///
    /// # Panics
    /// If `done..end` is not a range inside the buffer.
    pub fn start(&mut self, transfer: Transfer) -> Result<Ticket, Transfer> {
        let bytes = &transfer.buffer.as_slice()[transfer.done..transfer.end];
        let (start, len, at) = (bytes.as_ptr().cast_mut(), bytes.len() as u32, transfer.offset + transfer.done as u64);
        let Some(free) = self.flights.iter().position(Option::is_none) else { return Err(transfer) };
        let file = Fd(transfer.file.as_fd().as_raw_fd());
        let entry = match transfer.direction {
            Direction::Read => opcode::Read::new(file, start, len).offset(at).build(),
            Direction::Write => opcode::Write::new(file, start, len).offset(at).build(),
        };
        // SAFETY: buffer and file are valid until the kernel is done: both are owned by the flight, which is taken
        // apart only after its completion was seen, and leaked if the ring is dropped before. The address is that of
        // the buffer's own allocation, which does not move with the `Transfer`.
        if unsafe { self.uring.submission().push(&entry.user_data(free as u64)) }.is_err() {
            return Err(transfer);
        }
        self.flights[free] = Some(Flight { transfer: ManuallyDrop::new(transfer), result: None, late: None });
        Ok(Ticket(free))
    }

    /// Submit the started transfers to the kernel. Returns false if it took none; `wait` submits those again that it
    /// cannot take now.
    pub fn submit(&mut self) -> bool {
        self.uring.submit().is_ok_and(|count| count > 0)
    }

    /// Does the kernel know of all transfers?
    pub fn is_submitted(&mut self) -> bool {
        self.uring.submission().is_empty()
    }

    /// Wait for a transfer. Returns it with the number of bytes moved since its start, or the error. Returns `None` if
    /// it is not over within `timeout`: then `abandon` it, or wait again.
    pub fn wait(&mut self, ticket: &Ticket, timeout: Duration) -> Option<(Transfer, io::Result<usize>)> {
        self.wait_until_over(ticket, timeout);
        self.now(ticket)
    }

    /// Wait for a transfer, for `timeout` at most, and leave it.
    pub fn wait_until_over(&mut self, ticket: &Ticket, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let is_under_way = |ring: &Self| {
            ring.flights.get(ticket.0).is_some_and(|flight| flight.as_ref().is_some_and(|over| over.result.is_none()))
        };
        self.reap();
        while is_under_way(self) {
            let left = deadline.saturating_duration_since(Instant::now());
            let time = Timespec::new().sec(left.as_secs()).nsec(left.subsec_nanos());
            let args = SubmitArgs::new().timespec(&time);
            // These errors are not the transfer's: timeout, signal, no memory to submit now. The deadline bounds them.
            if self.uring.submitter().submit_with_args(1, &args).is_err() && left.is_zero() {
                return self.reap();
            }
            self.reap();
        }
    }

    /// Returns a transfer that is over, as `wait` does, or `None`. It makes no system call, unless transfers were
    /// abandoned. On a ring of one thread it sees only what was over when that thread last waited.
    pub fn now(&mut self, ticket: &Ticket) -> Option<(Transfer, io::Result<usize>)> {
        self.reap();
        let over = self.flights.get_mut(ticket.0)?;
        let result = over.as_ref().and_then(|flight| flight.result)?;
        let flight = over.take()?;
        let result = usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(-result));
        Some((ManuallyDrop::into_inner(flight.transfer), result))
    }

    /// Stop waiting for this transfer. When it is over, which a later call on this ring notices, `late` is called.
    pub fn abandon(&mut self, ticket: Ticket, late: impl FnOnce() + Send + 'static) {
        if let Some(Some(flight)) = self.flights.get_mut(ticket.0) {
            flight.late = Some(Box::new(late));
        }
    }

    /// Are there abandoned writes whose end is not known yet?
    pub fn has_late_writes(&self) -> bool {
        let is_late = |flight: &Flight| flight.late.is_some() && flight.transfer.direction == Direction::Write;
        self.flights.iter().flatten().any(is_late)
    }

    /// Take the results of transfers that are over, and release those that were abandoned.
    pub fn reap(&mut self) {
        if self.flights.iter().flatten().any(|flight| flight.late.is_some()) {
            // The kernel notes completions only in a call that asks for them, and nobody waits for abandoned transfers.
            // Without this call a ring that is full of them would stay full.
            let _ = self.uring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&Timespec::new()));
        }
        for completion in self.uring.completion() {
            let Some(Some(flight)) = self.flights.get_mut(completion.user_data() as usize) else { continue };
            flight.result = Some(completion.result());
        }
        let mut late = Vec::new();
        // The end of some transfers was seen before they were abandoned.
        let is_for_nobody = |flight: &mut Flight| flight.late.is_some() && flight.result.is_some();
        for over in self.flights.iter_mut().filter_map(|slot| slot.take_if(is_for_nobody)) {
            drop(ManuallyDrop::into_inner(over.transfer));
            late.extend(over.late);
        }
        for late in late {
            late();
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.reap();
        for flight in self.flights.drain(..).flatten() {
            let Transfer { file, buffer, .. } = ManuallyDrop::into_inner(flight.transfer);
            if flight.result.is_none() {
                // The kernel holds its own reference to the file. A transfer that was never submitted never will be.
                std::mem::forget(buffer);
            }
            drop(file);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memfd;
    use ballast_base::Bytes;
    use ballast_testkit::skip;
    use std::sync::atomic::{AtomicBool, Ordering};

    const TIMEOUT: Duration = Duration::from_secs(60);

    fn transfer(file: &Arc<SlowFd>, direction: Direction, offset: u64, bytes: &[u8]) -> Transfer {
        let mut buffer = Buffer::new(4096).expect("memory");
        buffer.as_mut_slice()[..bytes.len()].copy_from_slice(bytes);
        Transfer { file: Arc::clone(file), direction, offset, buffer, done: 0, end: bytes.len() }
    }

    fn ring() -> Option<Ring> {
        Ring::new(4).inspect_err(|error| skip("io_uring", error)).ok()
    }

    #[test]
    fn written_bytes_are_read_back_and_several_transfers_run_at_once() {
        let Some(mut ring) = ring() else { return };
        let file = Arc::new(memfd::create("ballast-test", Bytes(1 << 20)).expect("memfd").into());
        let tickets: Vec<_> = (0..4u8)
            .map(|n| ring.start(transfer(&file, Direction::Write, u64::from(n) * 10, &[n + 1; 10])).expect("room"))
            .collect();
        assert!(ring.start(transfer(&file, Direction::Write, 0, &[9])).is_err(), "four are under way");
        for ticket in &tickets {
            let (_, result) = ring.wait(ticket, TIMEOUT).expect("over");
            assert_eq!(result.expect("written"), 10);
        }
        let ticket = ring.start(transfer(&file, Direction::Read, 5, &[0; 30])).expect("room");
        let (transfer, result) = ring.wait(&ticket, TIMEOUT).expect("over");
        assert_eq!(result.expect("read"), 30);
        let expected: Vec<u8> = (5..35).map(|at| at / 10 + 1).collect();
        assert_eq!(transfer.buffer.as_slice()[..30], expected);
    }

    #[test]
    fn an_error_of_the_file_is_the_result() {
        let Some(mut ring) = ring() else { return };
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        let ticket = ring.start(transfer(&Arc::new(reader.into()), Direction::Write, 0, &[1])).expect("room");
        let (_, result) = ring.wait(&ticket, TIMEOUT).expect("over");
        assert_eq!(result.expect_err("a pipe's reading end was written").raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn a_transfer_that_is_not_over_in_time_is_abandoned_and_released_when_it_is_over() {
        let Some(mut ring) = ring() else { return };
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let reader = Arc::new(reader.into());
        let mut read = transfer(&reader, Direction::Read, 0, &[0; 8]);
        // A pipe has no offsets.
        read.offset = u64::MAX;
        let ticket = ring.start(read).expect("room");
        assert!(ring.wait(&ticket, Duration::ZERO).is_none());
        assert!(ring.wait(&ticket, Duration::from_millis(1)).is_none());
        let noticed = Arc::new(AtomicBool::new(false));
        let notice = Arc::clone(&noticed);
        ring.abandon(ticket, move || notice.store(true, Ordering::Release));
        assert_eq!(Arc::strong_count(&reader), 2, "the file stays open for the kernel");
        rustix::io::write(&writer, &[7; 8]).expect("write");
        let file = Arc::new(memfd::create("ballast-test", Bytes(4096)).expect("memfd").into());
        while !noticed.load(Ordering::Acquire) {
            let ticket = ring.start(transfer(&file, Direction::Write, 0, &[1])).expect("room");
            ring.wait(&ticket, TIMEOUT).expect("over").1.expect("written");
        }
        assert_eq!(Arc::strong_count(&reader), 1);
    }

    #[test]
    fn a_ring_full_of_abandoned_transfers_has_room_when_they_are_over() {
        let Some(mut ring) = ring() else { return };
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let reader = Arc::new(reader.into());
        let file = Arc::new(memfd::create("ballast-test", Bytes(4096)).expect("memfd").into());
        for _ in 0..4 {
            let mut read = transfer(&reader, Direction::Read, 0, &[0; 8]);
            read.offset = u64::MAX;
            let ticket = ring.start(read).expect("room");
            assert!(ring.wait(&ticket, Duration::ZERO).is_none());
            ring.abandon(ticket, || ());
        }
        ring.reap();
        assert!(ring.start(transfer(&file, Direction::Write, 0, &[1])).is_err(), "four are under way");
        rustix::io::write(&writer, &[7; 32]).expect("write");
        let mut write = transfer(&file, Direction::Write, 0, &[1]);
        let ticket = loop {
            ring.reap();
            match ring.start(write) {
                Ok(ticket) => break ticket,
                Err(back) => write = back,
            }
        };
        ring.wait(&ticket, TIMEOUT).expect("over").1.expect("written");
    }

    #[test]
    fn a_ring_that_is_dropped_while_the_kernel_reads_keeps_no_file_open() {
        let Some(mut ring) = ring() else { return };
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let reader = Arc::new(reader.into());
        let mut read = transfer(&reader, Direction::Read, 0, &[0; 8]);
        read.offset = u64::MAX;
        let ticket = ring.start(read).expect("room");
        assert!(ring.wait(&ticket, Duration::ZERO).is_none());
        drop(ring);
        assert_eq!(Arc::strong_count(&reader), 1);
        drop(writer);
    }

    #[test]
    fn a_ring_for_any_thread_tells_by_its_descriptor_what_another_thread_takes() {
        let mut ring = match Ring::for_any_thread(1) {
            Ok(ring) => ring,
            Err(error) => return skip("io_uring", error),
        };
        let watch = ring.watch().expect("a descriptor");
        let (reader, writer) = rustix::pipe::pipe().expect("pipe");
        let mut read = transfer(&Arc::new(reader.into()), Direction::Read, 0, &[0; 8]);
        read.offset = u64::MAX;
        let ticket = ring.start(read).expect("room");
        ring.submit();
        assert!(ring.now(&ticket).is_none());
        rustix::io::write(&writer, &[7; 8]).expect("write");
        watch.wait(TIMEOUT);
        rustix::event::poll(&mut [PollFd::new(&ring.fd(), PollFlags::IN)], None).expect("poll");
        let taken = std::thread::spawn(move || ring.now(&ticket)).join().expect("no panic");
        let (transfer, result) = taken.expect("over");
        assert_eq!((result.expect("read"), &transfer.buffer.as_slice()[..8]), (8, &[7; 8][..]));
    }
}
