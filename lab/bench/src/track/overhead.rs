//! The cost of tracking for the guest.
//!
//! Before: a guest works. After: rows have its slowdown in percent while it is tracked, on 10 s of every 20 (HugeScope
//! §4.2.1), for a small guest and for large working sets.
//! Threads: the bench's one. Units: percent of its operations. Promise: the same guest in the same memory is tracked
//! and not tracked by turns. The two halves of the time without tracking are compared with each other: their difference
//! is the noise.
//!
//! ```text
//! off, a half | off, a half | on |    on | off, a half | off, a half |    off ...     half = 5 s, on = 10 s
//! ```

use anyhow::{Context, Result};
use ballast_api::Track;
use ballast_base::{Bytes, MIB};
use ballast_testvm::{Spec, Workload};

use super::guest::{THINK_TICKS, Tracked};
use crate::report::Row;
use crate::rig::Bench;

/// Guests: workload, MiB of RAM, milliseconds of half the time without tracking, and pairs of off and on. Walks through
/// large memory run at the speed of the host's memory, which varies by a tenth from one second to the next, so only
/// many pairs mean something.
const GUESTS: [(Workload, u64, u64, usize); 5] = [
    (Workload::Hotset, 64, 5000, 2),
    (Workload::Zipf, 64, 5000, 2),
    (Workload::Sequential, 2048, 2500, 8),
    (Workload::Sequential, 4096, 2500, 8),
    (Workload::Sequential, 8192, 2500, 8),
];
const QUICK_HALF_MS: u64 = 500;
/// Free memory in bytes beyond the guest's: a collapse takes new huge pages before it frees the old ones.
pub(super) const SPARE: u64 = 4096 * MIB;

pub(super) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let quick = bench.options.quick;
    for (workload, mib, half_ms, pairs) in if quick { &GUESTS[..2] } else { &GUESTS[..] } {
        let (half_ms, pairs) = if quick { (QUICK_HALF_MS, 2) } else { (*half_ms, *pairs) };
        let name = format!("{workload:?}").to_lowercase();
        let mut row = bench.row(&format!("what tracking costs, {name}, {mib} MiB"));
        row.fact("measures", "overhead");
        row.fact("workload", name);
        row.fact("ram_bytes", mib * MIB);
        row.fact("on_ms", 2 * half_ms);
        row.fact("pairs", pairs);
        let free = available()?;
        if free < mib * MIB + SPARE {
            row.figure("overhead_pct", &[]);
            row.because(&format!(
                "{} MiB of memory are free, too little for this guest and {} more",
                free / MIB,
                SPARE / MIB
            ));
            each(row)?;
            continue;
        }
        let mut spec = Spec::new(*workload, Bytes(mib * MIB));
        if *workload != Workload::Sequential {
            spec.think_ticks = THINK_TICKS;
        }
        measure(bench, spec, half_ms, pairs, &mut row)?;
        each(row)?;
    }
    Ok(())
}

fn measure(bench: &mut Bench, spec: Spec, half_ms: u64, pairs: usize, row: &mut Row) -> Result<()> {
    let mut guest = Tracked::start(bench, spec)?;
    let name = guest.name.clone();
    let track = |bench: &Bench, track| bench.daemon.api().set_track(&name, track).map(drop);
    track(bench, Track::Off)?;
    guest.speed(half_ms)?;
    let (mut overhead, mut noise, mut speeds, mut waited) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for pair in bench.progress.over("pair", 0..pairs) {
        let mut off = [0.0; 2];
        let mut on = 0.0;
        // The order alternates: a guest that gets faster with time must not seem to gain by tracking.
        for is_on in if pair % 2 == 0 { [false, true] } else { [true, false] } {
            if is_on {
                track(bench, Track::On)?;
                on = guest.speed(2 * half_ms)?;
                waited.push(bench.daemon.api().heat(&name, 1)?.guest_percent);
                track(bench, Track::Off)?;
            } else {
                off = [guest.speed(half_ms)?, guest.speed(half_ms)?];
            }
        }
        let free = f64::midpoint(off[0], off[1]);
        overhead.push(100.0 * (1.0 - on / free));
        noise.push(100.0 * (1.0 - off[1] / off[0]));
        speeds.push(free);
    }
    row.difference("overhead_pct", &overhead);
    row.difference("overhead_aa_pct", &noise);
    row.figure("guest_waited_pct", &waited);
    row.figure("ops_per_s", &speeds);
    Ok(())
}

/// The host's available memory, in bytes.
pub(super) fn available() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").context("Reading /proc/meminfo")?;
    let kib = |line: &str| line.strip_prefix("MemAvailable:")?.split_ascii_whitespace().next()?.parse::<u64>().ok();
    text.lines().find_map(kib).map(|kib| kib * 1024).context("/proc/meminfo has no MemAvailable")
}
