//! `bench real`: a real program at full speed, with part of its memory far, beside the kernel's swap.
//!
//! Before: `scripts/real-programs.sh` has unpacked the programs; this is root; the kernel's side needs zram and a
//! memory cgroup. After: a row for each level of memory. Threads: the bench's one is the load, on one CPU; the program
//! has the other one, and so has the engine whatever it takes. Units: in every key. Promise: a side's speed under a
//! limit is compared with its own speed without one, just before; every byte is checked.

mod bloat;
mod day;
mod eight;
mod five;
mod running;
mod turn;

use std::time::Duration;

use anyhow::Result;
use ballast_realmem::keys::Sequence;

use self::running::{Running, has_swap, needs, protocol_of};
use self::turn::{LIMITED, LIMITED_QUICK, SEED, SETTLE_QUICK, Turn};
use crate::options::{Part, RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;

/// Part of the memory that a side may have, in percent.
const LEVELS: [u64; 4] = [90, 80, 65, 50];
/// Rounds: each side has one turn in each.
const ROUNDS: u64 = 3;
/// Time under the limit before its figures are taken, and while they are.
const SETTLE: Duration = Duration::from_secs(40);

/// Measures; `each` gets each row.
pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let program = bench.options.real.program.unwrap_or(Program::Redis);
    match bench.options.part {
        Some(Part::Day) => day::run(bench, each),
        Some(Part::Bloat) => bloat::run(bench, each),
        Some(Part::Eight) => eight::run(bench, each),
        Some(Part::Five) => five::run(bench, program, each),
        _ => levels(bench, program, each),
    }
}

/// A program at each level of memory.
fn levels(bench: &mut Bench, program: Program, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    needs(&[program])?;
    let (options, protocol) = (bench.options.clone(), protocol_of(program));
    let orders = match (options.real.order, options.quick) {
        (Some(order), _) => vec![order],
        (None, quick) if quick || protocol.is_none() => vec![Sequence::Repeat],
        _ => vec![Sequence::Repeat, Sequence::Random],
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

fn measure(bench: &mut Bench, program: Program, sequence: Sequence, level: u64, sides: &[Side]) -> Result<Row> {
    let program_name = program.name();
    let mut row = bench.row(&format!("{program_name}, {}, {level} % of its memory", sequence.name()));
    row.fact("program", program_name);
    row.fact("order", sequence.name());
    row.fact("memory_pct", level);
    let rounds = bench.options.real.rounds.unwrap_or(if bench.options.quick { 1 } else { ROUNDS });
    let mut turns: Vec<(Side, Vec<Turn>)> = sides.iter().map(|side| (*side, Vec::new())).collect();
    for round in 0..rounds {
        for (side, of_side) in &mut turns {
            if !has_swap(bench, *side, &mut row) {
                continue;
            }
            match turn(bench, program, sequence, level, *side, SEED + round) {
                Ok(turn) => of_side.push(turn),
                // Its out-of-memory killer ends a program that it cannot hold to the limit.
                Err(error) if side.is_kernel() => row.because(&format!("the kernel's side: {error:#}")),
                Err(error) => return Err(error),
            }
        }
    }
    let speeds = |turns: &[Turn]| turns.iter().map(|turn| turn.speed).collect::<Vec<_>>();
    for (side, of_side) in &turns {
        let end = side.end_of_keys();
        let mut figure = |key: &str, value: fn(&Turn) -> f64| {
            row.figure_of(&format!("real_{key}{end}"), of_side, value);
        };
        figure("speed", |turn| turn.speed);
        figure("requests_per_s_without_limit", |turn| turn.free_per_s);
        figure("requests_per_s", |turn| turn.limited.per_s);
        if protocol_of(program).is_some() {
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
    let mut running = Running::begin(bench, program, sequence, side, seed)?;
    running.limit(bench, level)?;
    // Each part of the way is watched, since it shows whether the choice of pages converges.
    let settle = bench.options.real.settle.map(|seconds| Duration::from_secs(seconds.into()));
    let settle = settle.unwrap_or(if quick { SETTLE_QUICK } else { SETTLE });
    let (step, mut left) = (Duration::from_secs(20), settle);
    while !left.is_zero() {
        let part = left.min(step);
        running.watch(bench, part)?;
        left -= part;
    }
    let mut turn = running.watch(bench, if quick { LIMITED_QUICK } else { LIMITED })?;
    turn.wrong = running.end(bench)?;
    Ok(turn)
}
