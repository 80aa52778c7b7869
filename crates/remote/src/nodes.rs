//! The nodes: idle connections to each, its timeout, and its figures.
//!
//! Before: `cluster` knows which node to ask. After: a caller has a connection of its own for one request.
//! Threads: any; a lock is held to take or return a connection, and never while waiting for a server.
//! Units: time; bytes of guests' pages as they are sent.
//! *Between VMs:* no connection is shared, so no request waits here for another one, whatever that carries. A server
//! reads its connections by turns, 16 KiB at a time; between two of these it executes at most one part of a chunk
//! (`store`) for each.
//! Promise: the timeout of a slow node is raised each time, up to [`TIMEOUT_MAX`]. With a constant timeout, no request
//! to a node that is always slightly slower would succeed.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::{Access, Link};
use crate::refusal::Addr;
use crate::resp::Commands;

/// Initial timeout of a node.
const TIMEOUT: Duration = Duration::from_millis(100);
/// Longest timeout of a node.
const TIMEOUT_MAX: Duration = Duration::from_millis(1600);
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

/// One node.
#[derive(Debug)]
pub struct Node {
    /// Address of the node.
    pub addr: Addr,
    idle: Mutex<Vec<(Link, Instant)>>,
    timeout_ms: AtomicU32,
    errors: AtomicU64,
    /// Requests by the power of two of their latency in microseconds.
    took: [AtomicU64; 26],
}

impl Node {
    /// Creates a node without any history.
    pub fn new(addr: Addr) -> Self {
        Self {
            addr,
            idle: Mutex::default(),
            timeout_ms: AtomicU32::new(TIMEOUT.as_millis() as u32),
            errors: AtomicU64::new(0),
            took: Default::default(),
        }
    }

    /// Returns the timeout for a request to this node.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Relaxed).into())
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Link, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `work` with a connection that no other thread uses. After an error the connection is closed.
    ///
    /// # Errors
    /// The node cannot be reached, or `work` failed.
    pub fn with<T>(
        &self,
        access: &Access,
        until: Instant,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        let (begun, timeout) = (Instant::now(), self.timeout());
        match self.kept(begun).map_or_else(|| Link::open(&self.addr, access, until), Ok) {
            Ok(link) => self.end(link, begun, timeout, work),
            Err(error) => {
                self.note(begun, timeout, Some(&error));
                Err(error)
            }
        }
    }

    /// Takes an idle connection, if there is one that works.
    fn kept(&self, now: Instant) -> Option<Link> {
        let (mut link, used) = self.idle().pop()?;
        (now.saturating_duration_since(used) < FRESH || !link.is_stale()).then_some(link)
    }

    /// Sends commands by an idle connection, if there is one and it takes them at once. Never waits for the server. The
    /// caller passes the connection to [`Node::end`], or closes it.
    pub fn begin(&self, commands: &Commands) -> Option<Link> {
        let mut link = self.kept(Instant::now())?;
        link.send_at_once(commands).is_ok().then_some(link)
    }

    /// Runs `work` with a connection that nobody else has, for a request that began then with this timeout. After an
    /// error the connection is closed.
    ///
    /// # Errors
    /// `work` failed.
    pub fn end<T>(
        &self,
        mut link: Link,
        begun: Instant,
        timeout: Duration,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        let done = work(&mut link);
        self.note(begun, timeout, done.as_ref().err());
        if done.is_ok() {
            let mut idle = self.idle();
            if idle.len() < KEPT {
                idle.push((link, Instant::now()));
            }
        }
        done
    }

    /// Records the result of a request that started with this timeout.
    fn note(&self, begun: Instant, timeout: Duration, error: Option<&io::Error>) {
        let late =
            error.is_some_and(|error| matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
        let was = timeout.as_millis() as u32;
        // Many threads may wait for the node at once, and only one of them changes the timeout.
        let set = |to: Duration| self.timeout_ms.compare_exchange(was, to.as_millis() as u32, Relaxed, Relaxed).is_ok();
        if error.is_none() {
            let took = begun.elapsed();
            let bucket = (u64::BITS - (took.as_micros() as u64).leading_zeros()) as usize;
            self.took[bucket.min(self.took.len() - 1)].fetch_add(1, Relaxed);
            if timeout > TIMEOUT && took < timeout / 4 {
                set((timeout / 2).max(TIMEOUT));
            }
            return;
        }
        self.errors.fetch_add(1, Relaxed);
        if late {
            set((timeout * 2).min(TIMEOUT_MAX));
        }
    }

    /// Returns the figures of the node.
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
