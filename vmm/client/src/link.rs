//! Requests over the attach socket, and what must survive the keeper: VM id, escrow files, pinned reason, may-pin flag.
//!
//! Before: a VMM thread adds, removes or pins. After: the keeper has replied, or the next attach message contains the
//! change.
//! Threads: VMM threads ask, one at a time; the service thread changes the phase and delivers replies.
//! Promise: a request never waits longer than its limit; a late reply never counts for a later request.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use ballast_base::Hva;
use ballast_base::wire::{self, ClientToKeeper, StoreFiles, VmId};
use ballast_sys::lock::Lock;
use ballast_sys::scm;

use crate::error::{AttachError, RequestError};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Down,
    /// The attach message was sent; its content is fixed.
    Pending,
    Up,
    Failed,
}

/// The files that the client keeps for the next keeper.
#[derive(Debug)]
pub(crate) struct Escrow {
    /// Number of files of each store.
    pub stores: Vec<StoreFiles>,
    /// The state file, then the files of the stores.
    pub files: Vec<OwnedFd>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub phase: Phase,
    pub vm: Option<VmId>,
    pub escrow: Option<Escrow>,
    pub pinned: Option<String>,
    /// The value in the next attach message; true even after a `MayPin` without a reply.
    pub may_pin: bool,
    socket: Option<Arc<OwnedFd>>,
    sent: u64,
    answered: u64,
    answer: Result<Asked, String>,
    /// Number of the last request; and the address of the region that it announces, if it announces one.
    adding: Option<(u64, Hva)>,
    error: Option<AttachError>,
}

impl State {
    /// Whether this is still the socket to the keeper. On another socket is another keeper, which had an attach
    /// message.
    fn is_on(&self, socket: &Arc<OwnedFd>) -> bool {
        self.socket.as_ref().is_some_and(|now| Arc::ptr_eq(now, socket))
    }
}

#[derive(Debug)]
pub(crate) struct Link {
    state: Mutex<State>,
    changed: Condvar,
    /// Held for a whole request, so that there is one at a time.
    asking: Mutex<()>,
    /// A keeper has confirmed that this VM may pin. This stays true: each later attach message says so.
    may_pin_confirmed: AtomicBool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    Done,
    /// The keeper did nothing, for this reason, and must be asked again soon.
    Again(String),
    /// There is no keeper now; the next attach message has the change.
    Later,
}

impl Link {
    /// `may_pin` is part of the first attach message, so a keeper has read it before the first request.
    pub fn new(pinned: Option<String>, may_pin: bool) -> Self {
        let state = State {
            phase: Phase::Down,
            vm: None,
            escrow: None,
            pinned,
            may_pin,
            socket: None,
            sent: 0,
            answered: 0,
            answer: Ok(Asked::Done),
            adding: None,
            error: None,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            asking: Mutex::new(()),
            may_pin_confirmed: AtomicBool::new(may_pin),
        }
    }

    pub fn phase(&self) -> Phase {
        self.state.locked().phase
    }

    pub fn vm(&self) -> Option<VmId> {
        self.state.locked().vm
    }

    pub fn first(&self) -> bool {
        self.vm().is_none()
    }

    pub fn socket(&self) -> Option<Arc<OwnedFd>> {
        self.state.locked().socket.clone()
    }

    /// Locks the state to compose an attach message. Nothing can be added or pinned while the lock is held.
    pub fn begin(&self) -> MutexGuard<'_, State> {
        self.state.locked()
    }

    pub fn up(&self, socket: Arc<OwnedFd>, vm: VmId, escrow: Option<Escrow>) {
        let mut state = self.state.locked();
        state.phase = Phase::Up;
        state.socket = Some(socket);
        state.vm = Some(vm);
        state.escrow = escrow.or(state.escrow.take());
        (state.sent, state.answered, state.adding) = (0, 0, None);
        self.changed.notify_all();
    }

    pub fn down(&self) {
        let mut state = self.state.locked();
        state.phase = Phase::Down;
        state.socket = None;
        self.changed.notify_all();
    }

    pub fn fail(&self, error: AttachError) {
        let mut state = self.state.locked();
        state.phase = Phase::Failed;
        state.error = Some(error);
        self.changed.notify_all();
    }

    /// Delivers the keeper's reply to the next request. If the keeper has taken the region of the last request, `taken`
    /// is called before the requesting thread runs, because the engine may zap pages of it at once. A late reply to an
    /// earlier request says nothing about that region.
    pub fn answer(&self, answer: Result<Asked, String>, taken: impl FnOnce(Hva)) {
        let mut state = self.state.locked();
        if state.answered < state.sent {
            state.answered += 1;
            if let Some((number, hva)) = state.adding
                && number == state.answered
                && answer == Ok(Asked::Done)
            {
                taken(hva);
            }
            state.answer = answer;
            self.changed.notify_all();
        }
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>, until: Option<Instant>) -> MutexGuard<'a, State> {
        match until {
            None => self.changed.wait(state).unwrap_or_else(std::sync::PoisonError::into_inner),
            Some(until) => match self.changed.wait_timeout(state, until.saturating_duration_since(Instant::now())) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            },
        }
    }

    /// Waits for the outcome of the first attach, which the service thread's timeouts bound.
    pub fn first_outcome(&self) -> Result<VmId, AttachError> {
        let mut state = self.state.locked();
        loop {
            if let Some(vm) = state.vm {
                return Ok(vm);
            }
            if state.phase == Phase::Failed {
                return Err(state.error.take().unwrap_or(AttachError::NoAnswer("was never reached")));
            }
            state = self.wait(state, None);
        }
    }

    /// Makes sure that a keeper knows that this VM may pin. Asks only until one has confirmed it.
    pub fn may_pin(&self, limit: Duration) -> Result<(), RequestError> {
        if self.may_pin_confirmed.load(Ordering::Acquire) {
            return Ok(());
        }
        self.ask(&ClientToKeeper::MayPin, &[], limit, true, |state| state.may_pin = true)?;
        self.may_pin_confirmed.store(true, Ordering::Release);
        Ok(())
    }

    /// Applies `change` to the next attach message. If there is a keeper, asks it and waits for at most `limit`. With
    /// `waits`, also waits for a missing keeper, whose attach message has the change.
    pub fn ask(
        &self,
        message: &ClientToKeeper,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
        waits: bool,
        change: impl FnOnce(&mut State),
    ) -> Result<Asked, RequestError> {
        self.ask_while(message, fds, limit, waits, change, &|| false)
    }

    /// Like `ask`, but after `limit`, waits for that keeper for another `limit` as long as `goes_on` returns true.
    pub fn ask_while(
        &self,
        message: &ClientToKeeper,
        fds: &[BorrowedFd<'_>],
        limit: Duration,
        waits: bool,
        change: impl FnOnce(&mut State),
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Asked, RequestError> {
        let _one_at_a_time = self.asking.locked();
        let until = Instant::now() + limit;
        let mut state = self.state.locked();
        while state.phase == Phase::Pending {
            if Instant::now() >= until {
                return Err(RequestError::NoAnswer);
            }
            state = self.wait(state, Some(until));
        }
        change(&mut state);
        if let (Phase::Up, Some(socket)) = (state.phase, state.socket.clone()) {
            match scm::send(socket.as_fd(), &wire::encode(message), fds) {
                Ok(()) => {
                    state.sent += 1;
                    let added = match message {
                        ClientToKeeper::AddRegion { region, .. } => Some(region.span.hva),
                        _ => None,
                    };
                    state.adding = added.map(|hva| (state.sent, hva));
                }
                // This keeper does not read its socket, and will not see the request.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(RequestError::NoAnswer),
                // The keeper is gone; the service thread will notice soon.
                Err(_) => return self.settle(state, &socket, until, waits),
            }
            let number = state.sent;
            let mut until = until;
            while state.answered < number && state.is_on(&socket) {
                if Instant::now() >= until {
                    if !goes_on() {
                        return Err(RequestError::NoAnswer);
                    }
                    until = Instant::now() + limit;
                }
                state = self.wait(state, Some(until));
            }
            if state.is_on(&socket) {
                return match state.answer.clone() {
                    // No other request may get this reply.
                    Ok(Asked::Again(_)) if !matches!(message, ClientToKeeper::AddRegion { .. }) => {
                        Err(RequestError::NoAnswer)
                    }
                    answer => answer.map_err(RequestError::Refused),
                };
            }
            if let (None, Ok(Asked::Again(why))) = (&state.socket, &state.answer)
                && state.answered >= number
            {
                // The keeper is gone. The region is in the next attach message, where it must not be.
                return Err(RequestError::Later(why.clone()));
            }
            return self.settle(state, &socket, until, waits);
        }
        self.missing(state, until, waits)
    }

    /// Waits until a keeper is there, for at most `limit`.
    pub fn wait_for_keeper(&self, limit: Duration) -> Result<(), RequestError> {
        let until = Instant::now() + limit;
        let mut state = self.state.locked();
        while state.phase != Phase::Up {
            if Instant::now() >= until {
                return Err(RequestError::NoAnswer);
            }
            state = self.wait(state, Some(until));
        }
        Ok(())
    }

    /// Waits until the service thread has noticed that the socket of a request has failed.
    fn settle(
        &self,
        mut state: MutexGuard<'_, State>,
        socket: &Arc<OwnedFd>,
        until: Instant,
        waits: bool,
    ) -> Result<Asked, RequestError> {
        while state.is_on(socket) {
            if Instant::now() >= until {
                return Err(RequestError::NoAnswer);
            }
            state = self.wait(state, Some(until));
        }
        self.missing(state, until, waits)
    }

    /// Handles the lack of a keeper; each attach message from now on has the change.
    fn missing(&self, mut state: MutexGuard<'_, State>, until: Instant, waits: bool) -> Result<Asked, RequestError> {
        while waits && state.phase != Phase::Up {
            if Instant::now() >= until {
                return Err(RequestError::NoAnswer);
            }
            state = self.wait(state, Some(until));
        }
        Ok(if waits { Asked::Done } else { Asked::Later })
    }
}
