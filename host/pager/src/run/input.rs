//! Input: the descriptors that one worker waits for, and a wake-up by other threads.
//!
//! Before: a set listens to a descriptor. After: its worker gets an event for each input, with the descriptor's number.
//! Threads: one waits; any adds, removes and wakes. Units: numbers of descriptors; 0 is the wake-up.
//! Promise: no wake-up is lost if the worker looks for work under the lock under which others add it, and calls
//! [`Input::begin_wait`] before it releases that lock. Waking a worker that does not wait costs no system call.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

const WAKE: u64 = 0;
/// Edge-triggered: while one worker is stuck with a descriptor, its input does not keep other workers busy.
const EDGE: EventFlags = EventFlags::IN.union(EventFlags::ET);

/// An epoll set, and an eventfd to wake the thread that waits for it.
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

    /// Listens to a descriptor under this number, which is not 0.
    pub fn add(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        Ok(epoll::add(&self.epoll, fd, EventData::new_u64(number), EDGE)?)
    }

    /// Listens to the next input of a descriptor under this number. The descriptor may have been added before.
    pub fn add_once(&self, fd: BorrowedFd<'_>, number: u64) -> io::Result<()> {
        let once = EventFlags::IN.union(EventFlags::ONESHOT);
        let (again, data) = (EventData::new_u64(number), EventData::new_u64(number));
        // The descriptor nearly always was added before.
        match epoll::modify(&self.epoll, fd, again, once) {
            Err(rustix::io::Errno::NOENT) => Ok(epoll::add(&self.epoll, fd, data, once)?),
            changed => Ok(changed?),
        }
    }

    pub fn remove(&self, fd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, fd);
    }

    pub fn wake(&self) {
        if self.is_waiting.swap(false, Ordering::SeqCst) {
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }

    pub fn is_waiting(&self) -> bool {
        self.is_waiting.load(Ordering::Relaxed)
    }

    /// Returns whether there are events that the worker has not read.
    pub fn is_there(&self) -> bool {
        let mut fds = [PollFd::new(&self.epoll, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }

    /// To be called under the lock of the work: from now on [`Input::wake`] wakes the worker.
    pub fn begin_wait(&self) {
        self.is_waiting.store(true, Ordering::SeqCst);
    }

    pub fn end_wait(&self) {
        self.is_waiting.store(false, Ordering::Relaxed);
    }

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
