//! The cost of the attachment for a VM without a limit.
//!
//! Before: two VMs run the same workload, and neither is attached. After: rows have the slowdown of a VM after its
//! attachment, with the other VM as the reference.
//! Threads: the bench's one; VMs are processes. Units: operations per second, of time and of CPU time.
//! Promise: only one VM runs at a time, in short turns, so the machine's other load affects both alike. All processes
//! run on one CPU, engine and timers included: so the VMs pay for their CPU time, and no VM moves to a CPU of another
//! speed, which would change more than the measured cost. Attaching changes nothing else, not even the place of the
//! memory.
//!
//! ```text
//! phase      first VM     second VM
//!   0        free         free        ┐ the change from 0 to 1 is the A/A noise
//!   1        free         free        ┘ ┐
//!   2        attached     free          ├ the cost: the distance of 2 below the mean of 1 and 3
//!   3        attached     attached      ┘
//! ```
//! In phase 3 both VMs have the cost, so their ratio is that of phase 1. A steady drift of the machine has no effect.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use ballast_base::Bytes;
use ballast_testvm::{Spec, Workload};
use rustix::process::Signal;

use crate::cpu;
use crate::order::{Answer, Backing, GuestKind, Order, Role, WorkloadConfig};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::worker::Worker;

/// The first phase with an attached VM; in each phase after it, one more is attached.
const FIRST_ATTACHED: usize = 2;
const BOTH_ATTACHED: usize = 3;
/// Uncounted turns of each VM before each phase.
const SETTLE: usize = 2;

/// A VM that is stopped except in its turn.
struct Contestant(Worker);

impl Contestant {
    fn start(config: WorkloadConfig) -> Result<Self> {
        let mut worker = Worker::start(&Role::Workload(config))?;
        worker.ask(&Order::Fill)?;
        let contestant = Self(worker);
        contestant.0.signal(Signal::STOP)?;
        Ok(contestant)
    }

    /// Continues the VM, lets it obey one order, and stops it again.
    fn turn(&mut self, order: &Order) -> Result<Answer> {
        self.0.signal(Signal::CONT)?;
        let answer = self.0.ask(order);
        self.0.signal(Signal::STOP)?;
        answer
    }

    fn speed(&mut self, ms: u64) -> Result<[f64; 2]> {
        let Answer::Sliced { ops, wall_us, cpu_us } = self.turn(&Order::Slice { ms })? else { bail!("a VM stands") };
        Ok([ops as f64 * 1e6 / wall_us, ops as f64 * 1e6 / cpu_us])
    }
}

/// The figures of a pair: the first VM's speed over the second's, by clock and by CPU time, in each phase.
struct Pair {
    ratio: [[f64; 2]; 4],
    attached_ops_per_s: f64,
    /// CPU time of engine, keeper and both clients while both VMs are attached, in percent of one CPU.
    service_cpu_pct: f64,
}

impl Pair {
    /// Slowdown of a VM by its attachment, in percent.
    fn cost_pct(&self, clock: usize) -> f64 {
        let [_, before, attached, after] = self.ratio.map(|ratio| ratio[clock]);
        (1.0 - attached / (before * after).sqrt()) * 100.0
    }

    /// Slowdown of the first VM from phase 0 to phase 1 in percent: noise, because neither VM changed.
    fn noise_pct(&self, clock: usize) -> f64 {
        (1.0 - self.ratio[1][clock] / self.ratio[0][clock]) * 100.0
    }
}

fn pair(bench: &mut Bench, zipf: bool, ram_bytes: u64, turns: usize, ms: u64) -> Result<Pair> {
    let mut start = || {
        let backing = Backing::Ballast { name: bench.vm_name(), socket: bench.daemon.attach_socket() };
        let spec = Spec::new(if zipf { Workload::Zipf } else { Workload::Hotset }, Bytes(ram_bytes));
        Contestant::start(WorkloadConfig { spec, kind: bench.options.guest, backing })
    };
    let (mut first, mut second) = (start()?, start()?);
    let mut pair = Pair { ratio: [[0.0; 2]; 4], attached_ops_per_s: 0.0, service_cpu_pct: 0.0 };
    let service = [bench.engine_pid()?, bench.daemon.keeper_pid()];
    let service_us = |vms: [u32; 2]| -> Result<f64> {
        let daemon = service.iter().map(|pid| cpu::of_threads(*pid, |_| true)).sum::<Result<f64>>()?;
        let clients =
            vms.iter().map(|pid| cpu::of_threads(*pid, |name| name == "ballast-client")).sum::<Result<f64>>()?;
        Ok(daemon + clients)
    };
    let vms = [first.0.pid(), second.0.pid()];
    // The warm-up is a whole phase, because VMs get faster at first, and at different rates.
    for _ in 0..turns {
        first.speed(ms)?;
        second.speed(ms)?;
    }
    for (phase, ratio) in pair.ratio.iter_mut().enumerate() {
        match phase {
            FIRST_ATTACHED => first.turn(&Order::Attach).map(drop)?,
            BOTH_ATTACHED => second.turn(&Order::Attach).map(drop)?,
            _ => {}
        }
        // The attach itself is not a cost of an idle VM: it is finished before the phase begins.
        for _ in 0..SETTLE {
            first.speed(ms)?;
            second.speed(ms)?;
        }
        let (mut ratios, mut speeds) = ([const { Vec::new() }; 2], Vec::new());
        let (start, before_us) = (Instant::now(), service_us(vms)?);
        for turn in 0..turns {
            let (ours, theirs) = if turn % 2 == 0 {
                let ours = first.speed(ms)?;
                (ours, second.speed(ms)?)
            } else {
                let theirs = second.speed(ms)?;
                (first.speed(ms)?, theirs)
            };
            speeds.push(ours[0]);
            (0..2).for_each(|clock| ratios[clock].push(ours[clock] / theirs[clock]));
        }
        for (clock, ratios) in ratios.iter().enumerate() {
            ratio[clock] = median(ratios).context("there are turns")?;
        }
        pair.attached_ops_per_s = median(&speeds).context("there are turns")?;
        pair.service_cpu_pct = (service_us(vms)? - before_us) / start.elapsed().as_secs_f64() / 1e4;
    }
    Ok(pair)
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (ram_bytes, repetitions, turns, ms) = match (bench.options.quick, bench.options.is(GuestKind::Kvm)) {
        (true, _) => (16 << 20, 2, 4, 20),
        (false, false) => (64 << 20, 60, 5, 40),
        // A KVM guest takes longer to start.
        (false, true) => (64 << 20, 30, 5, 40),
    };
    for (zipf, workload) in [(false, "hotset"), (true, "zipf")] {
        let mut row = bench.row(workload);
        row.fact("workload", workload);
        row.fact("ram_bytes", ram_bytes);
        row.fact("repetitions", repetitions);
        row.fact("turns_per_phase", turns);
        row.fact("turn_ms", ms);
        let pairs: Vec<Pair> = bench
            .progress
            .over("pair of VMs", 0..repetitions)
            .map(|_| pair(bench, zipf, ram_bytes, turns, ms))
            .collect::<Result<_>>()?;
        let cost = |clock| pairs.iter().map(|pair| pair.cost_pct(clock)).collect::<Vec<_>>();
        let noise = |clock| pairs.iter().map(|pair| pair.noise_pct(clock)).collect::<Vec<_>>();
        row.difference("idle_overhead_pct", &cost(0));
        row.difference("idle_aa_pct", &noise(0));
        row.difference("idle_overhead_cpu_pct", &cost(1));
        row.difference("idle_aa_cpu_pct", &noise(1));
        row.figure_of("idle_service_cpu_pct", &pairs, |pair| pair.service_cpu_pct);
        row.figure_of("attached_ops_per_s", &pairs, |pair| pair.attached_ops_per_s);
        each(row)?;
    }
    Ok(())
}
