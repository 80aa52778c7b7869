//! The eight VMs of `levels` once more, adopted: Ballast's policy decides, and the kernel's swap moves the pages.
//!
//! Before: the daemon has no other VM, since a policy divides one budget among all. After: a row for each level.
//! Threads: the caller's. Units: slowdowns; a level is in percent of the RAM of all VMs.
//! Promise: VMs and levels are those of `levels`, and each level is compared with the same VMs without pressure before
//! and after it. The sides do not take turns: a machine that drifts between the two parts shows in `aa`, not here.

use anyhow::{Result, bail};

use super::levels::{Alone, eight, levels_of, measure, report};
use super::setup::{POLICY, Scale, Side};
use crate::report::Row;
use crate::rig::Bench;

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Err(why) = &bench.kernel {
        bail!("there is no swap: {why}");
    }
    let specs = eight(scale);
    let mut all = Alone::start(bench, Side::Adopted, &specs, scale)?;
    for level in levels_of(bench) {
        let bytes = all.cast.size_bytes() * level / 100;
        let mut row = bench.row(&format!("eight adopted VMs, {level} % of their memory"));
        row.fact("vms", specs.len());
        row.fact("level_pct", level);
        row.fact("level_bytes", bytes);
        row.fact("policy", POLICY.to_string());
        let seen = measure(bench, &mut all.cast, POLICY, Some(bytes), scale, scale.windows)?;
        row.figure_of("engine_cpu_pct", &seen, |window| window.engine_us / window.seconds / 1e4);
        let base = all.after(bench, scale)?;
        report(&mut row, "adopted_", &all.cast, &base, &seen);
        each(row)?;
    }
    all.cast.wake()?;
    all.cast.verify(bench)
}
