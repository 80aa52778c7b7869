//! How much the rules depend on their parameters (Demeter 5.2.3, Figure 9), simulated.
//!
//! Before: nothing; it needs no daemon and no root. After: a row for each program and each value of one parameter, with
//! the share of accesses that the fast tier serves by the published rule, by ours, and by an oracle. All other
//! parameters are the paper's. Ours has no threshold: only samples and epochs are varied for it.
//! Units: samples a second, milliseconds, samples. Promise: as `simulate` promises; all values of a parameter see the
//! same accesses, and the moves of an epoch are in proportion to its length.

use anyhow::Result;
use ballast_base::GIB;
use ballast_ranges::UNIT;
use ballast_testkit::published::Parameters;

use super::simulate::{EPOCH_MS, Guest, VCPUS, Way};
use super::stream::{Kind, Stream};
use crate::report::Row;
use crate::stats::mean;

/// The stream advances, and shares are taken, once in this time.
const TICK_MS: u64 = 100;
const MEMORY: u64 = 4 * GIB;
const FAST_PCT: usize = 20;
/// Samples a second of the paper's period of 4093, if a guest has 82 million accesses a second.
const RATE: usize = 20_000;
const PROGRAMS: [Kind; 3] = [Kind::Contiguous, Kind::Scattered(16), Kind::Moving];

/// One value of one parameter.
#[derive(Clone, Copy)]
enum Value {
    SamplesPerS(usize),
    EpochMs(u64),
    TauSplit(u64),
    Alpha(u64),
}

/// The paper's value of each parameter is among the others.
const FULL: &[Value] = &[
    Value::SamplesPerS(200),
    Value::SamplesPerS(1_000),
    Value::SamplesPerS(5_000),
    Value::SamplesPerS(RATE),
    Value::SamplesPerS(100_000),
    Value::EpochMs(100),
    Value::EpochMs(200),
    Value::EpochMs(EPOCH_MS),
    Value::EpochMs(1_000),
    Value::EpochMs(5_000),
    Value::EpochMs(10_000),
    Value::TauSplit(1),
    Value::TauSplit(5),
    Value::TauSplit(10),
    Value::TauSplit(15),
    Value::TauSplit(17),
    Value::TauSplit(30),
    Value::TauSplit(60),
    Value::Alpha(1),
    Value::Alpha(2),
    Value::Alpha(4),
    Value::Alpha(8),
];
const QUICK: &[Value] = &[Value::EpochMs(5_000)];

/// Simulate all of it. `begin` makes a row and reports its title.
pub(super) fn run(quick: bool, begin: &dyn Fn(&str) -> Row, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (programs, values, seeds) = if quick { (&PROGRAMS[..1], QUICK, 2) } else { (&PROGRAMS[..], FULL, 5) };
    for kind in programs {
        for value in values {
            each(row(*kind, *value, seeds, begin))?;
        }
    }
    Ok(())
}

fn row(kind: Kind, value: Value, seeds: u64, begin: &dyn Fn(&str) -> Row) -> Row {
    let (mut rate, mut epoch_ms, mut parameters) = (RATE, EPOCH_MS, Parameters::of(VCPUS));
    let (name, is_of_both) = match value {
        Value::SamplesPerS(samples) => {
            rate = samples;
            (format!("{samples} samples/s"), true)
        }
        Value::EpochMs(ms) => {
            epoch_ms = ms;
            (format!("epoch {ms} ms"), true)
        }
        Value::TauSplit(tau_split) => {
            parameters.tau_split = tau_split;
            (format!("tau_split {tau_split}"), false)
        }
        Value::Alpha(alpha) => {
            parameters.alpha = alpha;
            (format!("alpha {alpha}"), false)
        }
    };
    let mut row = begin(&format!("sensitivity, {}, {name}", kind.name()));
    row.fact("measures", "sensitivity");
    row.fact("workload", kind.name());
    row.fact("memory_bytes", MEMORY);
    row.fact("fast_pct", FAST_PCT);
    row.fact("samples_per_s", rate);
    row.fact("epoch_ms", epoch_ms);
    row.fact("tau_split", parameters.tau_split);
    row.fact("alpha", parameters.alpha);
    let ways = if is_of_both { &[Way::Published, Way::Ours][..] } else { &[Way::Published] };
    let (mut oracles, mut shares) = (Vec::new(), vec![Vec::new(); ways.len()]);
    for seed in 1..=seeds {
        let mut stream = Stream::new(kind, MEMORY, seed, 0);
        let units = (MEMORY / UNIT) as usize;
        let fast = units * FAST_PCT / 100;
        let mut guests: Vec<Guest> =
            ways.iter().map(|way| Guest::tuned(*way, units, fast, parameters, epoch_ms)).collect();
        let (mut state, mut samples, mut oracle, mut hits) =
            (seed, Vec::new(), Vec::new(), vec![Vec::new(); ways.len()]);
        for tick in 1..=80_000 / TICK_MS {
            samples.extend(stream.sample(rate * TICK_MS as usize / 1000, &mut state));
            oracle.push(stream.oracle(fast).0);
            guests.iter().zip(&mut hits).for_each(|(guest, hits)| hits.push(guest.hits(stream.units())));
            if (tick * TICK_MS).is_multiple_of(epoch_ms) {
                guests.iter_mut().for_each(|guest| guest.end_epoch(&samples));
                samples.clear();
            }
            if (tick * TICK_MS).is_multiple_of(EPOCH_MS) {
                stream.advance();
            }
        }
        // Of all the time: a rule that is late loses by it.
        oracles.push(mean(&oracle) * 100.0);
        shares.iter_mut().zip(&hits).for_each(|(shares, hits)| shares.push(mean(hits) * 100.0));
    }
    row.figure("fmem_hit_pct_oracle", &oracles);
    for (way, shares) in ways.iter().zip(&shares) {
        row.figure(&format!("fmem_hit_pct{}", way.suffix()), shares);
    }
    row
}
