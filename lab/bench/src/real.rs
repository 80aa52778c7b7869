//! `bench real`: a real program at full speed, with part of its memory far, beside the kernel's swap.
//!
//! Before: `scripts/real-programs.sh` has unpacked the programs; this is root; the kernel's side needs zram and a
//! memory cgroup. After: a row for each level of memory. Threads: the bench's one is the load, on one CPU; the program
//! has the other one, and so has the engine whatever it takes. Units: in every key. Promise: a side's speed under a
//! limit is compared with its own speed without one, just before, on the clock of each moment; every byte is checked.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::VmStat;
use ballast_base::MIB;
use ballast_realmem::batch::{self, Batch};
use ballast_realmem::keys::Sequence;
use ballast_realmem::load::{Load, Window};
use ballast_realmem::protocol::Protocol;
use ballast_realmem::server::{self, Memory, Server};

use crate::cgroup;
use crate::options::{RealOrder as Order, RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;

/// Keys of 1 KiB values.
const KEYS: u32 = 1_000_000;
const KEYS_QUICK: u32 = 150_000;
/// Part of the memory that a side may have, in percent.
const LEVELS: [u64; 4] = [90, 80, 65, 50];
/// Rounds: each side has one turn in each.
const ROUNDS: usize = 3;
/// Time without a limit, before the figures of it are taken, and while they are.
const WARM: Duration = Duration::from_secs(5);
const FREE: Duration = Duration::from_secs(10);
/// Time under the limit before its figures are taken, and while they are.
const SETTLE: Duration = Duration::from_secs(40);
const SETTLE_QUICK: Duration = Duration::from_secs(3);
const LIMITED: Duration = Duration::from_secs(20);
const LIMITED_QUICK: Duration = Duration::from_secs(3);
const SEED: u64 = 42;

/// The figures of one turn.
#[derive(Clone, Debug, Default)]
struct Turn {
    /// Speed under the limit, of that without one.
    speed: f64,
    /// The requests a second without a limit.
    free_per_s: f64,
    limited: Window,
    restores_per_s: f64,
    soon_per_s: f64,
    evictions_per_s: f64,
    minor_per_s: f64,
    us_per_fault: f64,
    us_per_eviction: f64,
    engine_pct: f64,
    wrong: f64,
}

/// Measures; `each` gets each row.
pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let options = bench.options.clone();
    let program = options.real.program.unwrap_or(Program::Redis);
    let why = match runs(program) {
        Runs::Server(protocol) => server::missing(protocol),
        Runs::Batch(_) => batch::missing(),
    };
    if let Some(why) = why {
        bail!("{why}");
    }
    let orders = match (options.real.order, options.quick) {
        (Some(order), _) => vec![order],
        _ if matches!(runs(program), Runs::Batch(_)) => vec![Order::Repeat],
        (None, true) => vec![Order::Repeat],
        (None, false) => vec![Order::Repeat, Order::Random],
    };
    let levels = match (options.levels.is_empty(), options.quick) {
        (false, _) => options.levels.clone(),
        (true, true) => vec![80],
        (true, false) => LEVELS.to_vec(),
    };
    let sides = options.real.side.map_or_else(|| vec![Side::Ballast, Side::Kernel], |side| vec![side]);
    for order in orders {
        for level in &levels {
            let row = measure(bench, program, order, *level, &sides)?;
            each(row)?;
        }
    }
    Ok(())
}

fn measure(bench: &mut Bench, program: Program, order: Order, level: u64, sides: &[Side]) -> Result<Row> {
    let sequence = sequence(order);
    let program_name = format!("{program:?}").to_lowercase();
    let mut row = bench.row(&format!("{program_name}, {}, {level} % of its memory", sequence.name()));
    row.fact("program", program_name);
    row.fact("order", sequence.name());
    row.fact("memory_pct", level);
    let rounds = bench.options.real.rounds.unwrap_or(if bench.options.quick { 1 } else { ROUNDS });
    let mut turns: Vec<(Side, Vec<Turn>)> = sides.iter().map(|side| (*side, Vec::new())).collect();
    for round in 0..rounds {
        for (side, of_side) in &mut turns {
            if *side != Side::Ballast
                && let Err(why) = &bench.kernel
            {
                row.because(why);
                continue;
            }
            match turn(bench, program, sequence, level, *side, SEED + round as u64) {
                Ok(turn) => of_side.push(turn),
                // Its out-of-memory killer ends a program that it cannot hold to the limit.
                Err(error) if *side != Side::Ballast => row.because(&format!("the kernel's side: {error:#}")),
                Err(error) => return Err(error),
            }
        }
    }
    let speeds = |turns: &[Turn]| turns.iter().map(|turn| turn.speed).collect::<Vec<_>>();
    for (side, of_side) in &turns {
        let end = match side {
            Side::Ballast => "",
            Side::Kernel => "_kernel",
            Side::Shared => "_kernel_shared",
        };
        let mut figure = |key: &str, value: fn(&Turn) -> f64| {
            row.figure(&format!("real_{key}{end}"), &of_side.iter().map(value).collect::<Vec<_>>());
        };
        figure("speed", |turn| turn.speed);
        figure("requests_per_s_without_limit", |turn| turn.free_per_s);
        figure("requests_per_s", |turn| turn.limited.per_s);
        if matches!(runs(program), Runs::Server(_)) {
            figure("p50_us_of_16", |turn| turn.limited.p50_us);
            figure("p95_us_of_16", |turn| turn.limited.p95_us);
            figure("p99_us_of_16", |turn| turn.limited.p99_us);
        }
        figure("restores_per_s", |turn| turn.restores_per_s);
        figure("evictions_per_s", |turn| turn.evictions_per_s);
        figure("wrong_bytes", |turn| turn.wrong);
        if *side == Side::Ballast {
            figure("restored_soon_per_s", |turn| turn.soon_per_s);
            figure("minor_faults_per_s", |turn| turn.minor_per_s);
            figure("engine_us_per_fault", |turn| turn.us_per_fault);
            figure("engine_us_per_eviction", |turn| turn.us_per_eviction);
            figure("engine_cpu_pct", |turn| turn.engine_pct);
        }
    }
    if let [(Side::Ballast, ours), (_, theirs), ..] = &turns[..] {
        row.ratio("real_speed_of_kernel", &speeds(ours), &speeds(theirs));
    }
    Ok(row)
}

/// One turn of a side: without a limit, then with one.
fn turn(bench: &mut Bench, program: Program, sequence: Sequence, level: u64, side: Side, seed: u64) -> Result<Turn> {
    let quick = bench.options.quick;
    let name = bench.vm_name();
    let memory = match side {
        Side::Ballast => {
            Memory::Attached { client: client()?, socket: bench.daemon.attach_socket(), name: name.clone() }
        }
        Side::Kernel => Memory::Private,
        Side::Shared => Memory::Shared,
    };
    let cgroup = match side {
        Side::Ballast => None,
        _ => Some(bench.guard.cgroup()?),
    };
    let place = |pid: u32| match &cgroup {
        None => Ok(()),
        Some(cgroup) => std::fs::write(cgroup.join("cgroup.procs"), pid.to_string())
            .with_context(|| format!("Moving {pid} to {}", cgroup.display())),
    };
    let keys = if quick { KEYS_QUICK } else { KEYS };
    let mut work = match runs(program) {
        Runs::Server(protocol) => {
            let server = Server::start(protocol, &memory, place)?;
            bench.guard.end_process(server.pid())?;
            let load = Box::new(Load::begin(&server, protocol, sequence, keys, seed)?);
            Work::Server { load, _server: server }
        }
        Runs::Batch(kind) => {
            let batch = Batch::start(kind, &memory, place)?;
            bench.guard.end_process(batch.pid())?;
            Work::Batch(batch)
        }
    };
    let warm = work.run(if quick { SETTLE_QUICK } else { WARM })?;
    let free = work.run(if quick { LIMITED_QUICK } else { FREE })?;
    let held = match &cgroup {
        Some(cgroup) => cgroup::usage(cgroup)?,
        None => bench.daemon.api().vm(&name)?.resident_bytes,
    };
    let limit = held / 100 * level / MIB * MIB;
    match &cgroup {
        Some(cgroup) => cgroup::limit(cgroup, limit)?,
        None => drop(bench.daemon.api().set_limit(&name, Some(limit))?),
    }
    let settle = bench.options.real.settle.unwrap_or(if quick { SETTLE_QUICK } else { SETTLE });
    // Each part of the way is told, since it shows whether the choice of pages converges.
    let (step, mut left, mut wrong) = (Duration::from_secs(20), settle, warm.wrong + free.wrong);
    while !left.is_zero() {
        let part = left.min(step);
        let (window, turn) = watched(bench, &name, &cgroup, &mut work, part)?;
        wrong += window.wrong;
        if std::env::var_os("BALLAST_BENCH_COURSE").is_some() {
            eprintln!(
                "{side:?} {} {level} %: speed {:.2}, restores {:.0}/s, soon {:.0}/s, minor {:.0}/s, evictions {:.0}/s, \
                 {:.1} us a fault, {:.1} us an eviction, engine {:.1} %, p99 {:.0} us",
                sequence.name(),
                window.speed / free.speed,
                turn.restores_per_s,
                turn.soon_per_s,
                turn.minor_per_s,
                turn.evictions_per_s,
                turn.us_per_fault,
                turn.us_per_eviction,
                turn.engine_pct,
                window.p99_us,
            );
        }
        left -= part;
    }
    let (limited, mut turn) = watched(bench, &name, &cgroup, &mut work, if quick { LIMITED_QUICK } else { LIMITED })?;
    turn.speed = limited.speed / free.speed;
    turn.free_per_s = free.per_s;
    turn.wrong = (wrong + limited.wrong + work.check_all()?) as f64;
    turn.limited = limited;
    drop(work);
    match side {
        Side::Ballast => bench.daemon.wait_until_gone(&name)?,
        _ => drop(cgroup),
    }
    Ok(turn)
}

/// Runs the load for this long, and reads the counters around it.
fn watched(
    bench: &Bench,
    name: &str,
    cgroup: &Option<PathBuf>,
    work: &mut Work,
    time: Duration,
) -> Result<(Window, Turn)> {
    let counters = || match cgroup {
        None => Counters::of_vm(&bench.daemon.api().vm(name)?),
        Some(_) => Counters::of_kernel(),
    };
    let before = counters()?;
    let start = Instant::now();
    let window = work.run(time)?;
    let after = counters()?;
    Ok((window, after.since(&before, start.elapsed().as_secs_f64())))
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
    fn of_vm(vm: &VmStat) -> Result<Self> {
        Ok(Self {
            restores: vm.faults.restored_pages + vm.reclaim.prefetched_pages,
            soon: vm.reclaim.restored_soon_pages,
            evictions: vm.reclaim.evicted_pages + vm.reclaim.evicted_zero_pages,
            minor: vm.faults.minor,
            faults: vm.faults.total(),
            faults_us: vm.engine_time.faults_us,
            tasks_us: vm.engine_time.tasks_us,
        })
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

/// What a program is.
enum Runs {
    /// A server, with a load on the other CPU.
    Server(Protocol),
    /// A program that repeats a unit of work.
    Batch(batch::Kind),
}

fn runs(program: Program) -> Runs {
    match program {
        Program::Redis => Runs::Server(Protocol::Redis),
        Program::Memcached => Runs::Server(Protocol::Memcached),
        Program::Tpch => Runs::Batch(batch::Kind::Tpch),
        Program::Graph => Runs::Batch(batch::Kind::Graph),
        Program::Dgemm => Runs::Batch(batch::Kind::Dgemm),
        Program::Kmeans => Runs::Batch(batch::Kind::Kmeans),
    }
}

/// A running program.
enum Work {
    /// The server ends with this.
    Server {
        load: Box<Load>,
        _server: Server,
    },
    Batch(Batch),
}

impl Work {
    fn run(&mut self, time: Duration) -> Result<Window> {
        match self {
            Self::Server { load, .. } => load.run(time),
            Self::Batch(batch) => batch.run(time),
        }
    }

    /// Reads everything once; returns the number of wrong values. A unit of a batch has read all there is.
    fn check_all(&mut self) -> Result<u64> {
        match self {
            Self::Server { load, .. } => load.check_all(),
            Self::Batch(_) => Ok(0),
        }
    }
}

fn sequence(order: Order) -> Sequence {
    match order {
        Order::Random => Sequence::Random,
        Order::Repeat => Sequence::Repeat,
        Order::Moving => Sequence::Moving,
        Order::ScanBeside => Sequence::ScanBeside,
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
