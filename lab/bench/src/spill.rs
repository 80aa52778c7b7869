//! The rate at which far pages go to a disk, and the time of a touch of a page there.
//!
//! Before: guests hold all their data; the daemon has a file store in a directory, the kernel a swap file in the same.
//! After: rows have pages per second to the disk, and percentiles of single touches in random order.
//! Units: pages or MiB per second; microseconds per touch. Promise: before the first touch, all of a guest's pages are
//! on the disk alone. The floor is one read of 4 KiB at a time, past the page cache.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_base::units::{GIB, MIB};
use ballast_base::{Bytes, PAGE_SIZE, PageCount};
use ballast_sys::direct;

use crate::order::{Answer, Data, GuestKind, Order, Pace, Touched};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::{Summary, shuffle};
use crate::subject::{Subject, Way, in_turn, out, touch};
use crate::{cgroup, cpu, restore};

/// Size of the kernel's swap file.
pub(crate) const SWAP: Bytes = Bytes(GIB);
/// Seconds that a page is far before it goes to the disk: the least that can be set.
const AFTER_S: u64 = 1;
/// Time between two samples.
const SAMPLE: Duration = Duration::from_millis(2);
/// Beginning of the names of the spill worker's threads.
const WORKER: &str = "spill";
/// A longer pause is one between two passes of the spill worker, and not a slow disk.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest time until all pages are on the disk.
const TIMEOUT: Duration = Duration::from_secs(120);
/// Reads of one round of the floor.
const READS: usize = 2000;
const PINNED: Pace = Pace { pinned: true, ..Pace::ALL };
/// The headline figures.
const KEYS: [&str; 3] = ["spill_mib_per_s", "file_restore_us_p50", "file_restore_us_p99"];

/// The daemon's settings.
pub(crate) fn settings(dir: &Path) -> String {
    format!("[spill]\ndir = {:?}\nbudget = \"1G\"\nafter_s = {AFTER_S}\n", dir.to_string_lossy())
}

#[derive(Default)]
struct Series {
    out: Vec<f64>,
    cpu: Vec<f64>,
    touched: Vec<Summary>,
    /// Share of the touches that read from the disk, in percent.
    from_disk: Vec<f64>,
}

impl Series {
    fn of(&self, figure: impl Fn(&Summary) -> f64) -> Vec<f64> {
        self.touched.iter().map(figure).collect()
    }

    fn touched(&mut self, touched: &Touched, from_disk: u64) {
        self.touched.push(touched.summary);
        self.from_disk.push(100.0 * from_disk as f64 / touched.summary.count.max(1) as f64);
    }
}

/// Measure Ballast: reclaim to RAM, spill to the file, restore.
fn ballast(bench: &mut Bench, subject: &mut Subject, seed: u64, series: &mut Series) -> Result<()> {
    let stat = |bench: &Bench, subject: &Subject| bench.daemon.api().vm(subject.name());
    let before = stat(bench, subject)?.reclaim.spilled_pages;
    out(bench, &mut [&mut *subject])?;
    let spill_worker = |name: &str| name.starts_with(WORKER);
    let cpu_us = cpu::of_threads(bench.engine_pid()?, spill_worker)?;
    let (start, mut active) = (Instant::now(), Duration::ZERO);
    let (mut grew, mut sampled, mut seen) = (start, start, before);
    loop {
        let (now, stat) = (Instant::now(), stat(bench, subject)?);
        let spilled = stat.reclaim.spilled_pages;
        if spilled > seen {
            // After a pause, the worker has worked since the last sample at most.
            active += if seen == before || now - grew > PAUSE { now - sampled } else { now - grew };
            (grew, seen) = (now, spilled);
        }
        sampled = now;
        if stat.far_bytes > 0 && stat.far_file_bytes >= stat.far_bytes {
            break;
        }
        ensure!(
            start.elapsed() < TIMEOUT,
            "after {} s {} of {} far bytes are in the file",
            TIMEOUT.as_secs(),
            stat.far_file_bytes,
            stat.far_bytes
        );
        std::thread::sleep(SAMPLE);
    }
    let cpu_us = cpu::of_threads(bench.engine_pid()?, spill_worker)? - cpu_us;
    series.out.push((seen - before) as f64 / active.as_secs_f64());
    series.cpu.push(cpu_us / (seen - before).max(1) as f64);
    let before = stat(bench, subject)?.faults.file;
    let touched = touch(&mut [&mut *subject], seed, PINNED)?[0];
    series.touched(&touched, stat(bench, subject)?.faults.file - before);
    Ok(())
}

/// Measure the kernel: page out to the swap file, empty the swap cache, and page in.
fn kernel(subject: &mut Subject, seed: u64, series: &mut Series) -> Result<()> {
    let cgroup = subject.cgroup().context("the kernel's guest has no cgroup")?.to_owned();
    // The counters are those of the whole host, which is otherwise quiet: a cgroup's are up to two seconds old.
    let (writing, start) = (vmstat("nr_writeback")?, Instant::now());
    let Answer::Out(out) = subject.ask(&Order::PageOut)? else { bail!("no page went out") };
    ensure!(out.pages > 0, "the kernel put no page out");
    while vmstat("nr_writeback")? > writing {
        ensure!(start.elapsed() < TIMEOUT, "after {} s pages are still being written", TIMEOUT.as_secs());
        std::thread::sleep(SAMPLE);
    }
    series.out.push(out.pages as f64 / start.elapsed().as_secs_f64());
    series.cpu.push(out.cpu_us / out.pages as f64);
    // Written pages stay in the swap cache until the memory is needed.
    cgroup::empty(&cgroup);
    let before = vmstat("pswpin")?;
    let touched = touch(&mut [subject], seed, PINNED)?[0];
    series.touched(&touched, vmstat("pswpin")?.saturating_sub(before));
    Ok(())
}

/// Returns the exact value of a page counter of the kernel.
pub(crate) fn vmstat(name: &str) -> Result<u64> {
    // Without the refresh, the counts of single CPUs are missing.
    std::fs::write("/proc/sys/vm/stat_refresh", "1").context("Writing /proc/sys/vm/stat_refresh")?;
    let text = std::fs::read_to_string("/proc/vmstat").context("Reading /proc/vmstat")?;
    let pages = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    pages.with_context(|| format!("/proc/vmstat has no {name}"))
}

/// A buffer that the disk can be read into.
#[repr(align(4096))]
struct Page([u8; PAGE_SIZE]);

/// A file with the same data, read past the page cache.
struct Floor {
    file: File,
    order: Vec<u64>,
    data: Data,
}

impl Floor {
    fn new(dir: &Path, pages: u64, data: Data) -> Result<Self> {
        let file = File::from(direct::create_unnamed(dir, PageCount(pages).bytes())?);
        for page in 0..pages {
            let bytes = Page(data.page(page));
            file.write_all_at(&bytes.0, PageCount(page).bytes().0).context("Writing the floor's file")?;
        }
        file.sync_all().context("Writing the floor's file")?;
        Ok(Self { file, order: (0..pages).collect(), data })
    }

    fn round(&mut self, seed: u64) -> Result<Summary> {
        let _stay = cpu::Stay::here();
        shuffle(&mut self.order, seed);
        let mut times = vec![u32::MAX; self.order.len().min(READS)];
        let mut bytes = Page([0; PAGE_SIZE]);
        for (page, time) in self.order.iter().zip(&mut times) {
            let begin = Instant::now();
            self.file.read_exact_at(&mut bytes.0, PageCount(*page).bytes().0).context("Reading the floor's file")?;
            *time = u32::try_from(begin.elapsed().as_nanos()).unwrap_or(u32::MAX);
            ensure!(bytes.0 == self.data.page(*page), "WRONG DATA in the floor's file");
        }
        Ok(Summary::of(&mut times))
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if !bench.options.is(GuestKind::Native) {
        let mut row = bench.row("pages on a disk");
        row.because("the disk is what is measured, and it is the same for all guests (--guest native)");
        KEYS.iter().for_each(|key| row.figure(key, &[]));
        return each(row);
    }
    let (pages, repetitions) = if bench.options.quick { (4096, 2) } else { (16_384, 4) };
    for data in bench.options.data() {
        let mut row = bench.row(data.name());
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        row.fact("spill_after_s", AFTER_S);
        row.fact("dir", bench.options.dir.to_string_lossy());
        let mut subjects = bench.subjects(&[Way::Ballast, Way::Kernel], pages, data, &mut row)?;
        let mut floor = Floor::new(&bench.options.dir, pages, data)?;
        let mut reads = Series::default();
        let mut series: [Series; 2] = Default::default();
        for round in bench.progress.over("round", 0..=repetitions) {
            for subject in in_turn(&mut subjects, round) {
                // Round 0 warms up.
                let mut warm_up = Series::default();
                let of = if round == 0 { &mut warm_up } else { &mut series[subject.way as usize] };
                match subject.way {
                    Way::Ballast => ballast(bench, subject, round, of)?,
                    _ => kernel(subject, round, of)?,
                }
            }
            let summary = floor.round(round)?;
            if round > 0 {
                reads.touched.push(summary);
            }
        }
        subjects.iter_mut().try_for_each(Subject::verify)?;
        for subject in subjects.iter().filter(|subject| subject.way == Way::Ballast) {
            restore::stages(&mut row, &bench.daemon.api().vm(subject.name())?.restore_stages);
        }
        report(&mut row, &series, &reads);
        each(row)?;
    }
    Ok(())
}

/// A percentile: its name, and its field of a summary.
type Figure = (&'static str, fn(&Summary) -> f64);

fn report(row: &mut Row, [ballast, kernel]: &[Series; 2], floor: &Series) {
    let mib = |pages: &[f64]| -> Vec<f64> { pages.iter().map(|pages| pages * PAGE_SIZE as f64 / MIB as f64).collect() };
    row.figure("spill_pages_per_s", &ballast.out);
    row.figure("spill_mib_per_s", &mib(&ballast.out));
    row.figure("kernel_swapfile_out_pages_per_s", &kernel.out);
    row.figure("kernel_swapfile_out_mib_per_s", &mib(&kernel.out));
    row.ratio("ratio_spill", &ballast.out, &kernel.out);
    row.figure("spill_cpu_us_per_page", &ballast.cpu);
    row.figure("kernel_swapfile_out_cpu_us_per_page", &kernel.cpu);
    let sides = [("file_restore", ballast), ("kernel_swapfile_in", kernel), ("floor_pread", floor)];
    let figures: [Figure; 4] =
        [("p50", |s| s.p50_us), ("p90", |s| s.p90_us), ("p99", |s| s.p99_us), ("max", |s| s.max_us)];
    for (prefix, series) in sides {
        for (name, figure) in figures {
            row.figure(&format!("{prefix}_us_{name}"), &series.of(figure));
        }
    }
    for (name, figure) in [figures[0], figures[2]] {
        row.ratio(&format!("ratio_file_restore_{name}"), &ballast.of(figure), &kernel.of(figure));
        row.ratio(&format!("ratio_file_restore_floor_{name}"), &ballast.of(figure), &floor.of(figure));
    }
    row.figure("file_restore_from_disk_pct", &ballast.from_disk);
    row.figure("kernel_swapfile_in_from_disk_pct", &kernel.from_disk);
}
