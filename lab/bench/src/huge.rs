//! Compares 4 KiB and 2 MiB pages: the gains and losses of a guest on huge pages, by its access pattern.
//!
//! Before: guests of both kinds hold their data. After: a row has one touch of a far huge page against its floor. Other
//! rows have the time per touch for three orders of touches with half of the memory, beside the kernel's swap.
//! Threads: the bench's one. Units: microseconds. Promise: the floor does the least that a restore must do, on the same
//! data in the same run: it gets 512 pages from a store and copies 2 MiB.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, HUGE_SIZE, MIB, PAGES_PER_UNIT, PageCount, PageIdx};
use ballast_store::{Budget, PageBytes, PageKey, PutOutcome, RamOptions, RamStore, RegionKey, Store};

use crate::order::{Data, GuestKind, Pattern};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::median;
use crate::subject::{Subject, Way, out, walk};

const WAYS: [Way; 3] = [Way::Ballast, Way::Huge, Way::Kernel];

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if !bench.options.is(GuestKind::Native) {
        bail!("this bench has native guests alone");
    }
    let (pages, repetitions) = if bench.options.quick { (8192, 2) } else { (32_768, 5) };
    // Its data, and the memory that reclaim leaves above the limit.
    bench.guard.huge_pages(pages / PAGES_PER_UNIT + 4)?;
    let data = Data::HalfCompressible;
    let progress = bench.progress.clone();
    let named = |what: &str| {
        let mut row = Row::new("huge", "native", what);
        progress.row(row.title());
        row.fact("data", data.name());
        row.fact("pages", pages);
        row.fact("repetitions", repetitions);
        row
    };
    let mut row = named("one far huge page");
    let mut subjects = bench.subjects(&WAYS, pages, data, &mut row)?;
    one_page(bench, &mut subjects, repetitions, data, &mut row)?;
    each(row)?;
    for (pattern, what) in
        [(Pattern::Sequential, "sequential"), (Pattern::Strided, "strided"), (Pattern::Random, "random")]
    {
        let mut row = named(&format!("{what} touches of twice the memory it may have"));
        row.fact("order", what);
        under_pressure(bench, &mut subjects, pattern, repetitions, &mut row)?;
        each(row)?;
    }
    subjects.iter_mut().try_for_each(|subject| {
        subject.hold_to(bench, PageCount(2 * pages - 1).bytes().0)?;
        subject.verify()
    })
}

/// Touch one page of each 2 MiB while all memory is far.
fn one_page(bench: &mut Bench, subjects: &mut [Subject], repetitions: u64, data: Data, row: &mut Row) -> Result<()> {
    let (mut ours, mut p99, mut floor) = (Vec::new(), Vec::new(), Vec::new());
    let mut store = Floor::new(data)?;
    for subject in subjects.iter_mut().filter(|subject| subject.way == Way::Huge) {
        for round in bench.progress.over("round", 0..=repetitions) {
            out(bench, &mut [&mut *subject])?;
            let touched = walk(subject, Pattern::OnePerHuge, round)?.faults;
            let least = store.measure()?;
            // Round 0 warms up.
            if round > 0 {
                ours.push(touched.p50_us);
                p99.push(touched.p99_us);
                floor.push(least);
            }
        }
    }
    row.figure("restore_2m_us_p50", &ours);
    row.figure("restore_2m_us_p99", &p99);
    row.figure("floor_2m_us_p50", &floor);
    row.ratio("ratio_restore_2m", &ours, &floor);
    Ok(())
}

/// Measure guests that may each have half of their data in memory.
fn under_pressure(
    bench: &mut Bench,
    subjects: &mut Vec<Subject>,
    pattern: Pattern,
    repetitions: u64,
    row: &mut Row,
) -> Result<()> {
    let mut series: [Vec<f64>; WAYS.len()] = Default::default();
    let times = if bench.options.quick { (SETTLE / 5, MEASURE / 5) } else { (SETTLE, MEASURE) };
    // No fault waits for credits, so a guest of Ballast that wants more may be above its limit.
    let mut over: [Vec<f64>; WAYS.len()] = Default::default();
    let mut killed = false;
    for subject in &mut *subjects {
        subject.hold_to(bench, subject.data_bytes() / 2)?;
    }
    for round in bench.progress.over("round", 0..=repetitions) {
        if killed {
            subjects.retain(|subject| subject.way != Way::Kernel);
        }
        for subject in &mut *subjects {
            let steady = match steady(subject, pattern, round, times) {
                Ok(steady) => steady,
                Err(error) if subject.way == Way::Kernel => {
                    row.because(&format!("the kernel's guest did not survive its limit: {error:#}"));
                    killed = true;
                    continue;
                }
                Err(error) => return Err(error),
            };
            if round > 0 {
                let at = WAYS.iter().position(|way| *way == subject.way).unwrap_or_default();
                series[at].push(steady.touch_us);
                if subject.way.is_ours() {
                    over[at].push(steady.over_pct);
                }
            }
        }
    }
    if killed {
        subjects.retain(|subject| subject.way != Way::Kernel);
    }
    let [small, huge, kernel] = &series;
    row.figure("over_limit_4k_pct", &over[0]);
    row.figure("over_limit_2m_pct", &over[1]);
    row.figure("touch_4k_us", small);
    row.figure("touch_2m_us", huge);
    row.figure("kernel_touch_us", kernel);
    row.ratio("ratio_2m_4k", huge, small);
    row.ratio("ratio_4k_kernel", small, kernel);
    row.ratio("ratio_2m_kernel", huge, kernel);
    Ok(())
}

/// Time of a guest's walks before the measurement, so that it has settled at its limit, and of the measurement.
const SETTLE: Duration = Duration::from_millis(1000);
const MEASURE: Duration = Duration::from_millis(1000);

struct Steady {
    touch_us: f64,
    /// Memory above the limit in percent of it, the median over the walks; 0 for the kernel's guest.
    over_pct: f64,
}

/// Walk over all of the memory repeatedly.
fn steady(subject: &mut Subject, pattern: Pattern, round: u64, times: (Duration, Duration)) -> Result<Steady> {
    let (mut touches, mut wall_us, mut over) = (0, 0.0, Vec::new());
    let start = Instant::now();
    for seed in (round << 32).. {
        let touched = walk(subject, pattern, seed)?;
        if start.elapsed() < times.0 {
            continue;
        }
        touches += touched.summary.count;
        wall_us += touched.wall_us;
        if subject.way.is_ours() {
            let limit = (subject.data_bytes() / 2) as f64;
            over.push(100.0 * (subject.resident()?.bytes().0 as f64 / limit - 1.0));
        }
        if start.elapsed() >= times.0 + times.1 {
            break;
        }
    }
    Ok(Steady { touch_us: wall_us / touches.max(1) as f64, over_pct: median(&over).unwrap_or_default() })
}

/// The least that a restore of 2 MiB must do, on memory as cold as the guest's, because each unit is used in turn.
struct Floor {
    store: RamStore,
    handles: Vec<Vec<ballast_store::Handle>>,
    bytes: Vec<PageBytes>,
    copies: Vec<Vec<PageBytes>>,
}

/// 64 MiB of pages, and as much to copy them to.
const FLOOR_UNITS: u64 = 32;

impl Floor {
    fn new(data: Data) -> Result<Self> {
        let (store, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(64 * MIB))))?;
        let mut handles = vec![Vec::new(); FLOOR_UNITS as usize];
        for page in 0..FLOOR_UNITS * PAGES_PER_UNIT {
            match store.put(key(page), &data.page(page)) {
                PutOutcome::Stored(handle) => handles[(page / PAGES_PER_UNIT) as usize].push(handle),
                refused => bail!("a store of the bench's own returns {refused:?}"),
            }
        }
        let room = || vec![[1; _]; PAGES_PER_UNIT as usize];
        Ok(Self { store, handles, bytes: room(), copies: (0..FLOOR_UNITS).map(|_| room()).collect() })
    }

    /// Decompress and copy; the median over all, in microseconds.
    fn measure(&mut self) -> Result<f64> {
        let mut times = Vec::new();
        for (unit, (handles, copy)) in (0..).zip(self.handles.iter().zip(&mut self.copies)) {
            let start = Instant::now();
            let mut outcomes = Vec::with_capacity(handles.len());
            self.store.get_run(key(unit * PAGES_PER_UNIT), handles, &mut self.bytes, &mut outcomes);
            copy.copy_from_slice(&self.bytes);
            std::hint::black_box(&copy);
            times.push(start.elapsed().as_secs_f64() * 1e6);
            debug_assert_eq!(size_of_val(&copy[..]), HUGE_SIZE);
        }
        Ok(median(&times).unwrap_or_default())
    }
}

fn key(page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 0 }.page(PageIdx(page))
}
