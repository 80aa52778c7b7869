//! Maestro's experiment: eight VMs, two of each workload, at falling levels of memory.
//!
//! Before: eight VMs of each side have filled their memory and run without pressure. After: a row for each level.
//! Threads: the caller's. Units: slowdowns; a level is in percent of the RAM of all VMs.
//! Promise: the speed without pressure is measured on each side by itself, before and after each level. A level is
//! compared with the mean of these two, which limits the effect of a drifting machine; their difference is the noise.
//! No VM's slowdown is left out.

use anyhow::Result;
use ballast_policy::Kind;
use serde_json::json;

use super::cast::{Cast, Window, spec, word};
use super::setup::{CAST, POLICY, Scale, Side};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::{geomean, median};

/// Percent of all RAM.
const LEVELS: [u64; 4] = [100, 75, 60, 45];
const QUICK: [u64; 2] = [100, 60];
/// At this level, in percent, all policies are measured. At the other levels below 100, only Maestro's and ours are.
const SHORT: u64 = 60;

pub(super) fn speeds(windows: &[Window]) -> Vec<f64> {
    let vms = windows.first().map_or(0, |window| window.ops_per_s.len());
    (0..vms).map(|vm| windows.iter().map(|window| window.ops_per_s[vm]).sum::<f64>() / windows.len() as f64).collect()
}

pub(super) fn slowdowns(before: &[f64], window: &Window) -> Vec<f64> {
    before.iter().zip(&window.ops_per_s).map(|(before, now)| before / now).collect()
}

/// Settle, then measure. The VMs are stopped before and after.
pub(super) fn measure(
    bench: &Bench,
    cast: &mut Cast,
    policy: Kind,
    bytes: Option<u64>,
    scale: Scale,
    windows: usize,
) -> Result<Vec<Window>> {
    match bytes {
        Some(bytes) => cast.begin_to_hold(bench, policy, bytes)?,
        None => cast.wake()?,
    }
    cast.window(bench, scale.settle)?;
    let seen = (0..windows).map(|_| cast.window(bench, scale.window)).collect::<Result<_>>()?;
    cast.rest(bench)?;
    Ok(seen)
}

pub(super) struct Alone {
    pub cast: Cast,
    pub speeds: Vec<f64>,
}

pub(super) struct Base {
    /// Speed of each VM without pressure: the mean of before and after.
    pub speeds: Vec<f64>,
    /// Slowdown after the level against before it, in each window: the noise.
    pub aa: Vec<f64>,
}

impl Alone {
    pub fn start(bench: &mut Bench, side: Side, specs: &[ballast_testvm::Spec], scale: Scale) -> Result<Self> {
        let mut cast = Cast::start(bench, side, specs)?;
        cast.rest(bench)?;
        let soon = Scale { settle: scale.window / 4, ..scale };
        let windows = measure(bench, &mut cast, Kind::None, None, soon, scale.windows)?;
        Ok(Self { cast, speeds: speeds(&windows) })
    }

    pub fn after(&mut self, bench: &Bench, scale: Scale) -> Result<Base> {
        let windows = measure(bench, &mut self.cast, Kind::None, None, scale, scale.windows.div_ceil(2))?;
        let aa = windows.iter().map(|window| geomean(&slowdowns(&self.speeds, window))).collect();
        let before = std::mem::replace(&mut self.speeds, speeds(&windows));
        let speeds = before.iter().zip(&self.speeds).map(|(before, after)| (before + after) / 2.0).collect();
        Ok(Base { speeds, aa })
    }
}

pub(super) fn eight(scale: Scale) -> Vec<ballast_testvm::Spec> {
    let of = |seed| CAST.map(|workload| spec(workload, scale.ram_bytes, seed, scale.store_ops));
    [of(1), of(2)].concat()
}

pub(super) fn levels_of(bench: &Bench) -> Vec<u64> {
    let levels: &[u64] = if bench.options.quick { &QUICK } else { &LEVELS };
    Some(bench.options.levels.clone()).filter(|chosen| !chosen.is_empty()).unwrap_or(levels.to_vec())
}

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let specs = eight(scale);
    let mut ours = Alone::start(bench, Side::Ballast, &specs, scale)?;
    let mut theirs = match bench.kernel.clone() {
        Ok(_) => Alone::start(bench, Side::Kernel, &specs, scale).map_err(|error| format!("{error:#}")),
        Err(why) => Err(why),
    };
    for level in levels_of(bench) {
        let bytes = ours.cast.size_bytes() * level / 100;
        let mut row = bench.row(&format!("eight VMs, {level} % of their memory"));
        row.fact("vms", specs.len());
        row.fact("level_pct", level);
        row.fact("level_bytes", bytes);
        row.fact("vm_bytes", scale.ram_bytes);
        row.fact("policy", POLICY.to_string());
        let seen = measure(bench, &mut ours.cast, POLICY, Some(bytes), scale, scale.windows)?;
        row.figure_of("limit_changes_per_min", &seen, |window| window.changed as f64 * 60.0 / window.seconds);
        row.figure_of("control_cpu_us_per_tick", &seen, |window| window.control_us / window.ticks.max(1) as f64);
        row.figure_of("engine_cpu_pct", &seen, |window| window.engine_us / window.seconds / 1e4);
        let others: &[Kind] = match level {
            100 => &[],
            SHORT => &[Kind::Maestro, Kind::Pressure],
            _ => &[Kind::Maestro],
        };
        let by_others = others
            .iter()
            .map(|policy| measure(bench, &mut ours.cast, *policy, Some(bytes), scale, scale.windows))
            .collect::<Result<Vec<_>>>()?;
        let base = ours.after(bench, scale)?;
        let us = report(&mut row, "", &ours.cast, &base, &seen);
        for (policy, seen) in others.iter().zip(by_others) {
            let slow = |window: &Window| geomean(&slowdowns(&base.speeds, window));
            row.figure_of(&format!("{policy}_geomean_slowdown"), &seen, slow);
            row.figure_of(&format!("{policy}_resident_bytes"), &seen, |window| window.resident_bytes);
        }
        let kernel = theirs.as_mut().map_err(|why| why.clone()).and_then(|theirs| {
            let both = measure(bench, &mut theirs.cast, Kind::None, Some(bytes), scale, scale.windows)
                .and_then(|seen| Ok((seen, theirs.after(bench, scale)?)));
            let (seen, base) = both.map_err(|error| format!("{error:#}"))?;
            row.fact("kernel_own_bytes", theirs.cast.own_bytes);
            Ok(report(&mut row, "kernel_", &theirs.cast, &base, &seen))
        });
        match kernel {
            Ok(kernel) => {
                // The improvement is the kernel's time over ours, minus one.
                let faster = us.iter().zip(&kernel).map(|(us, kernel)| (kernel / us - 1.0) * 100.0);
                row.difference("improvement_pct", &faster.collect::<Vec<_>>());
            }
            Err(why) => {
                ["kernel_geomean_slowdown", "improvement_pct"].iter().for_each(|key| row.figure(key, &[]));
                row.because(&format!("the kernel at {level} %: {why}"));
                // A VM that was killed stays dead.
                theirs = Err(why);
            }
        }
        each(row)?;
    }
    ours.cast.wake()?;
    ours.cast.verify(bench)?;
    if let Ok(theirs) = theirs {
        theirs.cast.wake()?;
        theirs.cast.verify(bench)?;
    }
    Ok(())
}

/// Report one side's figures at a level. Returns the geometric mean of each window.
pub(super) fn report(row: &mut Row, prefix: &str, cast: &Cast, base: &Base, seen: &[Window]) -> Vec<f64> {
    let slow: Vec<Vec<f64>> = seen.iter().map(|window| slowdowns(&base.speeds, window)).collect();
    let means: Vec<f64> = slow.iter().map(|window| geomean(window)).collect();
    row.figure(&format!("{prefix}aa_geomean_slowdown"), &base.aa);
    row.figure(&format!("{prefix}geomean_slowdown"), &means);
    row.figure_of(&format!("{prefix}resident_bytes"), seen, |window| window.resident_bytes);
    row.figure_of(&format!("{prefix}most_resident_bytes"), seen, |window| window.most_bytes);
    let stored = if prefix.is_empty() { "store_bytes" } else { "zram_bytes" };
    row.figure_of(stored, seen, |window| window.far_bytes);
    row.figure_of(&format!("{prefix}others_cpu_pct"), seen, |window| window.others_cpu_pct);
    for workload in CAST {
        let of = |window: &Window| {
            let vms = cast.vms.iter().zip(&window.misses_per_kop);
            vms.filter(|(vm, _)| vm.spec.workload == workload).map(|(_, misses)| misses / 2.0).sum::<f64>()
        };
        row.figure_of(&format!("{prefix}misses_per_kop_{}", word(workload)), seen, of);
    }
    let mut worst = (0.0, String::new());
    for (at, vm) in cast.vms.iter().enumerate() {
        let of: Vec<f64> = slow.iter().map(|window| window[at]).collect();
        let name = format!("{}_{}", word(vm.spec.workload), vm.spec.seed);
        if let Some(slow) = median(&of).filter(|slow| *slow > worst.0) {
            worst = (slow, name.clone());
        }
        row.figure(&format!("{prefix}slowdown_{name}"), &of);
    }
    row.fact(&format!("{prefix}worst_vm"), json!(worst.1));
    means
}
