//! The closer: closes descriptors of clients on threads of its own.
//!
//! Before: a client sent a descriptor. After: it is closed, or only a closing thread waits for that. A close may never
//! return: a socket that lingers, a file of a FUSE server that does not respond. It may take long: the last descriptor
//! of a large RAM file.
//! Threads: any may drop a [`SentFd`]; closing threads are started as needed, at most [`MOST_THREADS`].
//! Promise: dropping a [`SentFd`] never waits. The closer knows the users whose descriptors do not close
//! ([`Closer::stuck`]).

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// How long a closing may take before another thread takes the rest.
pub const HANGS_AFTER: Duration = Duration::from_millis(500);
/// Closing threads. With [`crate::clients::MOST_STUCK`] a user, eight hostile users would be needed to hold all.
const MOST_THREADS: usize = 32;

type Thing = Box<dyn Send>;

/// Closes descriptors on its own threads.
#[derive(Default)]
pub struct Closer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The user, and the thing to close.
    waiting: VecDeque<(u32, Thing)>,
    /// By number of the thread: the user, and since when.
    closing: HashMap<u64, (u32, Instant)>,
    threads: u64,
    next_thread: u64,
}

impl Closer {
    /// A closer without threads yet.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Dropping it may panic, but not while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drop something that came from this user, on a closing thread.
    pub fn close(self: &Arc<Self>, uid: u32, thing: impl Send + 'static) {
        let mut state = self.state();
        state.waiting.push_back((uid, Box::new(thing)));
        if state.threads == 0 {
            self.add_thread(&mut state);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Close things although the closing of others hangs. Called now and then.
    pub fn tend(self: &Arc<Self>, hangs_after: Duration) {
        let mut state = self.state();
        let all_hang = state.closing.len() as u64 == state.threads
            && state.closing.values().all(|(_, since)| since.elapsed() >= hangs_after);
        if !state.waiting.is_empty() && all_hang && state.threads < MOST_THREADS as u64 {
            self.add_thread(&mut state);
        }
    }

    /// How many closings of this user's descriptors hang.
    pub fn stuck(&self, uid: u32, hangs_after: Duration) -> usize {
        let state = self.state();
        state.closing.values().filter(|(whose, since)| *whose == uid && since.elapsed() >= hangs_after).count()
    }

    /// How many threads there are, if none of them has anything to do.
    pub fn idle(&self) -> Option<usize> {
        let state = self.state();
        (state.waiting.is_empty() && state.closing.is_empty()).then_some(state.threads as usize)
    }

    fn add_thread(self: &Arc<Self>, state: &mut State) {
        let (closer, number) = (self.clone(), state.next_thread);
        match std::thread::Builder::new().name("close".into()).spawn(move || closer.work(number)) {
            Ok(_) => {
                state.next_thread += 1;
                state.threads += 1;
            }
            // `tend` tries again.
            Err(error) => tracing::error!("Starting a thread that closes descriptors: {error}"),
        }
    }

    fn work(&self, number: u64) {
        let mut state = self.state();
        loop {
            if let Some((uid, thing)) = state.waiting.pop_front() {
                state.closing.insert(number, (uid, Instant::now()));
                drop(state);
                drop(thing);
                state = self.state();
                state.closing.remove(&number);
            } else if state.threads > 1 + state.closing.len() as u64 {
                // Another one is idle: this one was added because of a closing that hung and is over.
                state.threads -= 1;
                return;
            } else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }
}

/// A descriptor that a client sent, or a connection to a client. Its close may wait for anything.
pub struct SentFd {
    fd: Option<OwnedFd>,
    uid: u32,
    closer: Arc<Closer>,
}

impl SentFd {
    /// `fd` came from this user.
    pub fn new(fd: OwnedFd, uid: u32, closer: Arc<Closer>) -> Self {
        Self { fd: Some(fd), uid, closer }
    }

    /// Another descriptor in the place of this one.
    pub fn replaced_by(&self, fd: OwnedFd) -> Self {
        Self::new(fd, self.uid, self.closer.clone())
    }
}

impl AsFd for SentFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("there until dropped").as_fd()
    }
}

impl Drop for SentFd {
    fn drop(&mut self) {
        if let Some(fd) = self.fd.take() {
            self.closer.close(self.uid, fd);
        }
    }
}

impl std::fmt::Debug for Closer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        write!(f, "{} waiting, {} being closed by {} threads", state.waiting.len(), state.closing.len(), state.threads)
    }
}

impl std::fmt::Debug for SentFd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} of user {}", self.fd, self.uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    /// Says when its closing begins, and ends it when told.
    struct Hangs(mpsc::Sender<()>, mpsc::Receiver<()>);
    impl Drop for Hangs {
        fn drop(&mut self) {
            let _ = self.0.send(());
            let _ = self.1.recv();
        }
    }

    struct Says(mpsc::Sender<u32>, u32);
    impl Drop for Says {
        fn drop(&mut self) {
            let _ = self.0.send(self.1);
        }
    }

    #[test]
    fn what_cannot_be_closed_keeps_nothing_else_open_and_is_held_against_its_sender() {
        let closer = Closer::new();
        let (begun, begins) = mpsc::channel();
        let (closed, closes) = mpsc::channel();
        let mut ends = Vec::new();
        for (round, uid) in [7, 7, 8].into_iter().enumerate() {
            let (end, ended) = mpsc::channel();
            ends.push(end);
            closer.close(uid, Hangs(begun.clone(), ended));
            closer.tend(Duration::ZERO);
            begins.recv().expect("its closing begins, though others hang");
            closer.close(9, Says(closed.clone(), round as u32));
            closer.tend(Duration::ZERO);
            assert_eq!(closes.recv(), Ok(round as u32), "closed, though others hang");
        }
        assert_eq!([7, 8, 6].map(|uid| closer.stuck(uid, Duration::ZERO)), [2, 1, 0]);
        assert_eq!(closer.stuck(7, Duration::from_secs(3600)), 0, "they have not hung for so long");
        drop(ends);
        closer.close(9, Says(closed, 99));
        assert_eq!(closes.recv(), Ok(99));
    }
}
