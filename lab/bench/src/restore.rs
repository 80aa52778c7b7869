//! The time of one touch of a far page, as the guest's thread sees it.
//!
//! Before: pages are out, by each way. After: rows have percentiles of single touches in random order.
//! Threads: the bench's one. Units: microseconds per touch.
//! Promise: the ways take turns, forwards and backwards; each page is touched once.

use anyhow::Result;
use ballast_api::RestoreStages;

use crate::order::{Data, GuestKind, Pace, Touched};
use crate::report::{Row, rounded};
use crate::rig::Bench;
use crate::subject::{Side, Way, out, touch};
use crate::zram;

const WAYS: [Way; 5] = [Way::Ballast, Way::Kernel, Way::Plain, Way::Floor, Way::Near];

/// A pinned vCPU without pauses: the headline figures.
const PINNED: Pace = Pace { pinned: true, ..Pace::ALL };
/// A pinned vCPU that computes between touches, so that the worker that serves them has gone to sleep.
const PACED: Pace = Pace { most: 1000, think_us: 100, pinned: true, ..Pace::ALL };
/// A thread that the scheduler migrates.
const MOVING: Pace = Pace { most: 2000, ..Pace::ALL };

/// Measures one round of a way: percentiles of touches without pauses, with pauses, and of a thread that moves.
fn measure(bench: &mut Bench, side: &mut Side, seed: u64) -> Result<()> {
    let paces: &[(Pace, &str, &str)] = if bench.options.is(GuestKind::Native) {
        &[(PACED, "paced_p50", "paced_p99"), (MOVING, "moving_p50", "moving_p99")]
    } else {
        &[]
    };
    for (pace, p50, p99) in paces {
        out(bench, &mut side.guests)?;
        let summary = touch(&mut side.guests, seed, *pace)?[0].summary;
        side.figures.add(p50, summary.p50_us);
        side.figures.add(p99, summary.p99_us);
    }
    out(bench, &mut side.guests)?;
    let Touched { summary, faults, .. } = touch(&mut side.guests, seed, PINNED)?[0];
    for (key, value) in [
        ("faults_p50", faults.p50_us),
        ("faults_p99", faults.p99_us),
        ("faulted_pct", 100.0 * faults.count as f64 / summary.count.max(1) as f64),
        ("p50", summary.p50_us),
        ("p90", summary.p90_us),
        ("p99", summary.p99_us),
        ("max", summary.max_us),
    ] {
        side.figures.add(key, value);
    }
    Ok(())
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions) = match (bench.options.quick, bench.options.guest) {
        (true, _) => (4096, 2),
        (false, GuestKind::Native) => (16_384, 6),
        (false, _) => (8192, 4),
    };
    for data in Data::BOTH {
        let mut row = bench.row(data.name());
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        let is_native = bench.options.is(GuestKind::Native);
        if !is_native {
            row.because("the floor of a KVM guest: the host maps the neighbours of an untouched page along with it");
        }
        let ways = if is_native { &WAYS[..] } else { &WAYS[..3] };
        let mut sides = bench.sides(ways, &[pages], data, &mut row)?;
        bench.by_turns(&mut sides, repetitions, measure)?;
        memory(bench, &mut sides, &mut row)?;
        let of = |way: Way, key: &str| sides.iter().find(|side| side.way == way).map_or(&[][..], |s| s.figures.of(key));
        for (way, prefix) in WAYS.into_iter().zip(["restore", "kernel_swapin", "plain", "floor"]) {
            for key in ["p50", "p90", "p99", "max"] {
                row.figure(&format!("{prefix}_us_{key}"), of(way, key));
            }
        }
        for key in ["p50", "p99"] {
            row.ratio(&format!("ratio_restore_{key}"), of(Way::Ballast, key), of(Way::Kernel, key));
            row.ratio(&format!("ratio_plain_{key}"), of(Way::Ballast, key), of(Way::Plain, key));
        }
        if is_native {
            row.figure("restore_faulted_pct", of(Way::Ballast, "faulted_pct"));
            for percentile in ["p50", "p99"] {
                let key = format!("faults_{percentile}");
                let [ours, kernel, near] = [Way::Ballast, Way::Kernel, Way::Near].map(|way| of(way, &key));
                row.figure(&format!("restore_fault_us_{percentile}"), ours);
                row.ratio(&format!("ratio_restore_fault_{percentile}"), ours, kernel);
                row.figure(&format!("near_fault_us_{percentile}"), near);
                row.ratio(&format!("ratio_near_fault_{percentile}"), ours, near);
                for name in ["paced", "moving"] {
                    let key = format!("{name}_{percentile}");
                    for (way, prefix) in WAYS.into_iter().zip(["restore", "kernel_swapin", "plain"]) {
                        row.figure(&format!("{prefix}_{name}_us_{percentile}"), of(way, &key));
                    }
                    row.ratio(&format!("ratio_restore_{key}"), of(Way::Ballast, &key), of(Way::Kernel, &key));
                }
            }
        }
        each(row)?;
    }
    Ok(())
}

/// The memory that far pages occupy, and the engine's own measurements.
fn memory(bench: &mut Bench, sides: &mut [Side], row: &mut Row) -> Result<()> {
    for side in sides.iter_mut().filter(|side| !side.guests.is_empty()) {
        match side.way {
            Way::Ballast => {
                let name = side.guests[0].name().to_owned();
                if !bench.options.is(GuestKind::Kvm) {
                    let stat = bench.daemon.api().vm(&name)?;
                    let latency = stat.restore_latency;
                    row.fact("engine_restore_us_p50", rounded(latency.p50_us));
                    row.fact("engine_restore_us_p99", rounded(latency.p99_us));
                    row.fact("engine_restores", latency.count);
                    let RestoreStages { queue, lookup, read, install } = &stat.restore_stages;
                    // The stages of the engine's part of the time, over all rounds.
                    for (name, stage) in [("queue", queue), ("lookup", lookup), ("read", read), ("install", install)] {
                        row.fact(&format!("stage_{name}_us_p50"), rounded(stage.p50_us));
                        row.fact(&format!("stage_{name}_us_p99"), rounded(stage.p99_us));
                    }
                }
                out(bench, &mut side.guests)?;
                let stat = bench.daemon.api().vm(side.guests[0].name())?;
                let pages = (stat.far_bytes / ballast_base::PAGE_SIZE as u64).max(1);
                row.fact("store_bytes_per_page", stat.store_bytes / pages);
            }
            Way::Kernel => {
                out(bench, &mut side.guests)?;
                if let Ok(device) = &bench.kernel {
                    let (bytes, algorithm) = zram::used(device)?;
                    row.fact("kernel_compression", algorithm);
                    row.fact("zram_bytes_per_page", bytes / zram::used_pages()?.max(1));
                }
            }
            Way::Plain | Way::Near | Way::Floor => {}
        }
    }
    Ok(())
}
