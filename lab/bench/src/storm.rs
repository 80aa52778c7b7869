//! The effect of a neighbour that faults as fast as it can on a VM's restores.
//!
//! Before: a victim has far pages, and a neighbour is held to half of the memory it touches. After: a row has the
//! victim's percentiles alone and beside the storm.
//! Units: microseconds per touch. Promise: turns alone and beside the storm alternate; while the victim is measured
//! alone, the neighbour does nothing, and its reclaim has ended. The figures of a round are medians over its turns.

use std::time::Duration;

use anyhow::{Result, bail};
use ballast_base::PageCount;

use crate::order::{Answer, Data, Order, Pace};
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::stats::median;
use crate::subject::{Side, Way, out, touch};

const WAYS: [Way; 2] = [Way::Ballast, Way::Kernel];
/// The keys of a turn alone, and below, of one beside the storm.
const SOLO: [&str; 2] = ["solo_us_p50", "solo_us_p99"];
const BESIDE: [&str; 2] = ["beside_us_p50", "beside_us_p99"];
const TURN: u64 = 2000;
const LEAD: Duration = Duration::from_millis(10);
/// Pages of the neighbour, which is held to half of them.
const NEIGHBOUR_PAGES: u64 = 16_384;

/// In each turn the victim's pages go out, and then it touches some of them, alone or beside the storm.
fn measure(bench: &mut Bench, side: &mut Side, turns: u64, seed: u64) -> Result<()> {
    let (victim, neighbour) = side.guests.split_at_mut(1);
    neighbour[0].hold_to(bench, PageCount(NEIGHBOUR_PAGES / 2).bytes().0)?;
    let mut of_turns = Figures::default();
    for turn in 0..turns {
        let beside = turn % 2 == 1;
        out(bench, victim)?;
        if beside {
            neighbour[0].ask(&Order::Storm)?;
            std::thread::sleep(LEAD);
        }
        let summary = touch(victim, seed + turn, Pace { most: TURN, ..Pace::ALL })?[0].summary;
        if beside {
            let Answer::Sliced { ops, wall_us, .. } = neighbour[0].ask(&Order::Pause)? else {
                bail!("a storm does not end")
            };
            side.figures.add("neighbour_touches_per_s", ops as f64 * 1e6 / wall_us);
        }
        let [p50, p99] = if beside { BESIDE } else { SOLO };
        of_turns.add(p50, summary.p50_us);
        of_turns.add(p99, summary.p99_us);
    }
    for key in SOLO.into_iter().chain(BESIDE) {
        median(of_turns.of(key)).into_iter().for_each(|median| side.figures.add(key, median));
    }
    Ok(())
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (repetitions, turns) = if bench.options.quick { (2, 4) } else { (8, 10) };
    let pages = TURN + 4096;
    let data = Data::HalfCompressible;
    let mut row = bench.row("a victim alone and beside a fault storm");
    row.fact("data", data.name());
    row.fact("victim_pages", pages);
    row.fact("neighbour_pages", NEIGHBOUR_PAGES);
    row.fact("neighbour_limit_pages", NEIGHBOUR_PAGES / 2);
    row.fact("repetitions", repetitions);
    let mut sides = bench.sides(&WAYS, &[pages, NEIGHBOUR_PAGES], data, &mut row)?;
    bench.by_turns(&mut sides, repetitions, |bench, side, round| {
        match measure(bench, side, turns, round * turns) {
            Err(error) if side.way == Way::Kernel => {
                // The kernel finds every page of the storm young, and kills the guest; Ballast's turns continue.
                row.because(&format!("the kernel beside a storm: {error:#} (was it out of memory? see dmesg)"));
                side.figures = Figures::default();
                side.guests.clear();
                Ok(())
            }
            result => result,
        }
    })?;
    for (side, prefix) in sides.iter().zip(["storm_", "kernel_storm_"]) {
        let of = |key: &str| side.figures.of(key);
        row.ratio(&format!("{prefix}victim_p99_ratio"), of(BESIDE[1]), of(SOLO[1]));
        row.ratio(&format!("{prefix}victim_p50_ratio"), of(BESIDE[0]), of(SOLO[0]));
        for key in SOLO.into_iter().chain(BESIDE).chain(["neighbour_touches_per_s"]) {
            row.figure(&format!("{prefix}{key}"), of(key));
        }
    }
    each(row)
}
