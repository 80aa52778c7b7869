//! What a second fault lane adds to one VM of which two threads touch far pages at the same time. Part of `ballast
//! bench scale`.
//!
//! Before: two VMs with the same data, one served by one lane, one by two. After: how fast pages came back to both
//! threads together, and how long a touch took.
//! Threads: two in the guest. Units: pages per second of both; microseconds per touch that raised a fault.
//! Promise: the VMs take turns, forwards and backwards; each thread touches its half of the far pages, in random order
//! all over memory.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::Result;
use ballast_base::PAGE_SIZE;

use crate::Bench;
use crate::guest::Ram;
use crate::order::{Data, Pace, Touched};
use crate::report::Row;
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
    // Whole stripes of 32 MiB, as many for each of two lanes.
    let (pages, repetitions) = if bench.options.quick { (16_384, 2) } else { (32_768, 10) };
    let data = Data::HalfCompressible;
    let mut row = bench.row("two threads of one VM, on one fault lane and on two");
    row.fact("data", data.name());
    row.fact("pages", pages);
    row.fact("repetitions", repetitions);
    let make = |lanes| Subject::with_lanes(bench, Way::Ballast, Some(lanes), pages, data);
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
    row.ratio("ratio_restore_2_lanes", &two.restore, &one.restore);
    for (lanes, series) in [("1_lane", one), ("2_lanes", two)] {
        row.figure(&format!("restore_{lanes}_pages_per_s"), &series.restore);
        row.figure(&format!("restore_{lanes}_us_p50"), &series.p50);
        row.figure(&format!("restore_{lanes}_us_p99"), &series.p99);
    }
    each(row)
}

/// Touch these pages, each once, with several threads at the same time. The first word of each must be as expected.
pub(crate) fn touch_together(ram: &Ram, expected: &[u64], order: &[u64], threads: usize) -> Touched {
    let mut times = vec![u32::MAX; order.len()];
    let share = order.len().div_ceil(threads).max(1);
    let start = Instant::now();
    let wrong = std::thread::scope(|scope| {
        let parts = order.chunks(share).zip(times.chunks_mut(share));
        let threads: Vec<_> = parts
            .map(|(order, times)| {
                scope.spawn(move || {
                    let mut wrong = 0;
                    for (page, time) in order.iter().zip(times) {
                        let begin = Instant::now();
                        let found = ram.word(*page as usize * PAGE_SIZE).fetch_add(1, Relaxed);
                        *time = u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX);
                        wrong += u64::from(found != expected[*page as usize]);
                    }
                    wrong
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap_or(1)).sum()
    });
    Touched::of(&mut times, start.elapsed(), wrong)
}
