//! The cost of the attachment for a QEMU guest without a limit.
//!
//! Before: there are three guests, one under `ballast run`, and two without Ballast. After: rows have the slowdown of
//! the attached one against another, and, as the noise, that of the third. Each repetition attaches another of the
//! three. Units: as in `idle`. Promise: only one of them works at a time, in short turns; the others wait for an order.
//! A QEMU attaches at its start or never, so the three also differ in the place of their memory; the noise between two
//! equal ones shows how much that matters.

use anyhow::{Context, Result, bail};

use crate::order::{Answer, Backing, Data, GuestConfig, GuestKind, Order, Role};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::worker::Worker;

/// Operations per second by the clock, and per second of CPU time.
fn speed(worker: &mut Worker, zipf: bool, ms: u64) -> Result<[f64; 2]> {
    let Answer::Sliced { ops, wall_us, cpu_us } = worker.ask(&Order::Work { zipf, ms })? else { bail!("a VM stands") };
    Ok([ops as f64 * 1e6 / wall_us, ops as f64 * 1e6 / cpu_us])
}

fn start(bench: &mut Bench, backing: Backing, pages: u64) -> Result<Worker> {
    let (kind, data, dir) = (GuestKind::Qemu, Data::HalfCompressible, bench.guest_dir());
    let config = GuestConfig { backing, kind, pages, data, fault_workers: None, dir };
    let mut worker = Worker::start(&Role::Guest(config))?;
    worker.ask(&Order::Fill)?;
    if bench.options.quick { Ok(worker) } else { speed(&mut worker, false, 1000).map(|_| worker) }
}

/// Slowdowns, in percent, of the attached guest and the one before it against the one after it; and the attached
/// guest's speed.
fn trio(workers: &mut [Worker], attached: usize, zipf: bool, turns: usize, ms: u64) -> Result<([[f64; 2]; 2], f64)> {
    let mut ratios = [const { [const { Vec::new() }; 2] }; 2];
    let (other, third) = ((attached + 1) % 3, (attached + 2) % 3);
    let mut first = Vec::new();
    for turn in 0..=turns {
        let mut speeds = [[0.0; 2]; 3];
        for step in 0..3 {
            let at = (turn + step) % 3;
            speeds[at] = speed(&mut workers[at], zipf, ms)?;
        }
        // The first turn warms up.
        for clock in (0..2).filter(|_| turn > 0) {
            ratios[0][clock].push(speeds[attached][clock] / speeds[other][clock]);
            ratios[1][clock].push(speeds[third][clock] / speeds[other][clock]);
        }
        first.push(speeds[attached][0]);
    }
    let mut slower = [[0.0; 2]; 2];
    for (which, clock) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
        slower[which][clock] = (1.0 - median(&ratios[which][clock]).context("there are turns")?) * 100.0;
    }
    Ok((slower, median(&first).context("there are turns")?))
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (pages, repetitions, turns, ms) = if bench.options.quick { (1024, 2, 4, 20) } else { (8192, 6, 15, 100) };
    let (mut slower, mut speeds) = ([const { Vec::new() }; 2], [const { Vec::new() }; 2]);
    bench.progress.row("idle, qemu guest, one of three attached");
    for repetition in bench.progress.over("trio of guests", 0..repetitions) {
        let attached = repetition % 3;
        let name = bench.vm_name();
        let ballast = Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() };
        let mut workers = Vec::new();
        for at in 0..3 {
            let backing = if at == attached { ballast.clone() } else { Backing::Floor };
            workers.push(start(bench, backing, pages)?);
        }
        bench.daemon.wait_for_vm(&name)?;
        for workload in 0..2 {
            let (differences, speed) = trio(&mut workers, attached, workload == 1, turns, ms)?;
            slower[workload].push(differences);
            speeds[workload].push(speed);
        }
        for worker in &mut workers {
            worker.ask(&Order::Verify)?;
        }
    }
    for (workload, name) in ["hotset", "zipf"].into_iter().enumerate() {
        let mut row = bench.row(name);
        row.fact("workload", name);
        row.fact("data_pages", pages);
        row.fact("repetitions", repetitions);
        row.fact("turns", turns);
        row.fact("turn_ms", ms);
        let of = |which: usize, clock: usize| -> Vec<f64> {
            slower[workload].iter().map(|slower: &[[f64; 2]; 2]| slower[which][clock]).collect()
        };
        row.difference("idle_overhead_pct", &of(0, 0));
        row.difference("idle_aa_pct", &of(1, 0));
        row.difference("idle_overhead_cpu_pct", &of(0, 1));
        row.difference("idle_aa_cpu_pct", &of(1, 1));
        row.figure("attached_ops_per_s", &speeds[workload]);
        each(row)?;
    }
    Ok(())
}
