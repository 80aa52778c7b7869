//! The peer that is a process and no more: we have its userfaultfds and RAM files, and no thread of ours runs there.
//!
//! Before: a VMM passes its memory to a manager by itself (Cloud Hypervisor's hand-off), or the engine maps RAM itself.
//! After: its faults are served as any other's; the RAM that it maps stays resident.
//! Threads: any.
//! Promise: nothing is zapped, because the kernel lets no process drop another one's page-table entries of shared
//! memory (`process_madvise` with `MADV_DONTNEED` works on one's own). So no page that it maps goes far, and the VM
//! says why. Its end is seen by its pidfd, even if others hold its descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use ballast_base::wire::Range;
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::peer::{Heard, Peer, Zap};
use crate::run::pool::Notifier;

/// A process without our client.
#[derive(Debug)]
pub struct ProcessPeer {
    pid: u32,
    pidfd: OwnedFd,
    on_answer: Notifier,
    disconnected: AtomicBool,
}

/// A zap that did nothing.
#[derive(Debug)]
struct Kept(Vec<Range>);

impl ProcessPeer {
    /// The process with this number, which must not have ended yet.
    ///
    /// # Errors
    /// There is none, or the kernel refuses.
    pub fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw);
        let number = number.ok_or_else(|| io::Error::other(format!("{pid} is no process's number")))?;
        let pidfd = pidfd_open(number, PidfdFlags::empty())?;
        Ok(Self { pid, pidfd, on_answer: Notifier::default(), disconnected: AtomicBool::new(false) })
    }
}

impl Peer for ProcessPeer {
    fn cannot_zap(&self) -> Option<String> {
        let pid = self.pid;
        Some(format!("process {pid} maps it and runs no client of Ballast, so its pages cannot be unmapped there"))
    }

    fn begin_zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Box<dyn Zap>> {
        Ok(Box::new(Kept(ranges.to_vec())))
    }

    fn zap(self: Arc<Self>, ranges: &[Range]) -> io::Result<Vec<Range>> {
        Ok(ranges.to_vec())
    }

    fn on_answer(&self) -> &Notifier {
        &self.on_answer
    }

    /// There are none.
    fn take_zaps(&self) {}

    fn give_up_zaps(&self) {}

    /// Readable when the process has ended.
    fn input(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    fn hear(&self) -> io::Result<Heard> {
        Ok(if self.has_ended() { Heard::Gone } else { Heard::Nothing })
    }

    /// It forwards none: a freed page is a hole, which reads as zeros, or a far page, which is stored without need.
    fn discarded(&self, _seq: u64, _error: Option<String>) -> io::Result<()> {
        Ok(())
    }

    /// It asks for nothing.
    fn settled(&self, _range: Range) {}

    /// Nobody there replies.
    fn ask_agent_port(&self) -> io::Result<()> {
        Ok(())
    }

    fn take_agent_port(&self) -> Option<io::Result<Option<OwnedFd>>> {
        None
    }

    /// No thread of ours can stop it, so it is killed.
    fn stop_vm(&self, reason: &str) -> io::Result<()> {
        if self.pid == std::process::id() {
            // A mapping of this process's own, through which far pages go back into their file.
            return Err(io::Error::other(format!("no VM runs in this process: {reason}")));
        }
        tracing::error!("Killing process {}: {reason}", self.pid);
        Ok(pidfd_send_signal(&self.pidfd, Signal::KILL)?)
    }

    fn disconnect(&self) {
        self.disconnected.store(true, Ordering::Release);
        self.on_answer.notify();
    }

    fn is_disconnected(&self) -> bool {
        self.disconnected.load(Ordering::Acquire)
    }

    fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(&self.pidfd, PollFlags::IN)];
        matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(1))
    }
}

impl Zap for Kept {
    fn poll(&mut self, _now: Instant) -> io::Result<Option<Vec<Range>>> {
        Ok(Some(std::mem::take(&mut self.0)))
    }

    fn until(&self) -> Option<Instant> {
        None
    }
}
