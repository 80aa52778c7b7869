//! One VM: its regions, its views, its store, and the lanes that serve it.
//!
//! Before: the engine opens it from the keeper's descriptors. After: lanes run until the VM or the engine goes.
//! Threads: the public methods may be called from any thread; lanes are started by [`Vm::start`] and [`Vm::add_view`].
//! Promise: no page is served before [`Vm::start`], and by then `recover` has mended what the last engine left.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use ballast_base::wire::{self, EngineToClient, RegionInfo};
use ballast_base::{Bytes, Hva, PAGE_SIZE, PageCount, PageIdx};
use ballast_heat::{Settings, VmHeat};
use ballast_sys::uffd::{FaultKind, FillOutcome};

use crate::evict::{discard, expel_left};
use crate::fault::{Served, serve};
use crate::gate::Gate;
use crate::memory::Mapped;
use crate::page_state::{State, Ticket, Word};
use crate::prefetch::Prefetch;
use crate::recent::Recent;
use crate::region::Region;
use crate::slow::{self, Slow};
use crate::spill::{self, Spill};
use crate::state_file::{StateError, StateFile};
use crate::stats::{Counter, Pressure, Stats};
use crate::stores::Stores;
use crate::touch::Touches;
use crate::track::{self, Track};
use crate::view::View;
use crate::{away, coalesce, lane, prefetch, reclaim};

/// Nice value of fault lanes. A guest thread waits for one, and it runs for microseconds: it goes before all that
/// computes. No lane goes after it: each holds locks of pages now and then that a fault may want. Not -20: the kernel
/// spreads threads over CPUs by their weights, takes a lane that runs a tenth of the time at -20 for nine guests, and leaves
/// its CPU to it and one of them. At -8 it is half of one.
const DEMAND_NICE: i32 = -8;

/// Settings of the two loops.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// How long a page stays zapped before it is evicted (T).
    pub quarantine: Duration,
    /// The same, at most, when the VM is over its limit and nothing can have its memory pinned: then T is no safety
    /// matter, and a long one would let a working set larger than the limit rescue every page for ever.
    pub direct_quarantine: Duration,
    /// How long a page is in the RAM store before it goes to the file store, at least; `None` if none is to go.
    pub spill_after: Option<Duration>,
    /// Pause between two looks for memory that can be mapped huge again.
    pub coalesce_every: Duration,
    /// When to find out who is hot; [`Vm::set_track`] changes it.
    pub track: Track,
    /// How.
    pub heat: Settings,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            quarantine: Duration::from_secs(1),
            direct_quarantine: Duration::from_millis(20),
            spill_after: None,
            coalesce_every: coalesce::PASS,
            track: Track::Auto,
            heat: Settings::default(),
        }
    }
}

/// Kinds of reasons not to reclaim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Hold {
    /// The memory is pinned (locked, VFIO): for good.
    Pinned,
    /// A process that has not attached maps the RAM.
    Shared,
    /// Nobody has looked yet whether such a process exists.
    Unchecked,
    /// No keeper runs, so nobody would replace this engine.
    Orphaned,
}

impl Hold {
    const COUNT: usize = 4;
}

/// Whose faults a lane answers.
#[derive(Clone, Copy)]
enum Serves<'a> {
    Nobody,
    View(&'a View),
    All,
}

/// Something an operator should know.
pub type Report = Arc<dyn Fn(&str, String) + Send + Sync>;

/// Everything about one VM that its lanes share.
pub struct Vm {
    /// What outlives this engine.
    pub state: StateFile,
    /// Where its far pages sleep.
    pub stores: Stores,
    /// Settings.
    pub tuning: Tuning,
    /// Stall averages.
    pub pressure: Pressure,
    /// Who is hot.
    pub heat: Arc<VmHeat>,
    /// What fault lanes tell the tracker.
    pub(crate) touches: Touches,
    track: AtomicU8,
    /// What to bring back unasked.
    pub(crate) prefetch: Prefetch,
    /// Faults that wait for a disk.
    pub(crate) slow: Slow,
    /// What the spill lane is asked for.
    pub(crate) spill: Spill,
    epoch: u64,
    tickets: AtomicU64,
    regions: RwLock<Vec<Arc<Region>>>,
    views: RwLock<Vec<Arc<View>>>,
    lanes: Mutex<Vec<JoinHandle<()>>>,
    stopping: AtomicBool,
    /// Why its VMM was told to stop it.
    halted: OnceLock<String>,
    /// Why nothing may be reclaimed, by kind of reason.
    holds: Mutex<[Option<String>; Hold::COUNT]>,
    /// May something write to its memory without faulting, for a while?
    may_pin: AtomicBool,
    /// Was it above its limit when the reclaim lane last looked?
    pub(crate) over_limit: AtomicBool,
    /// How fast pages may come in while it is above its limit.
    pub(crate) gate: Gate,
    /// What came back of late.
    pub(crate) recent: Recent,
    /// Grows when a view is added: pages quarantined before are not known to be zapped in it.
    generation: AtomicU64,
    rung: Mutex<bool>,
    bell: Condvar,
    /// Where lanes wait that have time.
    dozing: (Mutex<()>, Condvar),
    /// Held by whoever registers memory with userfaultfd or gives it back.
    registering: Mutex<()>,
    /// Held shared by whoever moves pages of a region, exclusively by an unplug.
    layout: RwLock<()>,
    report: Report,
}

impl std::fmt::Debug for Vm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vm").field("name", &self.state.name()).field("epoch", &self.epoch).finish_non_exhaustive()
    }
}

impl Vm {
    /// A VM without lanes yet. `epoch` is what [`StateFile::take_over`] answered.
    pub fn new(state: StateFile, epoch: u64, stores: Stores, tuning: Tuning, report: Report) -> Self {
        let pressure = Pressure::new(Stats::of(&state));
        Self {
            state,
            stores,
            tuning,
            pressure,
            heat: Arc::new(VmHeat::new(tuning.heat, epoch)),
            touches: Touches::default(),
            track: AtomicU8::new(tuning.track as u8),
            prefetch: Prefetch::default(),
            slow: Slow::default(),
            spill: Spill::default(),
            epoch,
            tickets: AtomicU64::new(0),
            regions: RwLock::default(),
            views: RwLock::default(),
            lanes: Mutex::default(),
            stopping: AtomicBool::new(false),
            halted: OnceLock::new(),
            holds: Mutex::default(),
            may_pin: AtomicBool::new(false),
            over_limit: AtomicBool::new(false),
            gate: Gate::default(),
            recent: Recent::default(),
            generation: AtomicU64::new(0),
            rung: Mutex::default(),
            bell: Condvar::new(),
            dozing: Default::default(),
            registering: Mutex::default(),
            layout: RwLock::default(),
            report,
        }
    }

    /// Its counters.
    pub fn stats(&self) -> Stats<'_> {
        Stats::of(&self.state)
    }

    /// Tell operators something; also logged.
    pub fn report(&self, kind: &str, message: String) {
        tracing::warn!(vm = self.state.name(), kind, "{message}");
        (self.report)(kind, message);
    }

    /// A ticket for one batch of evictions.
    pub fn ticket(&self) -> Ticket {
        Ticket::new(self.epoch, self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// The regions; index is number.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.read().expect("no panic while held").clone()
    }

    /// One region.
    pub fn region(&self, number: u32) -> Option<Arc<Region>> {
        self.regions.read().expect("no panic while held").get(number as usize).cloned()
    }

    /// The views.
    pub fn views(&self) -> Vec<Arc<View>> {
        self.views.read().expect("no panic while held").clone()
    }

    /// Open the next region of the state file; they must come in order, with the right file each.
    pub fn open_region(&self, file: OwnedFd) -> Result<u32, StateError> {
        let mut regions = self.regions.write().expect("no panic while held");
        let number = regions.len() as u32;
        let records = self.state.regions();
        let Some(record) = records.get(number as usize) else {
            return Err(StateError::Invalid(format!("it has no region {number}")));
        };
        let table = self.state.map_region(record)?;
        regions.push(Arc::new(Region::new(number, record, file, table)?));
        Ok(number)
    }

    /// Begin serving: the lanes of the VM, then whatever views are there. `view`s added later start their own lanes.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        let own = [("reclaim", reclaim::run as fn(&Vm)), ("prefetch", prefetch::run)];
        for (kind, body) in own.into_iter().chain([("coalesce", coalesce::run as fn(&Vm)), ("track", track::run)]) {
            let vm = self.clone();
            self.start_lane(kind, move || vm.run_lane(kind, Serves::Nobody, || body(&vm)))?;
        }
        if self.stores.file.is_none() {
            return Ok(());
        }
        for _ in 0..slow::LANES {
            let vm = self.clone();
            self.start_lane("slow", move || vm.run_lane("slow", Serves::All, || slow::run(&vm)))?;
        }
        if let Some(after) = self.tuning.spill_after {
            let vm = self.clone();
            self.start_lane("spill", move || vm.run_lane("spill", Serves::Nobody, || spill::run(&vm, after)))?;
        }
        Ok(())
    }

    fn start_lane(&self, kind: &str, body: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let name = format!("{kind}/{}", self.state.name());
        let nice = if matches!(kind, "fault" | "slow") { DEMAND_NICE } else { 0 };
        let body = move || {
            // Of this thread alone, as Linux has it. Not permitted to: then it waits its turn like others.
            let _ = rustix::process::setpriority_process(None, nice);
            body();
        };
        let lane = std::thread::Builder::new().name(short(&name)).spawn(body)?;
        let mut lanes = self.lanes.lock().expect("no panic while held");
        // Views come and go; a thread that nobody joins keeps its stack.
        lanes.retain(|lane| !lane.is_finished());
        lanes.push(lane);
        Ok(())
    }

    /// Run a lane until it ends. A panic in it is a bug of ours that must not cost a guest its bytes: the lane starts
    /// again, and what it had read and not answered is raised anew. If that does not help, the VM goes without reclaim;
    /// a VM that nobody can serve is stopped.
    fn run_lane(&self, kind: &str, serves: Serves<'_>, body: impl Fn()) {
        const MOST_PANICS: u32 = 3;
        for _ in 0..MOST_PANICS {
            if std::panic::catch_unwind(std::panic::AssertUnwindSafe(&body)).is_ok() {
                return;
            }
            self.report("lane-panic", format!("the {kind} lane panicked; it starts again"));
            let woken = match serves {
                Serves::Nobody => Ok(()),
                Serves::View(view) => view.wake_all(),
                Serves::All => self.views().iter().try_for_each(|view| view.wake_all()),
            };
            if let Err(error) = woken {
                tracing::error!(vm = self.state.name(), "Waking a view: {error}");
            }
        }
        let reason = format!("the {kind} lane panicked {MOST_PANICS} times; it stays down");
        self.report("lane-panic", reason.clone());
        if !matches!(serves, Serves::Nobody) {
            self.fail_stop(&reason);
        }
    }

    /// Serve one more process that maps this VM's RAM.
    pub fn add_view(self: &Arc<Self>, view: Arc<View>, spans: &[(RegionInfo, u32)]) -> io::Result<()> {
        for (info, region) in spans {
            view.add_span(info, *region);
        }
        // No batch is under way while we hold the lock, and none from before counts afterwards.
        let layout = self.layout.write().expect("no panic while held");
        for region in self.regions() {
            register_as_flagged(&region, &view)?;
            for (first, count, _) in region.registered_chunks() {
                coalesce::learn(&view, &region, first, count);
            }
        }
        self.views.write().expect("no panic while held").push(view.clone());
        self.generation.fetch_add(1, Ordering::AcqRel);
        drop(layout);
        for shard in 0..view.shards().count() {
            let (vm, view) = (self.clone(), view.clone());
            let body = move || vm.run_lane("fault", Serves::View(&view), || lane::serve_faults(&vm, &view, shard));
            self.start_lane("fault", body)?;
        }
        let (vm, of) = (self.clone(), view.clone());
        let body = move || vm.run_lane("control", Serves::View(&of), || lane::serve_control(&vm, &of));
        self.start_lane("control", body)?;
        // Faults that an earlier engine read but did not answer are not delivered again: have them raised anew.
        view.wake_all()
    }

    /// A process that is a view already maps one more region.
    pub fn add_span(&self, view: &View, info: &RegionInfo, number: u32) -> io::Result<()> {
        let _layout = self.layout.write().expect("no panic while held");
        view.add_span(info, number);
        self.generation.fetch_add(1, Ordering::AcqRel);
        self.region(number).map_or(Ok(()), |region| register_as_flagged(&region, view))
    }

    /// A process that mapped this VM's RAM is gone.
    pub fn remove_view(&self, pid: u32) {
        self.views.write().expect("no panic while held").retain(|view| {
            if view.pid == pid {
                view.close();
            }
            view.pid != pid
        });
    }

    /// Is the VM to be left alone from now on?
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// End the lanes. Blocks until they are gone; pages stay where they are.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Release);
        self.ring();
        drop(self.dozing.0.lock().expect("no panic while held"));
        self.dozing.1.notify_all();
        self.prefetch.end();
        self.slow.ring();
        self.spill.ring();
        let lanes = std::mem::take(&mut *self.lanes.lock().expect("no panic while held"));
        for lane in lanes {
            if lane.thread().id() != std::thread::current().id() && lane.join().is_err() {
                self.report("lane-panic", "a lane of this VM panicked".into());
            }
        }
    }

    /// Wake the reclaim lane: a limit changed, or the VM grew over it.
    pub fn ring(&self) {
        *self.rung.lock().expect("no panic while held") = true;
        self.bell.notify_all();
    }

    /// Wait until somebody rings, at most so long.
    pub(crate) fn wait(&self, at_most: Duration) {
        let guard = self.rung.lock().expect("no panic while held");
        let waited = self.bell.wait_timeout_while(guard, at_most, |rung| !*rung);
        *waited.expect("no panic while held").0 = false;
    }

    /// Wait this long, or until the VM is stopped; answers whether it goes on.
    pub(crate) fn doze(&self, time: Duration) -> bool {
        let guard = self.dozing.0.lock().expect("no panic while held");
        let waited = self.dozing.1.wait_timeout_while(guard, time, |()| !self.is_stopping());
        drop(waited.expect("no panic while held"));
        !self.is_stopping()
    }

    /// Stop reclaiming, for this reason; `None` takes this kind of reason back.
    pub fn hold(&self, kind: Hold, reason: Option<String>) {
        self.holds.lock().expect("no panic while held")[kind as usize] = reason;
        self.ring();
    }

    /// Why nothing is reclaimed now, if so.
    pub fn held(&self) -> Option<String> {
        self.holds.lock().expect("no panic while held").iter().flatten().next().cloned()
    }

    /// Is it held for this kind of reason?
    pub fn is_held_for(&self, kind: Hold) -> bool {
        self.holds.lock().expect("no panic while held")[kind as usize].is_some()
    }

    /// When to find out who is hot, from now on.
    pub fn set_track(&self, track: Track) {
        self.track.store(track as u8, Ordering::Release);
    }

    /// When to find out who is hot.
    pub fn track(&self) -> Track {
        match self.track.load(Ordering::Acquire) {
            track if track == Track::Off as u8 => Track::Off,
            track if track == Track::On as u8 => Track::On,
            _ => Track::Auto,
        }
    }

    /// Is somebody finding out who is hot? Never while the VM is held: then it is left alone.
    pub fn is_tracked(&self) -> bool {
        let wanted = match self.track() {
            Track::Off => false,
            Track::On => true,
            // Over its limit a VM loses whatever it has, and the CPU is reclaim's.
            Track::Auto => self.effective_limit().is_some() && !self.over_limit.load(Ordering::Relaxed),
        };
        wanted && !self.is_stopping() && self.held().is_none()
    }

    /// Is the class of this VM *pinned*?
    pub fn is_pinned(&self) -> bool {
        self.is_held_for(Hold::Pinned)
    }

    /// From now on a device or the kernel may write to pages it looked up before they were zapped. When this returns, no
    /// page is evicted any more that was not zapped for the full quarantine time.
    pub fn set_may_pin(&self) {
        self.may_pin.store(true, Ordering::Release);
        drop(self.layout.write().expect("no panic while held"));
    }

    /// May something, so that even above its limit T is no shorter?
    pub(crate) fn may_pin(&self) -> bool {
        self.may_pin.load(Ordering::Acquire)
    }

    /// How long a page must have been zapped before it may go, now: T, or what direct reclaim would rather have where T
    /// is no safety matter.
    pub(crate) fn quarantine(&self, direct: Option<Duration>) -> Duration {
        let direct = direct.filter(|_| !self.may_pin());
        direct.map_or(self.tuning.quarantine, |direct| direct.min(self.tuning.quarantine))
    }

    /// Hold reclaim for this reason and bring every page back. Returns when all are resident.
    pub fn restore_for(&self, kind: Hold, reason: String) -> io::Result<()> {
        self.hold(kind, Some(reason));
        // Reclaim looks at the holds under the shared lock, before each batch: once we had it exclusively, no batch that
        // did not see this hold is under way.
        drop(self.layout.write().expect("no panic while held"));
        for region in self.regions() {
            self.restore_all(&region)?;
        }
        Ok(())
    }

    /// How many times a view was added.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Held shared while pages of any region are moved.
    pub(crate) fn layout(&self) -> std::sync::RwLockReadGuard<'_, ()> {
        self.layout.read().expect("no panic while held")
    }

    /// Finish what the last engine left half done: these pages are far, and their file holds zeros in their place. Before
    /// anybody is served.
    pub fn expel(&self, zeroed: &[(u32, PageIdx)]) {
        for (number, page) in zeroed {
            let Some(region) = self.region(*number) else { continue };
            let done = expel_left(region.key(*page), region.granule(*page), &*region, &self.stores);
            self.stats().sub(Counter::Far, done.stuck + done.lost);
            self.stats().add(Counter::Poisoned, done.lost);
            if done.lost > 0 {
                self.report_lost(*number, *page);
            }
        }
    }

    /// Bring every far or zero page of a region back.
    fn restore_all(&self, region: &Region) -> io::Result<()> {
        let Some(record) = self.state.regions().into_iter().nth(region.number as usize) else { return Ok(()) };
        // Words that were never written say Resident; to read them would have the kernel make memory for them.
        for written in self.state.written_words(&record)? {
            self.restore_pages(region, written)?;
        }
        Ok(())
    }

    fn restore_pages(&self, region: &Region, pages: Range<u64>) -> io::Result<()> {
        let views = self.views();
        let mut memories = views.iter().filter_map(|view| view.of_region(region));
        let Some(mut memory) = memories.next() else { return Ok(()) };
        for page in region.granules(pages) {
            let (granule, key) = (region.granule(page), region.key(page));
            loop {
                let word = granule.cell().load();
                if !matches!(word.state(), State::Far | State::Restoring | State::Zero) {
                    break;
                }
                if word.state() == State::Zero && !word.is_locked() {
                    // A hole in the file is what zeros look like to everybody else, too.
                    if granule.cell().swap(word, Word::new(State::Resident, 0)) {
                        self.stats().sub(Counter::Zero, granule.pages());
                    }
                    continue;
                }
                let (rescued, served) = serve(granule, key, FaultKind::Missing, &memory, &self.stores, |age| age);
                self.count_rescued(rescued, granule.pages());
                match served? {
                    Served::Later => std::thread::yield_now(),
                    // That process has gone, or does not map this part any more: through another one.
                    Served::Gone => match memories.next() {
                        Some(next) => memory = next,
                        None => {
                            return Err(io::Error::other(format!("no process of the VM maps page {page} any more")));
                        }
                    },
                    served => {
                        self.count(served, granule.pages());
                        if served == (Served::Poisoned { newly: true }) {
                            self.report_lost(region.number, page);
                        }
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Count pages that were touched on their way out.
    pub(crate) fn count_rescued(&self, rescued: bool, pages: u64) {
        if rescued {
            self.stats().add(Counter::Rescued, pages);
            self.stats().sub(Counter::Quarantined, pages);
        }
    }

    /// These granules, from this one on, are back. Their words had these stamps of when they went. Answers for how many
    /// milliseconds they were away, all together.
    pub(crate) fn came_back(
        &self,
        region: &Region,
        first: PageIdx,
        granule: u64,
        since: impl Iterator<Item = u8>,
    ) -> u64 {
        let (now, mut away_ms, mut back_milli_hz) = (away::stamp(), 0, 0);
        for (at, since) in since.enumerate() {
            self.recent.push((region.number, PageIdx(first.0 + at as u64 * granule)));
            let this_ms = away::between_ms(since, now);
            away_ms += this_ms;
            back_milli_hz += away::milli_hz(this_ms);
        }
        self.stats().add(Counter::AwayMs, away_ms);
        self.stats().add(Counter::BackMilliHz, back_milli_hz);
        away_ms
    }

    /// Count a served fault, and keep the gauges, which count the pages of its granule.
    pub(crate) fn count(&self, served: Served, pages: u64) {
        let stats = self.stats();
        match served {
            Served::Mapped => stats.add(Counter::FaultMinor, 1),
            Served::Fresh => stats.add(Counter::FaultFresh, 1),
            Served::Zeroed => {
                stats.add(Counter::FaultZero, 1);
                stats.sub(Counter::Zero, pages);
            }
            Served::Restored => {
                stats.add(Counter::FaultRestore, 1);
                stats.sub(Counter::Far, pages);
            }
            Served::Poisoned { newly } => {
                if newly {
                    stats.sub(Counter::Far, pages);
                    stats.add(Counter::Poisoned, pages);
                }
            }
            Served::Later => stats.add(Counter::FaultDeferred, 1),
            Served::Gone => {}
        }
    }

    /// Say that a page was lost.
    pub(crate) fn report_lost(&self, region: u32, page: PageIdx) {
        let text = "the guest gets a memory error when it touches it";
        self.report("page-lost", format!("the store lost page {page} of region {region}: {text}"));
    }

    /// The VMM frees these ranges: drop far copies and memory. Addresses are those of `view`; ranges outside the VM's
    /// RAM are ignored, ends are rounded inward to whole granules as the kernel's punch would.
    pub fn discard(&self, view: &View, ranges: &[wire::Range]) -> io::Result<()> {
        let _layout = self.layout();
        for (start, len) in ranges {
            let Some((number, first)) = view.find(*start) else { continue };
            let Some(region) = self.region(number) else { continue };
            let end = first.0.saturating_add(len / PAGE_SIZE as u64).min(region.pages().0);
            let first = (first.0 + u64::from(start.page_start() != *start)).next_multiple_of(region.granule_pages());
            self.discard_run(&region, first, region.first_of(PageIdx(end)).0)?;
        }
        Ok(())
    }

    fn discard_run(&self, region: &Region, first: u64, end: u64) -> io::Result<()> {
        /// Pages whose locks are held together.
        const BATCH: u64 = 512;
        let stats = self.stats();
        let views = self.views();
        let heal = |page| {
            let mut memories = views.iter().filter_map(|view| view.of_region(region));
            memories.try_for_each(|memory| {
                loop {
                    let filled = memory.install_zero(page)?;
                    // Another view may have filled the hole already; then this one's mark gives way to that page.
                    let there = filled == FillOutcome::AlreadyThere;
                    match if there { memory.map(page)? } else { filled } {
                        // The address space changes, or memory is short, for a moment.
                        FillOutcome::Retry => std::thread::yield_now(),
                        _ => return Ok(()),
                    }
                }
            })
        };
        let mut not_healed = None;
        for first in (first..end).step_by(BATCH as usize) {
            if self.is_stopping() {
                // A range of terabytes takes minutes, and whoever ends this VM waits.
                return Err(io::ErrorKind::Interrupted.into());
            }
            let run = (PageIdx(first), BATCH.min(end - first));
            // A punch tears what is mapped huge. Nothing waits for the discard of what has not been punched.
            region.units().disturb(run.0, run.1, std::thread::yield_now);
            let granule_of = |page| region.granule(page);
            let done = discard(region.number, run, granule_of, region, &self.stores, std::thread::yield_now, heal)?;
            stats.add(Counter::Discarded, done.counts.iter().sum());
            not_healed = done.not_healed.or(not_healed);
            for (state, gauge) in [
                (State::Quarantine, Counter::Quarantined),
                (State::Evicting, Counter::Quarantined),
                (State::Far, Counter::Far),
                (State::Restoring, Counter::Far),
                (State::Zero, Counter::Zero),
                (State::Poisoned, Counter::Poisoned),
            ] {
                stats.sub(gauge, done.counts[state as usize]);
            }
        }
        not_healed.map_or(Ok(()), Err)
    }

    /// RAM is about to be unplugged: forget its far pages.
    pub fn remove_region(&self, view: &View, start: Hva) -> io::Result<Option<u32>> {
        let _layout = self.layout.write().expect("no panic while held");
        let Some(number) = view.remove_span(start) else { return Ok(None) };
        if self.views().iter().any(|other| other.base(number).is_some()) {
            // Only this process is done with it.
            return Ok(None);
        }
        if let Some(region) = self.region(number) {
            self.discard_run(&region, 0, region.pages().0)?;
            self.stats().sub(Counter::RegisteredBytes, region.registered().0);
            region.remove();
            self.state.remove_region(number);
        }
        Ok(Some(number))
    }

    /// All guest RAM.
    pub fn size(&self) -> PageCount {
        PageCount(self.regions().iter().map(|region| region.pages().0).sum())
    }

    /// DRAM the RAM files use; a file that holds several regions counts once.
    pub fn resident(&self) -> io::Result<PageCount> {
        let mut seen = HashSet::new();
        let mut pages = PageCount(0);
        for region in self.regions() {
            if !region.is_removed() && seen.insert(region.file_id()) {
                pages += region.file_resident()?;
            }
        }
        Ok(pages)
    }

    /// Register the chunks that cover these pages with every view. A chunk is registered when its first page is about to
    /// be zapped: memory nobody reclaims from costs nothing.
    pub(crate) fn register(&self, region: &Region, first: PageIdx, end: PageIdx) -> io::Result<()> {
        for (first, count, flag) in region.chunks(first, end) {
            if flag.load(Ordering::Acquire) != 0 {
                continue;
            }
            let _one = self.registering.lock().expect("no panic while held");
            if flag.load(Ordering::Acquire) != 0 {
                continue;
            }
            let len = PageCount(count).bytes();
            let views = self.views();
            let mapped: Vec<_> = views.iter().filter_map(|view| Some((view, view.of_region(region)?))).collect();
            if mapped.is_empty() {
                return Err(io::Error::other(format!("no process is known to map region {}", region.number)));
            }
            for (view, memory) in mapped {
                coalesce::learn(view, region, first, count);
                memory.register(first, count)?;
            }
            flag.store(1, Ordering::Release);
            self.stats().add(Counter::RegisteredBytes, len.0);
        }
        Ok(())
    }

    /// Give chunks without far, zero or quarantined pages back to the kernel.
    pub(crate) fn unregister_settled(&self, region: &Region) -> io::Result<()> {
        // What the kernel has registered and what the flags say change together.
        let _one = self.registering.lock().expect("no panic while held");
        for (first, count, flag) in region.chunks(PageIdx(0), PageIdx(region.pages().0)) {
            if flag.load(Ordering::Acquire) == 0 {
                continue;
            }
            let mut settled = true;
            for page in region.granules(first.0..first.0 + count) {
                let granule = region.granule(page);
                let word = granule.cell().load();
                // A zero page is a hole, and an unregistered hole reads as zeros.
                if word.state() == State::Zero
                    && !word.is_locked()
                    && granule.cell().swap(word, Word::new(State::Resident, 0))
                {
                    self.stats().sub(Counter::Zero, granule.pages());
                } else if word.state() != State::Resident || word.is_locked() {
                    settled = false;
                    break;
                }
            }
            if settled {
                let len = PageCount(count).bytes();
                // The flag first: a chunk that is registered and not known to be costs a little, the reverse costs bytes.
                flag.store(0, Ordering::Release);
                self.stats().sub(Counter::RegisteredBytes, len.0);
                for view in self.views() {
                    if let Some(memory) = view.of_region(region) {
                        memory.unregister(first, count)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Count every page by its word and its file, slowly and exactly: `(size, resident, far, zero, untouched, poisoned)`.
    /// Every page is in exactly one of the last five. For tests; exact only while nothing moves.
    pub fn census(&self) -> io::Result<Census> {
        let mut census = Census::default();
        for region in self.regions() {
            for page in (0..region.pages().0).map(PageIdx) {
                census.size += PageCount(1);
                let present = region.is_present(page)?;
                let bin = match region.word(page).state() {
                    _ if present => &mut census.resident,
                    State::Far | State::Restoring => &mut census.far,
                    State::Zero => &mut census.zero,
                    State::Poisoned => &mut census.poisoned,
                    State::Resident | State::Quarantine | State::Evicting => &mut census.untouched,
                };
                *bin += PageCount(1);
            }
        }
        Ok(census)
    }

    /// Pages of a region by the state of their words, indexed by `State as usize`. Reads every word that was ever written.
    pub fn count_states(&self, region: &Region) -> io::Result<[u64; State::COUNT]> {
        let mut counts = [0; State::COUNT];
        if let Some(record) = self.state.regions().get(region.number as usize) {
            for pages in self.state.written_words(record)? {
                for page in region.granules(pages) {
                    counts[region.word(page).state() as usize] += region.granule_pages();
                }
            }
        }
        Ok(counts)
    }

    /// Tell every client to stop its VM, because its memory cannot be kept right.
    pub fn fail_stop(&self, reason: &str) {
        // The first reason led to the others.
        let _ = self.halted.set(reason.to_owned());
        for view in self.views() {
            if let Err(error) = view.tell(&EngineToClient::FailStop { reason: reason.to_owned() }) {
                tracing::error!(vm = self.state.name(), "Telling a VMM to stop: {error}");
            }
        }
    }

    /// Why this engine had the VM stopped, if it did.
    pub fn halted(&self) -> Option<&str> {
        self.halted.get().map(String::as_str)
    }

    /// The cap that holds, the operator's or the control loop's, if it is less than the VM's size.
    pub fn effective_limit(&self) -> Option<Bytes> {
        let caps = [self.state.limit(), self.state.target()];
        caps.into_iter().flatten().min().filter(|limit| *limit < self.size().bytes())
    }
}

fn register_as_flagged(region: &Region, view: &View) -> io::Result<()> {
    view.of_region(region).map_or(Ok(()), |memory| region.register_as_flagged(&memory))
}

/// Where every page of a VM is. See [`Vm::census`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Census {
    /// All pages.
    pub size: PageCount,
    /// In their file.
    pub resident: PageCount,
    /// In a store.
    pub far: PageCount,
    /// Known zero.
    pub zero: PageCount,
    /// Never touched, or discarded.
    pub untouched: PageCount,
    /// Lost.
    pub poisoned: PageCount,
}

/// Thread names are cut to 15 bytes by the kernel; cut them at a character.
fn short(name: &str) -> String {
    name.chars().take(15).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::wire::VmId;
    use ballast_store::{Budget, RamOptions, RamStore};

    #[test]
    fn lanes_that_ended_are_let_go_of_while_others_begin() {
        let state = StateFile::create(VmId([3; 16]), "test").expect("state");
        let (store, _arena) = RamStore::create(RamOptions::new(Budget::new(Bytes(1 << 20)))).expect("store");
        let stores = Stores { ram: Arc::new(store), file: None };
        let vm = Vm::new(state, 1, stores, Tuning::default(), Arc::new(|_: &str, _| {}));
        let lanes = || vm.lanes.lock().expect("no panic while held");
        for _ in 0..50 {
            vm.start_lane("fault", || {}).expect("a thread");
            while lanes().iter().any(|lane| !lane.is_finished()) {
                std::thread::yield_now();
            }
        }
        assert_eq!(lanes().len(), 1, "each thread that nobody joins keeps its stack");
        vm.stop();
    }
}
