//! The guard: a process that changes machine settings for the bench and restores them, even if the bench is killed.
//!
//! Before: the bench starts it first. After: its input ends, because the bench is done or was killed, and it undoes
//! everything in reverse order.
//! Threads: one. Promise: interrupt, termination and hang-up do not end it; it names a setting that it cannot restore
//! on standard error.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ballast_testkit::PoolLoan;
use rustix::fd::OwnedFd;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::cgroup::Cgroup;
use crate::end_pool::end_pool;
use crate::helper::obey;
use crate::order::{Answer, Order, Role};
use crate::setting::warn;
use crate::worker::Worker;

/// A process to end. A pidfd cannot refer to another process.
struct Process(OwnedFd);

impl Process {
    fn open(pid: u32) -> Result<Self> {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("no such process id")?;
        Ok(Self(pidfd_open(pid, PidfdFlags::empty())?))
    }

    fn kill(&self) {
        // An error means that the process is gone.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

struct Directory(PathBuf);

impl Drop for Directory {
    fn drop(&mut self) {
        match std::fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            result => warn(&format!("removing {}", self.0.display()), result),
        }
    }
}

struct Pool {
    dir: PathBuf,
    keeper: Process,
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.keeper.kill();
        if let Err(error) = end_pool(&self.dir) {
            eprintln!("ballast bench: returning the memory of {}: {error:#}", self.dir.display());
        }
    }
}

trait Undo {}
impl Undo for Process {}
impl Undo for Directory {}
impl Undo for Cgroup {}
impl Undo for Pool {}

pub(crate) fn run() -> Result<()> {
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // SAFETY: ignoring a signal installs no handler.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
    let mut made: Vec<Box<dyn Undo>> = Vec::new();
    let mut loans = Vec::new();
    let result = obey(|order| {
        let (undo, answer): (Box<dyn Undo>, Answer) = match order {
            Order::HugePages(pages) => {
                loans.push(PoolLoan::reserved(pages).context("Raising nr_hugepages")?);
                return Ok(Answer::Done);
            }
            Order::NoHugePages => {
                loans.clear();
                return Ok(Answer::Done);
            }
            Order::EndPool { dir, keeper } => (Box::new(Pool { dir, keeper: Process::open(keeper)? }), Answer::Done),
            Order::Cgroup(name) => {
                let cgroup = Cgroup::new(&name)?;
                let path = cgroup.path().to_owned();
                (Box::new(cgroup), Answer::Path(path))
            }
            Order::EndProcess(pid) => (Box::new(Process::open(pid)?), Answer::Done),
            Order::RemoveDir(path) => (Box::new(Directory(path)), Answer::Done),
            other => bail!("the guard cannot do {other:?}"),
        };
        made.push(undo);
        Ok(answer)
    });
    loans.clear();
    while made.pop().is_some() {}
    result
}

#[derive(Debug)]
pub struct Guard {
    worker: Worker,
    cgroups: u32,
}

impl Guard {
    /// Starts the guard. It must be dropped last.
    pub fn start() -> Result<Self> {
        Ok(Self { worker: Worker::start(&Role::Guard)?, cgroups: 0 })
    }

    /// Makes a memory cgroup, which the guard removes at its end.
    pub fn cgroup(&mut self) -> Result<PathBuf> {
        self.cgroups += 1;
        let name = format!("ballast-bench-{}-{}", std::process::id(), self.cgroups);
        match self.worker.ask(&Order::Cgroup(name))? {
            Answer::Path(path) => Ok(path),
            other => bail!("the guard replies {other:?}"),
        }
    }

    /// Adds huge pages to the host's pool, until the guard ends.
    pub fn huge_pages(&mut self, pages: u64) -> Result<()> {
        self.worker.ask(&Order::HugePages(pages)).map(drop)
    }

    pub fn no_huge_pages(&mut self) -> Result<()> {
        self.worker.ask(&Order::NoHugePages).map(drop)
    }

    /// Lets the guard return the memory of a daemon's pool at its end; it kills the daemon before that.
    pub fn end_pool(&mut self, dir: PathBuf, keeper: u32) -> Result<()> {
        self.worker.ask(&Order::EndPool { dir, keeper }).map(drop)
    }

    /// Lets the guard kill a process at its end, if it still runs.
    pub fn end_process(&mut self, pid: u32) -> Result<()> {
        self.worker.ask(&Order::EndProcess(pid)).map(drop)
    }

    /// Lets the guard remove a directory at its end, if it is still there.
    pub fn remove_dir(&mut self, path: PathBuf) -> Result<()> {
        self.worker.ask(&Order::RemoveDir(path)).map(drop)
    }
}
