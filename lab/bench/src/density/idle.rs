//! The cost of the service with idle VMs, and of requests for one VM at a time. `ballast bench density` runs it.
//!
//! Before: a daemon without VMs. After: a row has CPU time, threads, memory and descriptors of engine and keeper, and
//! the times of an attach, a limit and a list.
//! Threads: the bench's one. Units: in every key. Promise: CPU time is counted when no VM is above its limit. Memory is
//! the anonymous memory of engine and keeper, and their memory files without the bytes of far pages.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_base::units::GIB;

use super::fleet::{Fleet, Side};
use crate::overhead::Held;
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::percentile;
use crate::{cpu, machine};

const LISTS: usize = 20;

/// CPU time of engine and keeper in percent of one CPU.
fn cpu_pct(bench: &Bench, settle: Duration, time: Duration, turns: usize) -> Result<Vec<f64>> {
    std::thread::sleep(settle);
    let service = [bench.engine_pid()?, bench.daemon.keeper_pid()];
    let used = || service.iter().map(|pid| cpu::of_process_id(*pid)).sum::<Result<f64>>();
    let turn = |_| {
        let (before, start) = (used()?, Instant::now());
        std::thread::sleep(time);
        Ok((used()? - before) / start.elapsed().as_secs_f64() / 1e4)
    };
    (0..turns).map(turn).collect()
}

fn threads(pid: u32) -> Result<usize> {
    let path = format!("/proc/{pid}/task");
    Ok(std::fs::read_dir(&path).with_context(|| format!("Reading {path}"))?.count())
}

fn descriptors(pid: u32) -> Result<usize> {
    let path = format!("/proc/{pid}/fd");
    Ok(std::fs::read_dir(&path).with_context(|| format!("Reading {path}"))?.count())
}

fn report_times(row: &mut Row, key: &str, times: &[f64]) {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    for (suffix, fraction) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
        row.figure(&format!("{key}_{suffix}"), &percentile(&sorted, fraction).into_iter().collect::<Vec<_>>());
    }
}

pub(super) fn row(bench: &mut Bench, vms: usize, ram_bytes: u64) -> Result<Row> {
    let (settle, time, turns) = if bench.options.quick {
        (Duration::from_millis(100), Duration::from_millis(200), 2)
    } else {
        (Duration::from_secs(5), Duration::from_secs(5), 4)
    };
    let mut row = bench.row(&format!("{vms} idle VMs"));
    row.fact("measures", "idle");
    row.fact("vms", vms);
    row.fact("ram_bytes", ram_bytes);
    row.fact("limited_to_bytes", ram_bytes / 2);
    let service = [bench.engine_pid()?, bench.daemon.keeper_pid()];
    let [engine_before, keeper_before] = [descriptors(service[0])?, descriptors(service[1])?];
    let own = || -> Result<f64> { service.iter().map(|pid| Ok(machine::rss_anon(*pid)? as f64)).sum() };
    let (own_before, files_before) = (own()?, Held::now(bench)?.files);
    let mut fleet = Fleet::start(bench, Side::Ballast, vms, ram_bytes)?;
    bench.progress.step("attach", 1, 4);
    report_times(&mut row, "density_attach_ms", &fleet.attach(bench)?);
    let mut lists = Vec::new();
    for _ in 0..LISTS {
        let start = Instant::now();
        bench.daemon.api().vms()?;
        lists.push(start.elapsed().as_secs_f64() * 1e3);
    }
    row.figure("density_list_ms", &lists);
    bench.progress.step("idle without limits", 2, 4);
    fleet.fill()?;
    row.figure("density_idle_no_limit_cpu_pct", &cpu_pct(bench, settle, time, turns)?);
    let each = |now: f64, before: f64| (now - before) / vms as f64;
    row.figure("density_own_bytes_per_vm", &[each(own()?, own_before)]);
    row.figure("density_files_bytes_per_vm", &[each(Held::now(bench)?.files, files_before)]);
    bench.progress.step("idle with limits", 3, 4);
    report_times(&mut row, "density_limit_ms", &fleet.limit(bench)?);
    row.fact("vms_above_limit", fleet.squeezed(bench)?);
    row.figure("density_idle_cpu_pct", &cpu_pct(bench, settle, time, turns)?);
    row.figure("density_threads", &[(threads(service[0])? + threads(service[1])?) as f64]);
    row.figure("density_engine_descriptors_per_vm", &[each(descriptors(service[0])? as f64, engine_before as f64)]);
    row.figure("density_keeper_descriptors_per_vm", &[each(descriptors(service[1])? as f64, keeper_before as f64)]);
    let payload: u64 = bench.daemon.api().vms()?.iter().map(|vm| vm.store_bytes).sum();
    row.figure("density_half_far_own_bytes_per_vm", &[each(own()?, own_before)]);
    let files = (Held::now(bench)?.files - files_before - payload as f64).max(0.0);
    row.figure("density_half_far_files_bytes_per_vm", &[each(files, 0.0)]);
    let gib = vms as f64 * ram_bytes as f64 / GIB as f64;
    row.figure("density_half_far_bytes_per_gib", &[(own()? - own_before + files) / gib]);
    bench.progress.step("every byte", 4, 4);
    fleet.verify()?;
    Ok(row)
}
