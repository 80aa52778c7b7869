//! How much of each workload's memory can be taken before it is 5 % slower (Blowfish, 5.1.1), beside the kernel.
//!
//! Before: `sweep` bisects over limits, with a second guest that nobody squeezes as the yardstick. After: a row for each
//! workload. Units: parts of 1 of RAM. Promise: one VM at a time; Ballast tracks it, and pays for that.

use anyhow::Result;
use ballast_testvm::Workload;

use super::cast::{spec, word};
use super::{CAST, Scale};
use crate::Bench;
use crate::report::Row;
use crate::sweep::{Plan, Side, Sweep};

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if bench.options.quick { Plan::QUICK } else { Plan::FULL };
    let all = [Workload::Zipf].into_iter().chain(CAST);
    for workload in all.take(if bench.options.quick { 1 } else { usize::MAX }) {
        let mut row = Row::new("balance", bench.options.guest(), &format!("{}, 5 % slower", word(workload)));
        row.fact("workload", word(workload));
        row.fact("vm_bytes", scale.ram_bytes);
        row.fact("allowed_pct", plan.allowed_pct);
        let mut taken = Vec::new();
        for (side, prefix) in [(Side::Ballast, ""), (Side::Kernel, "kernel_")] {
            if let (Side::Kernel, Err(why)) = (side, &bench.kernel) {
                row.because(why);
                row.figure("kernel_reclaim_ratio_at_5pct", &[]);
                continue;
            }
            let spec = spec(workload, scale.ram_bytes, 1, scale.store_ops);
            let found = Sweep { spec, side, huge_pct: 0, track: true, plan }.run(bench)?;
            row.figure(&format!("{prefix}reclaim_ratio_at_5pct"), &[found.taken]);
            row.figure(&format!("{prefix}slowdown_pct"), &[found.slowdown_pct]);
            row.figure(&format!("{prefix}noise_pct"), &[found.noise_pct]);
            taken.push(found.taken);
        }
        if let [ours, kernel] = taken[..] {
            row.ratio("ratio_reclaim_at_5pct", &[ours], &[kernel]);
        }
        each(row)?;
    }
    Ok(())
}
