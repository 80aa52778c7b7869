//! The time of the first touch of a watched base page, by the zap scan (`pager/src/scan/zap.rs`).
//!
//! Before: this process has memory in base pages, and a thread serves its faults as a fault worker does. After: a row
//! has microseconds per page touched. Threads: the caller's touches, one serves. Units: microseconds.
//! Promise: all pages of [`UNITS`] units are touched in order, each once in a cycle, and every touch is of a watched
//! page.
//!
//! | | watched | a touch |
//! |---|---|---|
//! | page by page | unmapped | notifies the worker, which maps the page (`UFFDIO_CONTINUE`) |
//! | by blocks | unmapped | the same, with the 63 pages around it: the next of these costs nothing |

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use ballast_base::{Bytes, HUGE_SIZE, Hva, PAGE_SIZE};
use ballast_heat::source::BLOCK;
use ballast_sys::Uffd;
use ballast_sys::uffd::REQUIRED_FEATURES;
use ballast_testvm::GuestRam;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::order::GuestKind;
use crate::report::Row;
use crate::rig::Bench;

const UNITS: usize = 8;
const LEN: usize = UNITS * HUGE_SIZE;

pub(super) fn run(bench: &Bench, each: &mut dyn FnMut(Row) -> Result<()>) -> Result<()> {
    let mut row = bench.row("the touch of a watched base page");
    row.fact("measures", "touches");
    let mut figures: [Vec<f64>; 2] = Default::default();
    if bench.options.is(GuestKind::Native) {
        let memory = Memory::new()?;
        // Round 0 warms up.
        for round in bench.progress.over("round", 0..=if bench.options.quick { 2 } else { 10 }) {
            let all = [memory.zapped(1)?, memory.zapped(BLOCK)?];
            for (figure, value) in figures.iter_mut().zip(all).filter(|_| round > 0) {
                figure.push(value);
            }
        }
    } else {
        row.because("a vCPU pays the same and one exit: see native");
    }
    for (key, values) in ["touch_us_by_page", "touch_us_by_block"].iter().zip(&figures) {
        row.figure(key, values);
    }
    each(row)
}

struct Memory {
    ram: GuestRam,
    uffd: Uffd,
}

impl Memory {
    fn new() -> Result<Self> {
        let ram = GuestRam::new(Bytes(LEN as u64)).context("Allocating memory")?;
        let (uffd, _) = Uffd::create(REQUIRED_FEATURES).context("Creating a userfaultfd")?;
        let memory = Self { ram, uffd };
        memory.touch();
        memory.uffd.register(memory.at(0), LEN as u64).context("Registering memory")?;
        Ok(memory)
    }

    fn at(&self, page: u64) -> Hva {
        Hva(self.ram.addr() as u64 + page * PAGE_SIZE as u64)
    }

    /// Touch every page. Returns microseconds per page.
    fn touch(&self) -> f64 {
        let start = Instant::now();
        for offset in (0..LEN).step_by(PAGE_SIZE) {
            self.ram.word(offset).load(Relaxed);
        }
        start.elapsed().as_secs_f64() * 1e6 / (LEN / PAGE_SIZE) as f64
    }

    /// Measure unmapped pages, of which a worker maps `around` at a touch.
    fn zapped(&self, around: u64) -> Result<f64> {
        self.ram.zap(0, LEN).context("MADV_DONTNEED")?;
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let worker = scope.spawn(|| self.serve(around, &done));
            let took = self.touch();
            done.store(true, Relaxed);
            let served = worker.join().expect("the worker does not panic")?;
            ensure!(served == (LEN / PAGE_SIZE) as u64 / around, "{served} faults were served");
            Ok(took)
        })
    }

    fn serve(&self, around: u64, done: &AtomicBool) -> Result<u64> {
        let timeout = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
        let (mut faults, mut served) = (Vec::with_capacity(16), 0);
        while !done.load(Relaxed) {
            poll(&mut [PollFd::new(&self.uffd, PollFlags::IN)], Some(&timeout)).context("Waiting for a fault")?;
            self.uffd.read_faults(&mut faults).context("Reading a fault")?;
            for fault in &faults {
                let page = (fault.addr.0 - self.at(0).0) / PAGE_SIZE as u64;
                self.uffd.map_run(self.at(page - page % around), around).context("UFFDIO_CONTINUE")?;
                served += 1;
            }
        }
        Ok(served)
    }
}
