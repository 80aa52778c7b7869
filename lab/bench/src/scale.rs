//! The gain of a second VM: two that are reclaimed (or restored) at once against one.
//!
//! Before: two guests of each way hold their data. After: a row has the throughput of two over that of one.
//! Threads: the bench's one. Units: pages per second. Promise: one and two take turns, from the same state.

use std::time::Instant;

use anyhow::Result;

use crate::order::{Data, GuestKind, Pace};
use crate::reclaim::rate;
use crate::report::Row;
use crate::rig::Bench;
use crate::subject::{Subject, Way, out, touch};
use crate::{attach, fault_workers, many, overhead, qemu};

const WAYS: [Way; 2] = [Way::Ballast, Way::Kernel];
/// The headline figures.
const KEYS: [&str; 2] = ["scale_2_threads", "scale_2_threads_restore"];

#[derive(Default)]
struct Series {
    reclaim: [Vec<f64>; 2],
    restore: [Vec<f64>; 2],
    p99: [Vec<f64>; 2],
}

impl Series {
    /// Measure one alone, then both at once; in every second round in the opposite order.
    fn round(&mut self, bench: &mut Bench, pair: &mut [Subject], round: u64) -> Result<()> {
        let [first, second] = pair else { return Ok(()) };
        for turn in 0..2 {
            let both = (turn + round) % 2 == 1;
            let mut now = if both { vec![&mut *first, &mut *second] } else { vec![&mut *first] };
            self.reclaim[usize::from(both)].push(rate(&out(bench, &mut now)?));
            let start = Instant::now();
            let touched = touch(&mut now, round, Pace::ALL)?;
            let seconds = start.elapsed().as_secs_f64();
            let pages: u64 = touched.iter().map(|touched| touched.summary.count).sum();
            self.restore[usize::from(both)].push(pages as f64 / seconds);
            let worst = touched.iter().map(|touched| touched.summary.p99_us).fold(0.0, f64::max);
            self.p99[usize::from(both)].push(worst);
        }
        Ok(())
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if bench.options.is(GuestKind::Qemu) {
        return each(qemu::not_measured("scale", "two VMs at once against one", &KEYS));
    }
    let (pages, repetitions) = match (bench.options.quick, bench.options.is(GuestKind::Kvm)) {
        (true, _) => (8192, 2),
        (false, false) => (24_576, 6),
        (false, true) => (16_384, 2),
    };
    let data = Data::HalfCompressible;
    let mut row = bench.row("two VMs at once against one");
    row.fact("data", data.name());
    row.fact("pages", pages);
    row.fact("repetitions", repetitions);
    let mut pairs: Vec<Vec<Subject>> = Vec::new();
    for way in WAYS {
        pairs.push(bench.subjects(&[way, way], pages, data, &mut row)?);
    }
    let mut series: [Series; 2] = Default::default();
    for round in bench.progress.over("round", 0..=repetitions) {
        for (pair, series) in pairs.iter_mut().zip(&mut series) {
            let mut warm_up = Series::default();
            let of = if round == 0 { &mut warm_up } else { series };
            of.round(bench, pair, round)?;
        }
    }
    pairs.iter_mut().flatten().try_for_each(Subject::verify)?;
    let [ballast, kernel] = &series;
    row.ratio("scale_2_threads", &ballast.reclaim[1], &ballast.reclaim[0]);
    row.ratio("scale_2_threads_restore", &ballast.restore[1], &ballast.restore[0]);
    row.ratio("kernel_scale_2_threads", &kernel.reclaim[1], &kernel.reclaim[0]);
    row.ratio("kernel_scale_2_threads_restore", &kernel.restore[1], &kernel.restore[0]);
    for (name, index) in [("1", 0), ("2", 1)] {
        row.figure(&format!("reclaim_{name}_pages_per_s"), &ballast.reclaim[index]);
        row.figure(&format!("kernel_pageout_{name}_pages_per_s"), &kernel.reclaim[index]);
        row.figure(&format!("restore_{name}_pages_per_s"), &ballast.restore[index]);
        row.figure(&format!("kernel_swapin_{name}_pages_per_s"), &kernel.restore[index]);
        row.figure(&format!("restore_{name}_us_p99"), &ballast.p99[index]);
        row.figure(&format!("kernel_swapin_{name}_us_p99"), &kernel.p99[index]);
    }
    drop(pairs);
    if bench.options.is(GuestKind::Native) {
        attach::measure(bench, repetitions, &mut row)?;
    } else {
        row.because(
            "attaching, ten VMs at once, and the engine's memory: measured with native guests (--guest native)",
        );
    }
    each(row)?;
    if bench.options.is(GuestKind::Native) {
        many::run(bench, each)?;
        fault_workers::run(bench, each)?;
        overhead::run(bench, each)?;
    }
    Ok(())
}
