//! An engine from its keeper's side: a child, a socket, pings, and the orders that it has not yet taken.
//!
//! Before: `engines` starts the engine. After: it gets orders, and the keeper knows whether it is alive.
//! Threads: the keeper's one. Nothing here waits: orders that the engine's socket does not take stay in a queue.

use std::collections::VecDeque;
use std::io::ErrorKind;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use ballast_base::wire;
use ballast_handover::kept::KeptEngine;
use ballast_handover::orders::Order;
use ballast_sys::process::Process;
use ballast_sys::scm::{self, Received};
use ballast_sys::spawn::Child;
use rustix::event::PollFlags;
use rustix::process::{Signal, pidfd_send_signal};

use crate::program::Program;
use crate::taken;
use ballast_sys::slow_fd::SlowFd;

pub const PING_EVERY: Duration = Duration::from_secs(1);
/// Unanswered pings after which the engine is replaced.
const SILENCE: u32 = 15;
/// Most rounds before it serves. Opening a VM takes seconds at most; an engine that does not serve after ten minutes
/// is in a deadlock.
const STARTING: u32 = 600;
/// How long the API of a new engine waits for VMs that threads of dead engines still use. The threads end in
/// milliseconds, or when the kernel lets them.
pub const SERVE_TIMEOUT: Duration = Duration::from_millis(500);

/// The engine's signs of life. Counted in rounds of this keeper, not in time: a keeper that was stopped for a minute,
/// or a host that slept, has missed one round, not sixty.
#[derive(Debug)]
struct Pulse {
    asked: Instant,
    /// Rounds since the last sign of life.
    silent: u32,
    /// Rounds since the start, until it serves.
    starting: Option<u32>,
}

#[derive(Debug, PartialEq)]
enum Beat {
    Rest,
    Ask,
    Dead(&'static str),
}

impl Pulse {
    fn new(now: Instant) -> Self {
        Self { asked: now, silent: 0, starting: Some(0) }
    }

    fn beat(&mut self, now: Instant) -> Beat {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Engine,
    /// During an upgrade, the engine that will follow it.
    Next,
}

#[derive(Debug, PartialEq)]
pub(crate) enum Health {
    Alive,
    /// It does not answer, or does not begin to serve: the text says which.
    Silent(&'static str),
    Dead,
}

pub(crate) struct Engine {
    child: Child,
    process: Process,
    /// The other end is the engine's standard input.
    socket: OwnedFd,
    pulse: Pulse,
    orders: VecDeque<(Vec<u8>, Vec<Arc<SlowFd>>)>,
    /// The kernel had no space for the next order, and does not report when it has.
    starved: bool,
    killed: Option<&'static str>,
    begun: Instant,
    told_to_serve: bool,
}

impl Engine {
    fn new(child: Child, process: Process, socket: OwnedFd) -> Self {
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

    pub fn start(program: &Program) -> anyhow::Result<Self> {
        let (ours, theirs) = scm::pair().context("Making a socket")?;
        rustix::io::ioctl_fionbio(&ours, true).context("Making a socket non-blocking")?;
        let child = program
            .start(&["engine"], theirs.as_fd())
            .with_context(|| format!("Running {} engine", program.path().display()))?;
        let known = Process::find(child.id()).context("Reading the engine's start time");
        match known.and_then(|process| process.context("The engine has no start time")) {
            Ok(process) => Ok(Self::new(child, process, ours)),
            Err(error) => {
                // A later keeper could not tell this engine from other processes, so it must not be given a VM.
                let _ = pidfd_send_signal(child.pidfd(), Signal::KILL);
                Err(error)
            }
        }
    }

    pub fn of(kept: &KeptEngine) -> anyhow::Result<Self> {
        let KeptEngine { pid, start, pidfd, socket } = *kept;
        let mut engine = Self::new(taken::child(pid, pidfd)?, Process { pid, start }, taken::fd(socket)?);
        (engine.told_to_serve, engine.pulse.starting) = (true, None);
        Ok(engine)
    }

    pub fn kept(&self) -> KeptEngine {
        let Process { pid, start } = self.process;
        let [pidfd, socket] = [self.child.pidfd(), self.socket.as_fd()].map(|fd| fd.as_raw_fd());
        KeptEngine { pid, start, pidfd, socket }
    }

    pub fn process(&self) -> Process {
        self.process
    }

    /// Readable when the engine is dead.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.child.pidfd()
    }

    /// The engine's socket, and the events to wait for.
    pub fn interest(&self) -> (BorrowedFd<'_>, PollFlags) {
        let waits = self.has_orders() && !self.starved;
        (self.socket.as_fd(), if waits { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN })
    }

    pub fn has_orders(&self) -> bool {
        !self.orders.is_empty()
    }

    pub fn is_starting(&self) -> bool {
        self.pulse.starting.is_some()
    }

    /// Whether it serves, and answers operators as well.
    pub fn serves(&self) -> bool {
        !self.is_starting() && self.told_to_serve
    }

    pub fn has_started(&mut self) {
        self.pulse.starting = None;
    }

    /// Tells the engine to serve, unless it was told: once it has been given all VMs, or after [`SERVE_TIMEOUT`].
    pub fn serve(&mut self, has_all: bool) {
        if !self.told_to_serve && (has_all || self.begun.elapsed() > SERVE_TIMEOUT) {
            self.told_to_serve = true;
            self.give(&Order::Serve, &[]);
        }
    }

    /// Pings the engine if it is time, and sends waiting orders.
    pub fn keep(&mut self, now: Instant) -> Health {
        let beat = self.pulse.beat(now);
        // Its pidfd is not readable while the kernel keeps one of its threads. That thread delays its own VM, not all
        // VMs.
        if beat != Beat::Rest && (self.killed.is_some() || self.process.is_dying()) {
            return Health::Dead;
        }
        // If orders wait, a ping would only make the queue longer, and replies are missing anyway.
        if beat == Beat::Ask && !self.has_orders() {
            self.give(&Order::Ping, &[]);
        }
        if self.starved {
            self.flush();
        }
        if let Beat::Dead(how) = beat { Health::Silent(how) } else { Health::Alive }
    }

    pub fn hear(&mut self) -> Option<Received> {
        let received = scm::receive(&self.socket).ok().flatten()?;
        self.pulse.silent = 0;
        Some(received)
    }

    /// Queues an order, and sends what the engine's socket takes now.
    pub fn give(&mut self, order: &Order, fds: &[Arc<SlowFd>]) {
        self.orders.push_back((wire::encode(order), fds.to_vec()));
        if self.orders.len() == 1 {
            self.flush();
        }
    }

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
                // It can never be sent, and would block later orders.
                Err(error) if error.kind() == ErrorKind::InvalidInput => {
                    tracing::error!("An order with {} descriptors is left out: {error}", fds.len());
                }
                Err(error) => {
                    // Too many descriptors are in flight, or there is no memory: the order stays in the queue.
                    tracing::warn!("Giving the engine an order: {error}; trying again");
                    self.starved = true;
                    return;
                }
            }
            self.orders.pop_front();
        }
    }

    /// Kills the engine. Its pidfd tells when it is dead, or the next [`Self::keep`].
    pub fn kill(&mut self, how: &'static str) {
        let _ = pidfd_send_signal(self.child.pidfd(), Signal::KILL);
        self.killed = Some(how);
    }

    /// Whether it has ended; then it is reaped as well.
    pub fn is_reaped(&self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// How it ended, and why it was killed, if it was. If it has ended, it is reaped.
    pub fn end(&self) -> String {
        let status = match self.child.try_wait() {
            Ok(Some(status)) => status.to_string(),
            Ok(None) => "the kernel keeps threads of it".into(),
            Err(error) => error.to_string(),
        };
        format!("{} ({status})", self.killed.unwrap_or("died"))
    }

    pub fn into_child(self) -> Child {
        self.child
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::program::install_script;

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

    #[test]
    fn an_engine_that_takes_no_orders_does_not_hold_up_its_keeper_and_gets_them_all_in_the_end() {
        let dir = tempfile::tempdir().expect("temporary directory");
        let path = dir.path().join("engine");
        install_script(&path, "exec sleep 1000");
        // A shell opens its script through the program's descriptor, which must stay open until then.
        let program = Program::at(path).expect("a program");
        let mut engine = Engine::start(&program).expect("started");
        let note = |number: u32| Order::Note { vm: None, kind: "test".into(), message: number.to_string() };
        // The kernel's queue holds a few hundred at most.
        for number in 0..5000 {
            engine.give(&note(number), &[]);
        }
        let waiting = engine.orders.len();
        assert!(waiting > 0 && engine.interest().1.contains(PollFlags::OUT));
        engine.flush();
        assert_eq!(engine.orders.len(), waiting);
        let last = wire::decode::<Order>(&engine.orders[waiting - 1].0).expect("an order");
        assert_eq!(last, note(4999));
        engine.kill("is not needed any more");
    }
}
