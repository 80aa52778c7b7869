//! Measures how much of each workload's memory can be taken before it is 5 % slower (Blowfish, 5.1.1), beside the
//! kernel.
//!
//! Before: `sweep` bisects over limits, with a second, unlimited guest as the reference. After: a row for each
//! workload, and for one whose skew huge pages hide (HugeScope, 2.2): a tenth of its pages is hot, side by side or
//! spread over a part of its huge pages, and the rest is never touched.
//! Threads: the caller's. Units: fractions of RAM. Promise: one VM runs at a time; Ballast tracks it, and the cost of
//! that is included.

use anyhow::Result;
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Spec, Workload};

use super::cast::{spec, word};
use super::setup::{CAST, Scale};
use crate::report::Row;
use crate::rig::Bench;
use crate::sweep::{Plan, Side, Sweep};

/// Computing after each operation, in ticks of the TSC: some 10 us, as a key-value store does on one CPU.
const THINK_TICKS: u64 = 25_000;
/// RAM of the guest with skew.
const SKEWED_RAM: u64 = 256 * MIB;
/// Layout of its hot pages: percent of its memory that is mapped huge, and of its huge pages that have hot pages.
const LAYOUTS: [(u32, u32); 4] = [(0, 100), (100, 25), (100, 50), (100, 100)];

/// A guest of a row.
struct Guest {
    what: String,
    spec: Spec,
    huge_pct: u32,
}

pub(super) fn run(bench: &mut Bench, scale: Scale, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if bench.options.quick { Plan::QUICK } else { Plan::FULL };
    let all = guests(scale);
    for guest in all.into_iter().take(if bench.options.quick { 1 } else { usize::MAX }) {
        let mut row = bench.row(&format!("{}, 5 % slower", guest.what));
        row.fact("workload", guest.what);
        row.fact("vm_bytes", guest.spec.ram.0);
        row.fact("allowed_pct", plan.allowed_pct);
        let mut taken = Vec::new();
        for (side, prefix) in [(Side::Ballast, ""), (Side::Kernel, "kernel_")] {
            if let (Side::Kernel, Err(why)) = (side, &bench.kernel) {
                row.because(why);
                row.figure("kernel_reclaim_ratio_at_5pct", &[]);
                continue;
            }
            let sweep = Sweep { spec: guest.spec.clone(), side, huge_pct: guest.huge_pct, track: true, plan };
            let found = sweep.run(bench)?;
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

fn guests(scale: Scale) -> Vec<Guest> {
    let workloads = [Workload::Zipf].into_iter().chain(CAST).map(|workload| Guest {
        what: word(workload).to_owned(),
        spec: spec(workload, scale.ram_bytes, 1, scale.store_ops),
        huge_pct: 0,
    });
    let skewed = LAYOUTS.into_iter().map(|(huge_pct, over)| {
        let spread = Some(f64::from(over) / 100.0);
        let hot = Spec::new(Workload::Hotset, Bytes(SKEWED_RAM));
        let spec = Spec { think_ticks: THINK_TICKS, spread, hot_weight: 1.0, ..hot };
        let what = match huge_pct {
            0 => "hot tenth of base pages".to_owned(),
            _ => format!("hot tenth in {over} % of the huge pages"),
        };
        Guest { what, spec, huge_pct }
    });
    workloads.chain(skewed).collect()
}
