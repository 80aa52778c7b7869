//! DAMON, the kernel's access monitor: for how long each range of physical memory was not accessed.
//!
//! Before: the host wants reports. After: ranges of guest-physical memory, each with how often it was seen accessed.
//! Units: bytes at DAMON's border, pages here. Promise: a kdamond is taken only if no other program has one,
//! `damon_stat` (on by default in newer kernels, and then in the way) is stopped meanwhile, and both are as before when
//! this is dropped. A note below /run has the next start, or `--undo`, do that for an agent that was killed.
//!
//! DAMON samples one page of each of its ranges at a time by the accessed bits of page tables, splits and merges ranges
//! by the result, and counts for how many aggregations a range has been as it is (its age). It sees pages that programs
//! map and pages of files. It takes the kernel's own memory for cold, however often the kernel uses it.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_tier::source::damon::lock;

use crate::files;

const ADMIN: &str = "/sys/kernel/mm/damon/admin/kdamonds";
const STAT: &str = "/sys/module/damon_stat/parameters/enabled";
/// File that says that the kdamond is ours, and how `damon_stat` was set.
const NOTE: &str = "/run/ballast-agent.damon";

/// Time between two samples of one page of each range, and time after which DAMON sums the samples up, in microseconds.
/// Both are twice DAMON's own defaults, because memory is reported after seconds.
const SAMPLE_US: u64 = 10_000;
const AGGREGATION_US: u64 = 200_000;
/// Largest number of samples of one aggregation.
pub const MOST_ACCESSES: u32 = (AGGREGATION_US / SAMPLE_US) as u32;
/// Bounds of the number of ranges that DAMON distinguishes: one for each MiB, within these.
const FEWEST_RANGES: u64 = 100;
const MOST_RANGES: u64 = 1000;

/// A range that DAMON reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Range {
    /// First page.
    pub page: u64,
    /// Page after the last one.
    pub end: u64,
    /// Number of samples of the last aggregation in which it was accessed.
    pub accesses: u32,
    /// Number of aggregations, about, for which that has not changed.
    pub age: u32,
}

/// DAMON of this guest, while it monitors.
#[derive(Debug)]
pub struct Damon {
    /// Number of its thread.
    pid: Option<u32>,
}

/// The kdamonds were taken for reports and for tiering together: the first is for reports.
static SHARED: AtomicBool = AtomicBool::new(false);

/// Takes a kdamond for reports, and more for tiering, until [`undo`].
///
/// # Errors
/// The kernel has no DAMON, or another program uses it.
pub fn share(more: usize) -> io::Result<()> {
    let _held = lock();
    take(1 + more as u64)?;
    SHARED.store(true, Ordering::Release);
    Ok(())
}

/// Takes this number of kdamonds.
fn take(threads: u64) -> io::Result<()> {
    let count: u32 = files::read(path("nr_kdamonds"))?.parse().unwrap_or(u32::MAX);
    if count != 0 {
        return Err(io::Error::new(io::ErrorKind::ResourceBusy, "DAMON is in use by another program"));
    }
    let stat = files::read(STAT).is_ok_and(|enabled| enabled == "Y");
    fs::write(NOTE, if stat { "stat=Y\n" } else { "stat=N\n" })?;
    if stat {
        files::write(STAT, "N")?;
    }
    files::write(path("nr_kdamonds"), threads)
}

fn path(file: &str) -> PathBuf {
    PathBuf::from(ADMIN).join(file)
}

/// Restores the kernel's settings, also those that a killed agent did not restore.
pub fn undo() {
    SHARED.store(false, Ordering::Release);
    let _held = lock();
    let Ok(note) = fs::read_to_string(NOTE) else { return };
    stop(&note);
}

/// Stops our kdamonds, and restores the setting of `damon_stat`.
fn stop(note: &str) {
    let put = |file: PathBuf, value: &str| {
        if file.exists()
            && let Err(error) = files::write(file, value)
        {
            eprintln!("ballast-agent: {error}");
        }
    };
    let threads: u32 = files::read(path("nr_kdamonds")).ok().and_then(|count| count.parse().ok()).unwrap_or(0);
    for state in (0..threads).map(|index| path(&format!("{index}/state"))) {
        if files::read(&state).is_ok_and(|state| state == "on") {
            put(state, "off");
        }
    }
    put(path("nr_kdamonds"), "0");
    if note.contains("stat=Y") {
        put(STAT.into(), "Y");
    }
    let _ = fs::remove_file(NOTE);
}

impl Damon {
    /// Starts to monitor this memory, in ranges of pages.
    ///
    /// # Errors
    /// The kernel has no DAMON, or another program uses it.
    pub fn start(ram: &[(u64, u64)]) -> io::Result<Self> {
        if !SHARED.load(Ordering::Acquire) {
            undo();
        }
        let held = lock();
        if !SHARED.load(Ordering::Acquire) {
            take(1)?;
        }
        // If the rest fails, it is put back when this is dropped.
        let mut damon = Self { pid: None };
        let started = damon.configure(ram).and_then(|()| files::write(path("0/state"), "on"));
        let pid = files::read(path("0/pid"));
        drop(held);
        started?;
        damon.pid = pid?.parse().ok();
        Ok(damon)
    }

    fn configure(&self, ram: &[(u64, u64)]) -> io::Result<()> {
        let put = |file: &str, value: u64| files::write(path(file), value);
        put("0/contexts/nr_contexts", 1)?;
        files::write(path("0/contexts/0/operations"), "paddr")?;
        let attrs = "0/contexts/0/monitoring_attrs";
        put(&format!("{attrs}/intervals/sample_us"), SAMPLE_US)?;
        put(&format!("{attrs}/intervals/aggr_us"), AGGREGATION_US)?;
        put(&format!("{attrs}/intervals/update_us"), AGGREGATION_US * 1000)?;
        let pages: u64 = ram.iter().map(|(page, end)| end - page).sum();
        let most = (pages >> 8).clamp(FEWEST_RANGES, MOST_RANGES);
        put(&format!("{attrs}/nr_regions/max"), most)?;
        put(&format!("{attrs}/nr_regions/min"), 10)?;
        put("0/contexts/0/targets/nr_targets", 1)?;
        let regions = "0/contexts/0/targets/0/regions";
        put(&format!("{regions}/nr_regions"), ram.len() as u64)?;
        for (index, (page, end)) in ram.iter().enumerate() {
            put(&format!("{regions}/{index}/start"), page << 12)?;
            put(&format!("{regions}/{index}/end"), end << 12)?;
        }
        put("0/contexts/0/schemes/nr_schemes", 1)?;
        let scheme = "0/contexts/0/schemes/0";
        files::write(path(&format!("{scheme}/action")), "stat")?;
        for what in ["sz", "nr_accesses", "age"] {
            put(&format!("{scheme}/access_pattern/{what}/min"), 0)?;
            put(&format!("{scheme}/access_pattern/{what}/max"), u64::from(u32::MAX))?;
        }
        Ok(())
    }

    /// Returns all ranges as they are now, ascending. Waits for the end of an aggregation.
    ///
    /// # Errors
    /// Another program has stopped DAMON.
    pub fn ranges(&self) -> io::Result<Vec<Range>> {
        let _held = lock();
        files::write(path("0/state"), "update_schemes_tried_regions")?;
        let dir = path("0/contexts/0/schemes/0/tried_regions");
        let mut ranges = Vec::new();
        for entry in fs::read_dir(&dir)?.flatten() {
            if entry.file_name().to_str().is_none_or(|name| name.parse::<u32>().is_err()) {
                continue;
            }
            let number = |file: &str| -> io::Result<u64> {
                let text = files::read(entry.path().join(file))?;
                text.parse().map_err(|_| io::Error::new(io::ErrorKind::InvalidData, format!("DAMON says {text:?}")))
            };
            let (start, end) = (number("start")?, number("end")?);
            let (accesses, age) = (number("nr_accesses")? as u32, number("age")? as u32);
            ranges.push(Range { page: start >> 12, end: end >> 12, accesses, age });
        }
        ranges.sort_unstable();
        Ok(ranges)
    }

    /// Returns the CPU time of DAMON's thread so far, in microseconds.
    pub fn cpu_us(&self) -> u64 {
        let stat = self.pid.and_then(|pid| files::read(format!("/proc/{pid}/stat")).ok()).unwrap_or_default();
        let after = stat.rsplit_once(')').map_or("", |(_, after)| after);
        let ticks: u64 = after.split_whitespace().skip(11).take(2).filter_map(|word| word.parse::<u64>().ok()).sum();
        ticks * 10_000
    }
}

impl Drop for Damon {
    fn drop(&mut self) {
        if !SHARED.load(Ordering::Acquire) {
            return undo();
        }
        let _held = lock();
        if files::read(path("0/state")).is_ok_and(|state| state == "on")
            && let Err(error) = files::write(path("0/state"), "off")
        {
            eprintln!("ballast-agent: {error}");
        }
    }
}
