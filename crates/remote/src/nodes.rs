//! The nodes: connections to each that nobody uses just now, how long to wait for it, and what it did so far.
//!
//! Before: `cluster` knows which node to ask. After: a connection of one's own, for one request.
//! Threads: any; a lock is held to take a connection or give it back, and never while a server is waited for.
//! Units: time; bytes of guests' pages as they are sent.
//! Promise: a node that is slow is waited for longer each time, up to [`TIMEOUT_MAX`]: if the wait were always the
//! same, a node that is always a little slower would never be heard.

use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::link::{Access, Link};
use crate::refusal::Addr;

/// How long a node is waited for at first.
const TIMEOUT: Duration = Duration::from_millis(100);
/// The longest.
const TIMEOUT_MAX: Duration = Duration::from_millis(1600);
/// A connection that was not used for this long is looked at before it is used: the server may have gone.
const FRESH: Duration = Duration::from_millis(100);
/// Connections kept for later.
const KEPT: usize = 64;

/// What a node did, since this process began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFigures {
    /// Requests it answered.
    pub requests: u64,
    /// Failed requests: no connection, no answer in time, nonsense.
    pub errors: u64,
    /// What it was last waited for, half of the requests and 99 of 100, in microseconds, as powers of two.
    pub p50_us: u64,
    /// See there.
    pub p99_us: u64,
}

/// One of them.
#[derive(Debug)]
pub struct Node {
    /// Where it is.
    pub addr: Addr,
    idle: Mutex<Vec<(Link, Instant)>>,
    timeout_ms: AtomicU32,
    errors: AtomicU64,
    /// Requests by the power of two of their microseconds.
    took: [AtomicU64; 26],
}

impl Node {
    /// Nothing is known of it.
    pub fn new(addr: Addr) -> Self {
        Self {
            addr,
            idle: Mutex::default(),
            timeout_ms: AtomicU32::new(TIMEOUT.as_millis() as u32),
            errors: AtomicU64::new(0),
            took: Default::default(),
        }
    }

    /// How long to wait for it.
    pub fn timeout(&self) -> Duration {
        Duration::from_millis(self.timeout_ms.load(Relaxed).into())
    }

    fn idle(&self) -> MutexGuard<'_, Vec<(Link, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Do something with a connection of one's own. After an error the connection is closed.
    ///
    /// # Errors
    /// It cannot be reached, or what was done failed.
    pub fn with<T>(
        &self,
        access: &Access,
        until: Instant,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        let (begun, timeout) = (Instant::now(), self.timeout());
        let kept = self.idle().pop();
        let kept = kept.and_then(|(mut link, used)| (begun - used < FRESH || !link.is_stale()).then_some(link));
        let done = kept.map_or_else(|| Link::open(&self.addr, access, until), Ok).and_then(|mut link| {
            let done = work(&mut link)?;
            let mut idle = self.idle();
            if idle.len() < KEPT {
                idle.push((link, Instant::now()));
            }
            Ok(done)
        });
        self.note(begun, timeout, done.as_ref().err());
        done
    }

    /// The result of a request that was begun with this timeout.
    fn note(&self, begun: Instant, timeout: Duration, error: Option<&io::Error>) {
        let late =
            error.is_some_and(|error| matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock));
        let was = timeout.as_millis() as u32;
        // Many may wait for it at once: what they learn counts once.
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

    /// What it did.
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
