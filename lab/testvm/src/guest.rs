//! The workload itself: fill, run, verify. The same source runs in native threads and, compiled again, in KVM vCPUs.
//!
//! The child modules `law` and `programs` define the contents of cells, the cells of operations, and some workloads.
//!
//! Before: `vm` lays out a [`Job`] per worker. After: the job has its results. Meanwhile the worker reports events
//! through a [`Port`].
//! Threads: one worker per job; workers own disjoint cells. The host reads a job's atomics at any time.
//! Units: a *cell* is the piece of guest RAM that one operation checks and updates: a page, or a key-value slot.
//! Promise: every word is compared with its expected value before it is replaced. Workers access guest RAM only by
//! volatile 8-byte accesses. Nothing outside `core` is used, and nothing can panic.

#[path = "law.rs"]
mod law;
#[path = "programs.rs"]
pub mod programs;

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

pub use law::*;

/// Guest address at which the KVM guest's program is linked (`guest/link.ld` says the same).
pub const IMAGE_ADDR: u64 = 0x10000;
/// I/O port to which a KVM guest writes its events.
pub const PORT: u16 = 0x0B0A;

/// The worker has arrived before phase `event & 0xFF`. `tell` returns whether it continues.
pub const EVENT_ARRIVE: u32 = 0x100;
pub const EVENT_WRONG: u32 = 0x200;
/// The worker has nothing to do until the host sets `stop`.
pub const EVENT_IDLE: u32 = 0x400;
pub const EVENT_DONE: u32 = 0x500;
/// The guest program reached code that must be unreachable.
pub const EVENT_PANIC: u32 = 0x600;

/// Write version 0 of every cell.
pub const PHASE_FILL: u32 = 0;
/// Do the operations.
pub const PHASE_RUN: u32 = 1;
/// Check every word of every cell.
pub const PHASE_VERIFY: u32 = 2;
/// The job is done. No worker touches guest RAM after this.
pub const PHASE_END: u32 = 3;

/// Workload kind: each operation takes the next cell.
pub const KIND_SEQUENTIAL: u32 = 0;
/// Workload kind: all cells are equally likely.
pub const KIND_UNIFORM: u32 = 1;
/// Workload kind: a small set of cells takes most operations.
pub const KIND_HOTSET: u32 = 2;
/// Workload kind: a table of cumulative weights decides the cell.
pub const KIND_ZIPF: u32 = 3;
/// Workload kind: no operations.
pub const KIND_IDLE: u32 = 4;
/// Workload kind: cells by a bell curve, then uniformly, then in sequence, for `move_at` operations each.
pub const KIND_STORE: u32 = 5;
/// Workload kind, a program: a graph search.
pub const KIND_GRAPH: u32 = 6;
/// Workload kind, a program: a matrix product.
pub const KIND_MATRIX: u32 = 7;
/// Workload kind, a program: a table scan.
pub const KIND_SCAN: u32 = 8;

/// Words that an operation checks and updates: the first, the last, and six between.
pub const SAMPLES: u64 = 8;
/// Wrong words of which a job has a full record. Further ones are only counted.
pub const MAX_RECORDS: usize = 16;
/// Buckets of the histogram, eight per power of two: see [`bucket`].
pub const BUCKETS: usize = 496;

/// The channel of a worker to its host.
pub trait Port {
    /// Report an event. Returns false if the worker must stop; the host of a KVM guest then does not resume it.
    fn tell(&self, event: u32) -> bool;
}

/// The parameters of a worker. The host writes them before the start. They are constant afterwards.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Params {
    /// Address of the first byte of guest RAM, as the worker sees it.
    pub ram: u64,
    /// Address of the worker's version words (`u32` each), as the worker sees it.
    pub versions: u64,
    /// Address of the worker's table of cumulative weights (`u64` each), as the worker sees it.
    pub weights: u64,
    /// The worker's first cell, counted from the start of RAM.
    pub first_cell: u64,
    pub cells: u64,
    pub cell_words: u64,
    /// The least words of a value. Each cell uses this many or more, by its number. 0: all words of a cell are used.
    pub min_words: u64,
    pub ops: u64,
    pub content_seed: u64,
    /// Seed of the choices, different for each worker.
    pub pick_seed: u64,
    /// An operation writes if 32 random bits are below this.
    pub write_below: u64,
    /// A cell version is all zero if 32 hashed bits are below this.
    pub zero_below: u64,
    /// An operation takes a hot cell if 32 random bits are below this.
    pub hot_below: u64,
    pub hot_cells: u64,
    /// For a store: operations with each pattern.
    pub move_at: u64,
    /// Maps ranks to cells: `rank * stride % cells`. It is coprime with `cells`. 1 keeps the order.
    pub stride: u64,
    pub kind: u32,
    /// Nonzero: every second 64 bytes of a cell repeat one word, so the data compresses to about half.
    pub half: u32,
    /// Nonzero: measure every operation.
    pub latency: u32,
}

#[repr(C)]
#[derive(Debug, Default)]
pub struct Record {
    pub offset: AtomicU64,
    pub expected: AtomicU64,
    pub found: AtomicU64,
    /// Operations that the worker had done before.
    pub op: AtomicU64,
    /// Phase in which the word was found.
    pub phase: AtomicU32,
}

#[repr(C)]
#[derive(Debug)]
pub struct Job {
    pub params: Params,
    /// Set by the host to end the run phase.
    pub stop: AtomicU32,
    /// Rounds of computing before each operation. The host may change it at any time.
    pub think: AtomicU64,
    pub ops_done: AtomicU64,
    pub wrong_words: AtomicU64,
    /// Wrong bytes in these words.
    pub wrong_bytes: AtomicU64,
    pub records: [Record; MAX_RECORDS],
    /// Longest operation, in TSC ticks.
    pub longest: AtomicU64,
    /// Counted by [`bucket`] of their TSC ticks.
    pub histogram: [AtomicU64; BUCKETS],
}

struct Worker<'a, P> {
    job: &'a Job,
    port: &'a P,
    phase: u32,
}

impl<P: Port> Worker<'_, P> {
    #[inline]
    fn address(&self, cell: u64, index: u64) -> *mut u64 {
        let params = &self.job.params;
        let word = cell.wrapping_mul(params.cell_words).wrapping_add(index);
        (params.ram as *mut u64).wrapping_add(word as usize)
    }

    /// # Safety
    /// The word is inside guest RAM.
    #[inline]
    unsafe fn check(&self, cell: u64, index: u64, expected: u64) {
        let address = self.address(cell, index);
        // SAFETY: inside guest RAM (the caller's promise), which is mapped, and aligned because RAM is.
        let found = unsafe { address.read_volatile() };
        if found != expected {
            self.wrong(address as u64, expected, found);
        }
    }

    #[cold]
    #[inline(never)]
    fn wrong(&self, address: u64, expected: u64, found: u64) {
        let job = self.job;
        let mut difference = expected ^ found;
        let mut bytes = 0;
        while difference != 0 {
            bytes += (difference & 0xFF != 0) as u64;
            difference >>= 8;
        }
        job.wrong_bytes.fetch_add(bytes, Relaxed);
        let count = job.wrong_words.load(Relaxed);
        if let Some(record) = job.records.get(count as usize) {
            record.offset.store(address.wrapping_sub(job.params.ram), Relaxed);
            record.expected.store(expected, Relaxed);
            record.found.store(found, Relaxed);
            record.op.store(job.ops_done.load(Relaxed), Relaxed);
            record.phase.store(self.phase, Relaxed);
        }
        // Release: a thread that sees the count sees the record.
        job.wrong_words.store(count.wrapping_add(1), core::sync::atomic::Ordering::Release);
        if count < MAX_RECORDS as u64 {
            self.port.tell(EVENT_WRONG);
        }
    }

    #[inline]
    fn version(&self, local: u64) -> *mut u32 {
        (self.job.params.versions as *mut u32).wrapping_add(local as usize)
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn fill(&mut self) {
        let params = &self.job.params;
        for local in 0..params.cells {
            let cell = params.first_cell.wrapping_add(local);
            let contents = params.contents(cell, 0);
            for index in 0..params.words_of(cell) {
                // SAFETY: a word of one of the worker's cells is inside guest RAM.
                unsafe { self.address(cell, index).write_volatile(contents.word(index)) };
            }
        }
    }

    /// # Safety
    /// As for [`run`]; `local < cells`.
    #[inline]
    unsafe fn operation(&mut self, local: u64, write: bool) {
        let params = &self.job.params;
        let cell = params.first_cell.wrapping_add(local);
        let words = params.words_of(cell);
        let slot = self.version(local);
        // SAFETY: `local < cells`, and there is a version word per cell, private to this worker while it runs.
        let old = unsafe { slot.read_volatile() };
        let new = old.wrapping_add(u32::from(write));
        let (before, after) = (params.contents(cell, old), params.contents(cell, new));
        for i in 0..SAMPLES {
            let index = sample(i, words);
            // SAFETY: `index < words`, so the word is in the worker's cell, inside guest RAM.
            unsafe {
                self.check(cell, index, before.word(index));
                if write {
                    self.address(cell, index).write_volatile(after.word(index));
                }
            }
        }
        // SAFETY: as for the read.
        unsafe { slot.write_volatile(new) };
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn operations(&mut self) {
        let params = &self.job.params;
        let mut random = params.pick_seed;
        self.repeat(|worker, op| {
            let (local, write) = params.pick(&mut random, op, |i| {
                let entry = (params.weights as *const u64).wrapping_add(i as usize);
                // SAFETY: `i < cells`. A zipf job has that many weights, and nobody writes them now.
                unsafe { entry.read_volatile() }
            });
            // SAFETY: `pick` returns a cell below `cells`.
            unsafe { worker.operation(local, write) };
        });
    }

    #[inline]
    fn repeat(&mut self, mut operation: impl FnMut(&mut Self, u64)) {
        let job = self.job;
        let params = &job.params;
        let mut op = 0;
        while op < params.ops && job.stop.load(Relaxed) == 0 {
            think(job.think.load(Relaxed));
            let start = if params.latency != 0 { ticks() } else { 0 };
            operation(self, op);
            if params.latency != 0 {
                self.record(ticks().wrapping_sub(start));
            }
            op = op.wrapping_add(1);
            job.ops_done.store(op, Relaxed);
        }
    }

    #[inline]
    fn record(&self, ticks: u64) {
        let add_one = |counter: &AtomicU64| counter.store(counter.load(Relaxed).wrapping_add(1), Relaxed);
        if let Some(counter) = self.job.histogram.get(bucket(ticks) as usize) {
            add_one(counter);
        }
        if ticks > self.job.longest.load(Relaxed) {
            self.job.longest.store(ticks, Relaxed);
        }
    }

    /// One phase of a program.
    ///
    /// # Safety
    /// As for [`run`].
    unsafe fn program(&mut self, program: &mut programs::Program) {
        let params = &self.job.params;
        match self.phase {
            PHASE_FILL => program.fill(self, params),
            PHASE_RUN => self.repeat(|worker, _| program.step(worker, params)),
            _ => program.verify(self, params),
        }
    }

    /// # Safety
    /// As for [`run`].
    unsafe fn verify(&mut self) {
        let params = &self.job.params;
        for local in 0..params.cells {
            let cell = params.first_cell.wrapping_add(local);
            let words = params.words_of(cell);
            // SAFETY: there is a version word per cell.
            let version = unsafe { self.version(local).read_volatile() };
            let (filled, current) = (params.contents(cell, 0), params.contents(cell, version));
            let mut samples_seen = 0;
            for index in 0..words {
                // Operations leave all but the samples as they were filled.
                let sampled = index == sample(samples_seen, words);
                samples_seen += sampled as u64;
                let expected = if sampled { current } else { filled };
                // SAFETY: a word of one of the worker's cells is inside guest RAM.
                unsafe { self.check(cell, index, expected.word(index)) };
            }
        }
    }
}

/// A worker's share of guest RAM, its version words and its table. `programs` stays within the job's cells: see `run`.
impl<P: Port> programs::Memory for Worker<'_, P> {
    #[inline]
    fn read(&mut self, word: u64, expected: u64) {
        // SAFETY: a word of the job's cells.
        unsafe { self.check(self.job.params.first_cell, word, expected) };
    }

    #[inline]
    fn write(&mut self, word: u64, value: u64) {
        // SAFETY: a word of the job's cells, inside guest RAM and aligned.
        unsafe { self.address(self.job.params.first_cell, word).write_volatile(value) };
    }

    #[inline]
    fn version(&mut self, slot: u64) -> u32 {
        // SAFETY: fewer slots than cells, each of which has a version word private to this worker.
        unsafe { Worker::version(self, slot).read_volatile() }
    }

    #[inline]
    fn set_version(&mut self, slot: u64, version: u32) {
        // SAFETY: as above.
        unsafe { Worker::version(self, slot).write_volatile(version) };
    }

    #[inline]
    fn weight(&mut self, index: u64) -> u64 {
        let entry = (self.job.params.weights as *const u64).wrapping_add(index as usize);
        // SAFETY: an entry of the table that `Spec::weights` made for this program, which nobody writes now.
        unsafe { entry.read_volatile() }
    }
}

#[inline]
pub fn ticks() -> u64 {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the instruction exists on every x86-64 CPU, and neither Linux nor our KVM guest forbids it to user mode.
    return unsafe { core::arch::x86_64::_rdtsc() };
    #[cfg(not(target_arch = "x86_64"))]
    0
}

/// Compute for a number of rounds, about 3 ns each. It stands for the cost of a request beyond its memory accesses.
#[inline]
fn think(rounds: u64) {
    let mut thought = rounds;
    for _ in 0..rounds {
        thought = core::hint::black_box(mix(thought));
    }
}

/// Run all phases of a job. Reports an event to the port before each.
///
/// # Safety
/// In the caller's address space, from now until the return: `params.ram` is 8-byte aligned guest RAM that holds the
/// job's cells; `params.versions` is `cells` words used by nobody else; for a zipf job, `params.weights` is `cells`
/// words that nobody writes, for a program the words it asks for. Every cell has at least [`SAMPLES`] words in use.
pub unsafe fn run<P: Port>(job: &Job, port: &P) {
    let mut worker = Worker { job, port, phase: PHASE_FILL };
    let mut program = programs::Program::new(&job.params);
    while port.tell(EVENT_ARRIVE | worker.phase) {
        // SAFETY: the caller's promise.
        unsafe {
            match worker.phase {
                PHASE_FILL | PHASE_RUN | PHASE_VERIFY if job.params.kind >= KIND_GRAPH => worker.program(&mut program),
                PHASE_FILL => worker.fill(),
                PHASE_RUN if job.params.kind == KIND_IDLE => {
                    port.tell(EVENT_IDLE);
                }
                PHASE_RUN => worker.operations(),
                PHASE_VERIFY => worker.verify(),
                _ => return,
            }
        }
        worker.phase += 1;
    }
}
