//! Eight real programs in less memory than they want together (Maestro, section 4, figure 1): two each of TPC-H, a
//! graph, matrix products and Redis.
//!
//! Before: as for `bench real`. After: a row for each level of memory; adopted programs have rows of their own
//! (`--side adopted`). Threads: the bench's one samples; each program has a thread that drives it or waits for its
//! units. Units: slowdowns; a level is in percent of the most memory that all programs had at once without a limit.
//! Promise: a side's slowdowns are of its own programs without a limit, before its levels; `eight_aa_slowdown` is their
//! slowdown some seconds after the limits went. Every program may use both CPUs.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use ballast_api::PolicyPatch;
use ballast_base::MIB;
use ballast_policy::Kind;
use ballast_realmem::batch::Batch;
use ballast_realmem::keys::Sequence;
use ballast_realmem::load::{DEPTH, Load};
use rustix::process::{Pid, Signal, kill_process};
use rustix::thread::{CpuSet, sched_setaffinity};

use super::running::{Work, has_swap, memory_of, needs, start, vm_of};
use super::turn::SEED;
use crate::options::{RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::geomean;
use crate::{cgroup, cpu};

const CAST: [Program; 4] = [Program::Tpch, Program::Graph, Program::Dgemm, Program::Redis];
const CAST_QUICK: [Program; 1] = [Program::Redis];
/// Percent of the memory that all programs want.
const LEVELS: [u64; 3] = [75, 60, 45];
/// Keys of 1 KiB of each Redis.
const KEYS: u32 = 800_000;
const KEYS_QUICK: u32 = 50_000;
/// Between two samples of the memory in use.
const SAMPLE: Duration = Duration::from_millis(500);
/// Requests between two looks whether a window has ended.
const BURST: u32 = 1600;

/// Times: from a change of limits until the programs are measured, and while they are.
#[derive(Clone, Copy)]
struct Times {
    settle: Duration,
    window: Duration,
}

struct Member {
    program: Program,
    work: Work,
    pid: Pid,
}

/// The programs of one side.
struct Cast {
    side: Side,
    members: Vec<Member>,
    vms: Vec<String>,
    /// The kernel's side: one for all.
    cgroup: Option<PathBuf>,
}

/// The figures of a window.
struct Window {
    /// Units or requests a second of each program; none if it ended.
    speeds: Vec<Option<f64>>,
    most_bytes: u64,
    engine_pct: f64,
    wrong: u64,
}

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    needs(&CAST)?;
    let seconds = Duration::from_secs;
    let (times, levels) = match bench.options.quick {
        true => (Times { settle: seconds(2), window: seconds(3) }, vec![60]),
        false => (Times { settle: seconds(20), window: seconds(45) }, LEVELS.to_vec()),
    };
    let levels = if bench.options.levels.is_empty() { levels } else { bench.options.levels.clone() };
    let mut rows = Vec::new();
    for level in levels {
        let mut row = bench.row(&format!("eight programs, {level} % of their memory"));
        row.fact("level_pct", level);
        rows.push((level, row));
    }
    let sides = match bench.options.real.side {
        Some(side) => vec![side],
        None => vec![Side::Ballast, Side::Kernel],
    };
    for side in sides {
        let is_there = rows.iter_mut().all(|(_, row)| has_swap(bench, side, row));
        if is_there {
            measure(bench, side, times, &mut rows)?;
        }
    }
    rows.into_iter().try_for_each(|(_, row)| each(row))
}

/// All levels of a side, on programs of its own.
fn measure(bench: &mut Bench, side: Side, times: Times, rows: &mut [(u64, Row)]) -> Result<()> {
    let policies: &[Kind] = match side {
        Side::Ballast => &[Kind::Gain, Kind::Maestro],
        Side::Adopted => &[Kind::Gain],
        Side::Kernel | Side::Shared => &[Kind::None],
    };
    let end = |kind: &Kind| match side {
        Side::Ballast => format!("_{kind}"),
        _ => side.end_of_keys().to_owned(),
    };
    let mut cast = Cast::start(bench, side)?;
    cast.window(bench, times.settle)?;
    let free = cast.window(bench, times.window)?;
    eprintln!("{side:?} without a limit: {:?}, {} MiB", free.speeds, free.most_bytes / MIB);
    for (level, row) in rows.iter_mut() {
        let bytes = free.most_bytes / 100 * *level;
        for kind in policies {
            let seen = cast.hold_to(bench, *kind, Some(bytes)).and_then(|()| {
                cast.window(bench, times.settle)?;
                cast.window(bench, times.window)
            });
            let seen = match seen {
                Ok(seen) => seen,
                Err(error) if side.is_kernel() => {
                    row.because(&format!("the kernel's side at {level} %: {error:#}"));
                    return Ok(());
                }
                Err(error) => return Err(error),
            };
            let slow = slowdowns(&free, &seen);
            eprintln!("{side:?} {kind} {level} %: {slow:.2?}, engine {:.0} %", seen.engine_pct);
            report(row, &end(kind), &cast, &seen, &slow);
            if side.is_kernel() && slow.contains(&None) {
                // What its out-of-memory killer ended does not come back.
                return Ok(());
            }
        }
    }
    cast.hold_to(bench, Kind::None, None)?;
    cast.window(bench, times.settle)?;
    let after = cast.window(bench, times.window)?;
    let later = geomean(&slowdowns(&free, &after).into_iter().flatten().collect::<Vec<_>>());
    rows.iter_mut().for_each(|(_, row)| row.figure(&format!("eight_aa_slowdown{}", side.end_of_keys()), &[later]));
    cast.end(bench)
}

/// How many times slower each program is than without a limit; none if it ended.
fn slowdowns(free: &Window, seen: &Window) -> Vec<Option<f64>> {
    free.speeds.iter().zip(&seen.speeds).map(|(free, seen)| Some((*free)? / (*seen)?)).collect()
}

fn report(row: &mut Row, end: &str, cast: &Cast, seen: &Window, slow: &[Option<f64>]) {
    let alive: Vec<f64> = slow.iter().copied().flatten().collect();
    let ended = slow.len() - alive.len();
    // A mean without the programs that ended would look like a success.
    let mean = if ended == 0 { vec![geomean(&alive)] } else { Vec::new() };
    row.figure(&format!("eight_slowdown{end}"), &mean);
    row.figure(&format!("eight_slowest{end}"), &[alive.iter().copied().fold(0.0, f64::max)]);
    row.figure(&format!("eight_ended{end}"), &[ended as f64]);
    row.figure(&format!("eight_most_bytes{end}"), &[seen.most_bytes as f64]);
    row.figure(&format!("eight_engine_cpu_pct{end}"), &[seen.engine_pct]);
    row.figure(&format!("eight_wrong_bytes{end}"), &[seen.wrong as f64]);
    for (at, (member, slow)) in cast.members.iter().zip(slow).enumerate() {
        let number = at / (cast.members.len() / 2) + 1;
        let values: Vec<f64> = slow.iter().copied().collect();
        row.figure(&format!("eight_slowdown_{}_{number}{end}", member.program.name()), &values);
    }
}

impl Cast {
    /// Starts all programs, one after the other: each stands still until the last one has its data.
    fn start(bench: &mut Bench, side: Side) -> Result<Self> {
        let cgroup = if side.is_kernel() { Some(bench.guard.cgroup()?) } else { None };
        let mut cast = Self { side, members: Vec::new(), vms: Vec::new(), cgroup };
        let programs: &[Program] = if bench.options.quick { &CAST_QUICK } else { &CAST };
        for seed in [SEED, SEED + 1] {
            programs.iter().try_for_each(|program| cast.add(bench, *program, seed))?;
        }
        cast.signal(Signal::CONT)?;
        Ok(cast)
    }

    /// Starts a program, which then stands still.
    fn add(&mut self, bench: &mut Bench, program: Program, seed: u64) -> Result<()> {
        let name = bench.vm_name();
        let memory = memory_of(bench, self.side, &name)?;
        let mut all = CpuSet::new();
        // The kernel ignores those that are not there.
        (0..CpuSet::MAX_CPU).for_each(|cpu| all.set(cpu));
        let place = |pid: u32| {
            bench.guard.end_process(pid)?;
            if let Some(cgroup) = &self.cgroup {
                cgroup::enter(cgroup, pid)?;
            }
            sched_setaffinity(pid_of(pid), &all).context("Letting a program have all CPUs")
        };
        let keys = if bench.options.quick { KEYS_QUICK } else { KEYS };
        let (work, pid) = start(program, &memory, Sequence::Random, keys, seed, place)?;
        self.vms.extend(vm_of(bench, self.side, name, pid)?);
        let pid = pid_of(pid).context("a program has a process id")?;
        kill_process(pid, Signal::STOP).context("Stopping a program")?;
        self.members.push(Member { program, work, pid });
        Ok(())
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        self.members
            .iter()
            .try_for_each(|member| kill_process(member.pid, signal).with_context(|| format!("Sending {signal:?}")))
    }

    /// Lets all programs together have this much.
    fn hold_to(&self, bench: &Bench, policy: Kind, bytes: Option<u64>) -> Result<()> {
        let Some(cgroup) = &self.cgroup else {
            let patch = PolicyPatch { policy: Some(policy), budget_bytes: Some(bytes), ..PolicyPatch::default() };
            bench.daemon.api().patch_policy(&patch)?;
            return Ok(());
        };
        // While the programs run, the kernel refuses a limit that it cannot reach at once.
        self.signal(Signal::STOP)?;
        let limited = cgroup::limit(cgroup, bytes.unwrap_or(cgroup::UNLIMITED));
        self.signal(Signal::CONT)?;
        limited
    }

    fn used(&self, bench: &Bench) -> Result<u64> {
        match &self.cgroup {
            Some(cgroup) => cgroup::usage(cgroup),
            None => Ok(bench.daemon.api().vms()?.iter().map(|vm| vm.resident_bytes).sum()),
        }
    }

    /// Measures all programs at once: until the unit of work that each has at the end of this time is done.
    fn window(&mut self, bench: &Bench, time: Duration) -> Result<Window> {
        let engine = bench.engine_pid()?;
        // A thread that ends in the window, as a policy's does when another one comes, counts, too.
        let (begun, engine_us) = (Instant::now(), cpu::of_process_id(engine)?);
        let is_over = AtomicBool::new(false);
        let mut members = std::mem::take(&mut self.members);
        let (found, most_bytes) = std::thread::scope(|scope| {
            let is_over = &is_over;
            let (mut servers, mut batches) = (Vec::new(), Vec::new());
            for (at, member) in members.iter_mut().enumerate() {
                match &mut member.work {
                    Work::Server { load, .. } => servers.push((at, scope.spawn(|| serve(load, is_over)))),
                    Work::Batch(batch) => batches.push((at, scope.spawn(move || units(batch, time)))),
                }
            }
            let mut most: Result<u64> = Ok(0);
            while begun.elapsed() < time || batches.iter().any(|(_, batch)| !batch.is_finished()) {
                std::thread::sleep(SAMPLE);
                most = most.and_then(|most| Ok(most.max(self.used(bench)?)));
            }
            is_over.store(true, Relaxed);
            let found = servers.into_iter().chain(batches).map(|(at, thread)| (at, thread.join()));
            let mut found: Vec<_> = found.collect();
            found.sort_by_key(|(at, _)| *at);
            (found, most)
        });
        self.members = members;
        let mut window = Window { speeds: Vec::new(), most_bytes: most_bytes?, engine_pct: 0.0, wrong: 0 };
        for (_, one) in found {
            match one {
                Ok(Ok((per_s, wrong))) => {
                    window.speeds.push(Some(per_s));
                    window.wrong += wrong;
                }
                Ok(Err(error)) if self.side.is_kernel() => {
                    eprintln!("{:?}: a program ended: {error:#}", self.side);
                    window.speeds.push(None);
                }
                Ok(Err(error)) => return Err(error),
                Err(_) => bail!("the thread of a program panicked"),
            }
        }
        let engine_us = cpu::of_process_id(engine)? - engine_us;
        window.engine_pct = engine_us / begun.elapsed().as_secs_f64() / 1e4;
        Ok(window)
    }

    /// Reads everything once more, and ends all.
    fn end(mut self, bench: &Bench) -> Result<()> {
        for member in &mut self.members {
            let wrong = member.work.check_all()?;
            if wrong > 0 {
                bail!("{wrong} values of {} are wrong", member.program.name());
            }
        }
        drop(self.members);
        self.vms.iter().try_for_each(|vm| bench.daemon.wait_until_gone(vm))
    }
}

/// Requests a second until the window is over, and the number of wrong values.
fn serve(load: &mut Load, is_over: &AtomicBool) -> Result<(f64, u64)> {
    let (begun, mut took, mut wrong) = (Instant::now(), Vec::new(), 0);
    while !is_over.load(Relaxed) {
        wrong += load.burst(BURST, &mut took)?;
    }
    Ok(((took.len() * DEPTH) as f64 / begun.elapsed().as_secs_f64(), wrong))
}

/// Units a second, and the number of wrong ones.
fn units(batch: &mut Batch, time: Duration) -> Result<(f64, u64)> {
    let window = batch.run(time)?;
    Ok((window.per_s, window.wrong))
}

fn pid_of(pid: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(pid).ok()?)
}
