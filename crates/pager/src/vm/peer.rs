//! The peer of a view: who acts for us in its process, and how the process's end is seen.
//!
//! Before: whoever hands over a view says of what kind its peer is. After: page-table entries are dropped when reclaim
//! asks, where the peer can; the VM is told what it must know, and hears what the peer says.
//! Threads: any. Units: ranges of the process's addresses.
//! Promise: a peer that cannot zap says so before any page of its process is put out. Nothing else of the pager knows
//! of what kind a peer is: a view's faults are served through its userfaultfds alone.
//!
//! There are two kinds: a process that runs our client (`client_peer`), and one that runs nothing of ours
//! (`process_peer`).

use std::fmt::Debug;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Instant;

use ballast_base::wire::Range;

use crate::run::pool::Notifier;

/// See above.
pub trait Peer: Debug + Send + Sync {
    /// Why nothing can be zapped in its process; `None` if it can be.
    fn cannot_zap(&self) -> Option<String>;

    /// Have the page-table entries of these ranges dropped; the result is to be polled when [`Peer::on_answer`] is
    /// notified.
    ///
    /// # Errors
    /// The peer cannot be asked. Some ranges may have been zapped, which is harmless.
    fn begin_zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Box<dyn Zap>>;

    /// The same, waiting until it is done. Returns the parts that could not be zapped: they may be mapped still.
    ///
    /// # Errors
    /// As above; or the answer is an error, or late, or the process is gone.
    fn zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Vec<Range>>;

    /// What is notified when a zap has been answered, or the process is gone.
    fn on_answer(&self) -> &Notifier;

    /// Nobody hears the peer any more: those that wait for its answers do so no longer.
    fn give_up_zaps(&self);

    /// What is readable when there is something to hear; always the same.
    fn input(&self) -> BorrowedFd<'_>;

    /// What it has said, or that it is gone. Does not wait.
    ///
    /// # Errors
    /// It cannot be heard any more.
    fn hear(&self) -> io::Result<Heard>;

    /// The discard with this number was carried out, or why it was not.
    ///
    /// # Errors
    /// It cannot be told.
    fn discarded(&self, seq: u64, error: Option<String>) -> io::Result<()>;

    /// Have the VM stopped: its memory cannot be kept right.
    ///
    /// # Errors
    /// It runs on.
    fn stop_vm(&self, reason: &str) -> io::Result<()>;

    /// It is gone, or is to be taken for gone: no thread need wait for an answer any more.
    fn disconnect(&self);

    /// Has it gone?
    fn is_disconnected(&self) -> bool;

    /// Is it known from here, without a keeper's word, that the process has ended?
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

/// What a peer has said.
#[derive(Debug)]
pub enum Heard {
    /// Nothing for the VM.
    Nothing,
    /// Memory is about to be freed; the peer waits for [`Peer::discarded`].
    Discard {
        /// To be repeated.
        seq: u64,
        /// Which.
        ranges: Vec<Range>,
    },
    /// Something that makes no sense.
    Nonsense(String),
    /// It will say nothing more.
    Gone,
}
