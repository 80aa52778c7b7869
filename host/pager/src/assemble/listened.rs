//! Messages of a view's peer: replies to zaps, discards, and the peer's end.
//!
//! Before: [`Vm::add_view`] has the servers (`run/servers.rs`) wait for the peer. After: the peer or engine has ended.
//! Threads: a worker bound to no CPU reads messages; a task carries out discards. Units: ranges of process addresses.
//! Promise: an invalid message is reported and costs the VM nothing: its faults are still served. A client can make a
//! `recvmsg` take arbitrarily long (it receives from the same socket into memory that is never filled, or it sends a
//! descriptor whose close waits). That blocks one thread, and no other VM's messages.

use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::run::queue::Next;
use crate::run::serve::{After, Serve};
use crate::run::set::Notify;
use crate::vm::Vm;
use crate::vm::client_peer::{ClientPeer, Heard};
use crate::vm::discards::{Asked, Rearm};
use crate::vm::settle::Small;
use crate::vm::view::View;

/// Pause before the retry of a discard that met a locked page.
const LOCKED_PAUSE: Duration = Duration::from_millis(10);

/// A peer whose messages are read. During a read, which a client can prolong, it keeps no reference to its VM.
pub(super) struct Listened {
    vm: Weak<Vm>,
    view: Weak<View>,
    peer: Arc<ClientPeer>,
    /// A discard of the peer is under way: the next message is read after it.
    asked: Arc<AtomicBool>,
    notify: Notify,
    invalid: u64,
}

impl Listened {
    pub fn new(vm: &Arc<Vm>, view: &Arc<View>, notify: Notify) -> Self {
        let (peer, asked) = (view.peer().clone(), Arc::default());
        Self { vm: Arc::downgrade(vm), view: Arc::downgrade(view), peer, asked, notify, invalid: 0 }
    }

    fn known(&self) -> Option<(Arc<Vm>, Arc<View>)> {
        self.vm.upgrade().zip(self.view.upgrade()).filter(|(vm, view)| !vm.is_stopping() && !view.is_closed())
    }

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
            // The VM's state file does not list the thread: it changes nothing of the VM here.
            let heard = self.peer.hear();
            let Some((vm, view)) = self.known() else { return After::next(Next::Done) };
            let next = self.heard(heard, &vm, view);
            if next != Next::Again || Instant::now() >= until {
                return after(next);
            }
        }
    }

    /// A bug of ours costs one message, not the later ones.
    fn panicked(&mut self, _times: u32) -> bool {
        tracing::error!("Taking a message of a client panicked");
        true
    }

    fn end(&mut self) {}

    /// Already the first read may block, and the workers that are bound to a CPU are for faults.
    fn roams(&self) -> bool {
        true
    }
}

pub(super) struct DiscardWorker {
    vm: Arc<Vm>,
    failed: u64,
    unanswered: u64,
    small: Small,
}

impl DiscardWorker {
    pub fn new(vm: Arc<Vm>) -> Self {
        Self { vm, failed: 0, unanswered: 0, small: Small::default() }
    }

    /// Carries out one discard; returns when to look for the next.
    pub fn run(&mut self, _now: Instant) -> Next {
        let vm = &self.vm;
        if vm.is_stopping() {
            // No reply: the client asks again, and the next engine carries the discard out.
            while vm.mail.discards.pop().is_some() {}
            return Next::Done;
        }
        let Some(Asked { view, seq, ranges, then }) = vm.mail.discards.pop() else { return Next::Idle };
        let discarded = vm.discard(&view, &ranges);
        if vm.is_stopping() && discarded.is_err() {
            return Next::Again;
        }
        if discarded.as_ref().is_err_and(|error| error.kind() == ErrorKind::WouldBlock) {
            // Orders that wait for this task are carried out before the retry.
            vm.mail.discards.put_back(Asked { view, seq, ranges, then });
            return Next::At(Instant::now() + LOCKED_PAUSE);
        }
        let unit = discarded.is_ok().then(|| self.small.discarded(&view, &ranges)).flatten();
        let error = discarded.err().map(|error| error.to_string());
        self.failed += u64::from(error.is_some());
        // Reported the 1st, 2nd, 4th, 8th ... time: repeated failures must not push other events out.
        if let Some(error) = &error
            && self.failed.is_power_of_two()
        {
            vm.report("discard-failed", format!("Discarding memory for process {}: {error}", view.pid));
        }
        // A client that misses a reply asks again, and gets another reply.
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
                tracing::debug!(vm = vm.state.name(), "Settling memory that is freed page by page: {error}");
            }
        }
        Next::Again
    }
}
