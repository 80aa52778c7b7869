//! Blowfish, section 5.2: VMs in pairs, with half of the memory that both together use at their peak.
//!
//! Before: two VMs of different workloads have filled their memory. After: a row for each pair.
//! Threads: the caller's. Units: slowdowns against the same pair without pressure, before and after.
//! Promise: every pair of the four workloads is there.

use anyhow::Result;

use super::cast::{spec, word};
use super::levels::{Alone, geomean, measure, slowdowns};
use super::setup::{CAST, POLICY, Scale, both_sides, pairs_of};
use crate::report::Row;
use crate::rig::Bench;
use crate::sweep::Side;

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let scale = Scale { settle: scale.settle / 2, window: scale.window * 2 / 3, ..scale };
    for [first, second] in pairs_of(&CAST, bench.options.quick) {
        let pair = format!("{}+{}", word(*first), word(*second));
        let mut row = bench.row(&format!("{pair}, half of their peak"));
        row.fact("vms", 2);
        row.fact("pair", pair);
        let specs = [*first, *second].map(|workload| spec(workload, scale.ram_bytes, 1, scale.store_ops));
        both_sides(bench, &mut row, "pair_slowdown", |bench, row, side, prefix| {
            one(bench, side, &specs, scale, prefix, row)
        })?;
        each(row)?;
    }
    Ok(())
}

fn one(
    bench: &mut Bench,
    side: Side,
    specs: &[ballast_testvm::Spec],
    scale: Scale,
    prefix: &str,
    row: &mut Row,
) -> Result<()> {
    let mut pair = Alone::start(bench, side, specs, Scale { windows: 2, ..scale })?;
    let half = pair.cast.size_bytes() / 2;
    let seen = measure(bench, &mut pair.cast, POLICY, Some(half), scale, scale.windows)?;
    let base = pair.after(bench, scale)?;
    let slow: Vec<Vec<f64>> = seen.iter().map(|window| slowdowns(&base.speeds, window)).collect();
    row.figure(&format!("{prefix}pair_aa_geomean_slowdown"), &base.aa);
    row.figure(&format!("{prefix}pair_slowdown"), &slow.iter().map(|window| geomean(window)).collect::<Vec<_>>());
    for (at, spec) in specs.iter().enumerate() {
        let of: Vec<f64> = slow.iter().map(|window| window[at]).collect();
        row.figure(&format!("{prefix}slowdown_{}", word(spec.workload)), &of);
    }
    row.figure(
        &format!("{prefix}resident_bytes"),
        &seen.iter().map(|window| window.resident_bytes).collect::<Vec<_>>(),
    );
    pair.cast.wake()?;
    pair.cast.verify(bench)
}
