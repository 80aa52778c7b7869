//! The memory of engine and keeper per GiB of guest RAM. `ballast bench scale` runs it.
//!
//! Before: a daemon without VMs. After: a VM of which half holds data was attached, and then all its data was evicted.
//! Threads: the bench's one. Units: bytes per GiB of guest RAM.
//! Promise: neither guest RAM nor the bytes of far pages are counted; these have a figure of their own. Memory that
//! both processes map is counted once.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use anyhow::{Context, Result};
use ballast_base::Bytes;
use ballast_base::units::{GIB, MIB};
use ballast_sys::meminfo;
use ballast_testhost::until;

use crate::order::Data;
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::subject::{Subject, Way, out};

/// Names of the engine's memory files: page states, and arenas with their index.
const OWN_FILES: [&str; 2] = ["ballast-state", "ballast-store"];

/// Longest time for which the files of a VM remain after its end.
const TIMEOUT: Duration = Duration::from_secs(10);

#[derive(Clone, Copy, Debug, Default)]
struct Held {
    /// Memory of their own, and their share of programs and libraries (`Pss_Anon`, `Pss_File`).
    own: f64,
    files: f64,
}

impl Held {
    fn now(bench: &Bench) -> Result<Self> {
        let (mut held, mut files) = (Self::default(), BTreeMap::new());
        for pid in [bench.engine_pid()?, bench.daemon.keeper_pid()] {
            held.own += own(pid)?;
            memory_files(pid, &mut files)?;
        }
        held.files = files.values().sum::<u64>() as f64;
        Ok(held)
    }

    fn more_than(self, before: Self, gib: f64) -> [f64; 2] {
        [(self.own - before.own) / gib, (self.files - before.files) / gib]
    }
}

fn own(pid: u32) -> Result<f64> {
    let [anon, file] = rollup_kib(pid, ["Pss_Anon", "Pss_File"])?;
    Ok((anon + file) * 1024.0)
}

/// Values of a process's `smaps_rollup`, in KiB, from one reading.
pub(crate) fn rollup_kib<const N: usize>(pid: u32, keys: [&str; N]) -> Result<[f64; N]> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = std::fs::read_to_string(&path).with_context(|| format!("Reading {path}"))?;
    let mut found = [0.0; N];
    for (key, kib) in keys.into_iter().zip(&mut found) {
        *kib = meminfo::number_in(&text, key).with_context(|| format!("{path} has no {key}"))? as f64;
    }
    Ok(found)
}

/// Add Ballast's own memory files that a process has open, each once.
fn memory_files(pid: u32, into: &mut BTreeMap<(u64, u64), u64>) -> Result<()> {
    let fds = format!("/proc/{pid}/fd");
    for entry in std::fs::read_dir(&fds).with_context(|| format!("Reading {fds}"))? {
        let path = entry?.path();
        // A descriptor may be closed after the listing.
        let Ok(target) = std::fs::read_link(&path) else { continue };
        if let Some((_, name)) = target.to_string_lossy().split_once("memfd:")
            && OWN_FILES.iter().any(|own| name.starts_with(own))
            && let Ok(meta) = std::fs::metadata(&path)
        {
            into.insert((meta.dev(), meta.ino()), meta.blocks() * 512);
        }
    }
    Ok(())
}

/// Waits for the state without VMs: the engine closes their files a moment after the API has forgotten them.
fn settled(bench: &Bench) -> Result<Held> {
    until("the memory files of a VM that has gone are still there", TIMEOUT, || {
        Ok(Some(Held::now(bench)?).filter(|now| now.files == 0.0))
    })
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let (ram, repetitions) = if bench.options.quick { (Bytes(64 * MIB), 2) } else { (Bytes(GIB), 4) };
    let gib = ram.0 as f64 / GIB as f64;
    let mut row = bench.row("what the engine needs for a GiB of guest RAM");
    row.fact("ram_bytes", ram.0);
    row.fact("repetitions", repetitions);
    let mut figures = Figures::default();
    for round in bench.progress.over("round", 0..=repetitions) {
        let before = settled(bench)?;
        // RAM is twice the data.
        let pages = ram.pages_floor().0 / 2;
        let mut subject = Subject::new(bench, Way::Ballast, pages, Data::HalfCompressible)?;
        let attached = Held::now(bench)?.more_than(before, gib);
        out(bench, std::slice::from_mut(&mut subject))?;
        let stat = bench.daemon.api().vm(subject.name())?;
        let far = Held::now(bench)?.more_than(before, gib);
        let payload = stat.store_bytes as f64 / gib;
        subject.verify()?;
        let name = subject.name().to_owned();
        drop(subject);
        bench.daemon.wait_until_gone(&name)?;
        // The first round warms up: the engine's first VM loads its libraries.
        if round == 0 {
            row.fact("far_bytes", stat.far_bytes);
            continue;
        }
        let far_files = (far[1] - payload).max(0.0);
        figures.add("engine_overhead_bytes_per_gib", attached[0] + attached[1]);
        figures.add("engine_overhead_half_far_bytes_per_gib", far[0] + far_files);
        figures.add("engine_overhead_half_far_files_bytes_per_gib", far_files);
        figures.add("store_half_far_bytes_per_gib", payload);
        figures.add("engine_base_bytes", before.own);
    }
    row.figures(&figures);
    each(row)
}
