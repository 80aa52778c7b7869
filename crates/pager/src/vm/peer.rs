//! The peer of a view: the client in its process, on the other end of the control socket.
//!
//! Before: the keeper hands over the socket. After: page-table entries are dropped when reclaim asks, and the VM is
//! told what it must know.
//! Threads: any; zaps of several workers are told apart by sequence numbers.
//! Promise: a zap that is not acknowledged in time is an error. What the client kept is said.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, ClientToEngine, EngineToClient, MAX_RANGES};
use ballast_sys::scm;

use crate::run::pool::{Notifier, blocking};

/// How long a client may take to acknowledge a zap. A zap takes microseconds; a stopped VMM takes for ever.
const ZAP_TIMEOUT: Duration = Duration::from_secs(5);

/// What a client has answered to a zap: which parts it left alone, or an errno.
type Zapped = Result<Vec<wire::Range>, i32>;

/// See above.
#[derive(Debug)]
pub struct Peer {
    control: OwnedFd,
    next_seq: AtomicU64,
    /// Zaps under way: `None` until answered; then which ranges were not zapped.
    zaps: Mutex<HashMap<u64, Option<Zapped>>>,
    answered: Condvar,
    on_answer: Notifier,
    disconnected: AtomicBool,
}

/// A zap that the client was asked for, part by part.
#[derive(Debug)]
pub(crate) struct Zap {
    peer: Arc<Peer>,
    rest: VecDeque<Vec<wire::Range>>,
    /// The part that was sent, and until when the client may answer it.
    awaited: Option<(u64, Instant)>,
    kept: Vec<wire::Range>,
}

impl Peer {
    /// The client at the other end of this socket. `epoch` makes the sequence numbers differ from those of earlier
    /// engines.
    pub fn new(control: OwnedFd, epoch: u64) -> Self {
        Self {
            control,
            next_seq: AtomicU64::new(epoch << 32),
            zaps: Mutex::default(),
            answered: Condvar::new(),
            on_answer: Notifier::default(),
            disconnected: AtomicBool::new(false),
        }
    }

    /// The control socket.
    pub fn control(&self) -> BorrowedFd<'_> {
        self.control.as_fd()
    }

    /// Tell the client something. Never waits: a client that does not read its socket fails its own VM's requests only.
    pub fn tell(&self, message: &EngineToClient) -> io::Result<()> {
        scm::try_send(&self.control, &wire::encode(message))
    }

    /// Have the client drop its page-table entries of these ranges; returns when it has, with the parts of them that it
    /// could not: they may be mapped still.
    ///
    /// # Errors
    /// The client answered with an error, not in time, or is gone. Some ranges may have been zapped, which is harmless.
    pub fn zap(self: &Arc<Self>, ranges: &[wire::Range]) -> io::Result<Vec<wire::Range>> {
        let mut zap = self.begin_zap(ranges)?;
        loop {
            if let Some(kept) = zap.poll(Instant::now())? {
                return Ok(kept);
            }
            let Some((seq, until)) = zap.awaited else { continue };
            let unanswered = |zaps: &mut HashMap<u64, Option<Zapped>>| matches!(zaps.get(&seq), Some(None));
            let left = until.saturating_duration_since(Instant::now());
            blocking(|| {
                let zaps = self.zaps.lock().expect("no panic while held");
                drop(self.answered.wait_timeout_while(zaps, left, unanswered).expect("no panic while held"));
            });
        }
    }

    /// The same without waiting: what is returned is to be asked when the client has answered ([`Peer::on_answer`]).
    pub(crate) fn begin_zap(self: &Arc<Self>, ranges: &[wire::Range]) -> io::Result<Zap> {
        let rest = ranges.chunks(MAX_RANGES).map(<[_]>::to_vec).collect();
        let mut zap = Zap { peer: self.clone(), rest, awaited: None, kept: Vec::new() };
        zap.send_next(Instant::now())?;
        Ok(zap)
    }

    /// What is notified when the client has answered a zap, or is gone.
    pub(crate) fn on_answer(&self) -> &Notifier {
        &self.on_answer
    }

    /// Take the client's answer to a zap. One meant for an earlier engine is not known here and is ignored.
    pub fn zapped(&self, answer: &ClientToEngine) {
        if let ClientToEngine::Zapped { seq, error, kept } = answer
            && let Some(slot) = self.zaps.lock().expect("no panic while held").get_mut(seq)
        {
            *slot = Some(error.map_or_else(|| Ok(kept.clone()), Err));
            self.answered.notify_all();
            self.on_answer.notify();
        }
    }

    /// Has the client gone?
    pub fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire)
    }

    /// The client is gone: no thread need wait for an answer any more.
    pub fn disconnect(&self) {
        self.disconnected.store(true, Ordering::Release);
        self.give_up_zaps();
    }

    /// Nobody hears the client any more: those that wait for its answers do so no longer.
    pub(crate) fn give_up_zaps(&self) {
        self.zaps.lock().expect("no panic while held").clear();
        self.answered.notify_all();
        self.on_answer.notify();
    }
}

impl Zap {
    /// The parts of it that the client could not zap, once it has answered all; `None` if it has not yet.
    ///
    /// # Errors
    /// Those of [`Peer::zap`].
    pub fn poll(&mut self, now: Instant) -> io::Result<Option<Vec<wire::Range>>> {
        while let Some((seq, until)) = self.awaited {
            let answer = {
                let mut zaps = self.peer.zaps.lock().expect("no panic while held");
                match zaps.get(&seq) {
                    Some(None) if now < until => return Ok(None),
                    Some(None) => Err(io::Error::new(io::ErrorKind::TimedOut, "the VMM did not answer a zap in time")),
                    Some(Some(_)) => Ok(zaps.remove(&seq).flatten().expect("looked at just now")),
                    None => Err(io::Error::new(io::ErrorKind::BrokenPipe, "the VMM is gone")),
                }
            };
            self.kept.extend(answer?.map_err(io::Error::from_raw_os_error)?);
            self.send_next(now)?;
        }
        Ok(Some(std::mem::take(&mut self.kept)))
    }

    /// Ask for the next part, if one is left.
    fn send_next(&mut self, now: Instant) -> io::Result<()> {
        self.awaited = None;
        let Some(ranges) = self.rest.pop_front() else { return Ok(()) };
        let seq = self.peer.next_seq.fetch_add(1, Ordering::Relaxed);
        self.peer.zaps.lock().expect("no panic while held").insert(seq, None);
        self.awaited = Some((seq, now + ZAP_TIMEOUT));
        self.peer.tell(&EngineToClient::Zap { seq, ranges })
    }

    /// When it will have taken too long.
    pub fn until(&self) -> Option<Instant> {
        self.awaited.map(|(_, until)| until)
    }
}

impl Drop for Zap {
    fn drop(&mut self) {
        if let Some((seq, _)) = self.awaited {
            self.peer.zaps.lock().expect("no panic while held").remove(&seq);
        }
    }
}
