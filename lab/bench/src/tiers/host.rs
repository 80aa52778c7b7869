//! Tiers on the host: the rows of hot bloat, by the model in [`super::bloat`].
//!
//! Before: nothing; it needs no daemon and no root. After: a row for each share of bloated memory has the share of
//! accesses that fast memory serves and the modelled time of an access, by each way and by an oracle.
//! Units: in every key. Promise: every row says that it is simulated and that its time is modelled; what is the
//! product's own is the tracker, the page-size policy and the plan of moves.

use anyhow::Result;
use ballast_base::{HUGE_SIZE, MIB, PAGE_SIZE};
use ballast_testkit::random::Random;

use super::bloat::{Guest, Truth, Way};
use crate::report::Row;

/// Latency of fast and of slow memory (Demeter, Table 2), in nanoseconds.
const LATENCY_NS: (f64, f64) = (68.7, 176.6);
/// What a split costs: the call, and mapping the unit's 512 pages again. Measured on Linux 6.18, medians.
const SPLIT_NS: f64 = (60 + 126) as f64 * 1000.0;
/// What it costs to join a unit again; the same.
const JOIN_NS: f64 = 5_300.0 * 1000.0;

/// The extent of the simulation.
struct Plan {
    units: u64,
    cycles: usize,
    seeds: u64,
    bloat_pct: &'static [u64],
}

const FULL: Plan = Plan { units: 2048, cycles: 100, seeds: 5, bloat_pct: &[0, 10, 25, 50, 75, 100] };
const QUICK: Plan = Plan { units: 512, cycles: 40, seeds: 2, bloat_pct: &[50] };
/// Shares of accesses that go anywhere in memory, at 50 % bloat.
const STRAY_PCT: &[f64] = &[0.1, 0.5, 1.0, 2.0, 5.0];
const QUICK_STRAY_PCT: &[f64] = &[1.0];
/// The same where the accessed pages of a bloated unit are in one block of it.
const BLOCK_STRAY_PCT: &[f64] = &[0.0, 2.0, 5.0];
const QUICK_BLOCK_STRAY_PCT: &[f64] = &[5.0];

/// Simulate all of it. `begin` makes a row and reports its title.
pub(super) fn run(quick: bool, begin: &dyn Fn(&str) -> Row, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if quick { QUICK } else { FULL };
    for bloat_pct in plan.bloat_pct {
        each(row(&plan, *bloat_pct, false, 0.0, begin))?;
    }
    for stray_pct in if quick { QUICK_STRAY_PCT } else { STRAY_PCT } {
        each(row(&plan, 50, false, *stray_pct, begin))?;
    }
    for stray_pct in if quick { QUICK_BLOCK_STRAY_PCT } else { BLOCK_STRAY_PCT } {
        each(row(&plan, 50, true, *stray_pct, begin))?;
    }
    Ok(())
}

/// The result of one way in one simulation.
struct Outcome {
    hit_pct: f64,
    ns: f64,
    within_s: Option<f64>,
    splits: f64,
    joins: f64,
    moved_mib: f64,
}

fn row(plan: &Plan, bloat_pct: u64, is_block: bool, stray_pct: f64, begin: &dyn Fn(&str) -> Row) -> Row {
    let stray = if stray_pct > 0.0 { format!(", {stray_pct} % of accesses anywhere") } else { String::new() };
    let block = if is_block { " in one block" } else { "" };
    let mut row = begin(&format!("tiers on the host, {bloat_pct} % bloat{block}{stray}"));
    row.fact("measures", "host_tiers");
    row.fact("modelled_time", true);
    row.fact("bloat_pct", bloat_pct);
    row.fact("stray_pct", stray_pct);
    row.fact("bloat_in_one_block", is_block);
    row.fact("memory_bytes", plan.units * HUGE_SIZE as u64);
    row.fact("fast_pct", 20);
    let mut oracles = [Vec::new(), Vec::new(), Vec::new()];
    let mut outcomes: Vec<Vec<Outcome>> = Way::ALL.iter().map(|_| Vec::new()).collect();
    for seed in 1..=plan.seeds {
        let truth = Truth::new(plan.units, bloat_pct, is_block, stray_pct, &mut Random(seed));
        let (small, huge) = truth.oracle();
        [small * 100.0, huge * 100.0, latency(small)].into_iter().zip(&mut oracles).for_each(|(x, all)| all.push(x));
        for (way, outcomes) in Way::ALL.into_iter().zip(&mut outcomes) {
            outcomes.push(simulate(way, plan, &truth, seed, small));
        }
    }
    row.figure("host_tier_hit_pct_oracle", &oracles[0]);
    row.figure("host_tier_hit_pct_oracle_2mib", &oracles[1]);
    row.figure("modelled_access_ns_oracle", &oracles[2]);
    for (way, outcomes) in Way::ALL.iter().zip(&outcomes) {
        let suffix = way.suffix();
        let all = |value: fn(&Outcome) -> f64| outcomes.iter().map(value).collect::<Vec<_>>();
        row.figure(&format!("host_tier_hit_pct{suffix}"), &all(|outcome| outcome.hit_pct));
        row.figure(&format!("modelled_access_ns{suffix}"), &all(|outcome| outcome.ns));
        if *way == Way::FirstTouch {
            continue;
        }
        row.figure(&format!("splits{suffix}"), &all(|outcome| outcome.splits));
        row.figure(&format!("joins{suffix}"), &all(|outcome| outcome.joins));
        row.figure(&format!("moved_mib{suffix}"), &all(|outcome| outcome.moved_mib));
        let within: Vec<f64> = outcomes.iter().filter_map(|outcome| outcome.within_s).collect();
        row.figure(&format!("within_3_points_s{suffix}"), &within);
        if within.is_empty() {
            row.because(&format!("within_3_points_s{suffix}: never within 3 points of the oracle"));
        }
    }
    row
}

/// The mean latency of an access, if fast memory serves this share.
fn latency(hits: f64) -> f64 {
    hits * LATENCY_NS.0 + (1.0 - hits) * LATENCY_NS.1
}

fn simulate(way: Way, plan: &Plan, truth: &Truth, seed: u64, oracle: f64) -> Outcome {
    let mut guest = Guest::new(way, truth.units(), seed);
    let (mut shares, mut within_s) = (Vec::new(), None);
    for _ in 0..plan.cycles {
        guest.cycle(truth);
        let share = guest.hits(truth);
        if within_s.is_none() && share >= oracle - 0.03 {
            within_s = Some(guest.now().as_secs_f64());
        }
        shares.push(share);
    }
    // The state of a guest that runs for long. The splits and joins of all the time are paid for by its accesses.
    let settled = &shares[shares.len() / 2..];
    let hits = settled.iter().sum::<f64>() / settled.len() as f64;
    let (splits, joins) = (guest.changed.0 as f64, guest.changed.1 as f64);
    let accesses = truth.all() * guest.now().as_secs_f64();
    Outcome {
        hit_pct: hits * 100.0,
        ns: latency(hits) + (splits * SPLIT_NS + joins * JOIN_NS) / accesses,
        within_s,
        splits,
        joins,
        moved_mib: guest.moved as f64 * PAGE_SIZE as f64 / MIB as f64,
    }
}
