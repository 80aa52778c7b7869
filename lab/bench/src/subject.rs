//! The subject of a measurement: a guest whose pages are paged out and restored by one of the ways ([`Way`]).
//!
//! Before: the bench has a daemon, and the kernel's swap if it is available. After: it has the figures of one round.
//! Threads: the bench's one; the guests are processes. Units: pages, microseconds.
//! Promise: all ways get the same orders; only [`out`] knows that a limit makes Ballast page out.

use std::fs::File;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use ballast_base::units::MIB;
use ballast_base::{Bytes, PageCount};
use ballast_sys::memfd;

use crate::order::{Answer, Backing, Data, GuestConfig, GuestKind, Order, Out, Pace, Role, Touched};
use crate::report::{Figures, Row};
use crate::rig::Bench;
use crate::worker::Worker;
use crate::{cgroup, cpu};

/// The limit of a guest of Ballast while its pages go out: far below its data.
const SQUEEZED: Bytes = Bytes(4 * MIB);
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time between two samples of a file's memory, each of which costs a microsecond.
const SAMPLE: Duration = Duration::from_micros(200);
/// The engine is asked for the number of zapped pages once per this many samples.
const ZAPPED_EVERY: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Ballast,
    Kernel,
    Plain,
    /// A minor fault and a copy of 4 KiB.
    Floor,
    /// A plain handler on the CPU of the guest's thread.
    Near,
}

impl Way {
    pub fn is_ours(self) -> bool {
        self == Self::Ballast
    }
}

#[derive(Debug)]
pub struct Subject {
    pub way: Way,
    config: GuestConfig,
    worker: Option<Worker>,
    ram: Option<File>,
    cgroup: Option<std::path::PathBuf>,
    name: String,
}

/// A squeeze under way: resident pages, zapped pages and CPU time at its begin.
#[derive(Default)]
struct Squeeze {
    before: u64,
    zapped: u64,
    cpu_us: f64,
}

impl Subject {
    /// Makes a guest. A native guest is filled at once, a KVM guest before each round.
    pub fn new(bench: &mut Bench, way: Way, pages: u64, data: Data) -> Result<Self> {
        let cgroup = if way == Way::Kernel { Some(bench.guard.cgroup()?) } else { None };
        let backing = match (way, &cgroup) {
            (Way::Kernel, Some(cgroup)) => Backing::Kernel { procs: cgroup.join("cgroup.procs") },
            (Way::Plain, _) => Backing::Plain,
            (Way::Near, _) => Backing::Near,
            (Way::Floor, _) => Backing::Floor,
            _ => Backing::Ballast { socket: bench.daemon.attach_socket(), name: String::new() },
        };
        // RAM is twice the data, so a limit can be above the data and below RAM.
        let ram_bytes = PageCount(2 * pages).bytes().0;
        let config = GuestConfig { backing, kind: bench.options.guest, ram_bytes, pages, data, number: 0 };
        let mut subject = Self { way, config, worker: None, ram: None, cgroup, name: String::new() };
        if !bench.options.is(GuestKind::Kvm) {
            subject.start(bench)?;
        }
        Ok(subject)
    }

    fn start(&mut self, bench: &mut Bench) -> Result<()> {
        // The old process ends first, so that the new one gets its memory.
        (self.worker, self.ram) = (None, None);
        if let Backing::Ballast { name, .. } = &mut self.config.backing {
            *name = bench.vm_name();
            self.name.clone_from(name);
        }
        let mut worker = Worker::start(&Role::Guest(self.config.clone()))?;
        let Answer::Filled { ram } = worker.ask(&Order::Fill)? else { bail!("a guest does not fill its memory") };
        if let Some(path) = ram {
            self.ram = Some(File::open(&path).with_context(|| format!("Opening {}", path.display()))?);
        }
        self.worker = Some(worker);
        if self.way.is_ours() { bench.daemon.wait_for_vm(&self.name) } else { Ok(()) }
    }

    fn worker(&mut self) -> Result<&mut Worker> {
        self.worker.as_mut().context("the guest has not started")
    }

    pub fn ask(&mut self, order: &Order) -> Result<Answer> {
        self.worker()?.ask(order)
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Limits the guest to this number of bytes, through Ballast or its cgroup.
    pub fn hold_to(&mut self, bench: &Bench, bytes: u64) -> Result<()> {
        match (self.way, &self.cgroup) {
            (Way::Ballast, _) => bench.daemon.api().set_limit(&self.name, Some(bytes)).map(drop)?,
            (Way::Kernel, Some(cgroup)) => cgroup::limit(cgroup, bytes)?,
            (way, _) => bail!("a guest of {way:?} has no limit"),
        }
        Ok(())
    }

    pub fn cgroup(&self) -> Option<&std::path::Path> {
        self.cgroup.as_deref()
    }

    pub fn resident(&self) -> Result<PageCount> {
        Ok(memfd::resident(self.ram.as_ref().context("guest RAM is no file")?)?)
    }

    /// CPU time of the engine's threads and of the guest's process, whose own thread is idle at that time.
    fn cpu_us(&mut self, bench: &Bench) -> Result<f64> {
        Ok(cpu::of_threads(bench.engine_pid()?, |_| true)? + cpu::of_threads(self.worker()?.pid(), |_| true)?)
    }

    /// Pages of this VM that the engine has had zapped.
    fn zapped(&self, bench: &Bench) -> Result<u64> {
        Ok(bench.daemon.api().vm(&self.name)?.reclaim.zapped_pages)
    }

    fn start_out(&mut self, bench: &Bench) -> Result<Squeeze> {
        if !self.way.is_ours() {
            self.worker()?.tell(&Order::PageOut)?;
            return Ok(Squeeze::default());
        }
        let zapped = self.zapped(bench)?;
        let squeeze = Squeeze { before: self.resident()?.0, zapped, cpu_us: self.cpu_us(bench)? };
        bench.daemon.api().set_limit(&self.name, Some(SQUEEZED.0))?;
        Ok(squeeze)
    }

    fn finish_out(&mut self, bench: &Bench, squeeze: &Squeeze, start: Instant) -> Result<Out> {
        if !self.way.is_ours() {
            return match self.worker()?.answer()? {
                Answer::Out(out) => Ok(out),
                other => bail!("a guest answers {other:?} to a page-out"),
            };
        }
        let limit = SQUEEZED.pages_floor().0;
        let (mut zapped_us, mut first_us) = (None, None);
        for sample in 0u64.. {
            let resident = self.resident()?.0;
            if resident < squeeze.before {
                first_us.get_or_insert_with(|| start.elapsed().as_secs_f64() * 1e6);
            } else if sample.is_multiple_of(ZAPPED_EVERY)
                && zapped_us.is_none()
                && self.zapped(bench)? - squeeze.zapped >= squeeze.before.saturating_sub(limit)
            {
                zapped_us = Some(start.elapsed().as_secs_f64() * 1e6);
            }
            if resident <= limit {
                break;
            }
            ensure!(start.elapsed() < TIMEOUT, "after {} s the VM still holds {resident} pages", TIMEOUT.as_secs());
            std::thread::sleep(SAMPLE);
        }
        let wall_us = start.elapsed().as_secs_f64() * 1e6;
        let out = Out {
            pages: squeeze.before.saturating_sub(self.resident()?.0),
            wall_us,
            cpu_us: self.cpu_us(bench)? - squeeze.cpu_us,
            first_us: first_us.unwrap_or(wall_us),
            waited_us: zapped_us.map_or(0.0, |zapped| first_us.unwrap_or(wall_us) - zapped),
        };
        // The engine must agree.
        let stat = bench.daemon.api().vm(&self.name)?;
        ensure!(stat.resident_bytes <= SQUEEZED.0 + MIB, "the engine sees {} bytes resident", stat.resident_bytes);
        Ok(out)
    }

    /// Lets the guest have all its memory again. A higher limit alone restores no page.
    fn relax(&self, bench: &Bench) -> Result<()> {
        if !self.way.is_ours() {
            return Ok(());
        }
        // The limit is above all data and below RAM, so that reclaim does nothing; the RAM of other guests is all data.
        let limit = (self.config.kind == GuestKind::Native).then(|| PageCount(2 * self.config.pages - 1).bytes().0);
        bench.daemon.api().set_limit(&self.name, limit)?;
        Ok(())
    }

    pub fn verify(&mut self) -> Result<()> {
        self.ask(&Order::Verify).map(drop)
    }
}

#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) way: Way,
    /// Empty if this machine lacks something that the way needs.
    pub(crate) guests: Vec<Subject>,
    pub(crate) figures: Figures,
}

impl Bench {
    /// Guests of each way, each with one of these numbers of pages. If the kernel cannot have any, the row says why.
    pub(crate) fn sides(&mut self, ways: &[Way], pages: &[u64], data: Data, row: &mut Row) -> Result<Vec<Side>> {
        let mut sides = Vec::new();
        for way in ways.iter().copied() {
            let kernel = if way == Way::Kernel { self.kernel.clone() } else { Ok(Default::default()) };
            let guests = kernel.map_err(|why| anyhow!("{why}")).and_then(|_| {
                pages.iter().map(|pages| Subject::new(self, way, *pages, data)).collect::<Result<Vec<_>>>()
            });
            let guests = match guests {
                Err(error) if way == Way::Kernel => {
                    row.because(&format!("{error:#}"));
                    Vec::new()
                }
                guests => guests?,
            };
            sides.push(Side { way, guests, figures: Figures::default() });
        }
        Ok(sides)
    }

    /// Measures all sides in turns in each round, forwards and backwards. Round 0 warms up: its figures are dropped. In
    /// the end every byte of all guests is compared.
    pub(crate) fn by_turns(
        &mut self,
        sides: &mut [Side],
        rounds: u64,
        mut one: impl FnMut(&mut Self, &mut Side, u64) -> Result<()>,
    ) -> Result<()> {
        for round in self.progress.over("round", 0..=rounds) {
            for side in in_turn(sides.iter_mut(), round).into_iter().filter(|side| !side.guests.is_empty()) {
                one(self, side, round)?;
                if round == 0 {
                    side.figures = Figures::default();
                }
            }
        }
        sides.iter_mut().flat_map(|side| &mut side.guests).try_for_each(Subject::verify)
    }
}

/// The sides in the order of this round: forwards in one, backwards in the next.
pub fn in_turn<T>(sides: impl IntoIterator<Item = T>, round: u64) -> Vec<T> {
    let mut turns: Vec<T> = sides.into_iter().collect();
    if round % 2 == 1 {
        turns.reverse();
    }
    turns
}

/// Pages out these guests, all at once. Returns the sum of pages and CPU time, and the time until all were out.
pub fn out(bench: &mut Bench, subjects: &mut [Subject]) -> Result<Out> {
    if bench.options.is(GuestKind::Kvm) {
        subjects.iter_mut().try_for_each(|subject| subject.start(bench))?;
    }
    let start = Instant::now();
    let squeezes = subjects.iter_mut().map(|subject| subject.start_out(bench)).collect::<Result<Vec<_>>>()?;
    let mut sum = Out::default();
    for (subject, squeeze) in subjects.iter_mut().zip(&squeezes) {
        let out = subject.finish_out(bench, squeeze, start)?;
        sum.pages += out.pages;
        sum.cpu_us += out.cpu_us;
        sum.wall_us = sum.wall_us.max(out.wall_us);
        sum.first_us = sum.first_us.max(out.first_us);
        sum.waited_us = sum.waited_us.max(out.waited_us);
    }
    subjects.iter().try_for_each(|subject| subject.relax(bench))?;
    ensure!(sum.pages > 0, "no page went out");
    Ok(sum)
}

/// Lets these guests touch pages that are out, all at once. Returns the figures of each.
pub fn touch(subjects: &mut [Subject], seed: u64, pace: Pace) -> Result<Vec<Touched>> {
    let order = Order::Touch { seed, pace };
    subjects.iter_mut().try_for_each(|subject| subject.worker()?.tell(&order))?;
    let mut all = Vec::new();
    for subject in subjects {
        let Answer::Touched(touched) = subject.worker()?.answer()? else { bail!("a guest does not touch") };
        ensure!(touched.wrong == 0, "WRONG DATA: {} pages have wrong bytes ({:?})", touched.wrong, subject.way);
        all.push(touched);
    }
    Ok(all)
}
