//! The listener: one thread that waits for input on many sockets.
//!
//! Before: [`Listener::watch`] gives it a descriptor. After: the listener tells the descriptor's source of input, one
//! call at a time.
//! Threads: one, which must not wait for anything else: a source passes on what takes time, with the [`Rearm`].
//! Promise: a source is not told of more input before the `Rearm` that it was given is dropped, and not told at all
//! after [`Watched`] is dropped. A socket with much input delays another by one call.

use std::collections::HashMap;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;

/// Something with a socket.
pub trait Source: Send + Sync {
    /// The socket; always the same.
    fn fd(&self) -> BorrowedFd<'_>;
    /// There is input, or the socket was closed.
    fn ready(&self, then: Rearm);
}

/// The listener. A copy is the same listener.
#[derive(Clone, Debug)]
pub struct Listener(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    epoll: OwnedFd,
    sources: Mutex<Sources>,
}

#[derive(Debug, Default)]
struct Sources {
    last: u64,
    known: HashMap<u64, Known>,
}

#[derive(Clone)]
struct Known {
    source: Arc<dyn Source>,
    /// Held while it is told of input.
    told: Arc<Mutex<()>>,
}

impl std::fmt::Debug for Known {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Known").finish_non_exhaustive()
    }
}

/// A source is watched until this is dropped. Dropping it waits while the source is being told of input.
#[derive(Debug)]
pub struct Watched(Listener, u64);

/// When this is dropped, the source is told of input again.
#[derive(Debug)]
pub struct Rearm(Listener, u64);

const ONCE: EventFlags = EventFlags::IN.union(EventFlags::ONESHOT);

impl Listener {
    /// The listener of this process.
    ///
    /// # Errors
    /// The kernel gives no descriptor or no thread.
    pub fn of_process() -> io::Result<Self> {
        static LISTENER: OnceLock<Listener> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _one = STARTING.lock().expect("no panic while held");
        if let Some(listener) = LISTENER.get() {
            return Ok(listener.clone());
        }
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let listener = Self(Arc::new(Shared { epoll, sources: Mutex::default() }));
        let listens = listener.clone();
        std::thread::Builder::new().name("listener".into()).spawn(move || listens.run())?;
        Ok(LISTENER.get_or_init(|| listener).clone())
    }

    fn sources(&self) -> MutexGuard<'_, Sources> {
        self.0.sources.lock().expect("no panic while held")
    }

    /// Watches this source for input.
    ///
    /// # Errors
    /// The kernel does not watch such a descriptor.
    pub fn watch(&self, source: Arc<dyn Source>) -> io::Result<Watched> {
        let mut sources = self.sources();
        sources.last += 1;
        let key = sources.last;
        epoll::add(&self.0.epoll, source.fd(), EventData::new_u64(key), ONCE)?;
        sources.known.insert(key, Known { source, told: Arc::default() });
        Ok(Watched(self.clone(), key))
    }

    fn run(self) {
        let mut events = Vec::with_capacity(64);
        loop {
            events.clear();
            match epoll::wait(&self.0.epoll, rustix::buffer::spare_capacity(&mut events), None) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return tracing::error!("Waiting for clients: {error}"),
            }
            for event in &events {
                let data = event.data;
                self.tell(data.u64());
            }
        }
    }

    fn tell(&self, key: u64) {
        let Some(Known { source, told }) = self.sources().known.get(&key).cloned() else { return };
        let _told = told.lock().expect("no panic while held");
        // It may have been forgotten before we had the lock.
        if !self.sources().known.contains_key(&key) {
            return;
        }
        // A bug of ours costs one message, not those of all others.
        if catch_unwind(AssertUnwindSafe(|| source.ready(Rearm(self.clone(), key)))).is_err() {
            tracing::error!("taking a message panicked");
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let Some(known) = self.0.sources().known.remove(&self.1) else { return };
        // The source is not told any more, whatever the result.
        let _ = epoll::delete(&self.0.0.epoll, known.source.fd());
        drop(known.told.lock());
    }
}

impl Rearm {
    /// Stops telling the source of input.
    pub fn forget(mut self) {
        self.1 = 0;
    }
}

impl Drop for Rearm {
    fn drop(&mut self) {
        let sources = self.0.sources();
        let Some(known) = sources.known.get(&self.1) else { return };
        if let Err(error) = epoll::modify(&self.0.0.epoll, known.source.fd(), EventData::new_u64(self.1), ONCE) {
            tracing::error!("Listening to a client again: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;
    use std::sync::mpsc::{Sender, channel};

    struct Echo {
        fd: OwnedFd,
        said: Sender<(u8, Rearm)>,
    }

    impl Source for Echo {
        fn fd(&self) -> BorrowedFd<'_> {
            self.fd.as_fd()
        }

        fn ready(&self, then: Rearm) {
            let mut byte = [0];
            let read = rustix::io::read(&self.fd, &mut byte).expect("read");
            self.said.send((if read == 0 { b'.' } else { byte[0] }, then)).expect("heard");
        }
    }

    #[test]
    fn a_source_is_told_of_input_when_it_has_dealt_with_the_last_and_not_after_it_is_dropped() {
        let listener = Listener::of_process().expect("listener");
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().expect("pair");
        let (said, says) = channel();
        let watched = listener.watch(Arc::new(Echo { fd: ours.into(), said })).expect("watch");
        rustix::io::write(&theirs, b"ab").expect("write");
        let (byte, then) = says.recv().expect("told");
        assert!(byte == b'a' && says.try_recv().is_err());
        drop(then);
        let (byte, then) = says.recv().expect("told");
        assert_eq!(byte, b'b');
        drop(theirs);
        drop(then);
        let (end, then) = says.recv().expect("told");
        assert_eq!(end, b'.');
        drop(watched);
        drop(then);
        assert!(says.recv().is_err(), "it is forgotten, and with it the sender");
    }
}
