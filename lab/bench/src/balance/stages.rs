//! Blowfish, section 5.2: programs whose need for memory changes, in pairs that share half of what both fill.
//!
//! Before: two VMs of different programs have filled their memory. After: a row for each pair.
//! Threads: the caller's. Units: a slowdown is the time of one run through all stages over its time without pressure,
//! with the same neighbour. Promise: every pair of the four programs is there. Runs are measured from the moment memory
//! gets short; a VM that ends before its neighbour continues with its next run.
//!
//! | program | its stages, some 24 s alone | after the paper's |
//! |---|---|---|
//! | triangles | a third, two thirds, then all of a graph, mostly its middle | GAPBS triangle count, three parts |
//! | means | load all, then sweep over three fifths or compute on little, five times | Spark k-means: load, then vary |
//! | compiler | a seventh, then four fifths, then little again, and half | 602.gcc_s: phases, no locality |
//! | cache | keys by a bell curve over a half, which moves through all | Memcached, skewed with churn |

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ballast_base::Bytes;
use ballast_testvm::{Pattern, Spec, Stage, Workload};

use super::cast::Cast;
use super::levels::geomean;
use super::setup::{POLICY, Scale, both_sides, pairs_of};
use crate::order::{Answer, Order};
use crate::report::Row;
use crate::rig::Bench;
use crate::sweep::Side;

/// Rounds of computing before an operation: 4.5 us.
const THINK: u64 = 1500;
/// Runs with half of the memory.
const RUNS: usize = 3;
/// Time between two samples of the VMs' progress.
const SAMPLE: Duration = Duration::from_millis(50);

/// A program: its name and its stages.
struct Program {
    name: &'static str,
    stages: Vec<Stage>,
}

impl Program {
    /// `second`: operations in a second.
    fn all(second: u64) -> [Self; 4] {
        let stage =
            |seconds: f64, from, part, pattern| Stage { ops: (second as f64 * seconds) as u64, from, part, pattern };
        let mut means = vec![stage(0.08, 0.0, 1.0, Pattern::Sequential)];
        for _ in 0..5 {
            means.push(stage(3.0, 0.0, 0.6, Pattern::Sequential));
            means.push(stage(2.0, 0.0, 0.05, Pattern::Uniform));
        }
        let thirds = [1.0, 2.0, 3.0].map(|thirds| stage(8.0, 0.0, thirds / 3.0, Pattern::Bell));
        let units =
            [(4.0, 0.0, 0.15), (3.0, 0.0, 0.8), (5.0, 0.0, 0.2), (4.0, 0.3, 0.5), (5.0, 0.85, 0.15), (3.0, 0.0, 0.4)];
        let keys = [0.0, 1.0, 2.0, 3.0].map(|at| stage(6.0, at / 6.0, 0.5, Pattern::Bell));
        [
            Self { name: "triangles", stages: thirds.to_vec() },
            Self { name: "means", stages: means },
            Self {
                name: "compiler",
                stages: units.map(|(seconds, from, part)| stage(seconds, from, part, Pattern::Uniform)).to_vec(),
            },
            Self { name: "cache", stages: keys.to_vec() },
        ]
    }

    /// Operations of one run.
    fn ops(&self) -> u64 {
        self.stages.iter().map(|stage| stage.ops).sum()
    }

    fn spec(&self, ram_bytes: u64) -> Spec {
        let spec = Spec::new(Workload::Stages, Bytes(ram_bytes));
        Spec { stages: self.stages.clone(), think: THINK, write_fraction: 0.1, ..spec }
    }
}

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let programs = Program::all(if bench.options.quick { 2_000 } else { 200_000 });
    for programs in pairs_of(&programs, bench.options.quick) {
        let name = programs.map(|program| program.name).join("+");
        let mut row = bench.row(&format!("{name} in stages, half of their peak"));
        row.fact("vms", 2);
        row.fact("pair", name);
        both_sides(bench, &mut row, "pair_slowdown", |bench, row, side, prefix| {
            let slow = pair(bench, side, programs, scale)?;
            let mean: Vec<f64> = slow.iter().map(|run| geomean(run)).collect();
            row.figure(&format!("{prefix}pair_slowdown"), &mean);
            for (vm, program) in programs.iter().enumerate() {
                let of: Vec<f64> = slow.iter().map(|run| run[vm]).collect();
                row.figure(&format!("{prefix}slowdown_{}", program.name), &of);
            }
            Ok(())
        })?;
        each(row)?;
    }
    Ok(())
}

/// The slowdown of both VMs, in each run with half of their memory.
fn pair(bench: &mut Bench, side: Side, programs: [&Program; 2], scale: Scale) -> Result<Vec<Vec<f64>>> {
    let mut cast = Cast::start(bench, side, &programs.map(|program| program.spec(scale.ram_bytes)))?;
    let ops = programs.map(Program::ops);
    let alone = one_run(&mut cast, ops)?;
    let half = cast.size_bytes() / 2;
    cast.begin_to_hold(bench, POLICY, half)?;
    let mut slow = Vec::new();
    for _ in bench.progress.over("run", 0..RUNS) {
        let took = one_run(&mut cast, ops)?;
        slow.push(took.iter().zip(&alone).map(|(took, alone)| took / alone).collect());
    }
    cast.verify(bench)?;
    Ok(slow)
}

/// The time in seconds that each VM takes for `ops` operations from now on.
fn one_run(cast: &mut Cast, ops: [u64; 2]) -> Result<Vec<f64>> {
    let start = Instant::now();
    let mut from = vec![None; cast.vms.len()];
    let mut last = vec![(0.0, 0); cast.vms.len()];
    let mut took = vec![None; cast.vms.len()];
    while took.iter().any(Option::is_none) {
        for (at, vm) in cast.vms.iter_mut().enumerate() {
            let Answer::Progress { ops: done } = vm.worker.ask(&Order::Progress)? else { bail!("a VM stands") };
            let now = start.elapsed().as_secs_f64();
            let (began, first) = *from[at].get_or_insert((now, done));
            let end = first + ops[at];
            if done >= end && took[at].is_none() {
                // Interpolate between the last sample and this one.
                let (then, before) = last[at];
                let part = (end - before) as f64 / (done - before).max(1) as f64;
                took[at] = Some(then + (now - then) * part - began);
            }
            last[at] = (now, done);
        }
        std::thread::sleep(SAMPLE);
    }
    Ok(took.into_iter().flatten().collect())
}
