//! The cost of splitting and coalescing one unit of 2 MiB: its mapping alone, as tracking does, against the huge page
//! itself, as the kernel does.
//!
//! Before: this process has memory in huge pages. After: a row has microseconds per unit.
//! Threads: the caller's. Units: microseconds.
//! Promise: both sides work on the same kind of memory file, one unit at a time, in turns. After each split every page
//! is mapped by 4 KiB, and after each coalesce the unit is mapped huge; both are checked.
//!
//! - Split, ours: drop the huge mapping and map 512 pages (`UFFDIO_CONTINUE`). The huge page stays whole.
//! - Coalesce, ours: map it huge again (`MADV_COLLAPSE`). Nothing is copied.
//! - Split, the kernel's: punch one page out of the huge page, which splits it, and touch all 512, which maps them.
//! - Coalesce, the kernel's: `MADV_COLLAPSE` copies 512 pages into a new huge page.
//!
//! A punch is the way to have the kernel split a huge page that needs no debugfs, which a locked-down kernel denies to
//! root. Since Linux 6.15 it splits into as few pieces as possible, which is quicker than a split into 512.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE, PAGES_PER_UNIT};
use ballast_sys::remote::{Collapsed, Remote};
use ballast_sys::uffd::REQUIRED_FEATURES;
use ballast_sys::{Uffd, memfd};
use ballast_testvm::GuestRam;

use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;

const UNITS: usize = 32;
/// Tries to map one huge; the last one counts.
const TRIES: usize = 100;

pub(super) fn run(bench: &Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("splitting and coalescing one unit");
    row.fact("measures", "units");
    row.fact("kernel_split", "punching one page out of it");
    let keys = ["split_us_per_unit", "coalesce_us_per_unit", "kernel_split_us", "kernel_collapse_us"];
    let mut figures: [Vec<f64>; 4] = Default::default();
    if bench.options.is(GuestKind::Native) {
        let repetitions = if bench.options.quick { 2 } else { 10 };
        let memory = Memory::new()?;
        // Round 0 warms up.
        for round in bench.progress.over("round", 0..=repetitions) {
            let ours = memory.ours()?;
            let kernels = memory.kernels()?;
            for (figure, value) in figures.iter_mut().zip(ours.into_iter().chain(kernels)).filter(|_| round > 0) {
                figure.push(value);
            }
        }
    } else {
        row.because("a unit's mapping is split and coalesced in the VMM's page tables, whatever the guest: see native");
    }
    for (key, values) in keys.iter().zip(&figures) {
        row.figure(key, values);
    }
    row.ratio("ratio_split", &figures[0], &figures[2]);
    row.ratio("ratio_coalesce", &figures[1], &figures[3]);
    each(row)
}

struct Memory {
    ram: GuestRam,
    uffd: Uffd,
    remote: Remote,
}

/// Microseconds since `start`.
fn us(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1e6
}

impl Memory {
    fn new() -> Result<Self> {
        let ram = GuestRam::new(Bytes((UNITS * HUGE_SIZE) as u64)).context("Allocating memory")?;
        let (uffd, _) = Uffd::create(REQUIRED_FEATURES).context("Creating a userfaultfd")?;
        let remote = Remote::open(std::process::id()).context("Opening this process")?;
        let memory = Self { ram, uffd, remote };
        (0..UNITS).for_each(|unit| memory.touch(unit));
        for unit in 0..UNITS {
            memory.coalesce(unit)?;
        }
        Ok(memory)
    }

    fn at(&self, unit: usize) -> Hva {
        Hva((self.ram.addr() + unit * HUGE_SIZE) as u64)
    }

    fn touch(&self, unit: usize) {
        for page in 0..PAGES_PER_UNIT as usize {
            self.ram.word(unit * HUGE_SIZE + page * PAGE_SIZE).fetch_add(1, Relaxed);
        }
    }

    fn is_huge(&self, unit: usize) -> Result<bool> {
        let pieces = self.remote.huge(self.at(unit), HUGE_SIZE as u64).context("Looking for huge mappings")?;
        Ok(!pieces.is_empty())
    }

    fn coalesce(&self, unit: usize) -> Result<f64> {
        let (mut outcome, mut took) = (Collapsed::Busy, 0.0);
        for _ in 0..TRIES {
            let start = Instant::now();
            outcome = self.remote.collapse(self.at(unit), HUGE_SIZE as u64).context("MADV_COLLAPSE")?;
            took = us(start);
            // The kernel has pages of it in hand for a moment, to compact memory, say.
            if outcome != Collapsed::Busy {
                break;
            }
        }
        ensure!(outcome == Collapsed::Done && self.is_huge(unit)?, "a unit cannot be mapped huge: {outcome:?}");
        Ok(took)
    }

    /// Measure our ways. Returns the medians over all units: split, coalesce.
    fn ours(&self) -> Result<[f64; 2]> {
        let (mut split, mut coalesce) = (Vec::new(), Vec::new());
        for unit in 0..UNITS {
            self.uffd.register(self.at(unit), HUGE_SIZE as u64).context("Registering memory")?;
            let start = Instant::now();
            self.ram.zap(unit * HUGE_SIZE, HUGE_SIZE).context("MADV_DONTNEED")?;
            let (mapped, outcome) = self.uffd.map_run(self.at(unit), PAGES_PER_UNIT).context("UFFDIO_CONTINUE")?;
            split.push(us(start));
            ensure!(mapped == PAGES_PER_UNIT && !self.is_huge(unit)?, "{mapped} pages were mapped: {outcome:?}");
            coalesce.push(self.coalesce(unit)?);
            self.uffd.unregister(self.at(unit), HUGE_SIZE as u64).context("Unregistering memory")?;
        }
        Ok([median(&split).unwrap_or_default(), median(&coalesce).unwrap_or_default()])
    }

    /// Measure the kernel's ways. Returns the same.
    fn kernels(&self) -> Result<[f64; 2]> {
        let (mut split, mut collapse) = (Vec::new(), Vec::new());
        for unit in 0..UNITS {
            let start = Instant::now();
            memfd::punch(self.ram.memfd(), (unit * HUGE_SIZE) as u64, PAGE_SIZE as u64).context("Punching a page")?;
            self.touch(unit);
            split.push(us(start));
            ensure!(!self.is_huge(unit)?, "a unit that the kernel split is still mapped huge");
            collapse.push(self.coalesce(unit)?);
        }
        Ok([median(&split).unwrap_or_default(), median(&collapse).unwrap_or_default()])
    }
}
