//! The equipment of every bench: its daemon, the kernel's swap, the guard that restores the machine, and the next name.
//!
//! Before: `lib` knows which bench runs, and the settings and swap that it needs. After: a bench starts guests.
//! Threads: the bench's one. Units: none. Promise: fields are dropped in order, so the guard restores the machine last.

use std::path::PathBuf;

use anyhow::{Context, Result};
use ballast_testhost::Daemon;

use crate::cpu::Stay;
use crate::guard::Guard;
use crate::options::{Options, Which};
use crate::order::GuestKind;
use crate::progress::Progress;
use crate::report::Row;

/// The kernel's swap space.
#[derive(Clone, Copy, Debug)]
pub(crate) enum KernelSwap {
    /// The bench has no figures of the kernel.
    None,
    /// A zram device.
    Zram,
}

/// Everything a bench runs with. Fields are dropped in this order.
#[derive(Debug)]
pub(crate) struct Bench {
    pub(crate) options: Options,
    pub(crate) daemon: Daemon,
    /// The swap device, or the reason why there is none.
    pub(crate) kernel: Result<PathBuf, String>,
    names: u32,
    pub(crate) progress: Progress,
    pub(crate) guard: Guard,
    _one_cpu: Option<Stay>,
}

impl Bench {
    /// Start guard and daemon, and take the kernel's swap.
    pub(crate) fn start(options: Options, settings: &str, swap: KernelSwap) -> Result<Self> {
        let progress = Progress::start();
        // Every process that is started from here on inherits the CPU.
        let one_cpu = (options.which == Which::Idle && !options.is(GuestKind::Qemu)).then(Stay::here);
        let mut guard = Guard::start()?;
        let daemon = Daemon::with_settings(settings)?;
        guard.remove_dir(daemon.dir().to_owned())?;
        guard.end_process(daemon.keeper_pid())?;
        let kernel = match swap {
            KernelSwap::None => Err(String::new()),
            KernelSwap::Zram => guard.swap().map_err(|error| format!("{error:#}")),
        };
        Ok(Self { options, daemon, kernel, names: 0, progress, guard, _one_cpu: one_cpu })
    }

    /// Run `work` with a daemon that has other settings, instead of the bench's own.
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

    /// A row for the measurement that begins now.
    pub(crate) fn row(&self, what: &str) -> Row {
        let row = Row::new(self.options.which.name(), self.options.guest(), what);
        self.progress.row(row.title());
        row
    }

    /// A name that no other VM of this bench has.
    pub(crate) fn vm_name(&mut self) -> String {
        self.numbered("bench")
    }

    /// `base` with the next number.
    pub(crate) fn numbered(&mut self, base: &str) -> String {
        self.names += 1;
        format!("{base}-{}", self.names)
    }

    /// A directory for a guest's files. The guest makes it when needed; it is removed with the guest or the daemon.
    pub(crate) fn guest_dir(&mut self) -> PathBuf {
        let name = self.numbered("guest");
        self.daemon.dir().join(name)
    }

    /// The engine's process id, which changes when the engine is replaced.
    pub(crate) fn engine_pid(&self) -> Result<u32> {
        Ok(self.daemon.api().host().context("Asking for the engine's process id")?.engine_pid)
    }
}
