//! Tiers on the host: the rows of hot bloat, by the model in [`super::bloat`].
//!
//! Before: nothing; it needs no daemon and no root. After: a row for each share of bloated memory has the share of
//! accesses that fast memory serves and the modelled time of an access, by each way and by an oracle.
//! Units: in every key. Promise: every row says that it is simulated and that its time is modelled; the tracker, the
//! page-size policy and the plan of moves are the product's.

use anyhow::Result;
use ballast_base::HUGE_SIZE;
use ballast_testkit::random::Random;

use super::bloat::{Guest, Truth, Way};
use crate::report::Row;

/// Latency of fast and of slow memory (Demeter, Table 2), in nanoseconds.
const LATENCY_NS: (f64, f64) = (68.7, 176.6);
/// Cost of a split: the call, and mapping the unit's 512 pages again. Measured on Linux 6.18, medians.
const SPLIT_NS: f64 = (60 + 126) as f64 * 1000.0;
/// Cost of joining a unit again, measured likewise.
const JOIN_NS: f64 = 5_300.0 * 1000.0;

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

/// Runs all simulations. `begin` makes a row and reports its title.
pub(super) fn run(quick: bool, begin: &dyn Fn(&str) -> Row, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if quick { QUICK } else { FULL };
    for bloat_pct in plan.bloat_pct {
        each(row(&plan, *bloat_pct, 0.0, begin))?;
    }
    for stray_pct in if quick { QUICK_STRAY_PCT } else { STRAY_PCT } {
        each(row(&plan, 50, *stray_pct, begin))?;
    }
    Ok(())
}

struct Outcome {
    hit_pct: f64,
    ns: f64,
}

fn row(plan: &Plan, bloat_pct: u64, stray_pct: f64, begin: &dyn Fn(&str) -> Row) -> Row {
    let stray = if stray_pct > 0.0 { format!(", {stray_pct} % of accesses anywhere") } else { String::new() };
    let mut row = begin(&format!("tiers on the host, {bloat_pct} % bloat{stray}"));
    row.fact("measures", "host_tiers");
    row.fact("modelled_time", true);
    row.fact("bloat_pct", bloat_pct);
    row.fact("stray_pct", stray_pct);
    row.fact("memory_bytes", plan.units * HUGE_SIZE as u64);
    row.fact("fast_pct", 20);
    let mut oracles = [Vec::new(), Vec::new()];
    let mut outcomes: Vec<Vec<Outcome>> = Way::ALL.iter().map(|_| Vec::new()).collect();
    for seed in 1..=plan.seeds {
        let truth = Truth::new(plan.units, bloat_pct, stray_pct, &mut Random(seed));
        let best = truth.oracle();
        [best * 100.0, latency(best)].into_iter().zip(&mut oracles).for_each(|(x, all)| all.push(x));
        for (way, outcomes) in Way::ALL.into_iter().zip(&mut outcomes) {
            outcomes.push(simulate(way, plan, &truth, seed));
        }
    }
    row.figure("host_tier_hit_pct_oracle", &oracles[0]);
    row.figure("modelled_access_ns_oracle", &oracles[1]);
    for (way, outcomes) in Way::ALL.iter().zip(&outcomes) {
        let suffix = way.suffix();
        row.figure_of(&format!("host_tier_hit_pct{suffix}"), outcomes, |outcome| outcome.hit_pct);
        row.figure_of(&format!("modelled_access_ns{suffix}"), outcomes, |outcome| outcome.ns);
    }
    row
}

/// The mean latency of an access, if fast memory serves this share.
fn latency(hits: f64) -> f64 {
    hits * LATENCY_NS.0 + (1.0 - hits) * LATENCY_NS.1
}

fn simulate(way: Way, plan: &Plan, truth: &Truth, seed: u64) -> Outcome {
    let mut guest = Guest::new(way, truth.units(), seed);
    let mut shares = Vec::new();
    for _ in 0..plan.cycles {
        guest.cycle(truth);
        shares.push(guest.hits(truth));
    }
    // The second half shows a guest that runs for long. Its accesses pay for the splits and joins of the whole run.
    let settled = &shares[shares.len() / 2..];
    let hits = settled.iter().sum::<f64>() / settled.len() as f64;
    let (splits, joins) = (guest.changed.0 as f64, guest.changed.1 as f64);
    let accesses = truth.all() * guest.now().as_secs_f64();
    Outcome { hit_pct: hits * 100.0, ns: latency(hits) + (splits * SPLIT_NS + joins * JOIN_NS) / accesses }
}
