//! A test VM: guest RAM, the private memory of the workers, and their phases.
//!
//! Before: `workload` has a plan, and `ram` maps memory. After: the caller has an [`Outcome`].
//! Threads: `run` starts one per worker and waits for them. Any thread may call `stop`, `think` and `progress`.
//! Promise: no worker is in phase N+1 before all have finished phase N, and the hook runs between the two. Parameters,
//! version words and results are in private memory, so paging of guest RAM cannot change the expected contents.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_sys::lock::Lock;
use serde::Serialize;

use crate::guest::{self, Job, Params, Port};
use crate::kvm::Machine;
use crate::outcome::{GuestKind, Latency, Outcome, Wrong};
use crate::private::{Places, Private, STACK_LEN};
use crate::ram::GuestRam;
use crate::workload::Spec;

/// The point between two phases at which the hook is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Before the fill: nothing has touched guest RAM yet.
    Fill,
    /// After the fill, before the operations.
    Run,
    /// After the operations, before every word is checked.
    Verify,
    /// After the check of every word: nothing touches guest RAM any more.
    End,
}

/// The progress of all workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Operations done.
    pub ops: u64,
    /// Wrong bytes found.
    pub wrong_bytes: u64,
}

/// A point in time, by the monotonic clock and the time stamp counter.
#[derive(Clone, Copy, Debug)]
struct Mark {
    time: Instant,
    ticks: u64,
}

impl Mark {
    fn now() -> Self {
        Self { time: Instant::now(), ticks: guest::ticks() }
    }
}

/// The barrier between phases.
#[derive(Debug, Default)]
struct Barrier {
    arrived: usize,
    generation: u64,
    started: bool,
    failed: bool,
    stopped: bool,
    /// For each phase, the end of the previous one and its own begin. The hook ran between the two.
    marks: Vec<(Mark, Mark)>,
}

/// A test VM. It can run once.
#[derive(Debug)]
pub struct Vm {
    spec: Spec,
    machine: Option<Machine>,
    plan: Vec<Params>,
    places: Vec<Places>,
    private: Private,
    ram: GuestRam,
    barrier: Mutex<Barrier>,
    turn: Condvar,
}

type Hook<'a> = dyn Fn(Moment, &GuestRam) + Sync + 'a;

impl Vm {
    /// Lay out memory and, for a KVM guest, create its vCPUs. This does not touch guest RAM.
    pub fn new(spec: &Spec, kind: GuestKind) -> Result<Self> {
        let mut plan = spec.plan()?;
        let make_ram = if spec.huge_pages { GuestRam::huge } else { GuestRam::new };
        let ram = make_ram(spec.ram).with_context(|| format!("Allocating {} for guest RAM", spec.ram))?;
        let mut machine = if kind == GuestKind::Kvm { Some(Machine::new()?) } else { None };
        let per_worker = size_of::<Job>() + STACK_LEN + 5 * PAGE_SIZE;
        let tables: Vec<Vec<u64>> = plan.iter().map(|params| spec.weights(params)).collect();
        let words: usize = tables.iter().map(Vec::len).sum();
        let cells: u64 = plan.iter().map(|params| params.cells).sum();
        let size = (cells as usize * 4 + words * 8 + plan.len() * per_worker + Machine::private_len(spec.ram))
            .next_multiple_of(PAGE_SIZE);
        let mut private = Private::new(size, kind).context("Allocating private memory")?;
        let ram_address = match &mut machine {
            None => ram.addr() as u64,
            Some(machine) => machine.lay_out(&mut private, &ram)?,
        };
        let mut places = Vec::new();
        for (params, weights) in plan.iter_mut().zip(tables) {
            let job = private.take(size_of::<Job>());
            let versions = private.take((params.cells as usize * 4).next_multiple_of(8));
            let stack = private.take(STACK_LEN);
            let table = private.take(weights.len() * 8);
            private
                .map
                .words(table, weights.len())
                .iter()
                .zip(&weights)
                .for_each(|(to, from)| to.store(*from, Relaxed));
            params.ram = ram_address;
            params.versions = private.address(versions);
            params.weights = private.address(table);
            let target = private.map.ptr(job, size_of::<Job>()).cast::<Job>();
            // SAFETY: in bounds (checked by `ptr`), page-aligned, and no reference to the job exists yet. The rest of
            // the job is atomics, for which zero is a valid value.
            unsafe { (&raw mut (*target).params).write(*params) };
            places.push(Places { job, stack });
        }
        if let Some(machine) = &mut machine {
            machine.add_vcpus(&private, &places)?;
        }
        let (barrier, turn) = Default::default();
        let vm = Self { spec: spec.clone(), machine, plan, places, private, ram, barrier, turn };
        vm.think(spec.think);
        Ok(vm)
    }

    /// Returns guest RAM: its memory file and its mapping.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// Returns the present progress of the workers, without slowing them down.
    pub fn progress(&self) -> Progress {
        self.jobs().fold(Progress::default(), |sum, job| Progress {
            ops: sum.ops + job.ops_done.load(Relaxed),
            wrong_bytes: sum.wrong_bytes + job.wrong_bytes.load(Relaxed),
        })
    }

    /// Set the rounds of computing before each operation. They decide how busy the VM is.
    pub fn think(&self, rounds: u64) {
        self.jobs().for_each(|job| job.think.store(rounds, Relaxed));
    }

    /// End the run phase after the operations in flight. RAM is then verified as usual.
    pub fn stop(&self) {
        self.jobs().for_each(|job| job.stop.store(1, Relaxed));
        self.barrier().stopped = true;
        self.turn.notify_all();
    }

    /// Fill RAM, do the operations, and verify RAM. All workers wait while `hook` runs, before each phase and at the
    /// end.
    pub fn run(&self, hook: &Hook<'_>) -> Result<Outcome> {
        ensure!(!std::mem::replace(&mut self.barrier().started, true), "this VM has run already");
        let results: Vec<Result<bool>> = std::thread::scope(|scope| {
            let spawn = |worker| scope.spawn(move || self.work(worker, hook));
            let threads: Vec<_> = (0..self.plan.len()).map(spawn).collect();
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            threads.into_iter().map(join).collect()
        });
        let ended: Vec<bool> = results.into_iter().collect::<Result<_>>()?;
        if !ended.into_iter().all(|ended| ended) {
            bail!("stopped because another worker failed");
        }
        Ok(self.outcome())
    }

    /// Runs all phases of one worker. Returns whether all workers came to the end.
    fn work(&self, worker: usize, hook: &Hook<'_>) -> Result<bool> {
        /// Ends the wait of the other workers if this one ends early, by an error or a panic in the hook.
        struct Leave<'a>(&'a Vm, bool);
        impl Drop for Leave<'_> {
            fn drop(&mut self) {
                if !self.1 {
                    self.0.barrier().failed = true;
                    self.0.stop();
                }
            }
        }
        let mut leave = Leave(self, false);
        let desk = Desk { vm: self, worker, hook };
        match &self.machine {
            // SAFETY: `new` made this job's addresses. RAM and private memory are mapped as long as `self`. Version
            // words and weights have the job's length and belong to this worker, which runs once (`started`).
            None => unsafe { guest::run(self.job(worker), &desk) },
            Some(machine) => machine.run_vcpu(worker, &desk)?,
        }
        leave.1 = !self.barrier().failed;
        Ok(leave.1)
    }

    fn barrier(&self) -> MutexGuard<'_, Barrier> {
        // The lock is not held while the hook runs, so its panic poisons nothing. The barrier is consistent at every
        // unlock.
        self.barrier.locked()
    }

    fn job(&self, worker: usize) -> &Job {
        let job = self.private.map.ptr(self.places[worker].job, size_of::<Job>()).cast::<Job>();
        // SAFETY: in bounds, page-aligned, and valid as long as `self`. Parameters are constant since `new`. Everything
        // else in a job is atomic.
        unsafe { &*job }
    }

    fn jobs(&self) -> impl Iterator<Item = &Job> {
        (0..self.places.len()).map(|worker| self.job(worker))
    }

    fn wrong(&self, worker: usize, index: usize) -> Wrong {
        let record = &self.job(worker).records[index];
        let offset = record.offset.load(Relaxed);
        Wrong {
            worker,
            page: PageIdx::containing(offset).0,
            offset: offset % PAGE_SIZE as u64,
            expected: record.expected.load(Relaxed),
            found: record.found.load(Relaxed),
            op: record.op.load(Relaxed),
            phase: if record.phase.load(Relaxed) == guest::PHASE_RUN { "run" } else { "verify" },
        }
    }

    fn outcome(&self) -> Outcome {
        let sum = |of: fn(&Job) -> &AtomicU64| self.jobs().map(|job| of(job).load(Acquire)).sum();
        let barrier = self.barrier();
        let [fill, run, verify, end] = [guest::PHASE_FILL, guest::PHASE_RUN, guest::PHASE_VERIFY, guest::PHASE_END]
            .map(|phase| barrier.marks[phase as usize]);
        let ticks_per_ns = end.1.ticks.wrapping_sub(fill.0.ticks) as f64 / (end.1.time - fill.0.time).as_nanos() as f64;
        let latency = self.spec.latency.then(|| {
            let mut counts = vec![0; guest::BUCKETS];
            for job in self.jobs() {
                counts.iter_mut().zip(&job.histogram).for_each(|(sum, count)| *sum += count.load(Relaxed));
            }
            let longest = self.jobs().map(|job| job.longest.load(Relaxed)).max().unwrap_or_default();
            Latency::new(&counts, longest, ticks_per_ns)
        });
        let records = |(worker, job): (usize, &Job)| {
            let count = (job.wrong_words.load(Acquire) as usize).min(guest::MAX_RECORDS);
            (0..count).map(move |index| self.wrong(worker, index))
        };
        Outcome {
            ops: self.jobs().map(|job| job.ops_done.load(Relaxed)).sum(),
            wrong_bytes: sum(|job| &job.wrong_bytes),
            wrong_words: sum(|job| &job.wrong_words),
            wrong: self.jobs().enumerate().flat_map(records).collect(),
            run_ms: (verify.0.time - run.1.time).as_secs_f64() * 1e3,
            latency,
        }
    }
}

/// Receives one worker's events. A native worker calls it, or the thread that runs a vCPU.
struct Desk<'a> {
    vm: &'a Vm,
    worker: usize,
    hook: &'a Hook<'a>,
}

impl Desk<'_> {
    /// Wait until all workers have arrived. The last one calls the hook. Returns false if a worker failed.
    fn arrive(&self, phase: u32) -> bool {
        let vm = self.vm;
        let moment = match phase {
            guest::PHASE_FILL => Moment::Fill,
            guest::PHASE_RUN => Moment::Run,
            guest::PHASE_VERIFY => Moment::Verify,
            _ => Moment::End,
        };
        let mut barrier = vm.barrier();
        let generation = barrier.generation;
        barrier.arrived += 1;
        if barrier.arrived == vm.plan.len() {
            drop(barrier);
            let ended = Mark::now();
            (self.hook)(moment, &vm.ram);
            barrier = vm.barrier();
            barrier.arrived = 0;
            barrier.generation += 1;
            barrier.marks.push((ended, Mark::now()));
            vm.turn.notify_all();
        }
        while barrier.generation == generation && !barrier.failed {
            barrier = vm.turn.wait(barrier).unwrap_or_else(PoisonError::into_inner);
        }
        !barrier.failed
    }
}

impl Port for Desk<'_> {
    fn tell(&self, event: u32) -> bool {
        let vm = self.vm;
        match event & !0xFF {
            guest::EVENT_ARRIVE => return self.arrive(event & 0xFF),
            guest::EVENT_WRONG => {
                let count = vm.job(self.worker).wrong_words.load(Acquire) as usize;
                if let Some(index) = count.min(guest::MAX_RECORDS).checked_sub(1) {
                    let Wrong { worker, page, offset, expected, found, op, phase } = vm.wrong(self.worker, index);
                    eprintln!(
                        "WRONG worker={worker} phase={phase} op={op} page={page:#x} offset={offset:#x} \
                         expected={expected:#018x} found={found:#018x}"
                    );
                }
            }
            guest::EVENT_IDLE => {
                let mut barrier = vm.barrier();
                while !barrier.stopped {
                    barrier = vm.turn.wait(barrier).unwrap_or_else(PoisonError::into_inner);
                }
            }
            _ => {}
        }
        true
    }
}
