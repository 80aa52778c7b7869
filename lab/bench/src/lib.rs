//! `ballast bench`: Ballast against the kernel's own swap, a plain userfaultfd handler and the floor.
//!
//! Before: `ballastd` lies beside this program or on `PATH`; root and zram for the kernel's columns. After: rows, and a
//! machine that is as it was.
//! Threads: the caller's; guests, handler, guard and daemon are processes.
//! Units: in every key. Promise: all sides are measured in the same run, on the same data, in the same order of
//! touches, in turns; every page's contents are checked; a figure that could not be measured says why.
//!
//! ```text
//! bench ── orders, answers ──► guest (ballast) ◄── faults ── keeper, engine     `testhost`
//!   │                     ──► guest (kernel)  ◄── zram, in a cgroup            `guard` puts it back
//!   │                     ──► guest (plain)   ◄── faults ── handler            `plain`
//!   └─────────────────────►   guest (floor)
//! ```

mod attach;
mod balance;
mod cgroup;
mod cpu;
mod guard;
mod guest;
mod huge;
mod idle;
mod idle_qemu;
mod lanes;
mod leftover;
mod machine;
mod many;
mod order;
mod overhead;
mod plain;
mod progress;
mod qemu;
mod reclaim;
mod report;
mod restore;
mod role;
mod scale;
mod spill;
mod stats;
mod storm;
mod subject;
mod sweep;
mod track;
mod vcpu;
mod worker;
mod workload;
mod zram;

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use ballast_testhost::Daemon;
use serde_json::Value;

pub use machine::is_release;
pub use order::{Data, GuestKind};
pub use report::Row;
pub use role::run as run_role;
pub use worker::ROLE_COMMAND;

use cpu::Stay;
use guard::Guard;
use progress::Progress;
use subject::{Subject, Way};

/// Wait until no bench runs, and put back what one left that was killed together with its guard.
pub fn put_back_leftovers() -> Result<()> {
    let _held = zram::lock()?;
    leftover::put_back()
}

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// How long a touch of a far page takes.
    Restore,
    /// How fast cold pages go.
    Reclaim,
    /// What a second VM adds.
    Scale,
    /// What being attached costs when nothing is wanted.
    Idle,
    /// What a neighbour's faults do to a VM's.
    Storm,
    /// How fast far pages go to a disk, and how long a touch of one there takes.
    Spill,
    /// 4 KiB against 2 MiB.
    Huge,
    /// Many VMs in less memory than they want.
    Balance,
    /// Who is hot: how well that is known, and what knowing costs.
    Track,
}

impl Which {
    /// As it stands in JSON and tables.
    fn name(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Reclaim => "reclaim",
            Self::Scale => "scale",
            Self::Idle => "idle",
            Self::Storm => "storm",
            Self::Spill => "spill",
            Self::Huge => "huge",
            Self::Balance => "balance",
            Self::Track => "track",
        }
    }
}

/// A part of what [`Which::Balance`] measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Eight VMs, at falling levels of memory.
    Levels,
    /// A VM whose need jumps.
    Jump,
    /// Two VMs that want the same memory all the time.
    Pairs,
    /// Two VMs whose needs change.
    Stages,
    /// One VM, and how much of its memory can go.
    Memory,
}

/// How to measure it.
#[derive(Clone, Debug)]
pub struct Options {
    /// What.
    pub which: Which,
    /// What touches the memory.
    pub guest: GuestKind,
    /// Fewer pages and repetitions.
    pub quick: bool,
    /// Spill: a directory on the disk.
    pub dir: PathBuf,
    /// Balance: this part alone.
    pub part: Option<Part>,
}

impl Options {
    fn is(&self, guest: GuestKind) -> bool {
        self.guest == guest
    }

    /// What guest memory holds, one row each; a quick look at QEMU guests, which boot slowly, has one.
    fn data(&self) -> Vec<Data> {
        let all = [Data::HalfCompressible, Data::Incompressible];
        all.into_iter().take(if self.quick && self.is(GuestKind::Qemu) { 1 } else { 2 }).collect()
    }

    fn guest(&self) -> &'static str {
        self.guest.name()
    }
}

/// Everything a bench runs with. Fields are dropped in this order: the guard puts things back last.
#[derive(Debug)]
pub(crate) struct Bench {
    options: Options,
    daemon: Daemon,
    /// The swap device, or why there is none.
    kernel: Result<PathBuf, String>,
    names: u32,
    progress: Progress,
    guard: Guard,
    _one_cpu: Option<Stay>,
}

impl Bench {
    fn start(options: Options) -> Result<Self> {
        let progress = Progress::start();
        // What is started from here on inherits it.
        let one_cpu = (options.which == Which::Idle && !options.is(GuestKind::Qemu)).then(Stay::here);
        let mut guard = Guard::start()?;
        let spill = options.which == Which::Spill;
        let daemon = Daemon::with_settings(&if spill { spill::settings(&options.dir) } else { String::new() })?;
        guard.remove_dir(daemon.dir().to_owned())?;
        guard.end_process(daemon.keeper_pid())?;
        let kernel = match options.which {
            Which::Idle | Which::Track => Err(String::new()),
            Which::Spill => guard.swap_file(options.dir.clone(), spill::SWAP).map_err(|error| format!("{error:#}")),
            _ => guard.swap().map_err(|error| format!("{error:#}")),
        };
        Ok(Self { options, daemon, kernel, names: 0, progress, guard, _one_cpu: one_cpu })
    }

    /// Do something with a daemon that has other settings, in the place of the bench's own.
    fn with_settings<T>(&mut self, settings: &str, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
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

    /// A row about this, which is measured from now on.
    fn row(&self, what: &str) -> Row {
        let row = Row::new(self.options.which.name(), self.options.guest(), what);
        self.progress.row(row.title());
        row
    }

    /// A directory for a guest's files, which is made when it is needed and goes with the guest or the daemon.
    fn guest_dir(&mut self) -> PathBuf {
        self.names += 1;
        self.daemon.dir().join(format!("guest-{}", self.names))
    }

    fn engine_pid(&self) -> Result<u32> {
        Ok(self.daemon.api().host().context("Asking for the engine's process id")?.engine_pid)
    }

    /// A guest of each way that can be had. Without the kernel's swap or its cgroup the row says why.
    fn subjects(&mut self, ways: &[Way], pages: u64, data: Data, row: &mut Row) -> Result<Vec<Subject>> {
        let mut subjects = Vec::new();
        for way in ways {
            let kernel = if *way == Way::Kernel { self.kernel.clone().map(drop) } else { Ok(()) };
            match kernel {
                Ok(()) => match Subject::new(self, *way, pages, data) {
                    Ok(subject) => subjects.push(subject),
                    Err(error) if *way == Way::Kernel => row.because(&format!("{error:#}")),
                    Err(error) => return Err(error),
                },
                Err(why) => row.because(&why),
            }
        }
        Ok(subjects)
    }
}

/// Measure; `each` gets every row as soon as it is there, with the description of the machine.
pub fn run(options: Options, each: &mut dyn FnMut(&Row, &Value) -> Result<()>) -> Result<()> {
    let missing = match options.guest {
        GuestKind::Native => None,
        GuestKind::Kvm => ballast_testvm::kvm_missing(),
        GuestKind::Qemu => ballast_testvm::qemu::qemu_missing(),
    };
    if let Some(why) = missing {
        bail!("no {} guest can run here: {why} (--guest native needs nothing)", options.guest());
    }
    let machine = machine::describe();
    let mut bench = Bench::start(options)?;
    let progress = bench.progress.clone();
    let mut each = |row: Row| progress.aside(|| each(&row, &machine));
    let result = match bench.options.which {
        Which::Restore => restore::run(&mut bench, &mut each),
        Which::Reclaim => reclaim::run(&mut bench, &mut each),
        Which::Scale => scale::run(&mut bench, &mut each),
        Which::Idle => idle::run(&mut bench, &mut each),
        Which::Storm => storm::run(&mut bench, &mut each),
        Which::Spill => spill::run(&mut bench, &mut each),
        Which::Huge => huge::run(&mut bench, &mut each),
        Which::Balance => balance::run(&mut bench, &mut each),
        Which::Track => track::run(&mut bench, &mut each),
    };
    bench.progress.end();
    if result.is_err() {
        eprintln!("ballast bench: the daemon's log:\n{}", bench.daemon.log());
    }
    result
}
