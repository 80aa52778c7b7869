//! The loop: sample, classify, plan, move; one epoch of 500 ms after the other (Demeter §3.2).
//!
//! ```text
//! step    look at nodes again, choose programs (every 10th) ─► their map of memory ─► source.watch
//!         source.take ─► classifier.record, by program
//!         pages.look (a part of their page tables)
//!         classifier.end_epoch ─► did moves pay? ─► ranges of all programs in one order ─► relocate::plan
//!         ─► carry_out and Mover, turn by turn
//! ```
//!
//! Before: tiers, a source, a choice of programs. After: hot memory is in the fast tier, as far as it fits.
//! Threads: one, the caller's, which calls [`Tierer::step`] twice a second. Units: pages of 4 KiB, bytes, epochs.
//! Promise: at most the set bandwidth is moved; planning takes at most 1/50 of a CPU, reading page tables less; nothing
//! is moved while another program promotes; a program whose pages may not be moved delays no other one. Dropping the
//! [`Tierer`] restores everything except the places of pages.
//!
//! Programs share one order of heat: an address has its program's index in the bits that no address uses.

use std::collections::BTreeMap;
use std::io;
use std::time::Instant;

use ballast_ranges::relocate::{self, Limits, Tier};
use ballast_ranges::{Fitted, SAMPLE, rank};
use ballast_sys::{Remote, clock};

use crate::all::{All, MOST_PROGRAMS, joined, place, ranges_of};
use crate::beside::{self, Balancing};
use crate::carry::carry_out;
use crate::kernel::{Kernel, Machine};
use crate::kernel_files::Files;
use crate::mover::{Became, Mover, Order};
use crate::nodes::{Tiers, usage};
use crate::programs::{choose, memory};
use crate::settings::{EPOCH, Settings, Unavailable};
use crate::source::SampleSource;
use crate::source::damon::Damon;
use crate::status::{Status, TierStatus};
use crate::unit::PAGE;
use crate::watched::{Watched, index_of};
use crate::worth::{By, Worth};

/// Epochs between two choices of programs.
const CHOOSE_EVERY: u64 = 10;
/// Planning takes at most 1/N of a CPU: after a plan that took long the next one waits.
const PLAN_PART: u32 = 50;
/// The fast tier keeps 1/N of itself free above the kernel's watermarks, and at most this.
const RESERVE_PART: u64 = 64;
const MOST_RESERVE: u64 = 64 << 20;
/// Page-table entries that are read in an epoch, of all programs: 1 GiB of memory. An entry takes some 10 ns.
const MOST_READ: u64 = 1 << 18;

/// Tiering inside a guest.
pub struct Tierer {
    files: Files,
    kernel: Box<dyn Kernel>,
    settings: Settings,
    source: Box<dyn SampleSource>,
    tiers: Tiers,
    watched: Vec<Watched>,
    worth: Worth,
    plan_again: Instant,
    /// Pages that callers want free on the fast nodes, in addition to the reserve.
    asked: u64,
    status: Status,
    _balancing: Option<Balancing>,
}

impl std::fmt::Debug for Tierer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tierer").field("status", &self.status).finish_non_exhaustive()
    }
}

impl Tierer {
    /// Starts with samples from DAMON.
    ///
    /// # Errors
    /// The reason why this machine has no tiering.
    pub fn open(settings: Settings) -> Result<Self, Unavailable> {
        let files = Files::default();
        // The check comes first, before any resource of the kernel is taken.
        Self::check(&files)?;
        let damon = Damon::new(&files, settings.damon_threads_from);
        Self::with_files(files, settings, Box::new(damon))
    }

    fn tiers(files: &Files) -> Result<Tiers, Unavailable> {
        let tiers = Tiers::detect(files)?;
        if tiers.list.len() < 2 {
            return Err(Unavailable::OneTier(tiers.list.iter().map(|tier| tier.nodes.len()).sum()));
        }
        if !tiers.knows_frames() {
            return Err(Unavailable::Frames("the kernel shows no memory blocks"));
        }
        Ok(tiers)
    }

    fn check(files: &Files) -> Result<Tiers, Unavailable> {
        let tiers = Self::tiers(files)?;
        let here = 0u64;
        let mut frame = [None];
        let address = ballast_base::Hva(&raw const here as u64);
        Remote::open(std::process::id())?.physical(address, &mut frame)?;
        if frame[0].is_none() {
            return Err(Unavailable::Frames("page frames are hidden from this user; it must be root"));
        }
        Ok(tiers)
    }

    fn with_files(files: Files, settings: Settings, source: Box<dyn SampleSource>) -> Result<Self, Unavailable> {
        let tiers = Self::check(&files)?;
        let balancing = if settings.take_over { Balancing::off(&files)? } else { None };
        Ok(Self {
            files,
            kernel: Box::new(Machine),
            settings,
            source,
            tiers,
            watched: Vec::new(),
            worth: Worth::default(),
            plan_again: Instant::now(),
            asked: 0,
            status: Status::default(),
            _balancing: balancing,
        })
    }

    /// Sets how many pages of each node must be free for a caller that will take them. On nodes of the fast tier, the
    /// coldest memory is moved away for them.
    pub fn make_room(&mut self, pages: &BTreeMap<u32, u64>) {
        let asked = self.tiers.list[0].nodes.iter().filter_map(|node| pages.get(node));
        self.asked = asked.fold(0, |sum, pages| sum.saturating_add(*pages));
    }

    /// Returns the statistics.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Runs one epoch. The caller waits for [`EPOCH`] between two of them; DAMON's source waits for up to 200 ms in it.
    ///
    /// # Errors
    /// [`Unavailable::Io`]: the kernel refuses a call that it accepted before. The next step may succeed. Any other:
    /// this machine has no tiering any more, for example because the memory of one tier was unplugged.
    pub fn step(&mut self) -> Result<(), Unavailable> {
        let before = clock::cpu_time();
        let result = self.epoch();
        self.status.cpu_us += (clock::cpu_time() - before).as_micros() as u64;
        result
    }

    fn epoch(&mut self) -> Result<(), Unavailable> {
        if self.status.epochs.is_multiple_of(CHOOSE_EVERY) {
            self.detect()?;
            self.choose()?;
            let beside = beside::look(&self.files)?;
            (self.status.aside, self.status.notes) = (beside.promoter, beside.notes);
            let resting = self.watched.iter().filter(|watched| watched.rests(self.status.epochs)).count();
            if resting > 0 {
                let note = format!("the kernel refuses to move memory of {resting} programs (their cpusets, say)");
                self.status.notes.push(note);
            }
        }
        self.status.epochs += 1;
        self.sample()?;
        self.look();
        self.watched.iter_mut().for_each(Watched::end_epoch);
        let watched = &self.watched;
        let recent = |pid, address| Some(watched[index_of(watched, pid)?].classifier.recent(address));
        let new = |pid| Some(watched[index_of(watched, pid)?].new);
        self.worth.judge(self.status.epochs, recent, new);
        if self.status.aside.is_none() && self.is_known() && Instant::now() >= self.plan_again {
            self.relocate()?;
        }
        Ok(self.show()?)
    }

    /// Detects nodes again: they and parts of them come and go. If a tier has other nodes now, knowledge of pages is
    /// dropped. After a change of memory blocks it is wrong of few pages, which the next rounds correct.
    fn detect(&mut self) -> Result<(), Unavailable> {
        // Whether frames are hidden is not asked again: a page that the kernel is moving looks like a hidden one.
        let tiers = Self::tiers(&self.files)?;
        let nodes = |tiers: &Tiers| tiers.list.iter().map(|tier| tier.nodes.clone()).collect::<Vec<_>>();
        if nodes(&tiers) != nodes(&self.tiers) {
            self.watched.iter_mut().for_each(Watched::forget_pages);
        }
        self.tiers = tiers;
        Ok(())
    }

    /// Chooses programs again. The state of those that stay is kept.
    fn choose(&mut self) -> io::Result<()> {
        let mut choice = self.settings.choice.clone();
        choice.most = choice.most.min(MOST_PROGRAMS);
        let chosen = choose(&self.files, &choice)?;
        let mut before = std::mem::take(&mut self.watched);
        for program in chosen {
            let Ok(memory) = memory(&self.files, program.pid) else { continue };
            let same = |known: &Watched| (known.program.pid, known.program.start) == (program.pid, program.start);
            let mut watched = match before.iter().position(same) {
                Some(at) => {
                    let mut known = before.swap_remove(at);
                    if known.outgrows(&memory.areas) {
                        known.classifier = Fitted::new(memory.roots);
                    }
                    known
                }
                None => {
                    let Ok(process) = self.kernel.open(program.pid) else { continue };
                    Watched::new(program.clone(), process, Fitted::new(memory.roots))
                }
            };
            watched.chosen(program, memory.areas);
            self.watched.push(watched);
        }
        // Sorted, so that a source is not restarted without need.
        self.watched.sort_by_key(|watched| watched.program.pid);
        let pids: Vec<u32> = self.watched.iter().map(|watched| watched.program.pid).collect();
        self.source.watch(&pids)
    }

    fn sample(&mut self) -> io::Result<()> {
        let watched = &mut self.watched;
        watched.iter_mut().for_each(Watched::begin);
        let (mut samples, mut hits, mut known) = (0u64, 0.0, 0.0);
        self.source.take(&mut |pid, address, found| {
            let Some(at) = index_of(watched, pid) else { return };
            samples += u64::from(found.count);
            if let Some(share) = watched[at].pages.fast_share(address) {
                (hits, known) = (hits + share * f64::from(found.count), known + f64::from(found.count));
            }
            watched[at].record(address, found.count, found.each);
        })?;
        self.status.samples += samples;
        self.status.fast_hit_pct = (known > 0.0).then(|| hits / known * 100.0);
        Ok(())
    }

    fn look(&mut self) {
        let (tiers, most) = (&self.tiers, MOST_READ / (self.watched.len() as u64).max(1));
        // The pages of a program that has ended are absent, until it is dropped when programs are chosen again.
        self.watched.retain_mut(|watched| watched.look(tiers, most).is_ok());
    }

    /// Returns whether there is a program whose pages are known and may be moved.
    fn is_known(&self) -> bool {
        self.watched.iter().any(|watched| watched.rounds(self.status.epochs) > 0)
    }

    fn relocate(&mut self) -> io::Result<()> {
        let began = clock::cpu_time();
        let mut now = (0, 0, 0);
        for node in &self.tiers.list[0].nodes {
            let node = usage(&self.files, *node)?;
            now = (now.0 + node.size, now.1 + node.free, now.2 + node.high);
        }
        let (size, free, high) = now;
        let epoch = self.status.epochs;
        let known = self.watched.iter().filter(|watched| watched.rounds(epoch) > 0);
        let fast: u64 = known.map(|watched| watched.pages.counts().1).sum();
        // The kernel's reserve is no room. Where the kernel has less than its reserve, no page can be promoted.
        let short = high.saturating_sub(free) / PAGE;
        let free = free.saturating_sub(high) / PAGE;
        let reserve = ((size / RESERVE_PART).min(MOST_RESERVE) / PAGE).max(1);
        let seconds = EPOCH.as_secs_f64();
        let most = (self.settings.most_bytes_per_s as f64 * seconds) as u64 / PAGE;
        let limits = Limits {
            fast: fast + free,
            free,
            reserve: (reserve + short).saturating_add(self.asked),
            most: most.max(1),
        };
        let programs = self.watched.iter().map(|watched| (watched.rounds(epoch), watched.classifier.ranges()));
        let ranked = rank(&ranges_of(programs));
        let most = |watched: &Watched| self.worth.most(watched.program.pid, limits.most);
        let pages = All(self.watched.iter().map(|watched| (&watched.pages, most(watched))).collect());
        let plan = relocate::plan(&ranked, &pages, limits);
        // Measured in CPU time: where programs leave few CPUs, waiting for one is no cost of planning.
        self.plan_again = Instant::now() + (clock::cpu_time() - began) * PLAN_PART;
        self.carry_out(&plan, reserve)
    }

    fn carry_out(&mut self, plan: &relocate::Plan, reserve: u64) -> io::Result<()> {
        let pids: Vec<u32> = self.watched.iter().map(|watched| watched.program.pid).collect();
        let mover = Mover { files: &self.files, tiers: &self.tiers, pids: &pids };
        let by = |pid, pages: &[u64], node| self.kernel.move_pages(pid, pages, node);
        let (watched, moves, epoch) = (&mut self.watched, &mut self.status.moves, self.status.epochs);
        // Half of the reserve, because other programs may take memory of it during the turn.
        let turn = usize::try_from(reserve / 2).unwrap_or(usize::MAX);
        let (made, result) = carry_out(plan, turn, &mut |tier, pages, each| {
            let order = |(process, address)| Order { process, address };
            let orders: Vec<Order> = pages.iter().map(|page| order(place(*page))).collect();
            mover.carry(&by, tier, &orders, moves, &mut |order, became| {
                let of = &mut watched[order.process];
                match became {
                    Became::In(tier) => of.pages.moved(order.address, tier),
                    Became::Gone => of.pages.gone(order.address),
                    Became::Stays => of.pages.kept(order.address),
                    Became::Refused => of.refused(epoch),
                }
                each(joined(order.process, order.address), became);
            })
        });
        self.note(plan, &made);
        result
    }

    /// Records which pages were moved for which others, so that `worth` sees whether the moves pay.
    fn note(&mut self, plan: &relocate::Plan, made: &[usize]) {
        let epoch = self.status.epochs;
        let alone = plan.promote.len() - plan.gains.len();
        for &at in made {
            let Some(partner) = plan.partner(Tier::Fast, at) else { continue };
            let [(hot_at, hot), (cold_at, cold)] = [plan.promote[at], plan.demote[partner]].map(place);
            let [of_hot, of_cold] = [hot_at, cold_at].map(|at| &self.watched[at]);
            let by = By { pid: of_hot.program.pid, rate: of_hot.rate };
            // Counts are halved in each epoch, so equally many new samples in each add up to twice their number.
            let gains = plan.gains[at - alone] * (PAGE * SAMPLE) as f64 / 2.0;
            self.worth.moved(epoch, (by.pid, hot), by, Some(gains), || of_hot.classifier.recent(hot));
            self.worth.moved(epoch, (of_cold.program.pid, cold), by, None, || of_cold.classifier.recent(cold));
        }
    }

    fn show(&mut self) -> io::Result<()> {
        let mut shown = Vec::new();
        for tier in &self.tiers.list {
            let mut now = TierStatus { read_latency_ns: tier.read_latency_ns, ..TierStatus::default() };
            for node in &tier.nodes {
                now.add(*node, usage(&self.files, *node)?);
            }
            shown.push(now);
        }
        let counts = self.watched.iter().map(|watched| watched.pages.counts());
        let (present, fast) = counts.fold((0, 0), |sum, (present, fast)| (sum.0 + present, sum.1 + fast));
        self.status.tiers = shown;
        self.status.monitor_cpu_us = self.source.cpu_us();
        self.status.programs = self.watched.len() as u64;
        (self.status.managed_bytes, self.status.managed_fast_bytes) = (present * PAGE, fast * PAGE);
        self.status.ranges = self.watched.iter().map(|watched| watched.classifier.ranges().len() as u64).sum();
        Ok(())
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod walks;
