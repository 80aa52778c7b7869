//! Input: what one worker waits for, descriptors and a word from another thread.
//!
//! Before: a set listens to a descriptor. After: its worker has an event for each time that there was input, with the
//! number that the descriptor was added under.
//! Threads: one waits; any adds, removes and wakes. Units: numbers of descriptors; 0 is the wake-up.
//! Promise: a wake-up is not lost if the worker looks for work under the same lock as the others, and calls
//! [`Input::begin_wait`] before it releases that lock. A worker that does not wait costs the one that wakes it no
//! system call.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// The event that wakes the worker.
const WAKE: u64 = 0;
/// One event for each input: while a worker is stuck with one descriptor, that one's input does not keep others busy.
const EDGE: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// An epoll set, and a way to wake the thread that waits for it.
#[derive(Debug)]
pub(super) struct Input {
    epoll: OwnedFd,
    event: OwnedFd,
    /// The worker waits, or is about to.
    is_waiting: AtomicBool,
}

impl Input {
    pub fn new() -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        // Never read: each write is an event.
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&epoll, &event, EventData::new_u64(WAKE), EDGE)?;
        Ok(Self { epoll, event, is_waiting: AtomicBool::new(false) })
    }

    /// Listens to a descriptor, under this number, which is not 0.
    pub fn add(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), EDGE)?)
    }

    /// Listens to a descriptor until its next input, under this number. It may be known already, under any number.
    pub fn add_once(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        let once = EventFlags::IN.union(EventFlags::ONESHOT);
        let (again, data) = (EventData::new_u64(number), EventData::new_u64(number));
        // Nearly always it is known.
        match epoll::modify(&self.epoll, fd, again, once) {
            Err(rustix::io::Errno::NOENT) => Ok(epoll::add(&self.epoll, fd, data, once)?),
            changed => Ok(changed?),
        }
    }

    /// Listens to a descriptor no more.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Ends the wait, if the worker waits.
    pub fn wake(&self) {
        if self.is_waiting.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    /// Does the worker wait?
    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::Relaxed)
    }

    /// Returns whether there is input that the worker has not got.
    pub fn is_there(&self) -> bool {
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// From now on others wake it.
    pub fn begin_wait(&self) {
        self.is_waiting.store(true, Ordering::SeqCst);
    }

    /// It waits no more.
    pub fn end_wait(&self) {
        self.is_waiting.store(false, Ordering::Relaxed);
    }

    /// Waits for events, for this long at most; without a limit if there is none.
    pub fn wait(&self, events: &mut Vec<Event>, at_most: Option<Duration>) -> io::Result<()> {
        let pause =
            at_most.map(|pause| Timespec { tv_sec: pause.as_secs() as _, tv_nsec: pause.subsec_nanos().into() });
        events.clear();
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), pause.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }
}
