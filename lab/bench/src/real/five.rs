//! Which part of a program's memory can be far for 5 % of its speed (Blowfish, section 5.1.1, figures 6 and 7).
//!
//! Before: as for `bench real`. After: a row for the program. Units: percent of the memory that the program had without
//! a limit. Promise: all levels of a side are of one process, from the most memory to the least; a level counts when it
//! and all before it kept the speed.

use anyhow::Result;
use ballast_realmem::keys::Sequence;

use super::running::{Running, has_swap, needs};
use super::turn::{LIMITED, LIMITED_QUICK, SEED, SETTLE_QUICK, Turn};
use crate::options::{RealProgram as Program, RealSide as Side};
use crate::report::Row;
use crate::rig::Bench;

/// Speed that is enough, of that without a limit.
const ENOUGH: f64 = 0.95;
/// The next level is this much lower, in percent of the memory. The last step is one of `FINE`.
const STEP: u64 = 10;
const FINE: u64 = 5;

pub(super) fn run(bench: &mut Bench, program: Program, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    needs(&[program])?;
    let sides = match bench.options.real.side {
        Some(side) => vec![side],
        // A JVM finds its libraries by its program's file, which of an adopted program is another one.
        None if program == Program::Jvm => vec![Side::Ballast, Side::Kernel],
        None => vec![Side::Ballast, Side::Adopted, Side::Kernel],
    };
    let name = program.name();
    let order = bench.options.real.order.unwrap_or(Sequence::Random);
    let mut row = bench.row(&format!("{name}: memory that can be far for 5 % of its speed"));
    row.fact("program", name);
    let rounds = bench.options.real.rounds.unwrap_or(1);
    for side in sides {
        if !has_swap(bench, side, &mut row) {
            continue;
        }
        let mut found = Vec::new();
        for round in 0..rounds {
            found.push(part(bench, program, order, side, SEED + round)?);
        }
        let end = side.end_of_keys();
        let mut figure = |key: &str, value: fn(&(u64, Turn)) -> f64| {
            row.figure_of(&format!("five_{key}{end}"), &found, value);
        };
        figure("far_pct", |(far, _)| *far as f64);
        figure("speed", |(_, turn)| turn.speed);
        figure("p95_us_of_16", |(_, turn)| turn.limited.p95_us);
        figure("engine_cpu_pct", |(_, turn)| turn.engine_pct);
        figure("wrong_bytes", |(_, turn)| turn.wrong);
    }
    each(row)
}

/// The largest part that was far at enough speed, with the figures there.
fn part(bench: &mut Bench, program: Program, order: Sequence, side: Side, seed: u64) -> Result<(u64, Turn)> {
    let quick = bench.options.quick;
    let mut running = Running::begin(bench, program, order, side, seed)?;
    let (settle, limited) = if quick { (SETTLE_QUICK, LIMITED_QUICK) } else { (LIMITED, LIMITED) };
    let mut best = (0, Turn { speed: 1.0, ..Turn::default() });
    let (mut level, mut step) = (100 - STEP, STEP);
    loop {
        running.limit(bench, level)?;
        let turn = running.watch(bench, settle).and_then(|_| running.watch(bench, limited));
        let is_enough = match turn {
            Ok(turn) if turn.speed >= ENOUGH => {
                best = (100 - level, turn);
                true
            }
            Ok(_) => false,
            // The kernel's out-of-memory killer ended it. Another one tries the finer step.
            Err(error) if side.is_kernel() => {
                eprintln!("{side:?} {level} %: {error:#}");
                if step == FINE {
                    return Ok(best);
                }
                drop(running);
                running = Running::begin(bench, program, order, side, seed)?;
                false
            }
            Err(error) => return Err(error),
        };
        match (is_enough, step) {
            (true, STEP) if level > STEP => level -= STEP,
            (false, STEP) => (level, step) = (level + FINE, FINE),
            _ => break,
        }
    }
    match running.end(bench) {
        Ok(wrong) => best.1.wrong = wrong,
        Err(_) if side.is_kernel() => {}
        Err(error) => return Err(error),
    }
    Ok(best)
}
