//! The loop: sample, classify, plan, move; one epoch of 500 ms after the other (Demeter §3.2).
//!
//! ```text
//! step    choose programs (every 10th) ─► their map of memory ─► source.watch
//!         source.take ─► classifier.record, by program
//!         pages.look (a part of their page tables)
//!         classifier.end_epoch ─► did moves pay? ─► ranges of all programs in one order ─► relocate::plan
//!         ─► Mover, turn by turn
//! ```
//!
//! Before: tiers, a source, a choice of programs. After: what is hot is in the fast tier, as far as it fits.
//! Threads: one, the caller's, which calls [`Tierer::step`] twice a second. Units: pages of 4 KiB, bytes, epochs.
//! Promise: at most the set bandwidth is moved, and planning takes at most 1/50 of a CPU; nothing is moved while
//! another program promotes. When it is dropped, everything except the place of pages is as before.
//!
//! Programs share one order of heat: their addresses are told apart by their index in the bits that no address has.

use std::collections::BTreeMap;
use std::io;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_ranges::relocate::{self, Limits, Rule, Tier};
use ballast_ranges::{Classifier, Fitted, Roots, SAMPLE, rank};
use ballast_sys::{Remote, clock};

use crate::all::{All, MOST_PROGRAMS, place, ranges_of};
use crate::beside::{self, Balancing};
use crate::kernel_files::Files;
use crate::mover::{Became, Mover, Moves, Order};
use crate::nodes::{Tiers, usage};
use crate::pages::Pages;
use crate::programs::{Choice, Program, choose, memory};
use crate::source::damon::Damon;
use crate::source::perf::{Found, Perf};
use crate::source::{SampleSource, Samples};
use crate::status::{Status, TierStatus};
use crate::worth::Worth;

/// How long an epoch is (§3.2.1).
pub const EPOCH: Duration = Duration::from_millis(500);
/// Epochs between two choices of programs.
const CHOOSE_EVERY: u64 = 10;
/// Page-table entries read in an epoch: of 2 GiB of memory. Reading one takes some 10 ns.
const PAGES_READ: u64 = 1 << 19;
/// Planning takes at most 1/N of a CPU: after a plan that took long the next one waits.
const PLAN_PART: u32 = 50;
/// The fast tier keeps 1/N of itself free above the kernel's watermarks, and at most this.
const RESERVE_PART: u64 = 64;
const MOST_RESERVE: u64 = 64 << 20;
/// Samples of an epoch that are looked up in the page table: did the fast tier serve them?
const MOST_ASKED: u64 = 4096;
const PAGE: u64 = PAGE_SIZE as u64;

/// Makes the classifier of one program.
pub type MakeClassifier = fn(Roots) -> Box<dyn Classifier + Send>;

/// Settings of the guest's owner.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Programs to manage.
    pub choice: Choice,
    /// Most bytes promoted in a second; as many are demoted.
    pub most_bytes_per_s: u64,
    /// Switch NUMA balancing off while this runs. Otherwise this moves nothing where balancing promotes.
    pub take_over: bool,
    /// The caller has DAMON: the threads from this index on are for tiering, one for each program. `None`: take DAMON.
    pub damon_threads_from: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        Self { choice: Choice::default(), most_bytes_per_s: 256 << 20, take_over: false, damon_threads_from: None }
    }
}

/// Reasons why there is no tiering here.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// All memory is of one speed, as far as this kernel knows.
    #[error("Tiering: all memory is one tier: {0} nodes that nothing tells apart")]
    OneTier(usize),
    /// The kernel does not tell where pages are, or not to this user.
    #[error("Tiering: where pages are is not known: {0}")]
    Frames(&'static str),
    /// There is no source of samples.
    #[error("Tiering: nothing samples accesses: {pmu}; {damon}")]
    NoSource {
        /// Why no PMU.
        pmu: &'static str,
        /// Why not DAMON.
        damon: io::Error,
    },
    /// Something else.
    #[error("Tiering: {0}")]
    Io(#[from] io::Error),
}

/// A program that is managed.
struct Watched {
    program: Program,
    process: Remote,
    classifier: Box<dyn Classifier + Send>,
    pages: Pages,
}

/// Tiering inside a guest.
pub struct Tierer {
    files: Files,
    settings: Settings,
    make: MakeClassifier,
    rule: Rule,
    source: Box<dyn SampleSource>,
    own_damon: bool,
    tiers: Tiers,
    watched: Vec<Watched>,
    worth: Worth,
    plan_again: Instant,
    /// Pages that others want of the fast nodes, beside what is kept free anyway.
    asked: u64,
    status: Status,
    _balancing: Option<Balancing>,
}

impl std::fmt::Debug for Tierer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tierer").field("status", &self.status).finish_non_exhaustive()
    }
}

/// The index of a program among these, which are sorted.
fn index_of(watched: &[Watched], pid: u32) -> Option<usize> {
    watched.binary_search_by_key(&pid, |watched| watched.program.pid).ok()
}

fn ours(roots: Roots) -> Box<dyn Classifier + Send> {
    Box::new(Fitted::new(roots))
}

impl Tierer {
    /// Starts with the best source that this machine has: the PMU, else DAMON.
    ///
    /// # Errors
    /// Why this machine cannot.
    pub fn open(settings: Settings) -> Result<Self, Unavailable> {
        let files = Files::default();
        // Before anything is taken.
        Self::check(&files)?;
        match Perf::loads(&files)? {
            Found::Perf(perf) => Self::with_source(settings, Box::new(perf)),
            Found::Not(pmu) => {
                let damon = match settings.damon_threads_from {
                    Some(first) => Ok(Damon::beside(&files, first)),
                    None => Damon::open(&files),
                };
                let damon = damon.map_err(|damon| Unavailable::NoSource { pmu, damon })?;
                Self::with_source(settings, Box::new(damon))
            }
        }
    }

    fn check(files: &Files) -> Result<Tiers, Unavailable> {
        let tiers = Tiers::detect(files)?;
        if tiers.list.len() < 2 {
            return Err(Unavailable::OneTier(tiers.list.iter().map(|tier| tier.nodes.len()).sum()));
        }
        if !tiers.knows_frames() {
            return Err(Unavailable::Frames("the kernel shows no memory blocks"));
        }
        let here = 0u64;
        let mut frame = [None];
        let address = ballast_base::Hva(&raw const here as u64);
        Remote::open(std::process::id())?.physical(address, &mut frame)?;
        if frame[0].is_none() {
            return Err(Unavailable::Frames("page frames are hidden from this user; it must be root"));
        }
        Ok(tiers)
    }

    /// Starts with a source of the caller's.
    ///
    /// # Errors
    /// Why this machine cannot.
    pub fn with_source(settings: Settings, source: Box<dyn SampleSource>) -> Result<Self, Unavailable> {
        let files = Files::default();
        let tiers = Self::check(&files)?;
        let balancing = if settings.take_over { Balancing::off(&files)? } else { None };
        let status = Status {
            tiers: Vec::new(),
            told_by: tiers.told,
            source: source.name().into(),
            aside: None,
            notes: Vec::new(),
            programs: 0,
            managed_bytes: 0,
            managed_fast_bytes: 0,
            epochs: 0,
            samples: 0,
            samples_missed: 0,
            fast_hit_pct: None,
            epoch_samples: 0,
            ranges: 0,
            splits: 0,
            moves: Moves::default(),
            cpu_us: 0,
            classifier_cpu_us: 0,
            monitor_cpu_us: 0,
        };
        let own_damon = source.name() == "damon" || settings.damon_threads_from.is_some();
        Ok(Self {
            files,
            settings,
            make: ours,
            rule: Rule::Ours,
            source,
            own_damon,
            tiers,
            watched: Vec::new(),
            worth: Worth::default(),
            plan_again: Instant::now(),
            asked: 0,
            status,
            _balancing: balancing,
        })
    }

    /// Classifies and plans by other rules, such as the published ones, to compare them.
    pub fn by_rule(&mut self, make: MakeClassifier, rule: Rule) {
        (self.make, self.rule) = (make, rule);
    }

    /// Sets how many pages of each node are to be free, for one who is about to take them. Of nodes of the fast tier,
    /// the coldest memory is moved away for it.
    pub fn make_room(&mut self, pages: &BTreeMap<u32, u64>) {
        self.asked = self.tiers.list[0].nodes.iter().filter_map(|node| pages.get(node)).sum();
    }

    /// Returns the statistics.
    pub fn status(&self) -> &Status {
        &self.status
    }

    /// Runs one epoch. The caller waits for [`EPOCH`] between two of them; DAMON's source waits for up to 200 ms in it.
    ///
    /// # Errors The kernel refuses a call that it accepted before. The next step may succeed.
    pub fn step(&mut self) -> io::Result<()> {
        let before = clock::cpu_time();
        let result = self.epoch();
        self.status.cpu_us += (clock::cpu_time() - before).as_micros() as u64;
        result
    }

    fn epoch(&mut self) -> io::Result<()> {
        if self.status.epochs.is_multiple_of(CHOOSE_EVERY) {
            self.choose()?;
            let beside = beside::look(&self.files, self.own_damon)?;
            (self.status.aside, self.status.notes) = (beside.promoter, beside.notes);
        }
        self.status.epochs += 1;
        self.sample()?;
        self.look()?;
        let before = clock::cpu_time();
        self.watched.iter_mut().for_each(|watched| watched.classifier.end_epoch());
        let watched = &self.watched;
        let recent = |pid, address| Some(watched[index_of(watched, pid)?].classifier.recent(address));
        self.worth.judge(self.status.epochs, recent);
        self.status.classifier_cpu_us += (clock::cpu_time() - before).as_micros() as u64;
        if self.status.aside.is_none() && self.is_known() && Instant::now() >= self.plan_again {
            self.relocate()?;
        }
        self.show()
    }

    /// Choose programs again. The state of those that stay is kept.
    fn choose(&mut self) -> io::Result<()> {
        let mut choice = self.settings.choice.clone();
        choice.most = choice.most.min(MOST_PROGRAMS);
        let chosen = choose(&self.files, &choice)?;
        let mut before = std::mem::take(&mut self.watched);
        for program in chosen {
            let Ok(memory) = memory(&self.files, program.pid) else { continue };
            let same = |known: &Watched| (known.program.pid, known.program.start) == (program.pid, program.start);
            let mut watched = match before.iter().position(same) {
                Some(at) => before.swap_remove(at),
                None => {
                    let Ok(process) = Remote::open(program.pid) else { continue };
                    let classifier = (self.make)(memory.roots);
                    Watched { program: program.clone(), process, classifier, pages: Pages::default() }
                }
            };
            watched.program = program;
            watched.pages.set_areas(memory.areas);
            self.watched.push(watched);
        }
        // Sorted, so that a source is not restarted without need.
        self.watched.sort_by_key(|watched| watched.program.pid);
        let pids: Vec<u32> = self.watched.iter().map(|watched| watched.program.pid).collect();
        self.source.watch(&pids)
    }

    fn sample(&mut self) -> io::Result<()> {
        let watched = &mut self.watched;
        let (mut samples, mut asked, mut hits, mut known) = (0u64, 0u64, 0.0, 0.0);
        let mut cpu = Duration::ZERO;
        let mut batch: Vec<(usize, u64, Samples)> = Vec::new();
        let mut record = |watched: &mut Vec<Watched>, batch: &mut Vec<(usize, u64, Samples)>| {
            let before = clock::cpu_time();
            for (at, address, samples) in batch.drain(..) {
                watched[at].classifier.record_rough(address, samples.count, samples.each);
            }
            cpu += clock::cpu_time() - before;
        };
        let missed = self.source.take(&mut |pid, address, found| {
            let Some(at) = index_of(watched, pid) else { return };
            samples += u64::from(found.count);
            if asked < MOST_ASKED
                && let Some(share) = watched[at].pages.fast_share(address)
            {
                asked += 1;
                (hits, known) = (hits + share * f64::from(found.count), known + f64::from(found.count));
            }
            batch.push((at, address, found));
            if batch.len() >= 4096 {
                record(watched, &mut batch);
            }
        })?;
        record(watched, &mut batch);
        self.status.classifier_cpu_us += cpu.as_micros() as u64;
        self.status.samples += samples;
        self.status.epoch_samples = samples;
        self.status.samples_missed += missed.lost + missed.damaged;
        self.status.fast_hit_pct = (known > 0.0).then(|| hits / known * 100.0);
        Ok(())
    }

    /// Read a part of the page tables.
    fn look(&mut self) -> io::Result<()> {
        let each = PAGES_READ / (self.watched.len() as u64).max(1);
        let tiers = &self.tiers;
        // One that is gone is dropped when programs are chosen again; until then its pages are absent.
        self.watched.retain_mut(|watched| watched.pages.look(&watched.process, tiers, each).is_ok());
        Ok(())
    }

    /// Has all of a program's memory been read once? Before that, a plan would take unknown pages for absent.
    fn is_known(&self) -> bool {
        self.watched.iter().any(|watched| watched.pages.rounds() > 0)
    }

    fn relocate(&mut self) -> io::Result<()> {
        let began = clock::cpu_time();
        let mut now = (0, 0, 0);
        for node in &self.tiers.list[0].nodes {
            let node = usage(&self.files, *node)?;
            now = (now.0 + node.size, now.1 + node.free, now.2 + node.high);
        }
        let (size, free, high) = now;
        let known = self.watched.iter().filter(|watched| watched.pages.rounds() > 0);
        let fast: u64 = known.map(|watched| watched.pages.counts().1).sum();
        // What the kernel keeps for itself is no room, and where it is short of that, nothing can be promoted.
        let short = high.saturating_sub(free) / PAGE;
        let free = free.saturating_sub(high) / PAGE;
        let reserve = ((size / RESERVE_PART).min(MOST_RESERVE) / PAGE).max(1);
        let seconds = EPOCH.as_secs_f64();
        let most = (self.settings.most_bytes_per_s as f64 * seconds) as u64 / PAGE;
        let limits = Limits { fast: fast + free, free, reserve: reserve + short + self.asked, most: most.max(1) };
        let before = clock::cpu_time();
        let programs = self.watched.iter().map(|watched| (watched.pages.rounds(), watched.classifier.ranges()));
        let ranked = rank(&ranges_of(programs));
        self.status.classifier_cpu_us += (clock::cpu_time() - before).as_micros() as u64;
        let most = |watched: &Watched| self.worth.most(watched.program.pid, limits.most);
        let pages = All(self.watched.iter().map(|watched| (&watched.pages, most(watched))).collect());
        let plan = relocate::plan(&ranked, &pages, limits, self.rule);
        self.note(&plan);
        // CPU time: where programs leave it few CPUs, waiting for one is no cost of this.
        self.plan_again = Instant::now() + (clock::cpu_time() - began) * PLAN_PART;
        self.carry_out(&plan, reserve)
    }

    /// Remembers which pages a plan moves for which others, to see whether that pays.
    fn note(&mut self, plan: &relocate::Plan) {
        let [promote, demote] = [&plan.promote, &plan.demote].map(|list| &list[list.len() - plan.gains.len()..]);
        let epoch = self.status.epochs;
        for ((hot, cold), gain) in promote.iter().zip(demote).zip(&plan.gains) {
            let [(hot_at, hot), (cold_at, cold)] = [*hot, *cold].map(place);
            let [of_hot, of_cold] = [hot_at, cold_at].map(|at| &self.watched[at]);
            let [by, pid] = [of_hot, of_cold].map(|watched| watched.program.pid);
            // Counts are halved in each epoch: with as many new samples in each they are twice that.
            let gains = gain * (PAGE * SAMPLE) as f64 / 2.0;
            self.worth.moved(epoch, (by, hot), by, Some(gains), || of_hot.classifier.recent(hot));
            self.worth.moved(epoch, (pid, cold), by, None, || of_cold.classifier.recent(cold));
        }
    }

    fn carry_out(&mut self, plan: &relocate::Plan, reserve: u64) -> io::Result<()> {
        let pids: Vec<u32> = self.watched.iter().map(|watched| watched.program.pid).collect();
        let mover = Mover { files: &self.files, tiers: &self.tiers, pids: &pids };
        let order = |(process, address)| Order { process, address };
        // Half of the reserve, because other programs may take memory of it meanwhile.
        let turn = usize::try_from(reserve / 2).unwrap_or(usize::MAX).max(1);
        // What must be free before anything is promoted.
        let (ahead, demote) = plan.demote.split_at(plan.demote.len().saturating_sub(plan.promote.len()));
        let pairs = relocate::Plan { demote: demote.to_vec(), promote: plan.promote.clone(), gains: Vec::new() };
        let first: [(&[u64], &[u64]); 1] = [(ahead, &[])];
        for (demote, promote) in first.into_iter().chain(pairs.turns(turn)) {
            for (tier, list) in [(Tier::Slow, demote), (Tier::Fast, promote)] {
                if list.is_empty() {
                    continue;
                }
                let orders: Vec<Order> = list.iter().map(|at| order(place(*at))).collect();
                let watched = &mut self.watched;
                let has_room = mover.carry(tier, &orders, &mut self.status.moves, &mut |order, became| {
                    let pages = &mut watched[order.process].pages;
                    match became {
                        Became::In(tier) => pages.moved(order.address, tier),
                        Became::Gone => pages.gone(order.address),
                        Became::Stays => pages.kept(order.address),
                    }
                })?;
                if !has_room {
                    // A page for which no room can be made need not be promoted.
                    return Ok(());
                }
            }
        }
        Ok(())
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
        self.status.splits = self.watched.iter().map(|watched| watched.classifier.splits()).sum();
        Ok(())
    }
}
