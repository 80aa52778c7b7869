//! Two real guests with tiers, whose shares of fast memory change while they run (Demeter, 3.3).
//!
//! Before: `scripts/agent-image.sh` has made the image. After: a row has, for each of four compositions, the share of
//! each guest's accesses that its fast node serves, which the guest's program computes from the places of its pages,
//! and the best possible one with the memory that the guest had then.
//! Threads: the bench's one. Units: in every key. Promise: both guests run all the time; what one gives up by its
//! balloon is not more than the other one gets.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use ballast_api::{NodeBalloon, VmPatch};
use ballast_base::{Bytes, MIB};
use ballast_testvm::qemu::Accel;

use crate::booted::{Booted, TIMEOUT};
use crate::report::Row;
use crate::rig::Bench;

const TIERS: &str = "fast=256M,slow=384M";
const MEMORY: Bytes = Bytes(640 * MIB);
/// Time for the agent to move memory, and for the balloon before that.
const SETTLES: Duration = Duration::from_secs(60);
const FILLS: Duration = Duration::from_secs(90);
/// Fast memory that a guest keeps: what the balloon leaves, and some for its program.
const KEPT: u64 = 40 * MIB;
const GUESTS: [&str; 2] = ["first", "second"];
/// The compositions, in their order: does the first guest give its fast memory up, and the second?
const COMPOSITIONS: [(&str, [bool; 2]); 4] = [
    ("second_gives", [false, true]),
    ("first_gives", [true, false]),
    ("second_gives_again", [false, true]),
    ("none_gives", [false, false]),
];

/// Fast memory that programs of the guest have or could have, in whole MiB.
fn fast(bench: &Bench, guest: &Booted) -> Result<u64> {
    let tiering = guest.stat(bench)?.agent.and_then(|agent| agent.tiering).context("the agent tiers")?;
    let free = tiering.tiers.first().map_or(0, |tier| tier.free_bytes);
    Ok((tiering.managed_fast_bytes + free) / MIB * MIB)
}

fn held(bench: &Bench, guest: &Booted) -> Result<u64> {
    Ok(guest.stat(bench)?.agent.and_then(|agent| Some(agent.nodes.first()?.balloon_bytes)).unwrap_or(0))
}

/// Measure, and add the figures to the row.
pub(crate) fn measure(bench: &mut Bench, row: &mut Row) -> Result<()> {
    row.fact("workload", "two guests, a scattered hot eighth");
    row.fact("accelerator", if Accel::detect() == Accel::Kvm { "kvm" } else { "tcg" });
    row.fact("ram_bytes", MEMORY.0);
    row.fact("measures", "shares");
    let mut guests = Vec::new();
    for _ in GUESTS {
        guests.push(Booted::new(bench, MEMORY, &["--tiers", TIERS], "tier-load scattered 256")?);
    }
    for guest in &mut guests {
        guest.expect("filled")?;
    }
    // The agents tell what they manage once they have looked at all of it.
    std::thread::sleep(SETTLES);
    let most: Vec<u64> = guests.iter().map(|guest| fast(bench, guest)).collect::<Result<_>>()?;
    for (name, gives) in COMPOSITIONS {
        let wanted: Vec<u64> =
            most.iter().zip(gives).map(|(most, gives)| if gives { most.saturating_sub(KEPT) } else { 0 }).collect();
        for (guest, bytes) in guests.iter().zip(&wanted) {
            let patch = VmPatch { balloon: Some(NodeBalloon { node: 0, bytes: *bytes }), ..VmPatch::default() };
            bench.daemon.api().patch_vm(&guest.name, &patch)?;
        }
        let began = Instant::now();
        let is_done = || -> Result<bool> {
            let each = guests.iter().zip(&wanted).map(|(guest, wanted)| Ok(held(bench, guest)? == *wanted));
            Ok(each.collect::<Result<Vec<bool>>>()?.into_iter().all(|done| done))
        };
        while !is_done()? && began.elapsed() < FILLS {
            std::thread::sleep(Duration::from_millis(200));
        }
        row.figure(&format!("balloons_settled_s_{name}"), &[began.elapsed().as_secs_f64()]);
        std::thread::sleep(SETTLES);
        for (guest, which) in guests.iter_mut().zip(GUESTS) {
            guest.guest.tell("hit")?;
            let said = guest.guest.answer(TIMEOUT)?;
            let (hit, oracle) = said.split_once(' ').with_context(|| format!("the guest says {said:?}"))?;
            row.figure(&format!("fmem_hit_pct_{which}_{name}"), &[hit.parse()?]);
            row.figure(&format!("fmem_hit_pct_oracle_{which}_{name}"), &[oracle.parse()?]);
            row.figure(&format!("balloon_mib_{which}_{name}"), &[held(bench, guest)? as f64 / MIB as f64]);
        }
    }
    guests.into_iter().try_for_each(|guest| guest.end(bench))
}
