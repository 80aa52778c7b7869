//! The lanes of one view: a fault lane for each userfaultfd serves its faults, the control lane listens to its client.
//!
//! Before: [`crate::vm::Vm::add_view`] starts them. After: they end when the view's process or the engine does.
//! Threads: one each; a page's faults always come to the same one (`shard`). A fault lane waits for nothing but faults:
//! a page another lane holds, or one whose store is busy, or for which there is no room below the limit (`gate`), is
//! put aside and tried again while others are served; one whose bytes are on a disk goes to the `slow` lanes. A fault of a thread
//! that goes through memory in order waits for up to 16 pages behind its own, which come back first (`streams`).
//! Promise: every fault read is served or, if this engine dies first, raised again by its successor's wake.

use std::collections::HashSet;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::wire::{self, ClientToEngine, EngineToClient};
use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_store::PageBytes;
use ballast_sys::scm;
use ballast_sys::uffd::{Fault, FaultKind};
use rustix::event::{PollFd, PollFlags, poll};

use crate::fault::{Served, serve};
use crate::follow::Follow;
use crate::forgotten::Forgotten;
use crate::memory::Mapped;
use crate::prefetch::{Company, is_far, next_run};
use crate::region::Region;
use crate::stages::{Times, Watch};
use crate::stats::{Counter, Latency};
use crate::stores::StoreOf;
use crate::streams::{self, Streams};
use crate::touch::{self, Touch, touched};
use crate::view::{RegionView, View};
use crate::vm::Vm;

/// How long a lane sleeps at most before it looks whether the VM is being stopped.
const NAP: Duration = Duration::from_millis(100);
/// A lock is held for some 20 to 40 µs, so a lane with nothing but put-aside faults tries again at once for this long. Then it
/// sleeps between tries: a busy store takes longer.
const EAGER: Duration = Duration::from_micros(200);
const RETRY: Duration = Duration::from_micros(50);

/// A fault that has waited for so long is told of, and so is another one after a minute: memory for its page cannot be had (a
/// pool of huge pages or a file system of limited size is used up), or a store does not answer.
const LONG: Duration = Duration::from_secs(5);
const TOLD_EVERY: Duration = Duration::from_secs(60);

/// A fault that was read and is not served yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub fault: Fault,
    pub since: Instant,
    /// It waits until pages have gone.
    pub gated: bool,
}

/// Serve the faults of one userfaultfd until the view's process is gone or the VM is stopped.
pub fn serve_faults(vm: &Vm, view: &Arc<View>, shard: usize) {
    let uffd = view.shards().get(shard);
    let mut lane = FaultLane {
        vm,
        view,
        shard,
        waiting: Vec::new(),
        watch: Watch::default(),
        company: Company::default(),
        streams: Streams::default(),
        room: Box::new([[0; PAGE_SIZE]; _]),
        told: None,
    };
    let mut follow = Follow::new(view.pid);
    let mut forgotten = Forgotten::new(Instant::now());
    let mut read = Vec::with_capacity(64);
    while !vm.is_stopping() && !view.is_closed() {
        // Without a read first: whom it just woke runs when this lane sleeps, so a call saved is saved twice.
        if lane.waiting.is_empty() && !sleep_until_readable(uffd, NAP) {
            forgotten.look(vm, view, uffd, 0, Instant::now());
            continue;
        }
        if let Err(error) = uffd.read_faults(&mut read) {
            // The address space is gone: so are its threads.
            tracing::debug!(vm = vm.state.name(), pid = view.pid, "Reading faults: {error}");
            return;
        }
        if read.is_empty() && lane.waiting.is_empty() {
            continue;
        }
        let now = Instant::now();
        let newest = read.last().map(|fault| fault.thread);
        lane.waiting.extend(read.drain(..).map(|fault| Waiting { fault, since: now, gated: false }));
        lane.tell_stall();
        let served = lane.serve_round();
        let may_nap = |waiting: &Waiting| waiting.gated || now.saturating_duration_since(waiting.since) > EAGER;
        if !served && lane.waiting.iter().all(may_nap) {
            sleep_until_readable(uffd, RETRY);
        } else if !served {
            std::thread::yield_now();
        }
        lane.tell_stall();
        lane.tell_long_waits(now);
        // Last: nobody waits for these.
        forgotten.look(vm, view, uffd, lane.waiting.len(), now);
        if let Some(thread) = newest {
            follow.faulted(thread, now);
        }
    }
    // What was read and not served is in nobody's hands: it is raised anew, for whoever serves this memory next.
    if !lane.waiting.is_empty()
        && let Err(error) = view.wake_all()
    {
        tracing::debug!(vm = vm.state.name(), pid = view.pid, "Waking what was not served: {error}");
    }
}

struct FaultLane<'a> {
    vm: &'a Vm,
    view: &'a Arc<View>,
    shard: usize,
    waiting: Vec<Waiting>,
    watch: Watch,
    company: Company,
    streams: Streams,
    room: Box<[PageBytes; streams::MOST as usize]>,
    /// When it was last said that a fault waits for long.
    told: Option<Instant>,
}

impl FaultLane<'_> {
    fn tell_stall(&self) {
        self.view.stall.update(self.vm, |waiters| {
            waiters.here[self.shard] = self.waiting.len();
            waiters.know(self.waiting.iter().map(|waiting| waiting.fault.thread));
        });
    }

    fn tell_long_waits(&mut self, now: Instant) {
        let is_long = |waiting: &&Waiting| now.saturating_duration_since(waiting.since) >= LONG;
        let Some(Waiting { fault, .. }) = self.waiting.iter().find(is_long) else { return };
        if self.told.is_some_and(|told| now.saturating_duration_since(told) < TOLD_EVERY) {
            return;
        }
        self.told = Some(now);
        let text = format!(
            "thread {} of process {} has waited {} s for the page at {}: no memory for it, or its store does not answer",
            fault.thread,
            self.view.pid,
            LONG.as_secs(),
            fault.addr
        );
        self.vm.report("fault-waits", text);
    }

    /// Try every waiting fault once; keeps those that must wait on. Answers whether any was served.
    fn serve_round(&mut self) -> bool {
        let before = self.waiting.len();
        let mut still = std::mem::take(&mut self.waiting);
        still.retain_mut(|waiting| !self.serve_one(waiting));
        let served = still.len() < before;
        self.waiting = still;
        served
    }

    /// Serve one fault; false if it must be tried again.
    fn serve_one(&mut self, waiting: &mut Waiting) -> bool {
        let vm = self.vm;
        let _serving = self.view.serving();
        let Some((region, page, memory)) = target(vm, self.view, waiting) else { return true };
        let mut touch = None;
        if let Some(unit) = region.units().of(page).filter(|unit| !unit.is_quiet()) {
            match touched(vm, self.view, &region, page, unit, waiting) {
                // The kernel may be copying the unit into a huge page: no other fault shall wait for that.
                Touch::Aside => {
                    vm.count(Served::Later, 1);
                    return false;
                }
                Touch::Mapped => return settle(vm, &region, page, waiting, Ok(Served::Mapped)).is_some(),
                Touch::Serve { tracked, around } => touch = Some((tracked, around)),
            }
        }
        let granule = region.granule(page);
        let is_missing = waiting.fault.kind == FaultKind::Missing;
        if is_missing && !vm.gate.admits(granule.pages(), || waiting.since.elapsed()) {
            if !std::mem::replace(&mut waiting.gated, true) {
                vm.ring();
            }
            return false;
        }
        if std::mem::take(&mut waiting.gated) {
            vm.stats().add(Counter::Throttled, 1);
            vm.stats().add(Counter::ThrottledNs, waiting.since.elapsed().as_nanos() as u64);
        }
        // Only the RAM store is asked here. A page that goes to the file just now is tried again, and then it is there.
        if vm.stores.file.is_some() && granule.is_in_file() {
            vm.slow.take(vm, self.view, *waiting);
            return true;
        }
        let came_along = is_missing && granule.pages() == 1 && self.bring_ahead(&region, page);
        let times = self.watch.start();
        let Some((served, away)) = resolve(vm, &region, page, waiting, &memory, &vm.stores.near(), &times) else {
            return false;
        };
        if let Some((tracked, around)) = touch {
            let around = around && served == Served::Mapped;
            touch::served(vm, &region, &memory, page, waiting, (tracked, around));
        }
        if served == Served::Restored && granule.pages() == 1 && !came_along {
            for pages in self.company.restored(&region, page, away, vm.gate.is_tight(), Instant::now()) {
                vm.prefetch.want(self.view, region.number, pages);
            }
        }
        true
    }

    /// If the thread touches one page after the other, bring back some that it touches next, before the one it waits for. Answers
    /// whether any came.
    fn bring_ahead(&mut self, region: &Region, page: PageIdx) -> bool {
        let vm = self.vm;
        if !is_far(region, page) {
            return false;
        }
        let far = |page| is_far(region, PageIdx(page));
        let (ahead, mut pages) = self.streams.fault(region.number, page.0, region.pages().0, far);
        if ahead == 0 {
            return false;
        }
        // Held by all who move pages that nobody waits for, so that these are still this region's addresses. If somebody
        // is about to change that, it is no time for guesses.
        let Some(_layout) = vm.try_layout() else { return false };
        let Some(memory) = self.view.of_region(region).filter(|_| !region.is_removed()) else { return false };
        let mut left = ahead.min(vm.room_ahead());
        while left > 0 {
            match next_run(vm, region, &memory, pages.clone(), &mut self.room[..left as usize]) {
                Ok(Some(came)) if !came.is_empty() => {
                    self.streams.came(came.end);
                    pages.start = came.end;
                    left -= came.end - came.start;
                }
                // None is far, or what is cannot be had now.
                Ok(_) => break,
                Err(error) => {
                    // The page that is waited for meets the same, and has the say.
                    tracing::debug!(vm = vm.state.name(), region = region.number, %page, "Reading ahead: {error}");
                    break;
                }
            }
        }
        let came = pages.start > page.0 + 1;
        if came {
            self.company.walked(region, page);
        }
        came
    }
}

/// Serve a fault on a granule of this region with the help of these stores, and account for it. Answers what became of it, and
/// for how long the page had been away; `None` if it must be tried again.
pub(crate) fn resolve(
    vm: &Vm,
    region: &Region,
    page: PageIdx,
    waiting: &Waiting,
    memory: &impl Mapped,
    stores: &impl StoreOf,
    times: &Times,
) -> Option<(Served, Duration)> {
    let granule = region.granule(page);
    let since = granule.cell().load().age();
    let (memory, stores) = (times.memory(memory), times.stores(stores));
    let (rescued, served) =
        serve(granule, region.key(page), waiting.fault.kind, &memory, region, &stores, ballast_heat::touched);
    vm.count_rescued(rescued, granule.pages());
    if matches!(served, Ok(Served::Gone)) {
        // The process is gone, or what is mapped there is not ours any more: given back to the kernel, or the VMM put something
        // else in its place. Neither wakes a thread that waits there already.
        let _ = memory.wake(page);
    }
    let served = settle(vm, region, page, waiting, served)?;
    if served != Served::Restored {
        return Some((served, Duration::ZERO));
    }
    times.restored(vm.stats(), waiting.since);
    let away_ms = vm.came_back(region, page, granule.pages(), std::iter::once(since));
    Some((served, Duration::from_millis(away_ms)))
}

/// The granule a fault is about, by its first page, which stays where it is while the caller holds [`View::serving`]. `None` if it
/// was unplugged while the fault was under way; then its thread has been woken and faults on whatever is there now.
pub(crate) fn target<'a>(vm: &Vm, view: &'a View, waiting: &Waiting) -> Option<(Arc<Region>, PageIdx, RegionView<'a>)> {
    let addr = waiting.fault.addr;
    let target = view.find(addr).and_then(|(number, page)| {
        let region = vm.region(number).filter(|region| !region.is_removed())?;
        let memory = view.of_region(&region)?;
        Some((region.first_of(page), memory, region))
    });
    let Some((page, memory, region)) = target else {
        let _ = view.wake(addr, PAGE_SIZE as u64);
        return None;
    };
    Some((region, page, memory))
}

/// Count what became of a fault, and say what must be said. `None` if it must be tried again.
fn settle(vm: &Vm, region: &Region, page: PageIdx, waiting: &Waiting, served: io::Result<Served>) -> Option<Served> {
    match served {
        Ok(Served::Later) => {
            vm.count(Served::Later, 1);
            None
        }
        Ok(served) => {
            vm.count(served, region.granule_pages());
            let took = waiting.since.elapsed();
            vm.stats().record(Latency::Fault, took);
            if matches!(served, Served::Restored | Served::Filled { .. } | Served::Zeroed | Served::Fresh) {
                vm.gate.came(region.granule_pages());
            }
            if matches!(served, Served::Restored | Served::Filled { .. }) {
                vm.stats().record(Latency::Restore, took);
            }
            vm.tell(served, region.number, page);
            Some(served)
        }
        Err(error) => {
            // Nothing was lost, but the thread would wait for ever and nobody would know why.
            let reason = format!("Resolving a fault on page {page} of region {}: {error}", region.number);
            vm.report("fault-failed", reason.clone());
            vm.fail_stop(&reason);
            Some(Served::Gone)
        }
    }
}

/// Adds up the time in which some, and all, of the VM's threads wait, from what this view's lanes see: from the read of a
/// fault to its resolution. The time a fault waits before it is read is not visible in user space and is not in it.
#[derive(Debug)]
pub(crate) struct Stall(Mutex<Waiters>);

#[derive(Debug)]
pub(crate) struct Waiters {
    /// Threads that ever faulted here: what "all" means.
    threads: HashSet<u32>,
    since: Instant,
    /// Faults that wait with each fault lane, and with the slow lanes.
    pub here: Vec<usize>,
    pub slow: usize,
}

impl Waiters {
    /// Threads remembered at most; a VMM that churns threads then only loses "full".
    const MAX_THREADS: usize = 4096;

    fn know(&mut self, threads: impl Iterator<Item = u32>) {
        if self.threads.len() < Self::MAX_THREADS {
            self.threads.extend(threads);
        }
    }
}

impl Stall {
    pub fn new(lanes: usize) -> Self {
        Self(Mutex::new(Waiters { threads: HashSet::new(), since: Instant::now(), here: vec![0; lanes], slow: 0 }))
    }

    /// Faults that wait with the slow lanes.
    pub fn on_disk(&self) -> usize {
        self.0.lock().expect("no panic while held").slow
    }

    /// Count the time since the last change, then change who waits.
    pub fn update(&self, vm: &Vm, change: impl FnOnce(&mut Waiters)) {
        let mut waiters = self.0.lock().expect("no panic while held");
        let now = Instant::now();
        let elapsed = now.saturating_duration_since(waiters.since).as_nanos() as u64;
        let waiting = waiters.here.iter().sum::<usize>() + waiters.slow;
        if waiting > 0 {
            vm.stats().add(Counter::StallSomeNs, elapsed);
            if waiting >= waiters.threads.len() {
                vm.stats().add(Counter::StallFullNs, elapsed);
            }
        }
        waiters.since = now;
        change(&mut waiters);
    }
}

/// Wait for input; true if there is some.
fn sleep_until_readable(fd: impl AsFd, at_most: Duration) -> bool {
    let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: at_most.as_nanos() as _ };
    let mut fds = [PollFd::new(&fd, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).is_ok_and(|ready| ready > 0)
}

/// Listen to the client until it or the engine is gone.
pub fn serve_control(vm: &Vm, view: &Arc<View>) {
    let mut nonsense = 0u64;
    while !vm.is_stopping() && !view.is_closed() {
        if !sleep_until_readable(view.control(), NAP) {
            continue;
        }
        let message = match scm::try_receive_bytes(view.control()) {
            Ok(Some(bytes)) => wire::decode::<ClientToEngine>(&bytes).map_err(|error| error.to_string()),
            Ok(None) => break,
            // The client took its message back, or somebody else did who has the other end.
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Err(error.to_string()),
            Err(error) => {
                vm.report("client-error", format!("Receiving from the client in process {}: {error}", view.pid));
                break;
            }
        };
        match message {
            Ok(answer @ ClientToEngine::Zapped { .. }) => view.zapped(&answer),
            Ok(ClientToEngine::Discard { seq, ranges }) => {
                let error = vm.discard(view, &ranges).err().map(|error| error.to_string());
                if let Some(error) = &error {
                    vm.report("discard-failed", format!("Discarding memory for process {}: {error}", view.pid));
                }
                // A client that does not read its answers repeats its question and gets another.
                if let Err(error) = view.tell(&EngineToClient::DiscardDone { seq, error }) {
                    tracing::warn!(vm = vm.state.name(), "Answering a discard of process {}: {error}", view.pid);
                }
            }
            Ok(ClientToEngine::Pong { .. }) => {}
            Err(error) => {
                // Said at the 1st, 2nd, 4th, 8th ... time; faults are served whatever the client says.
                nonsense += 1;
                if nonsense.is_power_of_two() {
                    vm.report("client-error", format!("The client in process {} sent nonsense: {error}", view.pid));
                }
            }
        }
    }
    view.disconnect();
}
