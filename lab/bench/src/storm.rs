//! The effect of a neighbour that faults as fast as it can on a VM's restores.
//!
//! Before: a victim has far pages, and a neighbour is held to half of the memory it touches. After: a row has the
//! victim's percentiles alone and beside the storm.
//! Units: microseconds per touch. Promise: alone and beside take turns; while the victim is measured alone, the
//! neighbour does nothing, and neither does its reclaim. The figures of a round are medians over its turns.

use std::time::Duration;

use anyhow::{Result, bail};
use ballast_base::PageCount;

use crate::order::{Answer, Data, GuestKind, Order, Pace};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::subject::{Subject, Way, out, touch};

const WAYS: [Way; 2] = [Way::Ballast, Way::Kernel];
/// The headline figures.
const KEYS: [&str; 2] = ["storm_victim_p99_ratio", "storm_victim_p50_ratio"];
/// Touches in one turn of the victim.
const TURN: u64 = 2000;
/// Time of the storm before the victim's turn begins.
const LEAD: Duration = Duration::from_millis(10);
/// Pages of the neighbour, which is held to half of them.
const NEIGHBOUR_PAGES: u64 = 16_384;

#[derive(Default)]
struct Series {
    p50: [Vec<f64>; 2],
    p99: [Vec<f64>; 2],
    storm: Vec<f64>,
}

impl Series {
    /// In each turn the victim's pages go out, and it touches some of them, alone or beside the storm.
    fn round(&mut self, bench: &mut Bench, pair: &mut [Subject], turns: u64, seed: u64) -> Result<()> {
        let [victim, neighbour] = pair else { return Ok(()) };
        neighbour.hold_to(bench, PageCount(NEIGHBOUR_PAGES / 2).bytes().0)?;
        let (mut p50, mut p99) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
        for turn in 0..turns {
            let beside = turn % 2 == 1;
            out(bench, &mut [victim])?;
            if beside {
                neighbour.ask(&Order::Storm)?;
                std::thread::sleep(LEAD);
            }
            let touched = touch(&mut [&mut *victim], seed + turn, Pace { most: TURN, ..Pace::ALL })?[0];
            if beside {
                let Answer::Sliced { ops, wall_us, .. } = neighbour.ask(&Order::Pause)? else {
                    bail!("a storm does not end")
                };
                self.storm.push(ops as f64 * 1e6 / wall_us);
            }
            p50[usize::from(beside)].push(touched.summary.p50_us);
            p99[usize::from(beside)].push(touched.summary.p99_us);
        }
        for which in 0..2 {
            self.p50[which].extend(median(&p50[which]));
            self.p99[which].extend(median(&p99[which]));
        }
        Ok(())
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if !bench.options.is(GuestKind::Native) {
        let mut row = bench.row("a victim alone and beside a fault storm");
        row.because("a storm of another guest than threads: its order of touches is not the bench's (--guest native)");
        KEYS.iter().for_each(|key| row.figure(key, &[]));
        return each(row);
    }
    let (repetitions, turns) = if bench.options.quick { (2, 4) } else { (8, 10) };
    let pages = TURN + 4096;
    let data = Data::HalfCompressible;
    let mut row = bench.row("a victim alone and beside a fault storm");
    row.fact("data", data.name());
    row.fact("victim_pages", pages);
    row.fact("neighbour_pages", NEIGHBOUR_PAGES);
    row.fact("neighbour_limit_pages", NEIGHBOUR_PAGES / 2);
    row.fact("repetitions", repetitions);
    let mut pairs: Vec<Vec<Subject>> = Vec::new();
    for way in WAYS {
        let mut pair = bench.subjects(&[way], pages, data, &mut row)?;
        pair.extend(bench.subjects(&[way], NEIGHBOUR_PAGES, data, &mut row)?);
        pairs.push(pair);
    }
    let mut series: [Series; 2] = Default::default();
    for round in bench.progress.over("round", 0..=repetitions) {
        for (pair, series) in pairs.iter_mut().zip(&mut series) {
            let mut warm_up = Series::default();
            let of = if round == 0 { &mut warm_up } else { &mut *series };
            let result = of.round(bench, pair, turns, round * turns);
            match result {
                Err(error) if pair.iter().all(|subject| subject.way == Way::Kernel) => {
                    // The kernel finds every page of the storm young, and kills the guest; Ballast's turns continue.
                    row.because(&format!("the kernel beside a storm: {error:#} (was it out of memory? see dmesg)"));
                    *series = Series::default();
                    pair.clear();
                }
                result => result?,
            }
        }
    }
    pairs.iter_mut().flatten().try_for_each(Subject::verify)?;
    let [ballast, kernel] = &series;
    row.ratio("storm_victim_p99_ratio", &ballast.p99[1], &ballast.p99[0]);
    row.ratio("storm_victim_p50_ratio", &ballast.p50[1], &ballast.p50[0]);
    row.ratio("kernel_storm_victim_p99_ratio", &kernel.p99[1], &kernel.p99[0]);
    row.ratio("kernel_storm_victim_p50_ratio", &kernel.p50[1], &kernel.p50[0]);
    for (side, prefix) in [(ballast, "storm_"), (kernel, "kernel_storm_")] {
        row.figure(&format!("{prefix}solo_us_p50"), &side.p50[0]);
        row.figure(&format!("{prefix}solo_us_p99"), &side.p99[0]);
        row.figure(&format!("{prefix}beside_us_p50"), &side.p50[1]);
        row.figure(&format!("{prefix}beside_us_p99"), &side.p99[1]);
        row.figure(&format!("{prefix}neighbour_touches_per_s"), &side.storm);
    }
    each(row)
}
