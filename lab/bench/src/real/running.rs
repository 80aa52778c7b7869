//! A program that runs under a side: first without a limit, then with those that it is given.
//!
//! Before: the bench's daemon runs, and its guard has set up the kernel's swap for the other sides. After: the
//! program has ended, and nothing of its VM or cgroup is left. Threads: the bench's one is the load, on one CPU; the
//! program has the other one. Units: in every name. Promise: speed under a limit is of this program's own without one,
//! just before.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use ballast_api::VmStat;
use ballast_base::MIB;
use ballast_realmem::batch::{self, Batch};
use ballast_realmem::keys::Sequence;
use ballast_realmem::load::{Load, Window};
use ballast_realmem::protocol::Protocol;
use ballast_realmem::server::{self, Memory, Server};

use super::turn::{LIMITED_QUICK, SETTLE_QUICK, Turn};
use crate::options::{RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;
use crate::{adopt, cgroup};

/// Keys of 1 KiB values.
pub(super) const KEYS: u32 = 1_000_000;
pub(super) const KEYS_QUICK: u32 = 150_000;
/// Time without a limit, before the figures of it are taken, and while they are.
const WARM: Duration = Duration::from_secs(5);
const FREE: Duration = Duration::from_secs(20);

/// A running program, which has had its time without a limit.
pub(super) struct Running {
    side: Side,
    vm: Option<String>,
    cgroup: Option<PathBuf>,
    work: Work,
    /// Its speed without a limit.
    free: Window,
    /// The memory that it had then, in bytes, and the part of it that it may have now, in percent.
    held: u64,
    level: u64,
    /// Values that were wrong so far.
    wrong: f64,
}

impl Running {
    pub(super) fn begin(
        bench: &mut Bench,
        program: Program,
        sequence: Sequence,
        side: Side,
        seed: u64,
    ) -> Result<Self> {
        let quick = bench.options.quick;
        let name = bench.vm_name();
        let memory = memory_of(bench, side, &name)?;
        let cgroup = match side {
            Side::Ballast | Side::Adopted => None,
            Side::Kernel | Side::Shared => Some(bench.guard.cgroup()?),
        };
        let place = |pid: u32| {
            bench.guard.end_process(pid)?;
            cgroup.as_ref().map_or(Ok(()), |cgroup| cgroup::enter(cgroup, pid))
        };
        let keys = if quick { KEYS_QUICK } else { KEYS };
        let (mut work, pid) = start(program, &memory, sequence, keys, seed, place)?;
        let vm = vm_of(bench, side, name, pid)?;
        let warm = work.run(if quick { SETTLE_QUICK } else { WARM })?;
        let free = work.run(if quick { LIMITED_QUICK } else { FREE })?;
        let held = match (&cgroup, &vm) {
            (Some(cgroup), _) => cgroup::usage(cgroup)?,
            (None, Some(vm)) => bench.daemon.api().vm(vm)?.resident_bytes,
            (None, None) => 0,
        };
        let wrong = (warm.wrong + free.wrong) as f64;
        Ok(Self { side, vm, cgroup, work, free, held, level: 100, wrong })
    }

    /// It may have this part of the memory that it had, in percent.
    pub(super) fn limit(&mut self, bench: &Bench, level: u64) -> Result<()> {
        self.level = level;
        let limit = self.held / 100 * level / MIB * MIB;
        if let Some(cgroup) = &self.cgroup {
            cgroup::limit(cgroup, limit)?;
        }
        if let Some(vm) = &self.vm {
            bench.daemon.api().set_limit(vm, Some(limit))?;
        }
        Ok(())
    }

    /// Runs it for this long, with the counters of that time, which are printed if `BALLAST_BENCH_COURSE` is set.
    pub(super) fn watch(&mut self, bench: &Bench, time: Duration) -> Result<Turn> {
        let before = self.counters(bench)?;
        let start = Instant::now();
        let window = self.work.run(time)?;
        let mut turn = self.counters(bench)?.since(&before, start.elapsed().as_secs_f64());
        self.wrong += window.wrong as f64;
        turn.speed = window.per_s / self.free.per_s;
        turn.free_per_s = self.free.per_s;
        turn.wrong = self.wrong;
        turn.limited = window;
        if std::env::var_os("BALLAST_BENCH_COURSE").is_some() {
            eprintln!("{:?} {} %: {turn}", self.side, self.level);
        }
        Ok(turn)
    }

    /// Reads all that it has once more, and ends it. Returns the number of values that were wrong.
    pub(super) fn end(mut self, bench: &Bench) -> Result<f64> {
        let wrong = self.wrong + self.work.check_all()? as f64;
        drop(self.work);
        if let Some(vm) = &self.vm {
            bench.daemon.wait_until_gone(vm)?;
        }
        Ok(wrong)
    }

    fn counters(&self, bench: &Bench) -> Result<Counters> {
        match &self.vm {
            Some(vm) if self.side == Side::Ballast => Ok(Counters::of_vm(&bench.daemon.api().vm(vm)?)),
            // The kernel moves the pages.
            Some(vm) => {
                Ok(Counters { tasks_us: bench.daemon.api().vm(vm)?.engine_time.tasks_us, ..Counters::of_kernel()? })
            }
            None => Counters::of_kernel(),
        }
    }
}

/// Counters of a side, since its start.
#[derive(Clone, Copy, Debug, Default)]
struct Counters {
    restores: u64,
    soon: u64,
    evictions: u64,
    minor: u64,
    faults: u64,
    faults_us: u64,
    tasks_us: u64,
}

impl Counters {
    fn of_vm(vm: &VmStat) -> Self {
        Self {
            restores: vm.faults.restored_pages + vm.reclaim.prefetched_pages,
            soon: vm.reclaim.restored_soon_pages,
            evictions: vm.reclaim.evicted_pages + vm.reclaim.evicted_zero_pages,
            minor: vm.faults.minor,
            faults: vm.faults.total(),
            faults_us: vm.engine_time.faults_us,
            tasks_us: vm.engine_time.tasks_us,
        }
    }

    /// The counters of the whole machine, on which nothing else swaps.
    fn of_kernel() -> Result<Self> {
        let text = std::fs::read_to_string("/proc/vmstat").context("Reading /proc/vmstat")?;
        let of = |key: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.parse().ok());
            value.with_context(|| format!("/proc/vmstat has no {key}"))
        };
        Ok(Self { restores: of("pswpin")?, evictions: of("pswpout")?, ..Self::default() })
    }

    fn since(&self, before: &Self, seconds: f64) -> Turn {
        let of = |counter: fn(&Self) -> u64| counter(self).saturating_sub(counter(before)) as f64;
        let each = |time: f64, count: f64| if count > 0.0 { time / count } else { 0.0 };
        let (faults_us, tasks_us) = (of(|all| all.faults_us), of(|all| all.tasks_us));
        Turn {
            restores_per_s: of(|all| all.restores) / seconds,
            soon_per_s: of(|all| all.soon) / seconds,
            evictions_per_s: of(|all| all.evictions) / seconds,
            minor_per_s: of(|all| all.minor) / seconds,
            us_per_fault: each(faults_us, of(|all| all.faults)),
            us_per_eviction: each(tasks_us, of(|all| all.evictions)),
            engine_pct: (faults_us + tasks_us) / seconds / 1e4,
            ..Turn::default()
        }
    }
}

/// Can this side be measured? If it cannot for want of swap, the row says why.
pub(super) fn has_swap(bench: &Bench, side: Side, row: &mut Row) -> bool {
    match &bench.kernel {
        Err(why) if side.needs_swap() => {
            row.because(why);
            false
        }
        _ => true,
    }
}

/// An error if one of these programs is not unpacked.
pub(super) fn needs(programs: &[Program]) -> Result<()> {
    let missing =
        |program: &Program| protocol_of(*program).map_or_else(|| batch::missing(&program.name()), server::missing);
    programs.iter().find_map(missing).map_or(Ok(()), |why| Err(anyhow!(why)))
}

/// The protocol of a server, which has a load on the other CPU. Other programs repeat a unit of work.
pub(super) fn protocol_of(program: Program) -> Option<Protocol> {
    match program {
        Program::Redis => Some(Protocol::Redis),
        Program::Memcached => Some(Protocol::Memcached),
        _ => None,
    }
}

/// A running program.
pub(super) enum Work {
    /// The server ends with this.
    Server {
        load: Box<Load>,
        _server: Server,
    },
    Batch(Batch),
}

/// Starts a program, and tells its process id. A server has values under this many keys, from this seed. `place` gets
/// the process id before the program has touched memory.
pub(super) fn start(
    program: Program,
    memory: &Memory,
    sequence: Sequence,
    keys: u32,
    seed: u64,
    place: impl FnOnce(u32) -> Result<()>,
) -> Result<(Work, u32)> {
    let Some(protocol) = protocol_of(program) else {
        let batch = Batch::start(&program.name(), memory, place)?;
        let pid = batch.pid();
        return Ok((Work::Batch(batch), pid));
    };
    let server = Server::start(protocol, memory, place)?;
    let pid = server.pid();
    let load = Box::new(Load::begin(&server, protocol, sequence, keys, seed)?);
    Ok((Work::Server { load, _server: server }, pid))
}

impl Work {
    fn run(&mut self, time: Duration) -> Result<Window> {
        match self {
            Self::Server { load, .. } => load.run(time),
            Self::Batch(batch) => batch.run(time),
        }
    }

    /// Reads everything once; returns the number of wrong values. A unit of a batch has read all there is.
    pub(super) fn check_all(&mut self) -> Result<u64> {
        match self {
            Self::Server { load, .. } => load.check_all(),
            Self::Batch(_) => Ok(0),
        }
    }
}

/// Where a side has a program's memory. Under Ballast this is its VM's name.
pub(super) fn memory_of(bench: &Bench, side: Side, name: &str) -> Result<Memory> {
    Ok(match side {
        Side::Ballast => {
            Memory::Attached { client: client()?, socket: bench.daemon.attach_socket(), name: name.to_owned() }
        }
        Side::Adopted => Memory::Vmm,
        Side::Kernel => Memory::Private,
        Side::Shared => Memory::Shared,
    })
}

/// The name of the VM that a process is, if this side has VMs. One that is to be adopted is adopted now.
pub(super) fn vm_of(bench: &Bench, side: Side, name: String, pid: u32) -> Result<Option<String>> {
    match side {
        Side::Ballast => Ok(Some(name)),
        Side::Adopted => adopt::adopt(bench, pid).map(Some),
        Side::Kernel | Side::Shared => Ok(None),
    }
}

/// The client library, beside this program or among what it was built from.
fn client() -> Result<PathBuf> {
    let own = std::env::current_exe().context("Finding this program")?;
    let dir = own.parent().context("a program has a directory")?;
    let library = "libballast_client.so";
    let found = [dir.join(library), dir.join("deps").join(library)].into_iter().find(|path| path.exists());
    found.with_context(|| format!("{library} is not beside {} (cargo build --release)", own.display()))
}
