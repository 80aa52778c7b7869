//! The choice of pages for fast memory: classifiers of ranges against an oracle, simulated. `ballast bench tiers`.
//!
//! Before: nothing; it needs no daemon and no root. After: rows have, for each access stream and size of the fast tier,
//! the share of accesses that the fast tier serves by the published rule, by ours, by a count for each 2 MiB, by LRU,
//! by first touch, and by a clairvoyant oracle whose moves are free; the last row has the cost of classifying.
//! Threads: the bench's one. Units: in every key. Promise: every row says that it is simulated. The classifiers and the
//! plans are the product's; memory, samples and moves are modelled; only the CPU time is measured.

mod bloat;
mod graph;
mod host;
mod sensitive;
mod simulate;
mod stream;

use anyhow::Result;
use ballast_base::{GIB, MIB};
use ballast_ranges::UNIT;
use ballast_testkit::published::Parameters;

use crate::cpu;
use crate::report::Row;
use crate::stats::{mean, random};
use crate::tiers::simulate::{Guest, Way, base};
use crate::tiers::stream::{Kind, Stream};

/// The extent of the simulation.
struct Plan {
    memory: u64,
    graph_memory: u64,
    epochs: u64,
    seeds: u64,
    /// Accesses of the graph's program in an epoch.
    accesses: u64,
    /// Samples per second, and the share of memory in the fast tier, in percent.
    rate: usize,
    fast_pct: &'static [u64],
    /// Other numbers of samples per second, to show their effect.
    rates: &'static [usize],
    /// Epochs whose CPU time is measured together, because the kernel counts it in ticks.
    cost_epochs: u64,
}

/// The guest has the memory of the paper's (Demeter §5.1), a fifth of it fast memory; and half and twice as much.
const FULL: Plan = Plan {
    memory: 16 * GIB,
    graph_memory: 256 * MIB,
    epochs: 160,
    seeds: 5,
    accesses: 1_000_000,
    rate: 20_000,
    fast_pct: &[10, 20, 40],
    rates: &[1_000, 5_000, 100_000],
    cost_epochs: 40,
};
const QUICK: Plan = Plan {
    memory: 4 * GIB,
    graph_memory: 64 * MIB,
    epochs: 50,
    seeds: 2,
    accesses: 200_000,
    rate: 10_000,
    fast_pct: &[20],
    rates: &[1_000],
    cost_epochs: 2,
};

/// Samples per second whose cost is measured.
const COST_RATE: usize = 1_000_000;

/// Simulate all of it. `begin` gets the title of the next row.
pub(crate) fn run(quick: bool, begin: &dyn Fn(&str), each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if quick { QUICK } else { FULL };
    let row = |what: &str| {
        let mut row = Row::new("tiers", "simulated", what);
        row.fact("simulated", true);
        begin(row.title());
        row
    };
    let of = |kind: Kind, fast_pct: u64, rate: usize| {
        let mut row = row(&format!("{}, {fast_pct} % fast, {rate} samples/s", kind.name()));
        row.fact("workload", kind.name());
        row.fact("fast_pct", fast_pct);
        row.fact("samples_per_s", rate);
        hits(&mut row, &plan, kind, fast_pct, rate);
        row
    };
    for kind in Kind::ALL {
        for fast_pct in plan.fast_pct {
            each(of(kind, *fast_pct, plan.rate))?;
        }
    }
    for rate in plan.rates {
        each(of(Kind::Scattered(64), 20, *rate))?;
    }
    let mut classifying = row("cost of classifying");
    cost(&mut classifying, &plan)?;
    each(classifying)?;
    sensitive::run(quick, &row, each)?;
    host::run(quick, &row, each)
}

/// The result of one way in one simulation.
#[derive(Default)]
struct Outcome {
    hit_pct: f64,
    within_s: Option<f64>,
    moved: f64,
    ranges: Option<(usize, u64)>,
}

/// Add the shares of accesses that the fast tier serves, by each way.
fn hits(row: &mut Row, plan: &Plan, kind: Kind, fast_pct: u64, rate: usize) {
    let mut oracles = [Vec::new(), Vec::new()];
    let mut outcomes: Vec<Vec<Outcome>> = Way::ALL.iter().map(|_| Vec::new()).collect();
    let mut memory = 0;
    for seed in 1..=plan.seeds {
        let size = if kind == Kind::Graph { plan.graph_memory } else { plan.memory };
        let mut stream = Stream::new(kind, size, seed, plan.accesses);
        let units = stream.units().len();
        memory = units as u64 * UNIT;
        let fast = units * fast_pct as usize / 100;
        let mut guests = Way::ALL.map(|way| Guest::new(way, units, fast));
        let mut state = seed;
        let mut hit = vec![Vec::new(); guests.len()];
        let mut best = [Vec::new(), Vec::new()];
        for _ in 0..plan.epochs {
            let (small, huge) = stream.oracle(fast);
            best[0].push(small);
            best[1].push(huge);
            let samples = stream.sample(rate / 2, &mut state);
            for (guest, hit) in guests.iter_mut().zip(&mut hit) {
                hit.push(guest.hits(stream.units()));
                guest.end_epoch(&samples);
            }
            stream.advance();
        }
        // The second half is the state of a program that runs for long, including moves of its hot set.
        let settled = |shares: &[f64]| mean(&shares[shares.len() / 2..]) * 100.0;
        for (oracle, best) in oracles.iter_mut().zip(&best) {
            oracle.push(settled(best));
        }
        for ((guest, hit), outcomes) in guests.iter().zip(&hit).zip(&mut outcomes) {
            let is_near = |at: &usize| hit[*at] >= best[0][*at] - 0.02;
            outcomes.push(Outcome {
                hit_pct: settled(hit),
                within_s: (0..hit.len()).find(is_near).map(|epoch| epoch as f64 / 2.0),
                moved: guest.moved_bytes() as f64 / (plan.epochs as f64 / 2.0),
                ranges: guest.ranges(),
            });
        }
    }
    row.fact("memory_bytes", memory);
    row.figure("fmem_hit_pct_oracle", &oracles[0]);
    row.figure("fmem_hit_pct_oracle_2mib", &oracles[1]);
    for (way, outcomes) in Way::ALL.iter().zip(&outcomes) {
        let suffix = way.suffix();
        let each = |value: fn(&Outcome) -> Option<f64>| outcomes.iter().filter_map(value).collect::<Vec<_>>();
        row.figure(&format!("fmem_hit_pct{suffix}"), &each(|outcome| Some(outcome.hit_pct)));
        if *way == Way::Ours || *way == Way::Published {
            row.figure(&format!("ranges{suffix}"), &each(|outcome| Some(outcome.ranges?.0 as f64)));
            row.figure(&format!("splits{suffix}"), &each(|outcome| Some(outcome.ranges?.1 as f64)));
            let within = each(|outcome| outcome.within_s);
            row.figure(&format!("within_2_points_s{suffix}"), &within);
            if within.is_empty() {
                row.because(&format!("within_2_points_s{suffix}: never within 2 points of the oracle"));
            }
        }
        if *way != Way::FirstTouch {
            row.figure(&format!("moved_mib_per_s{suffix}"), &each(|outcome| Some(outcome.moved / MIB as f64)));
        }
    }
}

/// CPU time of a classifier that is given a million samples a second, in percent of one CPU.
fn cost(row: &mut Row, plan: &Plan) -> Result<()> {
    row.fact("measures", "classifier_cpu");
    row.fact("samples_per_s", COST_RATE);
    row.fact("memory_bytes", plan.memory);
    let mut stream = Stream::new(Kind::Scattered(64), plan.memory, 1, 0);
    let units = stream.units().len();
    let mut state = 1;
    let samples = stream.sample(COST_RATE / 2, &mut state);
    let base = base(units as u64 * UNIT);
    let of_guest: Vec<u64> = samples.iter().map(|offset| base + offset).collect();
    // The worst case for a classifier is half a million places in 64 TiB.
    let anywhere: Vec<u64> = samples.iter().map(|_| simulate::anywhere(random(&mut state))).collect();
    for (samples, key) in [(of_guest, "classifier_cpu_pct"), (anywhere, "classifier_cpu_pct_anywhere")] {
        for way in [Way::Ours, Way::Published] {
            let parameters = Parameters::of(simulate::VCPUS);
            let mut classifier = way.classifier(base, units, parameters).expect("these two classify");
            let mut shares = Vec::new();
            for _ in 0..6 {
                let before = cpu::of_thread()?;
                for _ in 0..plan.cost_epochs {
                    samples.iter().for_each(|address| classifier.record(*address, 1));
                    classifier.end_epoch();
                    std::hint::black_box(ballast_ranges::rank(classifier.ranges()));
                }
                let simulated_us = plan.cost_epochs as f64 * 500_000.0;
                shares.push((cpu::of_thread()? - before) / simulated_us * 100.0);
            }
            row.figure(&format!("{key}{}", way.suffix()), &shares);
        }
    }
    Ok(())
}
