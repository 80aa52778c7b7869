//! The gain of a second fault worker for one VM of which two threads touch far pages at the same time. `ballast bench
//! scale` runs it.
//!
//! Before: two VMs have the same data; one fault worker serves one of them, and two serve the other. After: a row has
//! the rate of restores for both threads together, and the time of a touch.
//! Threads: two in the guest. Units: pages per second of both; microseconds per touch that raised a fault.
//! Promise: the VMs take turns, forwards and backwards; each thread touches its half of the far pages, in random order
//! all over memory.

use anyhow::Result;

use crate::order::{Data, Pace};
use crate::report::Row;
use crate::rig::Bench;
use crate::subject::{Subject, Way, in_turn, out, touch};

const TWO_THREADS: Pace = Pace { threads: 2, ..Pace::ALL };

#[derive(Default)]
struct Series {
    restore: Vec<f64>,
    p50: Vec<f64>,
    p99: Vec<f64>,
}

impl Series {
    fn round(&mut self, bench: &mut Bench, vm: &mut Subject, seed: u64) -> Result<()> {
        out(bench, &mut [&mut *vm])?;
        let touched = touch(&mut [vm], seed, TWO_THREADS)?[0];
        self.restore.push(touched.summary.count as f64 / touched.wall_us * 1e6);
        self.p50.push(touched.faults.p50_us);
        self.p99.push(touched.faults.p99_us);
        Ok(())
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    // Whole stripes of 32 MiB, the same number for each of two workers.
    let (pages, repetitions) = if bench.options.quick { (16_384, 2) } else { (32_768, 10) };
    let data = Data::HalfCompressible;
    let mut row = bench.row("two threads of one VM, on one fault worker and on two");
    row.fact("data", data.name());
    row.fact("pages", pages);
    row.fact("repetitions", repetitions);
    let make = |workers| Subject::with_fault_workers(bench, Way::Ballast, Some(workers), pages, data);
    let mut vms = [1, 2].into_iter().map(make).collect::<Result<Vec<_>>>()?;
    let mut series: [Series; 2] = Default::default();
    for round in bench.progress.over("round", 0..=repetitions) {
        for (vm, series) in in_turn(vms.iter_mut().zip(&mut series), round) {
            let mut warm_up = Series::default();
            let of = if round == 0 { &mut warm_up } else { series };
            of.round(bench, vm, round)?;
        }
    }
    vms.iter_mut().try_for_each(Subject::verify)?;
    let [one, two] = &series;
    row.ratio("ratio_restore_2_workers", &two.restore, &one.restore);
    for (workers, series) in [("1_worker", one), ("2_workers", two)] {
        row.figure(&format!("restore_{workers}_pages_per_s"), &series.restore);
        row.figure(&format!("restore_{workers}_us_p50"), &series.p50);
        row.figure(&format!("restore_{workers}_us_p99"), &series.p99);
    }
    each(row)
}
