//! Fair against classic generations (Blowfish §5.3, Figure 9a): how much can be taken from a guest half in huge pages
//! and half in base pages before it misses too much.
//!
//! Before: a guest uses its pages by Zipf's law, the popular ones side by side; every second 2 MiB is a huge page, so
//! there are huge and base pages of every heat. After: a row has its misses and waits while limits took more and more
//! of it, by both rules, and the reclamation ratio of each at the same rate of misses.
//! Threads: the bench's one. Units: fractions of RAM; restores for 100 operations; percent of the time. Promise: both
//! sides are the same daemon with one setting changed: `fair`. The guest is never stopped, and checks every word that
//! it reads.
//!
//! The rules differ only if huge pages at the edge of the kept memory are touched in some cycles and not in others. The
//! guest's size and speed are chosen for that (lab/notebook). Misses are counted instead of speed, because other load
//! on the machine hardly disturbs a count of thousands.

use anyhow::Result;
use ballast_api::Track;
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Placement, Spec, Workload};

use super::guest::Tracked;
use super::overhead::{SPARE, available};
use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;

/// Percent of RAM that is mapped huge.
const HUGE_PCT: u32 = 50;
/// The suffix of each side's keys, and its settings.
const SIDES: [(&str, &str); 2] = [("fair", "[heat]\nfair = true\n"), ("classic", "[heat]\nfair = false\n")];
/// The ratios are compared at this number of misses in 100 operations: at some 17 us each, 1 to 2 % of the guest's
/// time.
const ALLOWED_PCT: f64 = 5.0;
/// Computing after each operation, in ticks of the TSC: some 66 us. A guest of 8 GiB then does 15,000 operations a
/// second, and about one in a cycle (two to four seconds) in each 2 MiB of the colder half.
const THINK_TICKS: u64 = 166_000;

/// Sizes and times of the measurement.
struct Plan {
    ram: u64,
    /// Parts of RAM that are taken, ascending.
    taken: &'static [f64],
    /// Time before the first limit.
    warm_ms: u64,
    /// Time from a limit until it is measured.
    settle_ms: u64,
    /// Time for which it is measured.
    count_ms: u64,
    repetitions: usize,
}

const FULL: Plan = Plan {
    ram: 8192 * MIB,
    taken: &[0.2, 0.35, 0.5, 0.65],
    warm_ms: 20_000,
    settle_ms: 7000,
    count_ms: 7000,
    repetitions: 3,
};
const QUICK: Plan =
    Plan { ram: 128 * MIB, taken: &[0.3, 0.6], warm_ms: 2000, settle_ms: 500, count_ms: 1000, repetitions: 1 };

/// The result of a limit.
struct Point {
    /// The part of RAM that was not resident at the end.
    taken: f64,
    missed_pct: f64,
    /// By the engine's account.
    waited_pct: f64,
}

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if bench.options.quick { QUICK } else { FULL };
    let mut row = bench.row("fair against classic generations");
    row.fact("measures", "fair");
    row.fact("ram_bytes", plan.ram);
    row.fact("huge_pct", HUGE_PCT);
    row.fact("allowed_missed_pct", ALLOWED_PCT);
    row.fact("repetitions", plan.repetitions);
    // For each side, by repetition.
    let mut curves: [Vec<Vec<Point>>; 2] = Default::default();
    let free = available()?;
    // The store compresses the taken memory, and a collapse takes new huge pages before it frees the old ones.
    let needed = plan.ram / 2 * 3 + SPARE;
    if !bench.options.is(GuestKind::Native) {
        row.because("native guests alone: what is taken does not depend on who touches the memory");
    } else if free < needed {
        row.because(&format!("{} MiB of memory are free, {} are needed", free / MIB, needed / MIB));
    } else {
        for turn in bench.progress.over("turn", 0..2 * plan.repetitions) {
            // The side that comes first changes with each repetition.
            let side = (turn / 2 + turn % 2) % 2;
            curves[side].push(bench.with_settings(SIDES[side].1, |bench| plan.run(bench))?);
        }
    }
    let ratios = curves.each_ref().map(|curves| curves.iter().map(|curve| ratio(curve)).collect::<Vec<_>>());
    for (side, (name, _)) in SIDES.iter().enumerate() {
        row.figure(&format!("reclaim_ratio_{name}"), &ratios[side]);
    }
    row.ratio("ratio_fair_classic", &ratios[0], &ratios[1]);
    for (index, taken) in plan.taken.iter().enumerate() {
        for (side, (name, _)) in SIDES.iter().enumerate() {
            let of =
                |value: fn(&Point) -> f64| curves[side].iter().map(|curve| value(&curve[index])).collect::<Vec<_>>();
            let percent = 100.0 * taken;
            row.figure(&format!("missed_pct_{name}_{percent:.0}"), &of(|point| point.missed_pct));
            row.figure(&format!("waited_pct_{name}_{percent:.0}"), &of(|point| point.waited_pct));
        }
    }
    each(row)
}

/// The part that can be taken, interpolated between the measured points; with nothing taken nothing is missed.
fn ratio(curve: &[Point]) -> f64 {
    let (mut taken, mut missed) = (0.0, 0.0);
    for point in curve {
        if point.missed_pct > ALLOWED_PCT {
            return taken + (point.taken - taken) * (ALLOWED_PCT - missed) / (point.missed_pct - missed);
        }
        (taken, missed) = (point.taken, point.missed_pct);
    }
    taken
}

impl Plan {
    fn run(&self, bench: &mut Bench) -> Result<Vec<Point>> {
        let mut spec = Spec::new(Workload::Zipf, Bytes(self.ram));
        (spec.think_ticks, spec.placement) = (THINK_TICKS, Placement::Contiguous);
        let mut guest = Tracked::start_mixed(bench, spec, HUGE_PCT)?;
        let api = bench.daemon.api();
        api.set_track(&guest.name, Track::On)?;
        guest.speed(self.warm_ms)?;
        let mut points = Vec::new();
        for taken in self.taken {
            api.set_limit(&guest.name, Some(((1.0 - taken) * self.ram as f64) as u64))?;
            guest.speed(self.settle_ms)?;
            let before = api.vm(&guest.name)?;
            let operations = guest.speed(self.count_ms)? * self.count_ms as f64 / 1e3;
            let after = api.vm(&guest.name)?;
            let waited_us = (after.stall.some.total_us - before.stall.some.total_us) as f64;
            points.push(Point {
                taken: 1.0 - after.resident_bytes as f64 / self.ram as f64,
                missed_pct: 100.0 * (after.faults.restore - before.faults.restore) as f64 / operations,
                waited_pct: waited_us / (10.0 * self.count_ms as f64),
            });
        }
        Ok(points)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_interpolated_and_is_no_more_than_the_taken_part() {
        let curve = |missed: [f64; 2]| {
            let point = |taken, missed_pct| Point { taken, missed_pct, waited_pct: 0.0 };
            ratio(&[point(0.4, missed[0]), point(0.6, missed[1])])
        };
        assert_eq!(
            [curve([10.0, 20.0]), curve([2.5, 7.5]), curve([1.0, 2.0])].map(|ratio| (ratio * 100.0).round()),
            [20.0, 50.0, 60.0]
        );
    }
}
