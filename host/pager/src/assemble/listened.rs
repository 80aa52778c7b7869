//! Messages of the peer of a view: replies to zaps, discards, its end.
//!
//! Before: [`Vm::add_view`] has the servers (`run/servers.rs`) wait for the peer's input. After: the peer or the engine
//! is gone.
//! Threads: the worker that is on no CPU in particular takes messages; a task of the VM carries out discards. Units:
//! ranges of the process's addresses.
//! Promise: an invalid message is reported and costs the VM nothing: its faults are still served. A client can have a
//! `recvmsg` take as long as it likes (it receives from the same socket into memory that nobody fills, or it sends a
//! descriptor whose close waits). That keeps one thread, and no other VM's messages.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::run::queue::Next;
use crate::run::serve::{After, Serve};
use crate::run::set::Notify;
use crate::vm::Vm;
use crate::vm::discards::{Asked, Rearm};
use crate::vm::peer::{Heard, Peer};
use crate::vm::settle::Small;
use crate::vm::view::View;

/// Pause before a discard is tried again that met a locked page.
const LOCKED_PAUSE: Duration = Duration::from_millis(10);

/// A peer that is listened to. While a message is taken it keeps no VM: a client can make that take for ever.
pub(super) struct Listened {
    vm: Weak<Vm>,
    view: Weak<View>,
    peer: Arc<dyn Peer>,
    /// A discard of its is under way: its next message is not read before that is over.
    asked: Arc<AtomicBool>,
    notify: Notify,
    invalid: u64,
}

/// The socket or the process of a peer.
pub(super) struct Input(pub Arc<dyn Peer>);

impl AsFd for Input {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.input()
    }
}

impl Listened {
    /// The peer of this view; `notify` has it visited.
    pub fn new(vm: &Arc<Vm>, view: &Arc<View>, notify: Notify) -> Self {
        let (peer, asked) = (view.peer().clone(), Arc::default());
        Self { vm: Arc::downgrade(vm), view: Arc::downgrade(view), peer, asked, notify, invalid: 0 }
    }

    /// The VM and its view, unless either is to be left alone.
    fn known(&self) -> Option<(Arc<Vm>, Arc<View>)> {
        self.vm.upgrade().zip(self.view.upgrade()).filter(|(vm, view)| !vm.is_stopping() && !view.is_closed())
    }

    /// Deals with what was heard. Returns when to take the next message.
    fn heard(&mut self, heard: io::Result<Heard>, vm: &Vm, view: Arc<View>) -> Next {
        match heard {
            Ok(Heard::Nothing) => return Next::Idle,
            Ok(Heard::Reply) => {}
            Ok(Heard::AgentPort) => vm.mail.agent.notifier.notify(),
            Ok(Heard::Discard { seq, ranges }) => {
                self.asked.store(true, Ordering::Release);
                let then = Rearm(self.asked.clone(), self.notify.clone());
                vm.mail.discards.push(Asked { view, seq, ranges, then });
            }
            Ok(Heard::Nonsense(what)) => {
                // Reported at the 1st, 2nd, 4th, 8th ... time.
                self.invalid += 1;
                if self.invalid.is_power_of_two() {
                    vm.report("client-error", format!("The client in process {} sent nonsense: {what}", view.pid));
                }
            }
            Ok(Heard::Gone) => return self.gone(),
            Err(error) => {
                vm.report("client-error", format!("Receiving from the client in process {}: {error}", view.pid));
                return self.gone();
            }
        }
        Next::Again
    }

    /// Nothing more will come from it.
    fn gone(&self) -> Next {
        self.peer.disconnect();
        Next::Done
    }
}

impl Serve for Listened {
    fn serve(&mut self, _now: Instant, until: Instant) -> After {
        loop {
            let Some(shares) = self.known().map(|(vm, _)| vm.shares()) else { return After::next(Next::Done) };
            let after = |next| After { shares, ..After::next(next) };
            if self.asked.load(Ordering::Acquire) {
                return after(Next::Idle);
            }
            // The thread is not in the list of the VM's state file: it changes nothing of the VM.
            let heard = self.peer.hear();
            let Some((vm, view)) = self.known() else { return After::next(Next::Done) };
            let next = self.heard(heard, &vm, view);
            if next != Next::Again || Instant::now() >= until {
                return after(next);
            }
        }
    }

    /// A bug of ours costs one message, not those that follow.
    fn panicked(&mut self, _times: u32) -> bool {
        tracing::error!("Taking a message of a client panicked");
        true
    }

    fn end(&mut self) {}

    /// The first message may be stuck, too, and the workers of CPUs are for faults.
    fn roams(&self) -> bool {
        true
    }
}

/// Carries out the discards of a VM.
pub(super) struct DiscardWorker {
    vm: Arc<Vm>,
    failed: u64,
    unanswered: u64,
    small: Small,
}

impl DiscardWorker {
    /// The worker of this VM.
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failed: 0, unanswered: 0, small: Small::default() }
    }

    /// Carries out one; returns when to look for another.
    pub fn run(&mut self, _now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_stopping() {
            // Not answered: the client asks again, and the next engine carries it out.
            while vm.mail.discards.pop().is_some() {}
            return Next::Done;
        }
        let Some(Asked { view, seq, ranges, then }) = vm.mail.discards.pop() else { return Next::Idle };
        let discarded = vm.discard(&view, &ranges);
        if vm.is_stopping() && discarded.is_err() {
            return Next::Again;
        }
        if discarded.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            // Orders that wait for it are carried out meanwhile.
            vm.mail.discards.put_back(Asked { view, seq, ranges, then });
            return Next::At(Instant::now() + LOCKED_PAUSE);
        }
        let unit = discarded.is_ok().then(|| self.small.discarded(&view, &ranges)).flatten();
        let error = discarded.err().map(|error| error.to_string());
        self.failed += u64::from(error.is_some());
        // Reported at the 1st, 2nd, 4th, 8th ... time: a client that goes on must not push other events out.
        if let Some(error) = &error
            && self.failed.is_power_of_two()
        {
            vm.report("discard-failed", format!("Discarding memory for process {}: {error}", view.pid));
        }
        // A client that does not read its replies repeats its question and gets another reply.
        if let Err(error) = view.peer().discarded(seq, error) {
            self.unanswered += 1;
            if self.unanswered.is_power_of_two() {
                tracing::warn!(vm = vm.state.name(), "Answering a discard of process {}: {error}", view.pid);
            }
        }
        drop(then);
        match unit.map_or(Ok(false), |(region, first)| vm.settle(&view, region, first)) {
            Ok(false) => {}
            Ok(true) => self.small.told(),
            Err(error) => {
                tracing::debug!(vm = vm.state.name(), "Bringing back memory that is freed page by page: {error}");
            }
        }
        Next::Again
    }
}
