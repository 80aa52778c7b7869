//! The closer: closes descriptors of clients on threads of its own.
//!
//! Before: a client sent a descriptor. After: it is closed, or only a closing thread waits for that. The close of an
//! arbitrary descriptor may never return: a file of a FUSE server that does not respond, a socket that lingers (it does
//! no more then). That of memory may take long: the last descriptor of a large RAM file.
//! Threads: any may drop a [`SentFd`]; closing threads are started as needed, at most [`MOST_THREADS`].
//! Promise: dropping a [`SentFd`] never waits. What one user sent holds at most [`MOST_STUCK`] threads, and what
//! all users sent at most [`MOST_UNCHECKED`]: the RAM and userfaultfds of VMs, which were checked, are closed all the
//! same. The closer knows the users whose descriptors do not close ([`Closer::stuck`]).

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::ops::Bound;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ballast_sys::scm;

/// How long a closing may take, and something may wait to be closed, before another thread is added.
pub const HANGS_AFTER: Duration = Duration::from_millis(500);
/// Closing threads.
const MOST_THREADS: usize = 32;
/// Threads that close what was not checked.
const MOST_UNCHECKED: usize = MOST_THREADS - 8;
/// Threads that close what was not checked and is one user's. As many descriptors of a user have to hang before the
/// user's connections are refused, so six hostile users would be needed to keep the rest of what is not checked open.
pub const MOST_STUCK: usize = 4;
/// Descriptors and connections of a user that may wait to be closed. A user with more is treated as one whose
/// descriptors hang.
const MOST_WAITING: usize = 512;

type Thing = Box<dyn Send>;

/// A thing, and since when it waits.
struct Waiting(Thing, Instant);

/// Closes descriptors on its own threads.
#[derive(Default)]
pub struct Closer {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What was not checked, by user.
    unchecked: BTreeMap<u32, VecDeque<Waiting>>,
    checked: VecDeque<Waiting>,
    /// By number of the thread: since when, and the user, unless it was checked.
    closing: HashMap<u64, (Option<u32>, Instant)>,
    /// The user who had the last turn: each has one after the other.
    last: u32,
    threads: u64,
    next_thread: u64,
}

impl State {
    /// The users who may have a thread more for what was not checked, the next one first; each with its queue.
    fn turns(&self) -> impl Iterator<Item = (u32, &VecDeque<Waiting>)> {
        let closing = |uid: Option<u32>| {
            let unchecked = self.closing.values().filter_map(|(whose, _)| *whose);
            unchecked.filter(|whose| uid.is_none_or(|uid| uid == *whose)).count()
        };
        let after = (Bound::Excluded(self.last), Bound::Unbounded);
        let users = self.unchecked.range(after).chain(self.unchecked.range(..=self.last));
        let may = users.filter(move |(uid, _)| closing(None) < MOST_UNCHECKED && closing(Some(**uid)) < MOST_STUCK);
        may.map(|(uid, queue)| (*uid, queue))
    }

    /// Since when the oldest thing waits that one thread more would close.
    fn oldest(&self) -> Option<Instant> {
        let unchecked = self.turns().filter_map(|(_, queue)| queue.front());
        unchecked.chain(self.checked.front()).map(|Waiting(_, since)| *since).min()
    }

    fn next(&mut self) -> Option<(Option<u32>, Thing)> {
        if let Some(Waiting(thing, _)) = self.checked.pop_front() {
            return Some((None, thing));
        }
        let (uid, _) = self.turns().next()?;
        self.last = uid;
        let queue = self.unchecked.get_mut(&uid)?;
        let waiting = queue.pop_front();
        if queue.is_empty() {
            self.unchecked.remove(&uid);
        }
        waiting.map(|Waiting(thing, _)| (Some(uid), thing))
    }
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

    /// Drop something on a closing thread. `uid`: the user that it came from, unless it was checked.
    fn close(self: &Arc<Self>, uid: Option<u32>, thing: impl Send + 'static) {
        let mut state = self.state();
        let waiting = Waiting(Box::new(thing), Instant::now());
        match uid {
            Some(uid) => state.unchecked.entry(uid).or_default().push_back(waiting),
            None => state.checked.push_back(waiting),
        }
        // What was checked does not wait until it is known that the others hang.
        let waits = uid.is_none()
            && state.closing.len() as u64 == state.threads
            && state.closing.values().all(|(whose, _)| whose.is_some());
        if state.threads == 0 || waits && state.threads < MOST_THREADS as u64 {
            self.add_thread(&mut state);
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Close things although the closing of others hangs, or is slow. Called now and then.
    pub fn tend(self: &Arc<Self>, hangs_after: Duration) {
        let mut state = self.state();
        let waits = state.oldest().is_some_and(|since| since.elapsed() >= hangs_after);
        if waits && state.closing.len() as u64 == state.threads && state.threads < MOST_THREADS as u64 {
            self.add_thread(&mut state);
        }
    }

    /// How many closings of this user's descriptors hang; [`MOST_STUCK`] as well if very many wait.
    pub fn stuck(&self, uid: u32, hangs_after: Duration) -> usize {
        let state = self.state();
        if state.unchecked.get(&uid).is_some_and(|queue| queue.len() >= MOST_WAITING) {
            return MOST_STUCK;
        }
        state.closing.values().filter(|(whose, since)| *whose == Some(uid) && since.elapsed() >= hangs_after).count()
    }

    /// How many threads there are, if none of them has anything to do.
    pub fn idle(&self) -> Option<usize> {
        let state = self.state();
        let is_idle = state.unchecked.is_empty() && state.checked.is_empty() && state.closing.is_empty();
        is_idle.then_some(state.threads as usize)
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
            if let Some((uid, thing)) = state.next() {
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

/// A descriptor of any kind, on a closing thread.
struct Sent(OwnedFd);

impl Drop for Sent {
    fn drop(&mut self) {
        // Only now: its sender may share it, and set it again.
        scm::close_at_once(&self.0);
    }
}

/// A socket to a client, on a closing thread. The kernel would close the descriptors in it with the socket, one after
/// the other, each for as long as it lingers.
struct Connection(OwnedFd, u32, Arc<Closer>);

impl Drop for Connection {
    fn drop(&mut self) {
        let Self(socket, uid, closer) = &*self;
        // Of a user whose descriptors hang no more are received: a file that is not received waits for no server.
        if closer.stuck(*uid, HANGS_AFTER) < MOST_STUCK {
            scm::take_descriptors(socket, |fd| drop(SentFd::new(fd, *uid, closer.clone())));
        }
    }
}

/// A descriptor that a client sent, or a connection to a client. Its close may wait for anything.
pub struct SentFd {
    fd: Option<OwnedFd>,
    uid: u32,
    is_checked: bool,
    closer: Arc<Closer>,
}

impl SentFd {
    /// `fd` came from this user, and nothing is known of it.
    pub fn new(fd: OwnedFd, uid: u32, closer: Arc<Closer>) -> Self {
        Self { fd: Some(fd), uid, is_checked: false, closer }
    }

    /// It is memory, a userfaultfd, or a file that we made: its close ends.
    pub fn checked(mut self) -> Self {
        self.is_checked = true;
        self
    }

    /// Another descriptor, which we made, in the place of this one.
    pub fn replaced_by(&self, fd: OwnedFd) -> Self {
        Self::new(fd, self.uid, self.closer.clone()).checked()
    }

    /// End this connection, for every process that has it. One without descriptors in it is closed at once, so that a
    /// user whose descriptors hang fills no table with connections that are refused.
    pub fn hang_up(mut self) {
        if let Some(fd) = self.fd.take()
            && !scm::shut_and_empty(&fd)
        {
            self.closer.close(Some(self.uid), Connection(fd, self.uid, self.closer.clone()));
        }
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
            match self.is_checked {
                true => self.closer.close(None, fd),
                false => self.closer.close(Some(self.uid), Sent(fd)),
            }
        }
    }
}

impl std::fmt::Debug for Closer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        let waiting = state.checked.len() + state.unchecked.values().map(VecDeque::len).sum::<usize>();
        write!(f, "{waiting} waiting, {} being closed by {} threads", state.closing.len(), state.threads)
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

    /// A closer whose only thread is busy with user 7 until the sender is dropped.
    fn busy() -> (Arc<Closer>, mpsc::Sender<()>) {
        let closer = Closer::new();
        let (begun, begins) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        closer.close(Some(7), Hangs(begun, ended));
        begins.recv().expect("the only thread is busy");
        (closer, end)
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
            closer.close(Some(uid), Hangs(begun.clone(), ended));
            closer.tend(Duration::ZERO);
            begins.recv().expect("its closing begins, though others hang");
            closer.close(Some(9), Says(closed.clone(), round as u32));
            closer.tend(Duration::ZERO);
            assert_eq!(closes.recv(), Ok(round as u32), "closed, though others hang");
        }
        assert_eq!([7, 8, 6].map(|uid| closer.stuck(uid, Duration::ZERO)), [2, 1, 0]);
        assert_eq!(closer.stuck(7, Duration::from_secs(3600)), 0, "they have not hung for so long");
        drop(ends);
        closer.close(Some(9), Says(closed, 99));
        assert_eq!(closes.recv(), Ok(99));
    }

    #[test]
    fn a_user_of_whom_very_much_waits_counts_as_stuck_and_others_have_their_turns() {
        let (closer, end) = busy();
        let (closed, closes) = mpsc::channel();
        for _ in 0..MOST_WAITING {
            assert_eq!(closer.stuck(7, Duration::from_secs(3600)), 0);
            closer.close(Some(7), Says(closed.clone(), 7));
        }
        closer.close(Some(9), Says(closed, 9));
        assert_eq!([7, 9].map(|uid| closer.stuck(uid, Duration::from_secs(3600))), [MOST_STUCK, 0]);
        drop(end);
        let order: Vec<_> = closes.iter().collect();
        assert_eq!(order.len(), MOST_WAITING + 1);
        assert!(order[..2].contains(&9), "it waits for all of another user");
    }

    #[test]
    fn what_waits_for_long_is_closed_though_no_closing_of_another_user_takes_long() {
        let (closer, end) = busy();
        let (closed, closes) = mpsc::channel();
        closer.close(Some(9), Says(closed, 9));
        let long = Duration::from_secs(3600);
        closer.tend(long);
        assert_eq!(closer.state().threads, 1, "it has waited for a moment");
        for Waiting(_, since) in closer.state().unchecked.values_mut().flatten() {
            *since -= long;
        }
        closer.tend(long);
        assert_eq!(closes.recv(), Ok(9), "closed by a second thread");
        drop(end);
    }

    #[test]
    fn a_connection_without_descriptors_is_closed_at_once_and_another_one_waits() {
        let closer = Closer::new();
        let (ours, theirs) = scm::pair().expect("a pair");
        scm::send(&theirs, b"words", &[]).expect("send");
        SentFd::new(ours, 7, closer.clone()).hang_up();
        assert_eq!(closer.idle(), Some(0), "no thread was needed");
        let (ours, theirs) = scm::pair().expect("a pair");
        scm::send(&theirs, b"", &[]).expect("an empty message");
        scm::send(&theirs, b"words", &[theirs.as_fd()]).expect("send");
        assert!(!scm::shut_and_empty(&ours), "a descriptor is behind an empty message");
    }

    #[test]
    fn one_users_descriptors_hold_few_threads_and_memory_of_vms_is_closed_beside_them() {
        let closer = Closer::new();
        let (begun, begins) = mpsc::channel();
        let (closed, closes) = mpsc::channel();
        let mut ends = Vec::new();
        for _ in 0..40 {
            let (end, ended) = mpsc::channel();
            ends.push(end);
            closer.close(Some(7), Hangs(begun.clone(), ended));
        }
        for _ in 0..MOST_STUCK {
            begins.recv().expect("its closing begins");
            closer.tend(Duration::ZERO);
        }
        closer.close(None, Says(closed.clone(), 1));
        assert_eq!(closes.recv(), Ok(1), "RAM of a VM");
        closer.tend(Duration::ZERO);
        closer.close(Some(8), Says(closed, 2));
        closer.tend(Duration::ZERO);
        assert_eq!(closes.recv(), Ok(2), "another user's");
        assert_eq!(closer.stuck(7, Duration::ZERO), MOST_STUCK);
        begins.try_recv().expect_err("one more thread of that user");
    }

    /// A socket whose close waits for its peer, which never reads; and that peer.
    fn lingers() -> (OwnedFd, std::net::TcpStream) {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("listen");
        let mut ours = std::net::TcpStream::connect(listener.local_addr().expect("address")).expect("connect");
        let (theirs, _) = listener.accept().expect("accept");
        ours.set_nonblocking(true).expect("non-blocking");
        while ours.write(&[0; 65536]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(10_000))).expect("linger");
        (ours.into(), theirs)
    }

    #[test]
    fn sockets_that_linger_are_closed_at_once_received_or_not() {
        let closer = Closer::new();
        let (closed, closes) = mpsc::channel();
        let (ours, theirs) = scm::pair().expect("pair");
        let ((sent, _peer), (queued, _other)) = (lingers(), lingers());
        scm::send(&theirs, b"x", &[queued.as_fd(), queued.as_fd()]).expect("send");
        drop(queued);
        // There is one thread, because nobody tends the closer: it would wait for either.
        drop(SentFd::new(sent, 7, closer.clone()));
        SentFd::new(ours, 7, closer.clone()).hang_up();
        closer.close(Some(9), Says(closed.clone(), 1));
        assert_eq!(closes.recv(), Ok(1));
        // What was in the socket comes after that.
        closer.close(Some(9), Says(closed, 2));
        assert_eq!(closes.recv(), Ok(2));
        drop(theirs);
    }
}
