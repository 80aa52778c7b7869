//! Hot bloat (HugeScope §2.2, scaled down): how much memory can be taken from a guest whose hot pages lie alone in huge
//! pages.
//!
//! Before: a guest in huge pages touched all its memory, and then uses a tenth of it. After: a row has, for each share
//! of the hot pages that is spread over all huge pages, the part of RAM that can be taken while the guest is at most
//! 5 % slower.
//! Threads: the bench's one. Units: percent of RAM.

use anyhow::Result;
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Spec, Workload};

use super::guest::THINK_TICKS;
use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;
use crate::sweep::{Plan, Side, Sweep};

const RAM: u64 = 256 * MIB;

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("hot bloat: what can be taken at 5 % slowdown");
    row.fact("measures", "bloat");
    let (shares, plan, ram): (&[u32], _, _) = if bench.options.quick {
        (&[100], Plan::QUICK, RAM / 4)
    } else {
        (
            &[0, 25, 50, 75, 100],
            Plan { warm_ms: 6000, settle_ms: 1500, steps: 4, slices: 5, slice_ms: 100, ..Plan::FULL },
            RAM,
        )
    };
    row.fact("ram_bytes", ram);
    if !bench.options.is(GuestKind::Native) {
        row.because("native guests alone: what is taken does not depend on who touches the memory");
    }
    let mut noise = Vec::new();
    for share in bench.progress.over("share of bloat", shares) {
        let mut found = Vec::new();
        if bench.options.is(GuestKind::Native) {
            let mut spec = Spec::new(Workload::Hotset, Bytes(ram));
            (spec.hot_weight, spec.think_ticks, spec.spread) = (1.0, THINK_TICKS, Some(f64::from(*share) / 100.0));
            let sweep = Sweep { spec, side: Side::Ballast, huge_pct: 100, track: true, plan };
            let outcome = sweep.run(bench)?;
            found.push(100.0 * outcome.taken);
            noise.push(outcome.noise_pct);
        }
        row.figure(&format!("reclaimable_pct_{share}"), &found);
    }
    row.figure("noise_pct", &noise);
    each(row)
}
