//! The client's end of the control socket, and discards: announcements of freed memory, with a proof of receipt.
//!
//! Before: a VMM thread wants to free memory. After: the engine has dropped its far copies, or the message was taken
//! back.
//! Threads: VMM threads send and wait; the service thread delivers replies and replaces the socket. One lock, held
//! briefly.
//! Promise: a discard that failed never takes effect later. A waiter trusts a reply only if no later copy of its
//! message was read: an engine reads in order, so each earlier copy was read before, or died with its reader.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, ClientToEngine, Range};
use ballast_sys::lock::Lock;
use ballast_sys::scm;

/// Both ends of a control socket. The VMM keeps a duplicate of the engine's end, too, to take back messages that no
/// engine has read.
#[derive(Debug)]
pub(crate) struct Pair {
    pub ours: OwnedFd,
    pub theirs: OwnedFd,
}

impl Pair {
    pub fn new() -> io::Result<Self> {
        let (ours, theirs) = scm::pair()?;
        // A dead engine reads nothing, and the VMM must not wait for it. Only this end is affected.
        rustix::io::ioctl_fionbio(&ours, true)?;
        Ok(Self { ours, theirs })
    }

    /// Sends without waiting. `Ok(false)`: the queue is full, because no engine has read it for some time.
    pub fn send(&self, message: &ClientToEngine) -> io::Result<bool> {
        self.send_with(message, &[])
    }

    /// Like `send`, with descriptors. If the message is taken back, they are closed, and the engine asks again.
    pub fn send_with(&self, message: &ClientToEngine, fds: &[BorrowedFd<'_>]) -> io::Result<bool> {
        match scm::send(&self.ours, &wire::encode(message), fds) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn take_back(&self) -> Vec<Vec<u8>> {
        let mut messages = Vec::new();
        // `theirs` is blocking, because engines share its open file description. MSG_DONTWAIT fails when no message is
        // left.
        let mut buffer = vec![0; scm::MAX_MESSAGE];
        while let Ok((len, _)) =
            rustix::net::recv(&self.theirs, buffer.as_mut_slice(), rustix::net::RecvFlags::DONTWAIT)
        {
            if len == 0 {
                break;
            }
            messages.push(buffer[..len].to_vec());
        }
        messages
    }
}

#[derive(Debug)]
struct Waiter {
    id: u64,
    ranges: Vec<Range>,
    /// Sequence numbers of those copies on the current socket that may still take effect, ascending, as in the socket.
    copies: Vec<u64>,
    /// An engine read a copy from an earlier socket, and did not reply.
    uncertain: bool,
    done: Option<Result<(), String>>,
}

#[derive(Debug, Default)]
struct State {
    pair: Option<std::sync::Arc<Pair>>,
    last_number: u64,
    waiters: Vec<Waiter>,
}

impl State {
    fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Adds a waiter, which has sent nothing yet.
    fn add_waiter(&mut self, ranges: Vec<Range>) -> u64 {
        let id = self.next_number();
        self.waiters.push(Waiter { id, ranges, copies: Vec::new(), uncertain: false, done: None });
        id
    }

    /// Removes a copy that was taken back unread. Returns its waiter, if it has one.
    fn strike(&mut self, seq: u64) -> Option<u64> {
        let owner = self.waiters.iter_mut().find(|waiter| waiter.copies.contains(&seq))?;
        owner.copies.retain(|copy| *copy != seq);
        Some(owner.id)
    }

    fn send_copy(&mut self, id: u64) {
        let Some(pair) = self.pair.clone() else { return };
        let seq = self.next_number();
        let Some(waiter) = self.waiters.iter_mut().find(|waiter| waiter.id == id) else { return };
        if matches!(pair.send(&ClientToEngine::Discard { seq, ranges: waiter.ranges.clone() }), Ok(true)) {
            waiter.copies.push(seq);
        }
    }

    /// Takes back the unread copies of one waiter. Returns whether no copy is left that may take effect.
    fn recall(&mut self, id: u64) -> bool {
        let taken = self.pair.as_ref().map(|pair| pair.take_back()).unwrap_or_default();
        self.settle(id, taken);
        self.waiters.iter().all(|waiter| waiter.id != id || waiter.copies.is_empty() && !waiter.uncertain)
    }

    /// Handles messages that were taken back because of the waiter `id`; those of others are sent again. A discard gets
    /// a new number: an engine may have read a later message in between, so the reply to the earlier number does not
    /// count.
    fn settle(&mut self, id: u64, taken: Vec<Vec<u8>>) {
        let Some(pair) = self.pair.clone() else { return };
        let mut again = Vec::new();
        for bytes in taken {
            let Ok(ClientToEngine::Discard { seq, .. }) = wire::decode(&bytes) else {
                // There is space, because the message was taken back and this lock keeps discards out. If the reply to
                // a zap still finds none, only an engine misses it that has not read for seconds.
                drop(scm::send(&pair.ours, &bytes, &[]));
                continue;
            };
            // A copy without a waiter is dropped.
            let Some(owner) = self.strike(seq) else { continue };
            if owner != id && !again.contains(&owner) {
                again.push(owner);
            }
        }
        again.into_iter().for_each(|owner| self.send_copy(owner));
    }
}

/// Why a discard failed. The memory must not be freed.
#[derive(Debug, thiserror::Error)]
pub enum DiscardError {
    /// Caused by the VMM: a range is not whole pages of one announced region. The memory is unchanged.
    #[error("Discarding memory: {0}")]
    Invalid(String),
    /// No engine has read the message in time, and it was taken back. The memory is unchanged.
    #[error("Discarding memory: no engine replied within {0:?}; the memory was left as it is")]
    NoAnswer(Duration),
    /// The engine met an error. Some of the memory may read as zeros now.
    #[error("Discarding memory: {0}")]
    Failed(String),
}

#[derive(Debug, Default)]
pub(crate) struct ControlSocket {
    state: Mutex<State>,
    changed: Condvar,
}

impl ControlSocket {
    /// The socket whose other end engines get now.
    pub fn pair(&self) -> Option<std::sync::Arc<Pair>> {
        self.state.locked().pair.clone()
    }

    /// Replaces the socket. Takes back messages that no engine has read, and sends waiting discards on the new one.
    pub fn replace(&self, pair: std::sync::Arc<Pair>) {
        let mut state = self.state.locked();
        for bytes in state.pair.replace(pair).map(|old| old.take_back()).unwrap_or_default() {
            if let Ok(ClientToEngine::Discard { seq, .. }) = wire::decode(&bytes) {
                state.strike(seq);
            }
        }
        for index in 0..state.waiters.len() {
            if state.waiters[index].done.is_some() {
                // The waiter has not run since the reply: another copy would take effect after the discard has
                // returned.
                continue;
            }
            // A dead engine may have a thread that still works on a copy.
            state.waiters[index].uncertain |= !state.waiters[index].copies.is_empty();
            state.waiters[index].copies.clear();
            let id = state.waiters[index].id;
            state.send_copy(id);
        }
        self.changed.notify_all();
    }

    /// An engine has replied. The reply counts if no later copy can take effect, so unread copies are taken back.
    /// (Without that, a discard that takes longer than the time between copies would never return.)
    pub fn discard_done(&self, seq: u64, result: Result<(), String>) {
        let mut state = self.state.locked();
        let Some(waiter) = state.waiters.iter_mut().find(|waiter| waiter.copies.contains(&seq)) else { return };
        let id = waiter.id;
        if waiter.copies.last() != Some(&seq) {
            state.recall(id);
        }
        let Some(waiter) = state.waiters.iter_mut().find(|waiter| waiter.id == id) else { return };
        waiter.copies.retain(|copy| *copy > seq);
        if waiter.copies.is_empty() {
            waiter.done = Some(result);
            self.changed.notify_all();
        }
    }

    /// Sends a discard to the engine and waits. Repeats the message, because an engine may die between read and reply.
    ///
    /// After `timeout` without a reply, the message is taken back. If that fails, because an engine has read it and may
    /// act on it at any time, this waits longer and reports that by `announce`: a discard that took effect after the
    /// guest reused the page would destroy data.
    pub fn discard(&self, ranges: Vec<Range>, timeout: Duration, announce: impl Fn()) -> Result<(), DiscardError> {
        const FIRST_REPEAT: Duration = Duration::from_millis(200);
        let mut state = self.state.locked();
        let id = state.add_waiter(ranges);
        let mut repeat_at = Instant::now();
        let mut deadline = repeat_at + timeout;
        let mut pause = FIRST_REPEAT.min(timeout);
        let result = loop {
            let done = state.waiters.iter_mut().find(|waiter| waiter.id == id).and_then(|waiter| waiter.done.take());
            if let Some(result) = done {
                break result.map_err(DiscardError::Failed);
            }
            let now = Instant::now();
            if now >= deadline {
                if state.recall(id) {
                    break Err(DiscardError::NoAnswer(timeout));
                }
                // The waiter's unread copies were taken back.
                (deadline, repeat_at) = (now + timeout, now);
                // The wait is without the lock, which zaps need, too.
                drop(state);
                announce();
                state = self.state.locked();
                continue;
            }
            if now >= repeat_at {
                state.send_copy(id);
                repeat_at = now + pause;
                pause = (pause * 2).min(timeout);
            }
            let until = repeat_at.min(deadline);
            state = match self.changed.wait_timeout(state, until.saturating_duration_since(now)) {
                Ok((guard, _)) => guard,
                Err(poisoned) => poisoned.into_inner().0,
            };
        };
        state.waiters.retain(|waiter| waiter.id != id);
        result
    }
}

#[cfg(test)]
mod tests;
