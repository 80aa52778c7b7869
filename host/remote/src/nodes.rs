//! The nodes: idle connections to each, its timeout, and its figures.
//!
//! Before: `cluster` knows which node to ask. After: a caller has a connection of its own for one request.
//! Threads: any; a lock is held to take or return a connection, and never while waiting for a server.
//! Units: time; bytes of guests' pages as they are sent.
//! *Between VMs:* no connection is shared, so no request waits here for another one, however large that is. A server
//! reads its connections by turns, 16 KiB at a time; between two turns of a connection it executes at most one part of
//! a chunk (`store`) for each other one.
//! Promise: the timeout of a slow node is raised each time, up to a limit. With a constant timeout, no request to a
//! node that is always slightly slower would succeed. Quick requests lower it again, but never so far that the next
//! connection could not be opened in time. A request changes only the timeout of its own kind.

use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ballast_base::store::{IoContext, OnReply};
use ballast_sys::lock::Lock;

use crate::link::{Access, Deadline, Link};
use crate::refusal::Addr;
use crate::resp::Commands;
use crate::stream::is_giving_way;

/// What a request does. Each kind has a timeout of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    Run,
    /// Stores a run of pages, also on replicas.
    Write,
    /// Deletes pages. No replica is waited for.
    Unlink,
    /// Any other request. Its caller has a deadline.
    Other,
}

impl Kind {
    const ALL: [Self; 5] = [Self::Read, Self::Run, Self::Write, Self::Unlink, Self::Other];

    /// The initial and shortest timeout, and the longest one.
    const fn limits(self) -> (Duration, Duration) {
        match self {
            Self::Read | Self::Other => (Duration::from_millis(100), Duration::from_millis(1600)),
            // 2 MiB take longer than a page.
            Self::Run => (Duration::from_millis(100), Duration::from_millis(3200)),
            Self::Write | Self::Unlink => (Duration::from_secs(1), Duration::from_secs(4)),
        }
    }

    /// Returns the deadline of a request of this kind that begins now with this timeout.
    pub fn deadline(self, now: Instant, timeout: Duration, context: IoContext<'_>) -> Deadline<'_> {
        let most = if self == Self::Run { self.limits().1 } else { timeout };
        Deadline { context: context.until(now + timeout), more: most.saturating_sub(timeout) }
    }
}

/// A connection that was idle for this long is checked before it is used, because the server may have closed it.
const FRESH: Duration = Duration::from_millis(100);
/// Idle connections that are kept per node.
const KEPT: usize = 64;

/// Figures of a node since this process started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFigures {
    /// Requests that succeeded.
    pub requests: u64,
    /// Failed requests: no connection, no reply in time, or a malformed reply.
    pub errors: u64,
    /// Median latency of recent requests, in microseconds, rounded to a power of two.
    pub p50_us: u64,
    /// 99th percentile of the same latencies.
    pub p99_us: u64,
}

pub fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}

/// The error of a `WAIT` that was too short: fewer replicas have the write than must. The connection stays.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TooFew(pub String);

pub fn is_too_few(error: &io::Error) -> bool {
    error.get_ref().is_some_and(|why| why.is::<TooFew>())
}

#[derive(Debug)]
pub struct Node {
    pub addr: Addr,
    idle: Mutex<Vec<(Link, Instant)>>,
    /// The timeout of each kind.
    timeouts_ms: [AtomicU32; 5],
    opening_ms: AtomicU32,
    errors: AtomicU64,
    /// Requests by the power of two of their latency in microseconds.
    took: [AtomicU64; 26],
}

impl Node {
    pub fn new(addr: Addr) -> Self {
        Self {
            addr,
            idle: Mutex::default(),
            timeouts_ms: Kind::ALL.map(|kind| AtomicU32::new(kind.limits().0.as_millis() as u32)),
            opening_ms: AtomicU32::new(0),
            errors: AtomicU64::new(0),
            took: Default::default(),
        }
    }

    pub fn timeout(&self, kind: Kind) -> Duration {
        Duration::from_millis(self.timeouts_ms[kind as usize].load(Relaxed).into())
    }

    pub fn opening(&self) -> Duration {
        Duration::from_millis(self.opening_ms.load(Relaxed).into())
    }

    /// Runs `work` with an unshared connection. After an error it is closed, unless the error is [`TooFew`].
    pub fn with<T>(
        &self,
        kind: Kind,
        access: &Access,
        context: IoContext<'_>,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        let (begun, timeout) = (Instant::now(), self.timeout(kind));
        let link = self.take(kind, access, begun, context)?;
        self.end(link, kind, begun, timeout, work)
    }

    /// Takes a connection that no other thread uses, for a request that begins now.
    pub fn take(&self, kind: Kind, access: &Access, now: Instant, context: IoContext<'_>) -> io::Result<Link> {
        let timeout = self.timeout(kind);
        let link = self.kept(now).map_or_else(|| self.open(access, context), Ok);
        link.inspect_err(|error| self.note(kind, now, timeout, Some(error)))
    }

    fn open(&self, access: &Access, context: IoContext<'_>) -> io::Result<Link> {
        let begun = Instant::now();
        let link = Link::open(&self.addr, access, context)?;
        self.opening_ms.store(begun.elapsed().as_millis() as u32, Relaxed);
        Ok(link)
    }

    fn kept(&self, now: Instant) -> Option<Link> {
        let (mut link, used) = self.idle.locked().pop()?;
        (now.saturating_duration_since(used) < FRESH || !link.is_stale()).then_some(link)
    }

    /// Sends commands on an idle connection, if there is one and it takes them at once; `watch` gets its descriptor
    /// before. Never waits for the server. The caller passes the connection to [`Node::end`], or closes it.
    pub fn begin(&self, commands: &Commands, watch: OnReply<'_>) -> Option<Link> {
        let mut link = self.kept(Instant::now())?;
        watch(link.fd());
        link.send_at_once(commands).is_ok().then_some(link)
    }

    /// Runs `work` with a connection of [`Node::begin`], for a request that began then with this timeout. After an
    /// error the connection is closed, unless it is [`TooFew`].
    pub fn end<T>(
        &self,
        mut link: Link,
        kind: Kind,
        begun: Instant,
        timeout: Duration,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        let done = work(&mut link);
        self.note(kind, begun, timeout, done.as_ref().err());
        if done.as_ref().err().is_none_or(is_too_few) {
            let mut idle = self.idle.locked();
            if idle.len() < KEPT {
                idle.push((link, Instant::now()));
            }
        }
        done
    }

    /// Records the result of a request that started with this timeout, and adapts the timeout.
    pub fn note(&self, kind: Kind, begun: Instant, timeout: Duration, error: Option<&io::Error>) {
        let was = timeout.as_millis() as u32;
        // Many threads may wait for the node at once: only one of them changes the timeout.
        let set = |to: Duration| {
            let to = to.as_millis() as u32;
            self.timeouts_ms[kind as usize].compare_exchange(was, to, Relaxed, Relaxed).is_ok()
        };
        let (least, most) = kind.limits();
        let Some(error) = error else {
            let took = begun.elapsed();
            let bucket = (u64::BITS - (took.as_micros() as u64).leading_zeros()) as usize;
            self.took[bucket.min(self.took.len() - 1)].fetch_add(1, Relaxed);
            let least = least.max(self.opening() * 2).min(most);
            if timeout > least && took < timeout / 4 {
                set((timeout / 2).max(least));
            }
            return;
        };
        if is_giving_way(error) {
            return;
        }
        self.errors.fetch_add(1, Relaxed);
        if is_late(error) {
            set((timeout * 2).min(most));
        }
    }

    pub fn figures(&self) -> NodeFigures {
        let took: Vec<u64> = self.took.iter().map(|count| count.load(Relaxed)).collect();
        let requests = took.iter().sum();
        let percentile = |share: f64| {
            let (mut seen, wanted) = (0, (requests as f64 * share).ceil() as u64);
            let bucket = took.iter().position(|count| {
                seen += count;
                seen >= wanted.max(1)
            });
            bucket.map_or(0, |bucket| 1 << bucket)
        };
        NodeFigures { requests, errors: self.errors.load(Relaxed), p50_us: percentile(0.5), p99_us: percentile(0.99) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::gives_way;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    fn node(port: u16) -> Node {
        Node::new(Addr { host: "127.0.0.1".into(), port })
    }

    #[test]
    fn quick_reads_lower_their_own_timeout_and_not_that_of_runs_or_writes() {
        let (node, late) = (node(1), io::Error::from(io::ErrorKind::TimedOut));
        for kind in Kind::ALL {
            (0..10).for_each(|_| node.note(kind, Instant::now(), node.timeout(kind), Some(&late)));
            assert_eq!(node.timeout(kind), kind.limits().1);
        }
        (0..10).for_each(|_| node.note(Kind::Read, Instant::now(), node.timeout(Kind::Read), None));
        let others = [Kind::Run, Kind::Write, Kind::Unlink, Kind::Other];
        assert_eq!(node.timeout(Kind::Read), Kind::Read.limits().0);
        assert_eq!(others.map(|kind| node.timeout(kind)), others.map(|kind| kind.limits().1));
        (0..10).for_each(|_| node.note(Kind::Unlink, Instant::now(), node.timeout(Kind::Unlink), None));
        assert_eq!(node.timeout(Kind::Write), Kind::Write.limits().1);
        (0..10).for_each(|_| node.note(Kind::Write, Instant::now(), node.timeout(Kind::Write), None));
        assert_eq!(node.timeout(Kind::Write), Kind::Write.limits().0);
    }

    #[test]
    fn a_wait_that_was_too_short_keeps_its_connection_and_a_request_that_gives_way_is_no_error_of_its_node() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let node = node(listener.local_addr().expect("an address").port());
        let fails = |error: io::Error| {
            let context = IoContext::BACKGROUND.until(Instant::now() + Duration::from_secs(60));
            node.with(Kind::Write, &Access::default(), context, |_| Err::<(), _>(error)).expect_err("it fails");
            (node.idle.locked().len(), node.figures().errors, node.timeout(Kind::Write))
        };
        let seconds = Duration::from_secs;
        assert_eq!(fails(gives_way()), (0, 0, seconds(1)));
        assert_eq!(fails(io::Error::new(io::ErrorKind::TimedOut, TooFew("0".into()))), (1, 1, seconds(2)));
        assert_eq!(fails(io::ErrorKind::TimedOut.into()), (0, 2, seconds(4)));
    }

    #[test]
    fn quick_requests_leave_a_timeout_in_which_the_next_connection_can_be_opened() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let node = node(listener.local_addr().expect("an address").port());
        // A server that accepts connections slowly, and then is quick.
        std::thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let (mut asked, mut is_in) = ([0; 512], false);
                while matches!(stream.read(&mut asked), Ok(1..)) {
                    if !std::mem::replace(&mut is_in, true) {
                        std::thread::sleep(Kind::Read.limits().0 * 2);
                    }
                    if stream.write_all(b"+OK\r\n").is_err() {
                        break;
                    }
                }
            }
        });
        let file = std::env::temp_dir().join(format!("ballast-nodes-{}", std::process::id()));
        std::fs::write(&file, "secret").expect("write");
        let access = Access { password_file: Some(file.clone()), ..Access::default() };
        let ask = || {
            let context = IoContext::GUEST.until(Instant::now() + node.timeout(Kind::Read));
            node.with(Kind::Read, &access, context, |link| link.ask(&Commands::one(&[b"PING"]), context).map(drop))
        };
        let begun = Instant::now();
        while ask().is_err() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is never reached");
        }
        // The request is repeated if the last connection took longer than its timeout.
        loop {
            (0..20).for_each(|_| drop(ask()));
            let (timeout, opening) = (node.timeout(Kind::Read), node.opening());
            assert!(opening >= Kind::Read.limits().0 * 2);
            if timeout > opening {
                break;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{timeout:?}, and {opening:?} to open a connection");
        }
        std::fs::remove_file(file).expect("remove");
    }
}
