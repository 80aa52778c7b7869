//! The equipment of every bench: its daemon, the kernel's swap, the guard that restores the machine, and names for VMs.
//!
//! Before: `lib` knows which bench runs, and the settings and swap that it needs. After: a bench starts guests.
//! Threads: the bench's one. Units: none. Promise: fields are dropped in order, so guard and swap restore the machine
//! last.

use std::path::PathBuf;

use anyhow::{Context, Result};
use ballast_testhost::Daemon;
use ballast_testkit::swap::Swap;

use crate::cpu::Stay;
use crate::guard::Guard;
use crate::options::{Options, Which};
use crate::progress::Progress;
use crate::report::Row;

/// Size of the kernel's swap; it takes memory only for the pages that it has.
const SWAP: &str = "8G";

/// Everything a bench runs with. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) options: Options,
    pub(crate) daemon: Daemon,
    pub(crate) kernel: Result<PathBuf, String>,
    names: u32,
    pub(crate) progress: Progress,
    pub(crate) guard: Guard,
    _swap: Option<Swap>,
    _one_cpu: Option<Stay>,
}

impl Bench {
    /// Starts guard and daemon, and takes the kernel's swap if the bench measures the kernel.
    pub(crate) fn start(options: Options, settings: &str, swap: bool) -> Result<Self> {
        let progress = Progress::start();
        // Every process that is started from here on inherits the CPU.
        let one_cpu = (options.which == Which::Idle).then(Stay::here);
        let mut guard = Guard::start()?;
        let daemon = Daemon::with_settings(settings)?;
        guard.remove_dir(daemon.dir().to_owned())?;
        guard.end_process(daemon.keeper_pid())?;
        let swap = if swap { Swap::only(SWAP) } else { Err(String::new()) };
        let kernel = swap.as_ref().map(|swap| swap.device().to_owned()).map_err(String::clone);
        Ok(Self { options, daemon, kernel, names: 0, progress, guard, _swap: swap.ok(), _one_cpu: one_cpu })
    }

    /// Runs `work` with a daemon of other settings in place of the bench's own.
    pub(crate) fn with_settings<T>(&mut self, settings: &str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let daemon = Daemon::with_settings(settings)?;
        self.guard.remove_dir(daemon.dir().to_owned())?;
        self.guard.end_process(daemon.keeper_pid())?;
        let own = std::mem::replace(&mut self.daemon, daemon);
        let result = work(self);
        if result.is_err() {
            eprintln!("ballast bench: the log of the daemon with other settings:\n{}", self.daemon.log());
        }
        self.daemon = own;
        result
    }

    pub(crate) fn row(&self, what: &str) -> Row {
        let guest = match self.options.which {
            Which::Share | Which::Guest => "qemu".to_owned(),
            _ => format!("{:?}", self.options.guest).to_lowercase(),
        };
        let row = Row::new(&self.options.which.name(), &guest, what);
        self.progress.row(row.title());
        row
    }

    pub(crate) fn vm_name(&mut self) -> String {
        self.numbered("bench")
    }

    pub(crate) fn numbered(&mut self, base: &str) -> String {
        self.names += 1;
        format!("{base}-{}", self.names)
    }

    /// The engine's process id, which changes when the engine is replaced.
    pub(crate) fn engine_pid(&self) -> Result<u32> {
        Ok(self.daemon.api().host().context("Asking for the engine's process id")?.engine_pid)
    }
}
