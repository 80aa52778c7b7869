//! One VM under a limit, over time: the data for a picture of Ballast's main job.
//!
//! Before: a VM has filled its memory and works, mostly on two fifths of it. After: samples of its memory, faults and
//! speed, before a limit of five eighths of its RAM, under it, and without it again.
//! Threads: the bench's one; the VM is a process. Units: seconds since the first sample; bytes; per second.
//! Promise: every sample comes from the API, as an operator sees it, and every word that the VM reads is checked.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Spec, Workload};
use serde_json::json;

use crate::order::{Answer, Backing, Order, Role, WorkloadConfig};
use crate::report::Row;
use crate::rig::Bench;
use crate::worker::Worker;

const SAMPLE: Duration = Duration::from_millis(200);
/// Rounds of computing before an operation: some 3 us, like the work of a request.
const THINK: u64 = 1000;

/// The times without a limit, under it, and without it again.
struct Plan {
    ram: Bytes,
    free: Duration,
    limited: Duration,
    after: Duration,
}

const FULL: Plan = Plan {
    ram: Bytes(512 * MIB),
    free: Duration::from_secs(6),
    limited: Duration::from_secs(24),
    after: Duration::from_secs(10),
};
const QUICK: Plan = Plan {
    ram: Bytes(32 * MIB),
    free: Duration::from_secs(1),
    limited: Duration::from_secs(3),
    after: Duration::from_secs(1),
};

/// The samples. A rate is the one since the previous sample.
#[derive(Default)]
struct Samples {
    t_s: Vec<f64>,
    limit: Vec<Option<u64>>,
    resident: Vec<u64>,
    far: Vec<u64>,
    refaults_per_s: Vec<f64>,
    quarantine_hits_per_s: Vec<f64>,
    ops_per_s: Vec<f64>,
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let plan = if bench.options.quick { QUICK } else { FULL };
    let mut row = bench.row("one VM under a limit");
    let limit = plan.ram.0 / 8 * 5;
    row.fact("ram_bytes", plan.ram.0);
    row.fact("limited_to_bytes", limit);
    let (mut worker, name) = start(bench, plan.ram)?;
    let mut samples = Samples::default();
    samples.take(bench, &mut worker, &name, plan.free)?;
    let free = samples.ops_per_s.len();
    bench.daemon.api().set_limit(&name, Some(limit))?;
    samples.take(bench, &mut worker, &name, plan.limited)?;
    let limited = samples.ops_per_s.len();
    bench.daemon.api().set_limit(&name, None)?;
    samples.take(bench, &mut worker, &name, plan.after)?;
    worker.ask(&Order::Verify)?;
    row.figure("ops_per_s_free", &samples.ops_per_s[..free]);
    row.figure("ops_per_s_limited", &samples.ops_per_s[free..limited]);
    row.figure("ops_per_s_after", &samples.ops_per_s[limited..]);
    let within = (free..limited).find(|at| samples.resident[*at] <= limit);
    let within_s: Vec<f64> = within.map(|at| samples.t_s[at] - samples.t_s[free - 1]).into_iter().collect();
    row.figure("within_limit_s", &within_s);
    if within.is_none() {
        row.because("the VM did not get within its limit while it had one");
    }
    samples.report(&mut row);
    each(row)
}

fn start(bench: &mut Bench, ram: Bytes) -> Result<(Worker, String)> {
    let name = bench.vm_name();
    let backing = Backing::Ballast { socket: bench.daemon.attach_socket(), name: name.clone() };
    let spec = Spec { hot_fraction: 0.4, hot_weight: 0.9995, think: THINK, ..Spec::new(Workload::Hotset, ram) };
    let config = WorkloadConfig { spec, kind: bench.options.guest, backing };
    let mut worker = Worker::start(&Role::Workload(config))?;
    worker.ask(&Order::Attach)?;
    bench.daemon.wait_for_vm(&name)?;
    worker.ask(&Order::Fill)?;
    Ok((worker, name))
}

fn operations(worker: &mut Worker) -> Result<u64> {
    let Answer::Progress { ops } = worker.ask(&Order::Progress)? else { bail!("a VM has no progress") };
    Ok(ops)
}

impl Samples {
    fn take(&mut self, bench: &Bench, worker: &mut Worker, name: &str, time: Duration) -> Result<()> {
        let api = bench.daemon.api();
        let begin = self.t_s.last().copied().unwrap_or_default();
        let start = Instant::now();
        let (mut before, mut ops, mut at) = (api.vm(name)?, operations(worker)?, Instant::now());
        while start.elapsed() + SAMPLE <= time {
            std::thread::sleep(SAMPLE);
            let (vm, now_ops, now) = (api.vm(name)?, operations(worker)?, Instant::now());
            let per_s = |count: u64| count as f64 / (now - at).as_secs_f64();
            self.t_s.push(begin + start.elapsed().as_secs_f64());
            self.limit.push(vm.limit_bytes);
            self.resident.push(vm.resident_bytes);
            self.far.push(vm.far_bytes);
            self.refaults_per_s.push(per_s(vm.faults.restore - before.faults.restore));
            let hits = vm.reclaim.quarantine_hit_pages - before.reclaim.quarantine_hit_pages;
            self.quarantine_hits_per_s.push(per_s(hits));
            self.ops_per_s.push(per_s(now_ops - ops));
            (before, ops, at) = (vm, now_ops, now);
        }
        Ok(())
    }

    fn report(&self, row: &mut Row) {
        let round = |values: &[f64], digits: f64| -> Vec<f64> {
            values.iter().map(|value| (value * digits).round() / digits).collect()
        };
        row.fact("t_s", json!(round(&self.t_s, 100.0)));
        row.fact("limit_bytes", json!(self.limit));
        row.fact("resident_bytes", json!(self.resident));
        row.fact("far_bytes", json!(self.far));
        row.fact("refaults_per_s", json!(round(&self.refaults_per_s, 1.0)));
        row.fact("quarantine_hits_per_s", json!(round(&self.quarantine_hits_per_s, 1.0)));
        row.fact("ops_per_s", json!(round(&self.ops_per_s, 1.0)));
    }
}
