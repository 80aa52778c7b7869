//! Ten VMs at once: all are over their limits, then all touch their far pages. `ballast bench scale` runs it.
//!
//! Before: ten guests of each way hold their data; the kernel's are in ten cgroups, and ten have a plain handler each.
//! After: a row has the throughput of all, and the waits of each.
//! Units: pages per second of all ten; microseconds per touch. Promise: the ways take turns, forwards and backwards.

use std::time::Instant;

use anyhow::Result;

use crate::order::{Data, Pace};
use crate::reclaim::rate;
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::subject::{Subject, Way, in_turn, out, touch};

const VMS: usize = 10;

#[derive(Default)]
struct Series {
    reclaim: Vec<f64>,
    restore: Vec<f64>,
    /// Median over the VMs, and the VM that waited longest.
    p50: Vec<f64>,
    p99: Vec<f64>,
    worst_p99: Vec<f64>,
}

impl Series {
    fn round(&mut self, bench: &mut Bench, vms: &mut [Subject], seed: u64) -> Result<()> {
        let mut all: Vec<&mut Subject> = vms.iter_mut().collect();
        self.reclaim.push(rate(&out(bench, &mut all)?));
        let start = Instant::now();
        let touched = touch(&mut all, seed, Pace::ALL)?;
        let seconds = start.elapsed().as_secs_f64();
        self.restore.push(touched.iter().map(|touched| touched.summary.count).sum::<u64>() as f64 / seconds);
        let p99: Vec<f64> = touched.iter().map(|touched| touched.summary.p99_us).collect();
        self.p50.extend(median(&touched.iter().map(|touched| touched.summary.p50_us).collect::<Vec<_>>()));
        self.p99.extend(median(&p99));
        self.worst_p99.push(p99.into_iter().fold(0.0, f64::max));
        Ok(())
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = if bench.options.quick { (2048, 2) } else { (8192, 6) };
    let data = Data::HalfCompressible;
    let mut row = bench.row("ten VMs at once");
    row.fact("data", data.name());
    row.fact("vms", VMS);
    row.fact("pages", pages);
    row.fact("kernel_cgroups", VMS);
    row.fact("repetitions", repetitions);
    let mut sides: Vec<(Vec<Subject>, Series)> = Vec::new();
    for way in [Way::Ballast, Way::Kernel, Way::Plain] {
        sides.push((bench.subjects(&[way; VMS], pages, data, &mut row)?, Series::default()));
    }
    for round in bench.progress.over("round", 0..=repetitions) {
        for (vms, series) in in_turn(sides.iter_mut().filter(|(vms, _)| vms.len() == VMS), round) {
            let mut warm_up = Series::default();
            let of = if round == 0 { &mut warm_up } else { series };
            of.round(bench, vms, round)?;
        }
    }
    sides.iter_mut().flat_map(|(vms, _)| vms).try_for_each(Subject::verify)?;
    let [(_, ballast), (_, kernel), (_, plain)] = &sides[..] else { return Ok(()) };
    for (key, kernel_key, figure) in [
        ("reclaim_10_pages_per_s", "kernel_pageout_10_pages_per_s", (&ballast.reclaim, &kernel.reclaim)),
        ("restore_10_pages_per_s", "kernel_swapin_10_pages_per_s", (&ballast.restore, &kernel.restore)),
        ("restore_10_us_p50", "kernel_swapin_10_us_p50", (&ballast.p50, &kernel.p50)),
        ("restore_10_us_p99", "kernel_swapin_10_us_p99", (&ballast.p99, &kernel.p99)),
        ("restore_10_worst_vm_us_p99", "kernel_swapin_10_worst_vm_us_p99", (&ballast.worst_p99, &kernel.worst_p99)),
    ] {
        row.figure(key, figure.0);
        row.figure(kernel_key, figure.1);
        row.ratio(&format!("ratio_{key}"), figure.0, figure.1);
    }
    row.figure("plain_10_pages_per_s", &plain.restore);
    row.figure("plain_10_us_p50", &plain.p50);
    row.figure("plain_10_us_p99", &plain.p99);
    row.figure("plain_10_worst_vm_us_p99", &plain.worst_p99);
    row.ratio("ratio_restore_10_us_p99_plain", &ballast.p99, &plain.p99);
    each(row)
}
