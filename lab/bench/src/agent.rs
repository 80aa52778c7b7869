//! Reclaim in a real guest: by its agent's reports and by the host alone (`choice`), with free page reporting and
//! without it, and with the guest's kernel services tuned and not.
//!
//! Before: `scripts/agent-image.sh` has made the guest: Debian's unmodified kernel, the agent, and the programs in
//! `scripts/guest/`. After: a row for each workload, for free memory, and for kernel services.
//! Threads: the bench's one. Units: in every key. Promise: sides are measured by turns, each in a guest of its own that
//! differs in that alone; every guest compares all its bytes at the end. Where the guest is emulated, the row says so:
//! then counts can be compared, and times cannot.

use std::fs::File;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use ballast_api::ServiceRestores;
use ballast_base::{MIB, PAGE_SIZE};
use ballast_testvm::qemu::{Accel, Image, qemu_missing};

use crate::booted::{Booted, COUNTED, Figures, MEMORY, SETTLES, TAKEN, mib, percent, restored};
use crate::choice::{self, Load, RECLAIMED};
use crate::options::Part;
use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;
use crate::tier_shares;

/// The host tracks a VM that no agent reports on.
pub(crate) const SETTINGS: &str = "[heat]\ntrack = \"auto\"\n";

/// A disk of a guest.
const DISK: u64 = 192 * MIB;

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
    if is_wanted(Part::Written) {
        let mut row = bench.row("written");
        row.fact("workload", "written");
        written(bench, &mut row)?;
        each(row)?;
    }
    for load in Load::ALL.into_iter().filter(|load| is_wanted(load.part())) {
        by_turns(bench, each, load.name(), ["agent", "host"], |bench, side| choice::measure(bench, load, side))?;
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
    let of = |side: &str| -> Vec<f64> {
        let key = format!("{RECLAIMED}_{side}");
        all.iter().filter(|(other, _)| *other == key).map(|(_, value)| *value).collect()
    };
    let (by_agent, by_host) = (of("agent"), of("host"));
    if !by_agent.is_empty() {
        row.ratio("ratio_reclaimed", &by_agent, &by_host);
    }
    each(row)
}

/// A program of the guest fills memory and ends; then the limit takes as much as it had.
fn freed(bench: &mut Bench, side: &str) -> Result<Figures> {
    let options: &[&str] = if side == "reported" { &["--balloon"] } else { &[] };
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
    let by_service = |pages: fn(&ServiceRestores) -> u64| pages(&now.restored_for) - pages(&was.restored_for);
    let of = |key: &str| format!("{key}_{side}");
    let figures = vec![
        (of("restored_pages"), (restored(&after) - restored(&before)) as f64),
        (of("kernel_service_restores"), of_services as f64),
        (of("kernel_service_restores_pct"), percent(of_services, told)),
        (of("khugepaged_restores_pct"), percent(by_service(|of| of.khugepaged_pages), told)),
        (of("compaction_restores_pct"), percent(by_service(|of| of.compaction_pages), told)),
        (of("huge_pages_made"), (now.collapsed_huge_pages - was.collapsed_huge_pages) as f64),
    ];
    vm.end(bench)?;
    Ok(figures)
}

/// Memory that is far is written to a disk, and to swap, because the guest has too little.
fn written(bench: &mut Bench, row: &mut Row) -> Result<()> {
    let dir = tempfile::tempdir().context("Making a directory for disks")?;
    let disks = ["disk", "swap"].map(|name| dir.path().join(name));
    for disk in &disks {
        File::create(disk).and_then(|file| file.set_len(DISK)).context("Making a disk")?;
    }
    let mut vm = Booted::with_disks(bench, MEMORY, &disks.each_ref().map(PathBuf::as_path), &[], "written-load")?;
    vm.expect("filled")?;
    std::thread::sleep(SETTLES);
    vm.squeeze(bench, 2 * TAKEN)?;
    let before = vm.stat(bench)?;
    vm.guest.tell("go on")?;
    vm.expect("swapped")?;
    // Restored pages are told once a second, and so is what they were restored for.
    std::thread::sleep(Duration::from_secs(5));
    let after = vm.stat(bench)?;
    let (Some(was), Some(now)) = (&before.agent, &after.agent) else { bail!("the guest has no port of an agent") };
    let told = now.restored_pages - was.restored_pages;
    row.difference("restored_pages", &[(restored(&after) - restored(&before)) as f64]);
    row.difference("told_pages", &[told as f64]);
    for ((service, before), (_, after)) in was.restored_for.all().into_iter().zip(now.restored_for.all()) {
        row.difference(&format!("kernel_service_restores_pct_{service}"), &[percent(after - before, told)]);
    }
    vm.end(bench)
}
