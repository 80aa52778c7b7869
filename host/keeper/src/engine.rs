//! An engine from its keeper's side: a child, a socket, pings, and the orders that it has not taken.
//!
//! Before: `engine_child` starts one. After: it gets orders, and the keeper knows whether it is alive.
//! Threads: the keeper's one. Nothing here waits: orders that the engine's socket does not take stay in a queue.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_base::wire;
use ballast_handover::orders::Order;
use ballast_sys::process::Process;
use ballast_sys::scm;
use ballast_sys::spawn::{Child, Starter};
use rustix::event::PollFlags;
use rustix::process::{Signal, pidfd_send_signal};

use crate::closer::SentFd;
use crate::program::Program;

/// Time between pings to the engine.
pub const PING_EVERY: Duration = Duration::from_secs(1);
/// Unanswered pings after which it is replaced.
const SILENCE: u32 = 15;
/// Most replies before it serves. Opening a VM takes seconds at most; an engine that does not serve after ten minutes
/// is in a deadlock.
const STARTING: u32 = 600;

/// Does the engine still reply? Counted in rounds of this keeper, not in time: a keeper that was stopped for a minute,
/// or a host that slept, has gone without a reply for one round, not for sixty.
#[derive(Debug)]
pub(crate) struct Pulse {
    pub asked: Instant,
    /// Rounds since the last sign of life.
    pub silent: u32,
    /// Rounds since the start, until it serves.
    pub starting: Option<u32>,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Beat {
    /// It is not time yet.
    Rest,
    Ask,
    Dead(&'static str),
}

impl Pulse {
    pub fn new(now: Instant) -> Self {
        Self { asked: now, silent: 0, starting: Some(0) }
    }

    pub fn beat(&mut self, now: Instant) -> Beat {
        if now.saturating_duration_since(self.asked) < PING_EVERY {
            return Beat::Rest;
        }
        self.asked = now;
        self.silent += 1;
        if let Some(rounds) = &mut self.starting {
            *rounds += 1;
        }
        if self.silent > SILENCE {
            Beat::Dead("did not answer")
        } else if self.starting > Some(STARTING) {
            Beat::Dead("did not begin to serve")
        } else {
            Beat::Ask
        }
    }
}

/// One of the keeper's engines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The one that serves.
    Engine,
    /// The one that is to follow it.
    Next,
}

/// An engine that runs.
pub struct Engine {
    /// Its pidfd is readable when it is dead.
    pub child: Child,
    pub process: Process,
    /// The other end is its standard input.
    pub socket: OwnedFd,
    pub pulse: Pulse,
    /// Orders that it has not taken yet.
    pub orders: VecDeque<(Vec<u8>, Vec<Arc<SentFd>>)>,
    /// The kernel has no space for the next order, and does not report when it has.
    pub starved: bool,
    /// Why it was killed, if it was.
    pub killed: Option<&'static str>,
    pub begun: Instant,
    /// It was told that it has all VMs.
    pub told_to_serve: bool,
}

impl Engine {
    /// One that has just been started.
    pub fn new(child: Child, process: Process, socket: OwnedFd) -> Self {
        Self {
            child,
            process,
            socket,
            pulse: Pulse::new(Instant::now()),
            orders: VecDeque::new(),
            starved: false,
            killed: None,
            begun: Instant::now(),
            told_to_serve: false,
        }
    }

    /// Does it answer, also operators?
    pub fn serves(&self) -> bool {
        self.pulse.starting.is_none() && self.told_to_serve
    }

    /// The events to wait for on its socket.
    pub fn interest(&self) -> PollFlags {
        if self.orders.is_empty() || self.starved { PollFlags::IN } else { PollFlags::IN | PollFlags::OUT }
    }

    /// Give it an order: now, or as soon as it takes it.
    pub fn give(&mut self, order: &Order, fds: &[Arc<SentFd>]) {
        self.orders.push_back((wire::encode(order), fds.to_vec()));
        if self.orders.len() == 1 {
            self.flush();
        }
    }

    /// Give it as many orders as it takes now.
    pub fn flush(&mut self) {
        self.starved = false;
        while let Some((bytes, fds)) = self.orders.front() {
            let borrowed: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
            match scm::send(&self.socket, bytes, &borrowed) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if error.kind() == ErrorKind::BrokenPipe || error.kind() == ErrorKind::ConnectionReset => {
                    return self.orders.clear();
                }
                // It can never be sent, and would block later ones.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    tracing::error!("An order with {} descriptors is left out: {error}", fds.len());
                }
                Err(error) => {
                    // Too many descriptors in flight, or no memory: an order is never left out.
                    tracing::warn!("Giving the engine an order: {error}; trying again");
                    self.starved = true;
                    return;
                }
            }
            self.orders.pop_front();
        }
    }
}

/// Start an engine.
pub(crate) fn spawn(starter: &mut Starter, program: &Program) -> anyhow::Result<Engine> {
    let (ours, theirs) = scm::pair().context("Making a socket")?;
    rustix::io::ioctl_fionbio(&ours, true).context("Making a socket non-blocking")?;
    let child = program
        .start(starter, &["engine"], theirs.as_fd())
        .with_context(|| format!("Running {} engine", program.path().display()))?;
    let known = Process::find(child.id()).context("Reading the engine's start time");
    let process = match known.and_then(|process| process.context("The engine has no start time")) {
        Ok(process) => process,
        Err(error) => {
            // A later keeper could not tell this engine from others, so it must not be given a VM.
            let _ = pidfd_send_signal(child.pidfd(), Signal::KILL);
            return Err(error);
        }
    };
    Ok(Engine::new(child, process, ours))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_that_slept_counts_one_round_however_long_it_slept() {
        let start = Instant::now();
        let mut pulse = Pulse::new(start);
        assert_eq!(pulse.beat(start), Beat::Rest);
        let woken = start + Duration::from_secs(3600);
        assert_eq!(pulse.beat(woken), Beat::Ask, "the engine had no chance to answer");
        assert_eq!(pulse.beat(woken), Beat::Rest);
    }

    #[test]
    fn an_engine_that_never_answers_and_one_that_never_serves_are_both_replaced() {
        let mut now = Instant::now();
        let mut pulse = Pulse::new(now);
        let mut next = |pulse: &mut Pulse| {
            now += PING_EVERY;
            pulse.beat(now)
        };
        let asked = (0..).take_while(|_| next(&mut pulse) == Beat::Ask).count();
        assert_eq!(asked, SILENCE as usize);
        pulse.silent = 0;
        let answering = |pulse: &mut Pulse| {
            pulse.silent = 0;
            next(pulse) == Beat::Ask
        };
        let mut answering = answering;
        let left = STARTING as usize - SILENCE as usize - 1;
        assert_eq!((0..).take_while(|_| answering(&mut pulse)).count(), left);
        pulse.starting = None;
        assert!((0..2 * STARTING).all(|_| answering(&mut pulse)), "one that serves and answers is left alone");
    }
}
