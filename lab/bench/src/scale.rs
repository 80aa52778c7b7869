//! Ten VMs at once that are over their limits and then touch their far pages; and the memory of the engine.
//!
//! Before: guests of each way hold their data, the kernel's in cgroups of their own. After: a row has the throughput of
//! all ten and the waits of each.
//! Threads: the bench's one. Units: pages per second of all; microseconds per touch. Promise: the ways take turns.

use std::time::Instant;

use anyhow::Result;

use crate::order::{Data, Pace};
use crate::overhead;
use crate::reclaim::rate;
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::subject::{Subject, Way, out, touch};

const VMS: usize = 10;

struct Together {
    reclaim: f64,
    restore: f64,
    /// The median of the guests, and the guest that waited longest.
    p50: f64,
    p99: f64,
    worst_p99: f64,
}

fn together(bench: &mut Bench, guests: &mut [Subject], seed: u64) -> Result<Together> {
    let reclaim = rate(&out(bench, guests)?);
    let start = Instant::now();
    let touched = touch(guests, seed, Pace::ALL)?;
    let seconds = start.elapsed().as_secs_f64();
    let pages: u64 = touched.iter().map(|touched| touched.summary.count).sum();
    let p50: Vec<f64> = touched.iter().map(|touched| touched.summary.p50_us).collect();
    let p99: Vec<f64> = touched.iter().map(|touched| touched.summary.p99_us).collect();
    let middle = |values: &[f64]| median(values).unwrap_or_default();
    let worst_p99 = p99.iter().copied().fold(0.0, f64::max);
    Ok(Together { reclaim, restore: pages as f64 / seconds, p50: middle(&p50), p99: middle(&p99), worst_p99 })
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    ten(bench, each)?;
    overhead::run(bench, each)
}

fn ten(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = if bench.options.quick { (2048, 2) } else { (8192, 6) };
    let data = Data::HalfCompressible;
    let mut row = bench.row("ten VMs at once");
    row.fact("data", data.name());
    row.fact("vms", VMS);
    row.fact("pages", pages);
    row.fact("kernel_cgroups", VMS);
    row.fact("repetitions", repetitions);
    let mut sides = bench.sides(&[Way::Ballast, Way::Kernel, Way::Plain], &[pages; VMS], data, &mut row)?;
    bench.by_turns(&mut sides, repetitions, |bench, side, round| {
        let of = together(bench, &mut side.guests, round)?;
        side.figures.add("reclaim", of.reclaim);
        side.figures.add("restore", of.restore);
        side.figures.add("p50", of.p50);
        side.figures.add("p99", of.p99);
        side.figures.add("worst_p99", of.worst_p99);
        Ok(())
    })?;
    let [ballast, kernel, plain] = [0, 1, 2].map(|side| &sides[side].figures);
    for (key, kernel_key, plain_key, figure) in [
        ("reclaim_10_pages_per_s", "kernel_pageout_10_pages_per_s", None, "reclaim"),
        ("restore_10_pages_per_s", "kernel_swapin_10_pages_per_s", Some("plain_10_pages_per_s"), "restore"),
        ("restore_10_us_p50", "kernel_swapin_10_us_p50", Some("plain_10_us_p50"), "p50"),
        ("restore_10_us_p99", "kernel_swapin_10_us_p99", Some("plain_10_us_p99"), "p99"),
        (
            "restore_10_worst_vm_us_p99",
            "kernel_swapin_10_worst_vm_us_p99",
            Some("plain_10_worst_vm_us_p99"),
            "worst_p99",
        ),
    ] {
        row.figure(key, ballast.of(figure));
        row.figure(kernel_key, kernel.of(figure));
        row.ratio(&format!("ratio_{key}"), ballast.of(figure), kernel.of(figure));
        plain_key.into_iter().for_each(|key| row.figure(key, plain.of(figure)));
    }
    row.ratio("ratio_restore_10_us_p99_plain", ballast.of("p99"), plain.of("p99"));
    each(row)
}
