//! The time of one touch of a far page, as the guest's thread sees it.
//!
//! Before: pages are out, by each way. After: rows have percentiles of single touches in random order.
//! Threads: the bench's one. Units: microseconds per touch.
//! Promise: the ways take turns, forwards and backwards; each page is touched once.

use anyhow::Result;
use ballast_api::RestoreStages;

use crate::order::{GuestKind, Pace};
use crate::report::{Row, rounded};
use crate::rig::Bench;
use crate::subject::{Subject, Way, in_turn, out, touch};
use crate::{machine, qemu, swaps};

const WAYS: [Way; 5] = [Way::Ballast, Way::Kernel, Way::Plain, Way::Floor, Way::Near];

/// A pinned vCPU without pauses: the headline figures.
const PINNED: Pace = Pace { pinned: true, ..Pace::ALL };
/// A pinned vCPU that computes in between, so that the worker that serves the touches has gone to sleep.
const PACED: Pace = Pace { most: 1000, think_us: 100, pinned: true, ..Pace::ALL };
/// A thread that the scheduler migrates.
const MOVING: Pace = Pace { most: 2000, ..Pace::ALL };

/// The figures of the rounds of one way.
#[derive(Default)]
pub(crate) struct Series {
    pub(crate) p50: Vec<f64>,
    pub(crate) p90: Vec<f64>,
    pub(crate) p99: Vec<f64>,
    pub(crate) max: Vec<f64>,
    pub(crate) paced: [Vec<f64>; 2],
    pub(crate) moving: [Vec<f64>; 2],
    /// Figures of the touches that faulted, and their share in percent.
    pub(crate) faults: [Vec<f64>; 2],
    pub(crate) faulted_pct: Vec<f64>,
}

impl Series {
    fn round(&mut self, bench: &mut Bench, subject: &mut Subject, seed: u64) -> Result<()> {
        if bench.options.is(GuestKind::Native) {
            for (pace, into) in [(PACED, &mut self.paced), (MOVING, &mut self.moving)] {
                out(bench, &mut [&mut *subject])?;
                let summary = touch(&mut [&mut *subject], seed, pace)?[0].summary;
                into[0].push(summary.p50_us);
                into[1].push(summary.p99_us);
            }
        }
        out(bench, &mut [&mut *subject])?;
        let touched = touch(&mut [subject], seed, PINNED)?[0];
        let summary = touched.summary;
        self.faults[0].push(touched.faults.p50_us);
        self.faults[1].push(touched.faults.p99_us);
        self.faulted_pct.push(100.0 * touched.faults.count as f64 / summary.count.max(1) as f64);
        self.p50.push(summary.p50_us);
        self.p90.push(summary.p90_us);
        self.p99.push(summary.p99_us);
        self.max.push(summary.max_us);
        Ok(())
    }

    fn report(&self, row: &mut Row, prefix: &str) {
        for (name, values) in [("p50", &self.p50), ("p90", &self.p90), ("p99", &self.p99), ("max", &self.max)] {
            row.figure(&format!("{prefix}_us_{name}"), values);
        }
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = match (bench.options.quick, bench.options.guest) {
        (true, GuestKind::Qemu) => (2048, 2),
        (true, _) => (4096, 2),
        (false, GuestKind::Native) => (16_384, 6),
        (false, _) => (8192, 4),
    };
    for data in bench.options.data() {
        let mut row = bench.row(data.name());
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        let ways: &[Way] = match bench.options.guest {
            GuestKind::Native => &WAYS,
            GuestKind::Kvm => {
                row.because(
                    "the floor of a KVM guest: the host maps the neighbours of an untouched page along with it",
                );
                &WAYS[..3]
            }
            GuestKind::Qemu => {
                qemu::facts(&mut row);
                &[Way::Ballast, Way::Kernel, Way::Floor]
            }
        };
        let mut subjects = bench.subjects(ways, pages, data, &mut row)?;
        let mut series: [Series; 5] = Default::default();
        for round in bench.progress.over("round", 0..=repetitions) {
            for subject in in_turn(&mut subjects, round) {
                // Round 0 warms up, into figures that are dropped.
                let mut warm_up = Series::default();
                let of = if round == 0 { &mut warm_up } else { &mut series[subject.way as usize] };
                of.round(bench, subject, round)?;
            }
        }
        subjects.iter_mut().try_for_each(Subject::verify)?;
        memory(bench, &mut subjects, &mut row)?;
        let [ballast, kernel, plain, floor, near] = &series;
        ballast.report(&mut row, "restore");
        kernel.report(&mut row, "kernel_swapin");
        plain.report(&mut row, "plain");
        floor.report(&mut row, "floor");
        row.ratio("ratio_restore_p50", &ballast.p50, &kernel.p50);
        row.ratio("ratio_restore_p99", &ballast.p99, &kernel.p99);
        row.ratio("ratio_plain_p50", &ballast.p50, &plain.p50);
        row.ratio("ratio_plain_p99", &ballast.p99, &plain.p99);
        if bench.options.is(GuestKind::Native) {
            row.figure("restore_faulted_pct", &ballast.faulted_pct);
            for (at, percentile) in ["p50", "p99"].into_iter().enumerate() {
                row.figure(&format!("restore_fault_us_{percentile}"), &ballast.faults[at]);
                row.ratio(&format!("ratio_restore_fault_{percentile}"), &ballast.faults[at], &kernel.faults[at]);
                row.figure(&format!("near_fault_us_{percentile}"), &near.faults[at]);
                row.ratio(&format!("ratio_near_fault_{percentile}"), &ballast.faults[at], &near.faults[at]);
                for (name, [ballast, kernel, plain]) in [
                    ("paced", [ballast, kernel, plain].map(|series| &series.paced[at])),
                    ("moving", [ballast, kernel, plain].map(|series| &series.moving[at])),
                ] {
                    row.figure(&format!("restore_{name}_us_{percentile}"), ballast);
                    row.figure(&format!("kernel_swapin_{name}_us_{percentile}"), kernel);
                    row.figure(&format!("plain_{name}_us_{percentile}"), plain);
                    row.ratio(&format!("ratio_restore_{name}_{percentile}"), ballast, kernel);
                }
            }
        }
        each(row)?;
    }
    Ok(())
}

/// Add the stages of the engine's part of the time, over all rounds.
pub(crate) fn stages(row: &mut Row, stages: &RestoreStages) {
    let RestoreStages { queue, lookup, read, install } = stages;
    for (name, stage) in [("queue", queue), ("lookup", lookup), ("read", read), ("install", install)] {
        row.fact(&format!("stage_{name}_us_p50"), rounded(stage.p50_us));
        row.fact(&format!("stage_{name}_us_p99"), rounded(stage.p99_us));
    }
    row.fact("stages_watched", queue.count);
}

/// The memory that far pages occupy, and the engine's own measurements.
fn memory(bench: &mut Bench, subjects: &mut [Subject], row: &mut Row) -> Result<()> {
    for subject in subjects {
        match subject.way {
            Way::Ballast => {
                if !bench.options.is(GuestKind::Kvm) {
                    let stat = bench.daemon.api().vm(subject.name())?;
                    let latency = stat.restore_latency;
                    row.fact("engine_restore_us_p50", rounded(latency.p50_us));
                    row.fact("engine_restore_us_p99", rounded(latency.p99_us));
                    row.fact("engine_restores", latency.count);
                    stages(row, &stat.restore_stages);
                }
                row.fact("engine_rss_anon_bytes", machine::rss_anon(bench.engine_pid()?)?);
                out(bench, &mut [&mut *subject])?;
                let stat = bench.daemon.api().vm(subject.name())?;
                let pages = (stat.far_bytes / ballast_base::PAGE_SIZE as u64).max(1);
                row.fact("store_bytes_per_page", stat.store_bytes / pages);
            }
            Way::Kernel => {
                out(bench, &mut [&mut *subject])?;
                if let Ok(device) = &bench.kernel {
                    let (bytes, algorithm) = swaps::used(device)?;
                    row.fact("kernel_compression", algorithm);
                    row.fact("zram_bytes_per_page", bytes / swaps::used_pages()?.max(1));
                }
            }
            Way::Plain | Way::Near | Way::Floor => {}
        }
    }
    Ok(())
}
