//! Reclaim in a real guest: by its agent's reports and by the host alone, with free page reporting and without it, and
//! with the guest's kernel services tuned and not.
//!
//! Before: `scripts/agent-image.sh` has made the guest: Debian's unmodified kernel, the agent, and the programs in
//! `scripts/guest/`. After: a row for each workload, for free memory, and for kernel services.
//! Threads: the bench's one. Units: in every key. Promise: sides are measured by turns, each in a guest of its own that
//! differs in that alone; every guest compares all its bytes at the end. Where the guest is emulated, the row says so:
//! then counts can be compared, and times cannot.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_api::{NodeBalloon, VmPatch, VmStat};
use ballast_base::{Bytes, KIB, MIB, PAGE_SIZE};
use ballast_testvm::qemu::load::{self, Dataset, Mix};
use ballast_testvm::qemu::{Accel, Image, qemu_missing};

use crate::booted::Booted;
use crate::options::Part;
use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;
use crate::tier_shares;

/// The host tracks a VM that no agent reports on.
pub(crate) const SETTINGS: &str = "[heat]\ntrack = \"auto\"\n";
const MEMORY: Bytes = Bytes(320 * MIB);
/// Time in which agent and host learn what is hot, and time under the limit in which restores are counted.
const SETTLES: Duration = Duration::from_secs(60);
const COUNTED: Duration = Duration::from_secs(45);
/// Memory that the limit takes, and that the balloon is asked for.
const TAKEN: u64 = 80 * MIB;
const BALLOON: u64 = 32 * MIB;
/// Data of Redis.
const VALUE: u64 = 4 * KIB;
const DATA: u64 = 128 * MIB;

/// What runs in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// Files that are read every second, every 15 s and never (`agent-load`).
    Files,
    /// Redis, a tenth of whose keys has nine tenths of the accesses (`redis-load`).
    Redis,
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / MIB as f64
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

/// Pages that were restored, on touch or ahead of one.
fn restored(stat: &VmStat) -> u64 {
    stat.faults.restored_pages + stat.reclaim.prefetched_pages
}

/// The figures of one guest.
type Figures = Vec<(String, f64)>;

/// Adds figures that were measured by turns, from all guests that have them.
fn add(row: &mut Row, all: &[(String, f64)]) {
    let mut keys: Vec<&str> = Vec::new();
    for (key, _) in all {
        if !keys.contains(&key.as_str()) {
            keys.push(key);
        }
    }
    for key in keys {
        let values: Vec<f64> = all.iter().filter(|(other, _)| other == key).map(|(_, value)| *value).collect();
        row.difference(key, &values);
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Some(why) = qemu_missing() {
        bail!("no guest with an agent can run here: {why}");
    }
    Image::find_with_agent()?;
    bench.options.guest = GuestKind::Qemu;
    let only = bench.options.part;
    let is_wanted = |part| only.is_none_or(|only| only == part);
    if is_wanted(Part::Free) {
        by_turns(bench, each, "free", ["reported", "not_reported"], freed)?;
    }
    if is_wanted(Part::Scattered) {
        by_turns(bench, each, "scattered", ["agent", "host"], scattered)?;
    }
    if is_wanted(Part::Services) {
        by_turns(bench, each, "services", ["not_tuned", "tuned"], serviced)?;
    }
    for (part, load, name) in [(Part::Files, Load::Files, "files"), (Part::Redis, Load::Redis, "redis")] {
        if is_wanted(part) {
            by_turns(bench, each, name, ["agent", "host"], |bench, side| choose(bench, load, side))?;
        }
    }
    if is_wanted(Part::Shares) {
        let mut row = bench.row("shares of fast memory");
        tier_shares::measure(bench, &mut row)?;
        each(row)?;
    }
    Ok(())
}

/// Measures two sides by turns; the order changes after each.
fn by_turns(
    bench: &mut Bench,
    each: &mut dyn FnMut(Row) -> Result<()>,
    workload: &str,
    mut sides: [&str; 2],
    mut one: impl FnMut(&mut Bench, &str) -> Result<Figures>,
) -> Result<()> {
    let turns = if bench.options.quick { 1 } else { 2 };
    let mut row = bench.row(workload);
    row.fact("workload", workload);
    row.fact("accelerator", if Accel::detect() == Accel::Kvm { "kvm" } else { "tcg" });
    row.fact("ram_bytes", MEMORY.0);
    row.fact("turns", turns);
    let mut all = Vec::new();
    for _ in bench.progress.over("turn", 0..turns) {
        for side in sides {
            all.extend(one(bench, side)?);
        }
        sides.reverse();
    }
    add(&mut row, &all);
    each(row)
}

/// Takes memory of a guest by its agent's reports, or by the host's knowledge.
fn choose(bench: &mut Bench, load: Load, side: &str) -> Result<Figures> {
    let by_agent = side == "agent";
    let program = if load == Load::Files { "agent-load" } else { "redis-load" };
    let mut vm = Booted::new(bench, MEMORY, &[], &format!("{program}{}", if by_agent { "" } else { " alone" }))?;
    vm.expect("filled")?;
    let address = vm.guest.redis_addr();
    let mut data = Dataset::new((DATA / VALUE) as usize, VALUE as usize, 1);
    if load == Load::Redis {
        load::load(address, &data)?;
    }
    let mut work = |time: Duration| -> Result<()> {
        if load == Load::Files {
            std::thread::sleep(time);
            return Ok(());
        }
        let done = load::throughput(address, &mut data, &Mix { duration: time, ..Mix::default() })?;
        let wrong = done.reads.wrong + done.reads.missing;
        ensure!(wrong == 0, "WRONG DATA: {wrong} values of Redis: {:?}", done.reads.first_wrong);
        Ok(())
    };
    work(SETTLES)?;
    let tracked = |bench: &Bench| bench.daemon.api().heat(&vm.name, 1);
    let (before, heat) = (vm.stat(bench)?, tracked(bench)?);
    let began = Instant::now();
    let limit = before.resident_bytes.saturating_sub(TAKEN);
    bench.daemon.api().set_limit(&vm.name, Some(limit))?;
    work(COUNTED)?;
    let after = vm.stat(bench)?;
    let lasted_us = began.elapsed().as_micros() as f64;
    let agent = |stat: &VmStat| stat.agent.clone().context("the guest has the port of an agent");
    let (was, now) = (agent(&before)?, agent(&after)?);
    let judged = now.by_agent.judged_pages + now.by_host.judged_pages;
    let wrong = now.by_agent.wrong_pages + now.by_host.wrong_pages;
    let cycles = tracked(bench)?.cycles - heat.cycles;
    let evicted = |stat: &VmStat| stat.reclaim.evicted_pages + stat.reclaim.evicted_zero_pages;
    let (evicted, restored) = (evicted(&after) - evicted(&before), restored(&after) - restored(&before));
    let of = |key: &str| format!("{key}_{side}");
    let mut figures = vec![
        (of("restored_of_evicted_pct"), percent(restored, evicted)),
        (of("wrong_reclaim_pct"), percent(wrong, judged)),
        (of("judged_pages"), judged as f64),
        (of("evicted_mib"), mib(evicted * PAGE_SIZE as u64)),
        (of("restored_pages"), restored as f64),
        (of("quarantine_hit_pages"), (after.reclaim.quarantine_hit_pages - before.reclaim.quarantine_hit_pages) as f64),
        (of("judged_by_agent_pct"), percent(now.by_agent.judged_pages, judged)),
        (of("tracking_cycles"), cycles as f64),
        (of("engine_cpu_pct"), (after.engine_time.tasks_us - before.engine_time.tasks_us) as f64 * 100.0 / lasted_us),
    ];
    if by_agent {
        ensure!(now.reports > was.reports, "the agent does not report: {now:?}");
        figures.push(("agent_cpu_pct".into(), (now.cpu_us - was.cpu_us) as f64 * 100.0 / lasted_us));
    }
    bench.daemon.api().set_limit(&vm.name, None)?;
    if by_agent {
        figures.push(("balloon_error_pct".into(), balloon(bench, &vm)?));
    }
    if load == Load::Redis {
        let read = load::verify(address, &data)?;
        ensure!(read.verified == data.keys(), "WRONG DATA: {} bytes of Redis", read.bytes_lost);
    }
    vm.end(bench)?;
    Ok(figures)
}

/// Has the agent hold memory; returns by how much it misses, in percent.
fn balloon(bench: &Bench, vm: &Booted) -> Result<f64> {
    let patch = |bytes| VmPatch { balloon: Some(NodeBalloon { node: 0, bytes }), ..VmPatch::default() };
    bench.daemon.api().patch_vm(&vm.name, &patch(BALLOON))?;
    let held = || -> Result<u64> {
        Ok(vm.stat(bench)?.agent.and_then(|agent| Some(agent.nodes.first()?.balloon_bytes)).unwrap_or(0))
    };
    let began = Instant::now();
    while held()? != BALLOON && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(200));
    }
    let error = percent(held()?.abs_diff(BALLOON), BALLOON);
    bench.daemon.api().patch_vm(&vm.name, &patch(0))?;
    Ok(error)
}

/// A program of the guest fills memory and ends; then the limit takes as much as it had.
fn freed(bench: &mut Bench, side: &str) -> Result<Figures> {
    let options: &[&str] = if side == "reported" { &[] } else { &["--no-balloon"] };
    let mut vm = Booted::new(bench, MEMORY, options, "free-test")?;
    vm.expect("kept")?;
    vm.guest.tell("start the program")?;
    vm.expect("filled")?;
    let filled = vm.stat(bench)?;
    vm.guest.tell("end the program")?;
    std::thread::sleep(Duration::from_secs(10));
    let ended = vm.stat(bench)?;
    let limit = filled.resident_bytes.saturating_sub(TAKEN).min(ended.resident_bytes);
    vm.squeeze(bench, ended.resident_bytes - limit)?;
    let after = vm.stat(bench)?;
    let of = |key: &str| format!("{key}_{side}");
    let figures = vec![
        (of("returned_mib"), mib(filled.resident_bytes.saturating_sub(ended.resident_bytes))),
        (of("stored_mib"), mib(after.reclaim.evicted_pages * PAGE_SIZE as u64)),
        (of("zeros_mib"), mib(after.reclaim.evicted_zero_pages * PAGE_SIZE as u64)),
        (of("store_mib"), mib(after.store_bytes)),
    ];
    vm.end(bench)?;
    Ok(figures)
}

/// A guest deletes every other of many small files: free memory in blocks of some pages.
fn scattered(bench: &mut Bench, side: &str) -> Result<Figures> {
    let mut vm = Booted::new(bench, MEMORY, &[], if side == "agent" { "scatter-load" } else { "scatter-load alone" })?;
    vm.expect("filled")?;
    let filled = vm.stat(bench)?;
    vm.guest.tell("delete")?;
    vm.expect("deleted")?;
    std::thread::sleep(SETTLES);
    let after = vm.stat(bench)?;
    let of = |key: &str| format!("{key}_{side}");
    let figures = vec![
        (of("returned_mib"), mib(filled.resident_bytes.saturating_sub(after.resident_bytes))),
        (of("engine_cpu_ms"), (after.engine_time.tasks_us - filled.engine_time.tasks_us) as f64 / 1000.0),
        (of("restored_pages"), (restored(&after) - restored(&filled)) as f64),
    ];
    vm.end(bench)?;
    Ok(figures)
}

/// khugepaged makes huge pages of memory that is far but for one page in each.
fn serviced(bench: &mut Bench, side: &str) -> Result<Figures> {
    let is_tuned = side == "tuned";
    let mut vm = Booted::new(bench, MEMORY, &[], if is_tuned { "services-load" } else { "services-load untuned" })?;
    vm.expect("filled")?;
    std::thread::sleep(SETTLES);
    vm.squeeze(bench, TAKEN)?;
    vm.guest.tell("allow huge pages")?;
    vm.expect("huge")?;
    let before = vm.stat(bench)?;
    std::thread::sleep(COUNTED * 2);
    let after = vm.stat(bench)?;
    let (Some(was), Some(now)) = (&before.agent, &after.agent) else { bail!("the guest has no port of an agent") };
    ensure!(now.services_tuned == is_tuned, "the services are tuned: {}", now.services_tuned);
    let told = now.restored_pages - was.restored_pages;
    let of_services = now.service_restored_pages - was.service_restored_pages;
    let of = |key: &str| format!("{key}_{side}");
    let figures = vec![
        (of("restored_pages"), (restored(&after) - restored(&before)) as f64),
        (of("kernel_service_restores"), of_services as f64),
        (of("kernel_service_restores_pct"), percent(of_services, told)),
        (of("huge_pages_made"), (now.collapsed_huge_pages - was.collapsed_huge_pages) as f64),
    ];
    vm.end(bench)?;
    Ok(figures)
}
