//! Checks in another process whether a program could be the keeper, before this process becomes it.
//!
//! Before: an engine of the program serves. After: the program has read the record that this keeper would leave it, and
//! the state file of every VM, and has replied whether it could use them.
//! Threads: the keeper's one; nothing here waits on its side.
//! Promise: the program has only read-only copies of the record and duplicates of the state files. This keeper serves
//! on, whatever the program does.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use anyhow::Context;
use ballast_base::wire;
use ballast_handover::kept::Kept;
use ballast_handover::orders::Report;
use ballast_handover::state_file::StateFile;
use ballast_sys::scm;
use ballast_sys::spawn::{Child, Starter};
use rustix::net::Shutdown;
use rustix::process::{Signal, pidfd_send_signal};

use crate::program::Program;
use crate::stage::Deadline;

/// The argument of the program.
const ROLE: &str = "check-keeper";

/// A program that is being checked.
pub(crate) struct Checker {
    child: Child,
    socket: OwnedFd,
    pub deadline: Deadline,
}

impl Checker {
    /// Ask this program whether it could be the keeper of these VMs.
    pub fn ask<'a>(
        starter: &mut Starter,
        program: &Program,
        kept: &Kept,
        states: impl Iterator<Item = &'a StateFile>,
    ) -> anyhow::Result<Self> {
        let (socket, theirs) = scm::pair().context("Making a socket")?;
        rustix::io::ioctl_fionbio(&socket, true).context("Making a socket non-blocking")?;
        let kept = kept.write().context("Writing down what the keeper holds")?;
        scm::send(&socket, b"kept", &[kept.as_fd()]).context("Showing it what the keeper holds")?;
        // The socket's queue has room for a hundred messages and more.
        for some in states.map(StateFile::fd).collect::<Vec<_>>().chunks(scm::MAX_FDS) {
            scm::send(&socket, b"states", some).context("Showing it the state files")?;
        }
        rustix::net::shutdown(&socket, Shutdown::Write).context("Showing it the state files")?;
        let child = program.start(starter, &[ROLE], theirs.as_fd());
        let child = child.with_context(|| format!("Running {}", program.path().display()))?;
        Ok(Self { child, socket, deadline: Deadline::new(Instant::now()) })
    }

    /// Its reply, once there is one.
    pub fn answer(&self) -> Option<Result<(), String>> {
        match scm::receive(&self.socket) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => None,
            Ok(Some(received)) => Some(match wire::decode::<Report>(&received.bytes) {
                Ok(Report::Done { result, .. }) => result,
                Ok(_) => Err("it answers something else".into()),
                Err(error) => Err(error.to_string()),
            }),
            Ok(None) | Err(_) => Some(Err("it ended; its reason is in the log".into())),
        }
    }

    /// It is not needed any more. Returns the child to reap.
    pub fn end(self) -> Child {
        let _ = pidfd_send_signal(self.child.pidfd(), Signal::KILL);
        self.child
    }
}

/// The program's side: its standard input has the keeper's record, and takes the reply.
pub fn check() -> anyhow::Result<()> {
    let stdin = io::stdin();
    let result = inspect(&stdin).map_err(|error| format!("{error:#}"));
    let answer = wire::encode(&Report::Done { seq: 0, result });
    scm::send(&stdin, &answer, &[]).context("Answering the keeper")
}

fn inspect(keeper: impl AsFd) -> anyhow::Result<()> {
    let (mut kept, mut states) = (None, 0);
    while let Some(received) = scm::receive(&keeper).context("Listening to the keeper")? {
        for fd in received.fds {
            if kept.is_none() {
                kept = Some(Kept::read(&fd).context("Reading what the keeper holds")?);
            } else {
                StateFile::open(fd)?;
                states += 1;
            }
        }
    }
    let kept = kept.context("The keeper has sent no record")?;
    let vms = kept.vms.len() + kept.closing.len();
    anyhow::ensure!(states == vms, "{states} state files came with {vms} VMs");
    Ok(())
}
