//! Fair against classic generations (Blowfish §5.3, Figure 9a): how much can be taken from a guest half in huge pages and half
//! in base pages before it is 5 % slower.
//!
//! Before: a guest whose pages are used by Zipf's law, the popular ones side by side, so that there are huge pages of every
//! warmth. After: the reclamation ratio of both, and of the kernel's own reclaim of the same guest.
//! Units: parts of 1 of RAM. Promise: both are the same daemon with the same settings but one: `fair`.

use anyhow::Result;
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Placement, Spec, Workload};

use super::THINK_TICKS;
use crate::Bench;
use crate::order::GuestKind;
use crate::report::Row;
use crate::sweep::{Plan, Side, Sweep};

/// So much of RAM is mapped huge.
const HUGE_PCT: u32 = 50;

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = Row::new("track", bench.options.guest(), "fair against classic generations");
    row.fact("measures", "fair");
    let (ram, plan, repetitions) = if bench.options.quick {
        (64 * MIB, Plan::QUICK, 1)
    } else {
        (256 * MIB, Plan { warm_ms: 6000, slices: 5, slice_ms: 100, ..Plan::FULL }, 3)
    };
    row.fact("ram_bytes", ram);
    row.fact("huge_pct", HUGE_PCT);
    row.fact("repetitions", repetitions);
    let (mut ratios, mut noise) = ([const { Vec::new() }; 3], Vec::new());
    if bench.options.is(GuestKind::Native) {
        let mut spec = Spec::new(Workload::Zipf, Bytes(ram));
        (spec.think_ticks, spec.placement) = (THINK_TICKS, Placement::Contiguous);
        let sweep = |side| Sweep { spec: spec.clone(), side, huge_pct: HUGE_PCT, track: true, plan };
        for _ in 0..repetitions {
            for (settings, ratios) in ["[heat]\nfair = true\n", "[heat]\nfair = false\n"].into_iter().zip(&mut ratios) {
                let outcome = bench.with_settings(settings, |bench| sweep(Side::Ballast).run(bench))?;
                ratios.push(outcome.taken);
                noise.push(outcome.noise_pct);
            }
        }
        // Of all rows this one alone needs the machine's swap, for which benches wait for each other.
        if bench.options.quick {
            row.because("the kernel's side is for a run that is not quick");
        } else {
            match bench.guard.swap() {
                Ok(_) => ratios[2].push(sweep(Side::Kernel).run(bench)?.taken),
                Err(why) => row.because(&format!("{why:#}")),
            }
        }
    } else {
        row.because("native guests alone: what is taken does not depend on who touches the memory");
    }
    row.figure("reclaim_ratio_fair", &ratios[0]);
    row.figure("reclaim_ratio_classic", &ratios[1]);
    row.figure("reclaim_ratio_kernel", &ratios[2]);
    row.figure("noise_pct", &noise);
    row.ratio("ratio_fair_classic", &ratios[0], &ratios[1]);
    each(row)
}
