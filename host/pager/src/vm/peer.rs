//! The peer of a view: acts for the engine in the view's process, and tells when the process ends.
//!
//! Before: the caller that adds a view says of what kind its peer is. After: page-table entries are dropped when
//! reclaim asks, if the peer can; the VM is told what it must know, and hears the peer's messages.
//! Threads: any. Units: ranges of the process's addresses.
//! Promise: a peer that cannot zap says so before any page of its process is evicted. No other part of the pager knows
//! of what kind a peer is: a view's faults are served through its userfaultfds alone.
//!
//! There are two kinds: a process that runs our client (`client_peer`), and one that runs no code of ours
//! (`process_peer`).

use std::fmt::Debug;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Instant;

use ballast_base::wire::Range;

use crate::run::pool::Notifier;

/// Acts for the engine in one process.
pub trait Peer: Debug + Send + Sync {
    /// Why it cannot zap in its process; `None` if it can.
    fn cannot_zap(&self) -> Option<String>;

    /// Has the page-table entries of these ranges dropped; poll the result when [`Peer::on_answer`] is notified.
    ///
    /// # Errors
    /// The peer cannot be asked. Some ranges may have been zapped, which is harmless.
    fn begin_zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Box<dyn Zap>>;

    /// The same, waiting until it is done. Returns the parts that could not be zapped: they may be mapped still.
    ///
    /// # Errors
    /// As above; or the answer is an error, or late, or the process is gone.
    fn zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Vec<Range>>;

    /// Notified when a zap has been answered, or the process is gone.
    fn on_answer(&self) -> &Notifier;

    /// The peer is listened to from now on.
    fn take_zaps(&self);

    /// The peer is not listened to any more: threads that wait for its replies return, and zaps that begin later fail.
    fn give_up_zaps(&self);

    /// Readable when there is a message; always the same.
    fn input(&self) -> BorrowedFd<'_>;

    /// Its next message, or that it is gone. Does not wait.
    ///
    /// # Errors
    /// It cannot be heard any more.
    fn hear(&self) -> io::Result<Heard>;

    /// Tells it that the discard with this number was carried out, or why it was not.
    ///
    /// # Errors
    /// It cannot be told.
    fn discarded(&self, seq: u64, error: Option<String>) -> io::Result<()>;

    /// Tells it that this range, whole units of a region, is in memory and has no copy, until it is asked to zap there.
    fn settled(&self, range: Range);

    /// Asks for the host's end of the port of the guest's agent; the reply is [`Heard::AgentPort`].
    ///
    /// # Errors
    /// It cannot be asked.
    fn ask_agent_port(&self) -> io::Result<()>;

    /// The reply, once: a connected socket, or `None` if the VMM has no such port.
    fn take_agent_port(&self) -> Option<io::Result<Option<OwnedFd>>>;

    /// Has the VM stopped: its memory cannot be kept right.
    ///
    /// # Errors
    /// It runs on.
    fn stop_vm(&self, reason: &str) -> io::Result<()>;

    /// It is gone, or is to be treated as gone: no thread need wait for a reply any more.
    fn disconnect(&self);

    /// Has it gone?
    fn is_disconnected(&self) -> bool;

    /// Does the engine know, without the keeper's word, that the process has ended?
    fn has_ended(&self) -> bool;
}

/// A zap under way.
pub trait Zap: Debug + Send {
    /// The parts that could not be zapped, once all is done; `None` before.
    ///
    /// # Errors
    /// Those of [`Peer::zap`].
    fn poll(&mut self, now: Instant) -> io::Result<Option<Vec<Range>>>;

    /// When it will have taken too long.
    fn until(&self) -> Option<Instant>;
}

/// A message of a peer.
#[derive(Debug)]
pub enum Heard {
    /// There is no message.
    Nothing,
    /// A reply, which was taken.
    Reply,
    /// [`Peer::take_agent_port`] has the reply.
    AgentPort,
    /// Memory is about to be freed; the peer waits for [`Peer::discarded`].
    Discard {
        /// The number to be repeated.
        seq: u64,
        /// The memory.
        ranges: Vec<Range>,
    },
    /// An invalid message.
    Nonsense(String),
    /// There will be no more messages.
    Gone,
}
