//! A VM whose demand jumps: how soon it reaches its final speed.
//!
//! Before: four VMs share less memory than they have; one is nearly idle, and its memory has gone to the others. After:
//! it is as busy as the others, and its speed over time is known.
//! Threads: the caller's. Units: seconds; a speed is steady in the last third.
//! Promise: the steady speed is compared with the speed without pressure, because a VM may converge to a low speed.
//! Speeds also swing with the scheduler, so the time until the VM held nine tenths of its final memory is reported as
//! well.

use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use ballast_testvm::{Spec, Workload};

use super::cast::{Cast, spec};
use super::setup::{POLICY, Scale, Side};
use crate::order::{Answer, Order};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;

/// Rounds of computing before an operation: 3 us, and 100 ms.
const BUSY: u64 = 1000;
const IDLE: u64 = 30_000_000;
const JUMPS: usize = 3;
/// Percent of all RAM: the VM that jumps can have nearly all of its own, and each other VM three fifths.
const LEVEL_PCT: u64 = 68;

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("a VM whose demand jumps");
    row.fact("vms", 4);
    row.fact("level_pct", LEVEL_PCT);
    row.fact("vm_bytes", scale.ram_bytes);
    let mut specs = vec![spec(Workload::Uniform, scale.ram_bytes, 1, 0)];
    for seed in 2..=4 {
        let mut hotset = spec(Workload::Hotset, scale.ram_bytes, seed, 0);
        (hotset.hot_fraction, hotset.hot_weight, hotset.think) = (0.5, 0.999, BUSY);
        specs.push(hotset);
    }
    specs[0].think = BUSY;
    figures(bench, &mut row, Side::Ballast, "", &specs, scale)?;
    let kernel = match bench.kernel.clone() {
        Ok(_) => figures(bench, &mut row, Side::Kernel, "kernel_", &specs, scale),
        Err(why) => Err(anyhow!("{why}")),
    };
    // The kernel may end a VM.
    if let Err(error) = kernel {
        row.because(&format!("the kernel: {error:#}"));
        row.figure("kernel_converge_s", &[]);
    }
    each(row)
}

fn figures(bench: &mut Bench, row: &mut Row, side: Side, prefix: &str, specs: &[Spec], scale: Scale) -> Result<()> {
    let jumps = jumps(bench, side, specs, scale)?;
    row.figure_of(&format!("{prefix}converge_s"), &jumps, |jump| jump.converge_s);
    row.figure_of(&format!("{prefix}steady_slowdown"), &jumps, |jump| jump.steady_slowdown);
    let others: Vec<f64> = jumps.iter().flat_map(|jump| jump.others_slowdown.iter().copied()).collect();
    row.figure(&format!("{prefix}others_slowdown"), &others);
    if side == Side::Ballast {
        row.figure_of("memory_s", &jumps, |jump| jump.memory_s);
        row.figure_of("limit_changes_per_min", &jumps, |jump| jump.changes_per_min);
    }
    Ok(())
}

struct Jump {
    converge_s: f64,
    /// On Ballast's side only.
    memory_s: f64,
    steady_slowdown: f64,
    others_slowdown: Vec<f64>,
    changes_per_min: f64,
}

fn jumps(bench: &mut Bench, side: Side, specs: &[Spec], scale: Scale) -> Result<Vec<Jump>> {
    let mut cast = Cast::start(bench, side, specs)?;
    cast.window(bench, scale.window / 4)?;
    let before = cast.window(bench, scale.window)?.ops_per_s;
    let bytes = cast.size_bytes() * LEVEL_PCT / 100;
    cast.vms[0].worker.ask(&Order::Think(IDLE))?;
    cast.begin_to_hold(bench, POLICY, bytes)?;
    let count = if bench.options.quick { 1 } else { JUMPS };
    let jumps = (0..count).map(|_| jump(bench, &mut cast, &before, scale)).collect::<Result<_>>()?;
    cast.verify(bench)?;
    Ok(jumps)
}

fn jump(bench: &mut Bench, cast: &mut Cast, before: &[f64], scale: Scale) -> Result<Jump> {
    cast.vms[0].worker.ask(&Order::Think(IDLE))?;
    cast.window(bench, scale.settle)?;

    let length = scale.window * 2 + scale.settle;
    let slice = Order::Slice { ms: (length.as_millis() / 150) as u64 };
    let (start, mut speeds, mut held) = (Instant::now(), Vec::new(), Vec::new());
    cast.vms[0].worker.ask(&Order::Think(BUSY))?;
    let mut changed = None;
    while start.elapsed() < length {
        if changed.is_none() && start.elapsed() > length * 2 / 3 {
            changed = Some((bench.daemon.api().policy()?.changed_limits, Instant::now()));
        }
        let Answer::Sliced { ops, wall_us, .. } = cast.vms[0].worker.ask(&slice)? else { bail!("a VM stands") };
        speeds.push((start.elapsed().as_secs_f64(), ops as f64 * 1e6 / wall_us));
        if cast.side == Side::Ballast {
            let bytes = bench.daemon.api().vm(&cast.vms[0].name)?.resident_bytes;
            held.push((start.elapsed().as_secs_f64(), bytes as f64));
        }
    }
    let now = bench.daemon.api().policy()?.changed_limits;
    let changes_per_min = changed.map_or(0.0, |(then, at)| (now - then) as f64 * 60.0 / at.elapsed().as_secs_f64());
    let after = cast.window(bench, scale.window)?.ops_per_s;
    let (steady, holds) = (last(&speeds), last(&held));
    let after_s = |course: &[(f64, f64)], enough| converged(course, enough).unwrap_or(length).as_secs_f64();
    Ok(Jump {
        converge_s: after_s(&speeds, steady * 0.9),
        memory_s: after_s(&held, holds * 0.9),
        steady_slowdown: before[0] / steady,
        others_slowdown: (1..before.len()).map(|vm| before[vm] / after[vm]).collect(),
        changes_per_min,
    })
}

fn last(course: &[(f64, f64)]) -> f64 {
    let last: Vec<f64> = course[course.len() * 2 / 3..].iter().map(|(_, value)| *value).collect();
    median(&last).unwrap_or(0.0)
}

/// The first time from which on the median of five slices is at least `enough`.
fn converged(speeds: &[(f64, f64)], enough: f64) -> Option<Duration> {
    let fast = |five: &&[(f64, f64)]| median(&five.iter().map(|(_, speed)| *speed).collect::<Vec<_>>()) >= Some(enough);
    speeds.windows(5).find(fast).map(|five| Duration::from_secs_f64(five[2].0))
}
