//! Reclaim in a real guest, by its agent's reports or by the host alone (`choice`), with its kernel tuned or not.
//!
//! Before: `scripts/agent-image.sh` has made the guest: Debian's unmodified kernel, the agent, and the programs in
//! `scripts/guest/`. After: a row for each workload, and for kernel services.
//! Threads: the bench's one. Units: in every key. Promise: the sides take turns, each in a guest of its own that
//! differs in nothing else; every guest compares all its bytes at the end. Where the guest is emulated, the row says
//! so: then counts can be compared, and times cannot.

use anyhow::{Result, bail, ensure};
use ballast_testvm::qemu::{Accel, Image, qemu_missing};

use crate::booted::{Booted, COUNTED, MEMORY, SETTLES, TAKEN, percent, restored};
use crate::choice::{self, LOADS, RECLAIMED};
use crate::options::Part;
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::subject::in_turn;

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Some(why) = qemu_missing() {
        bail!("no guest with an agent can run here: {why}");
    }
    Image::find_with_agent()?;
    let only = bench.options.part;
    let is_wanted = |part| only.is_none_or(|only| only == part);
    if is_wanted(Part::Services) {
        by_turns(bench, each, "services", ["not_tuned", "tuned"], serviced)?;
    }
    for load in LOADS.into_iter().filter(|load| is_wanted(load.part)) {
        by_turns(bench, each, load.name, ["agent", "host"], |bench, side| choice::measure(bench, load, side))?;
    }
    Ok(())
}

fn by_turns(
    bench: &mut Bench,
    each: &mut dyn FnMut(Row) -> Result<()>,
    workload: &str,
    sides: [&str; 2],
    one: impl Fn(&mut Bench, &str) -> Result<Vec<(String, f64)>>,
) -> Result<()> {
    let turns = if bench.options.quick { 1 } else { 2 };
    let mut row = bench.row(workload);
    row.fact("workload", workload);
    row.fact("accelerator", if Accel::detect() == Accel::Kvm { "kvm" } else { "tcg" });
    row.fact("ram_bytes", MEMORY.0);
    row.fact("turns", turns);
    let mut figures = Figures::default();
    for turn in bench.progress.over("turn", 0..turns) {
        for side in in_turn(sides, turn) {
            one(bench, side)?.iter().for_each(|(key, value)| figures.add(key, *value));
        }
    }
    row.differences(&figures);
    let [by_agent, by_host] = ["agent", "host"].map(|side| figures.of(&format!("{RECLAIMED}_{side}")).to_vec());
    if !by_agent.is_empty() {
        row.ratio("ratio_reclaimed", &by_agent, &by_host);
    }
    each(row)
}

/// khugepaged makes huge pages of memory that is far, except for one page in each of them.
fn serviced(bench: &mut Bench, side: &str) -> Result<Vec<(String, f64)>> {
    let is_tuned = side == "tuned";
    let mut vm = Booted::new(bench, if is_tuned { "services-load" } else { "services-load untuned" })?;
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
