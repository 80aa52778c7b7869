//! The cost of managing VMs that were started without Ballast: pages out and back, counts of pages, the daemon's time.
//!
//! Before: processes under the name of a VMM have private memory with known contents. After: rows. Threads: the bench's
//! one; VMMs are processes. Units: in the keys. Promise: every word is compared in the end. At most 128 of the timed
//! touches of a round are of pages in memory.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use ballast_adopt::{Adopted, look};
use ballast_api::AdoptRequest;
use ballast_base::{Bytes, GIB, HUGE_SIZE, MIB, PAGE_SIZE, PageCount};
use ballast_sys::Anon;

use crate::cpu;
use crate::native::{Contents, Ram};
use crate::order::{Answer, Data, Order, Pace, Role, Touched};
use crate::report::Row;
use crate::rig::Bench;
use crate::stats::{percentile, random, shuffle};
use crate::worker::Worker;

const IDLE: u64 = 200;
const IDLE_RAM: u64 = 32 * MIB;
const IDLE_LIMIT: u64 = 16 * MIB;
const TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct Plain {
    ram: Ram,
    pages: usize,
    contents: Contents,
}

impl Plain {
    pub(crate) fn new(ram_bytes: u64) -> Result<Self> {
        let ram = Ram::Private(Anon::new(ram_bytes as usize).context("Mapping memory")?);
        let contents = Contents::new(Data::HalfCompressible, 0);
        Ok(Self { ram, pages: ram_bytes as usize / PAGE_SIZE, contents })
    }

    pub(crate) fn obey(&mut self, order: &Order) -> Result<Answer> {
        match *order {
            Order::Fill => {
                (0..self.pages).for_each(|page| {
                    self.contents.fill(&self.ram, page);
                });
                Ok(Answer::Done)
            }
            Order::TouchSparsely => {
                let pages = (0..self.pages).step_by(HUGE_SIZE / PAGE_SIZE);
                pages.for_each(|page| self.ram.word(page * PAGE_SIZE).store(1, Relaxed));
                Ok(Answer::Done)
            }
            Order::Touch { seed, .. } => Ok(Answer::Touched(self.touch(seed))),
            Order::Slice { ms } => Ok(self.slice(ms)),
            Order::Verify => {
                (0..self.pages).try_for_each(|page| self.contents.check(&self.ram, page, None))?;
                Ok(Answer::Done)
            }
            ref other => bail!("a plain VMM cannot do {other:?}"),
        }
    }

    fn touch(&self, seed: u64) -> Touched {
        let mut pages: Vec<usize> = (0..self.pages).collect();
        shuffle(&mut pages, seed);
        let mut times = Vec::with_capacity(pages.len());
        let begun = Instant::now();
        for page in pages {
            let begun = Instant::now();
            std::hint::black_box(self.ram.word(page * PAGE_SIZE).load(Relaxed));
            times.push(begun.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
        }
        Touched::of(&mut times, begun.elapsed(), 0)
    }

    /// Read random pages for this long, nine in ten of them in the first half.
    fn slice(&self, ms: u64) -> Answer {
        let (begun, mut state, mut ops) = (Instant::now(), 1, 0);
        while begun.elapsed() < Duration::from_millis(ms) {
            for _ in 0..64 {
                let pages = if random(&mut state).is_multiple_of(10) { self.pages } else { self.pages / 2 };
                let page = (random(&mut state) % pages as u64) as usize;
                std::hint::black_box(self.ram.word(page * PAGE_SIZE).load(Relaxed));
                ops += 1;
            }
        }
        Answer::Sliced { ops, wall_us: begun.elapsed().as_secs_f64() * 1e6, cpu_us: 0.0 }
    }
}

pub(crate) fn run(bench: &mut Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    if let Err(why) = &bench.kernel {
        bail!("there is no swap: {why}");
    }
    let vmm = vmm(bench)?;
    let (mib, repetitions) = if bench.options.quick { (32, 2) } else { (128, 7) };
    pages(bench, &vmm, mib * MIB, repetitions, each)?;
    scans(bench, &vmm, each)?;
    over_limit(bench, &vmm, mib * MIB, each)?;
    idle(bench, &vmm, each)
}

/// A copy of this program under the name of a VMM: the daemon knows a VMM by its name.
pub(crate) fn vmm(bench: &Bench) -> Result<PathBuf> {
    let vmm = bench.daemon.dir().join("firecracker");
    if !vmm.exists() {
        std::fs::copy(std::env::current_exe()?, &vmm).context("Copying this program")?;
    }
    Ok(vmm)
}

fn start(vmm: &Path, ram_bytes: u64) -> Result<Worker> {
    Worker::start_as(vmm, &Role::Plain { ram_bytes })
}

fn adopted(worker: &Worker) -> Result<Adopted> {
    Ok(Adopted::new(look(worker.pid())?)?)
}

/// Measures pages that go out and come back.
fn pages(bench: &Bench, vmm: &Path, ram: u64, rounds: u64, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    const STEP: u64 = 8 * MIB;
    // The pages that a CPU faulted in last wait in a list of that CPU, from which no other CPU can page them out.
    const FEW: u64 = 128 * PAGE_SIZE as u64;
    let mut row = bench.row("pages out and back");
    let (mut out, mut out_cpu, mut back, mut p99) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut worker = start(vmm, ram)?;
    worker.ask(&Order::Fill)?;
    let vm = adopted(&worker)?;
    for round in bench.progress.over("round", 0..=rounds) {
        let (begun, cpu) = (Instant::now(), cpu::of_thread()?);
        while vm.scan()?.resident > FEW {
            ensure!(begun.elapsed() < TIMEOUT, "pages stay: {:?}", vm.scan()?);
            vm.step(STEP)?;
        }
        let (took, cpu) = (begun.elapsed(), cpu::of_thread()? - cpu);
        let Answer::Touched(touched) = worker.ask(&Order::Touch { seed: round + 1, pace: Pace::ALL })? else {
            bail!("a VMM touched nothing");
        };
        if round > 0 {
            let pages = Bytes(ram).pages_floor().0 as f64;
            out.push(pages / took.as_secs_f64());
            out_cpu.push(cpu / pages);
            back.push(touched.faults.p50_us);
            p99.push(touched.faults.p99_us);
        }
    }
    row.fact("ram_bytes", ram);
    row.figure("adopt_reclaim_pages_per_s", &out);
    row.figure("adopt_reclaim_cpu_us_per_page", &out_cpu);
    row.figure("adopt_restore_us_p50", &back);
    row.figure("adopt_restore_us_p99", &p99);
    worker.ask(&Order::Verify)?;
    each(row)
}

/// Measures counts of pages, of memory in which one page in 2 MiB is touched.
fn scans(bench: &Bench, vmm: &Path, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let sizes: &[u64] = if bench.options.quick { &[1] } else { &[1, 16, 64] };
    for gib in sizes {
        let mut row = bench.row(&format!("a count of the pages of {gib} GiB"));
        let mut worker = start(vmm, gib * GIB)?;
        worker.ask(&Order::TouchSparsely)?;
        let vm = adopted(&worker)?;
        let mut times = Vec::new();
        for _ in 0..20 {
            let cpu = cpu::of_thread()?;
            let memory = vm.scan()?;
            times.push((cpu::of_thread()? - cpu) / *gib as f64);
            ensure!(memory.resident == gib * GIB / HUGE_SIZE as u64 * PAGE_SIZE as u64, "{memory:?}");
        }
        row.fact("gib", *gib);
        row.figure("adopt_scan_us_per_gib", &times);
        each(row)?;
    }
    Ok(())
}

/// Gives this process to the daemon as a VM. Returns its name there.
pub(crate) fn adopt(bench: &Bench, pid: u32) -> Result<String> {
    let request = AdoptRequest { pid: Some(pid), ..AdoptRequest::default() };
    let result = bench.daemon.api().adopt(&request)?;
    result.adopted.into_iter().next().map(|vm| vm.name).context("it was not adopted")
}

/// Measures a VM that reads more than its limit, as fast as it can.
fn over_limit(bench: &Bench, vmm: &Path, ram: u64, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("a VM that wants more than its limit");
    let mut worker = start(vmm, ram)?;
    worker.ask(&Order::Fill)?;
    let (name, api, limit) = (adopt(bench, worker.pid())?, bench.daemon.api(), ram * 3 / 4);
    let resident = || -> Result<u64> { Ok(api.vm(&name)?.resident_bytes) };
    api.set_limit(&name, Some(limit))?;
    let begun = Instant::now();
    while resident()? > limit {
        ensure!(begun.elapsed() < TIMEOUT, "it is not held to its limit");
    }
    let ms = if bench.options.quick { 1000 } else { 10_000 };
    worker.tell(&Order::Slice { ms })?;
    let (begun, mut over) = (Instant::now(), Vec::new());
    while begun.elapsed() < Duration::from_millis(ms - 100) {
        over.push((resident()? as f64 / limit as f64 - 1.0).max(0.0) * 100.0);
        std::thread::sleep(Duration::from_millis(10));
    }
    let Answer::Sliced { ops, .. } = worker.answer()? else { bail!("a VMM did nothing") };
    over.sort_unstable_by(f64::total_cmp);
    let at = |part| (percentile(&over, part).unwrap_or_default() * 100.0).round() / 100.0;
    row.fact("limit_bytes", limit);
    row.fact("reads_per_s", ops * 1000 / ms);
    row.fact("adopt_over_limit_pct", at(1.0));
    row.fact("adopt_over_limit_pct_median", at(0.5));
    api.set_limit(&name, None)?;
    worker.ask(&Order::Verify)?;
    each(row)
}

/// Measures many VMs that do nothing, below their limits.
fn idle(bench: &Bench, vmm: &Path, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("idle VMs");
    let count = if bench.options.quick { 20 } else { IDLE };
    let mut workers = Vec::new();
    for _ in 0..count {
        let mut worker = start(vmm, IDLE_RAM)?;
        worker.ask(&Order::TouchSparsely)?;
        let name = adopt(bench, worker.pid())?;
        bench.daemon.api().set_limit(&name, Some(IDLE_LIMIT))?;
        workers.push(worker);
    }
    let engine = bench.daemon.api().host()?.engine_pid;
    let length = if bench.options.quick { Duration::from_secs(2) } else { Duration::from_secs(20) };
    let mut shares = Vec::new();
    for _ in 0..3 {
        let (begun, cpu) = (Instant::now(), cpu::of_process_id(engine)?);
        std::thread::sleep(length);
        shares.push((cpu::of_process_id(engine)? - cpu) / begun.elapsed().as_secs_f64() / 1e4);
    }
    row.fact("vms", count);
    row.fact("pages_each", PageCount(IDLE_RAM / HUGE_SIZE as u64).0);
    row.figure(&format!("adopt_idle_cpu_pct_{count}"), &shares);
    each(row)
}
