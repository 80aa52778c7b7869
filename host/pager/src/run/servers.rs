//! Servers: a worker per CPU for the userfaultfds of all VMs, and one for clients' messages. No VM can stop the others.
//!
//! Before: [`Servers::add`] gets a descriptor with its [`Serve`]. After: a worker visits it whenever there is input,
//! the worker of the preferred CPU if it has one, until [`Served::close`].
//! Threads: a worker for each CPU of the process, pinned to it, from its first descriptor on; one that is not pinned;
//! one for each server that is stuck, or was in the last second; a watchdog. All have a higher priority than guests.
//! Promise: a server that is stuck (in a lock that its VMM holds, in a store) delays those that share its worker by at
//! most two [`TICK`]s: its thread stays with it alone, and another thread takes the rest. A server that runs for
//! [`TOO_MANY_TICKS`] without sleeping is handled in the same way. A panic affects one server. A worker that real-time
//! threads keep from its CPU may use other CPUs from then on. A worker that panics outside of a visit ends the process:
//! the next engine then serves all VMs, while a missing worker would serve none.
//!
//! A thread that has run for long and sleeps in the kernel is stuck. One that waits for a CPU counts as stuck only
//! after [`TOO_MANY_TICKS`], because another thread would only divide the CPU. A server that was stuck stays apart for
//! [`CALM`], with its thread, so a server that keeps getting stuck delays the others once.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use ballast_sys::affinity::Cpus;
use ballast_sys::priority::run_first;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use super::input::Input;
use super::pool::blocking;
use super::pool::watchdog::{QUIET_TICKS, sleeps};
use super::queue::{GroupId, TaskId};
use super::serve::{Placement, Serve};
use super::set::{Notify, Set, Slot, Visit, Worker};

pub(crate) mod stuck;

/// Time between checks of the watchdog while there are visits; length of a visit from which on it is checked.
const TICK: Duration = Duration::from_millis(5);
/// A visit of this length is stuck even if it does not sleep: a real-time thread has its CPU, or the kernel takes that
/// long (for example to drop an address space, if a VMM is killed while we fill one of its pages). It is counted in
/// ticks: if the host or the process was suspended, the watchdog was, too.
const TOO_MANY_TICKS: u32 = 20;
/// Time between searches for workers that get no CPU although there is input, and searches in a row that must find one.
/// Workers have a higher priority than guests, so only real-time threads keep one from its CPU for that long.
const STARVED_EVERY: Duration = Duration::from_millis(100);
const STARVED_TICKS: u32 = 2;
/// Longest sleep of the watchdog, so that it makes those searches.
const LONGEST_SLEEP: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// A server that was not stuck for this long rejoins the others; the time doubles each time, up to this power of 2.
const CALM: Duration = Duration::from_secs(1);
const MOST_DOUBLED: u32 = 8;

fn calm_of(slot: &Slot) -> Duration {
    CALM * (1 << slot.times_stuck().saturating_sub(1).min(MOST_DOUBLED))
}

/// The workers and their sets. A clone has the same workers.
#[derive(Clone, Debug)]
pub struct Servers(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    /// One for each CPU, then the one that is bound to none.
    sets: Vec<Arc<Set>>,
    all: Cpus,
    last: AtomicU64,
    /// Held while threads are started; true: there is a watchdog.
    starting: Mutex<bool>,
    is_watched: AtomicBool,
    /// Wakes the watchdog. A timer, because arming it wakes no thread while a fault waits.
    timer: OwnedFd,
    threads: AtomicU32,
}

/// A descriptor that is served until it is closed.
#[derive(Clone, Debug)]
pub struct Served(Arc<Slot>);

impl Served {
    /// Ends the visits, without waiting for one that is under way.
    pub fn close(&self) {
        self.0.close();
    }

    /// Has only the next input cause a visit; input that is there counts. A server whose peer writes more often than it
    /// is read calls this whenever it has read everything. A move to another worker ends it.
    ///
    /// # Errors
    /// The kernel does not watch its descriptor.
    pub fn listen_once(&self) -> io::Result<()> {
        let place = self.0.place();
        place.as_ref().map_or(Ok(()), |set| set.listen(&self.0, Input::add_once))
    }

    /// Returns whether no visit is under way, and none will come.
    pub fn is_over(&self) -> bool {
        self.0.is_over()
    }

    /// Waits until [`Served::is_over`]. It must have been closed.
    pub fn wait(&self) {
        if !self.is_over() {
            blocking(|| self.0.wait(None));
        }
    }

    /// Like [`Served::wait`], until this time at most.
    pub fn wait_until(&self, until: Instant) {
        if !self.is_over() {
            blocking(|| self.0.wait(Some(until)));
        }
    }
}

/// Calls `work`, and ends the process if it panics.
fn or_end(work: impl FnOnce()) {
    if catch_unwind(AssertUnwindSafe(work)).is_err() {
        tracing::error!("The threads that serve faults have failed");
        std::process::exit(101);
    }
}

struct Counted(Servers);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.0.threads.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Servers {
    /// The servers of this process.
    ///
    /// # Errors
    /// The kernel gives no descriptors.
    pub fn of_process() -> io::Result<Self> {
        static SERVERS: OnceLock<Servers> = OnceLock::new();
        static STARTING: Mutex<()> = Mutex::new(());
        let _one = STARTING.lock().expect("no panic while held");
        if let Some(servers) = SERVERS.get() {
            return Ok(servers.clone());
        }
        let servers = Self::new()?;
        Ok(SERVERS.get_or_init(|| servers).clone())
    }

    /// Separate servers, on the same CPUs.
    ///
    /// # Errors
    /// The kernel gives no descriptors, or does not list the CPUs.
    pub fn new() -> io::Result<Self> {
        // The first thread of the process is not pinned.
        let all = Cpus::of(std::process::id())?;
        let sets = all.iter().map(Some).chain([None]).map(|cpu| Set::new(cpu, false)).collect::<io::Result<_>>()?;
        Ok(Self(Arc::new(Shared {
            sets,
            all,
            last: AtomicU64::new(0),
            starting: Mutex::new(false),
            is_watched: AtomicBool::new(false),
            timer: timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?,
            threads: AtomicU32::new(0),
        })))
    }

    /// Serves a descriptor. `server` makes its server, from a handle that notifies it.
    ///
    /// # Errors
    /// The kernel does not watch this descriptor, or cannot start a thread.
    pub fn add(
        &self,
        group: GroupId,
        fd: Arc<dyn AsFd + Send + Sync>,
        server: impl FnOnce(Notify) -> Box<dyn Serve>,
    ) -> io::Result<Served> {
        let id = TaskId::new(self.0.last.fetch_add(1, Ordering::Relaxed) + 1);
        let slot = Slot::new(id, group, fd, server);
        let set = self.home(&slot);
        self.start(set)?;
        slot.enter(set)?;
        Ok(Served(slot))
    }

    /// Number of threads, without the watchdog.
    pub fn threads(&self) -> u32 {
        self.0.threads.load(Ordering::Acquire)
    }

    /// The set for a slot that is new, or that was stuck: the one with the fewest slots.
    fn home(&self, slot: &Slot) -> &Arc<Set> {
        let (roaming, cpus) = self.0.sets.split_last().expect("there is one at least");
        cpus.iter().filter(|_| !slot.roams).min_by_key(|set| set.len()).unwrap_or(roaming)
    }

    fn target(&self, set: &Arc<Set>, slot: &Slot, placement: Placement) -> Option<&Arc<Set>> {
        let (roaming, cpus) = self.0.sets.split_last().filter(|_| !slot.roams)?;
        let to = match placement {
            Placement::Stay => None,
            Placement::Cpu(cpu) => cpus.iter().find(|set| set.cpu == Some(cpu)),
            Placement::Roam => Some(roaming),
            Placement::Any if set.is_crowded_for(slot) => cpus.iter().find(|other| other.is_idle() || other.len() == 0),
            Placement::Any => None,
        };
        to.filter(|to| !set.is_apart && !Arc::ptr_eq(to, set))
    }

    /// Starts a worker for this set, and the watchdog, unless they exist.
    fn start(&self, set: &Arc<Set>) -> io::Result<()> {
        let mut has_watchdog = self.0.starting.lock().expect("no panic while held");
        if !*has_watchdog {
            let servers = self.clone();
            std::thread::Builder::new().name("fault-watchdog".into()).spawn(move || or_end(|| servers.watch()))?;
            *has_watchdog = true;
        }
        if set.lock().worker.is_some() {
            return Ok(());
        }
        let (worker, begin) = self.spawn(set)?;
        set.lock().worker = Some(worker);
        let _ = begin.send(());
        Ok(())
    }

    /// Starts a thread for this set. It begins after a message on the channel, and ends if the channel is closed.
    fn spawn(&self, set: &Arc<Set>) -> io::Result<(Arc<Worker>, Sender<()>)> {
        let worker = Arc::new(Worker { number: AtomicU32::new(0), set: Mutex::new(set.clone()) });
        let (begin, told): (_, Receiver<()>) = mpsc::channel();
        let name = set.cpu.map_or("fault".into(), |cpu| format!("fault/{cpu}"));
        let (servers, me) = (self.clone(), worker.clone());
        self.0.threads.fetch_add(1, Ordering::AcqRel);
        let counted = Counted(self.clone());
        std::thread::Builder::new().name(name).spawn(move || {
            let _counted = counted;
            me.number.store(rustix::thread::gettid().as_raw_pid() as u32, Ordering::Release);
            run_first();
            if told.recv().is_ok() {
                or_end(|| servers.work(&me));
            }
        })?;
        Ok((worker, begin))
    }

    fn work(&self, me: &Arc<Worker>) {
        let mut set = me.set.lock().expect("no panic while held").clone();
        if let Some(cpu) = set.cpu {
            // Without permission, the worker runs where the scheduler puts it.
            let _ = Cpus::only(cpu).hold(0);
        }
        let mut events = Vec::with_capacity(64);
        let mut now = Instant::now();
        let mut stuck = now;
        let mut is_eager = false;
        loop {
            let mut at_most = None;
            if set.is_apart {
                let Some(slot) = set.any() else { return set.is_left() };
                let calm = calm_of(&slot);
                if now.saturating_duration_since(stuck) >= calm {
                    if self.bring_home(&slot, &set) {
                        return set.is_left();
                    }
                    stuck = now;
                }
                at_most = Some((stuck + calm).saturating_duration_since(now));
            }
            if std::mem::take(&mut is_eager) {
                std::thread::yield_now();
            }
            if let Err(error) = set.wait(&mut events, now, at_most) {
                // An error of our own epoll set, which is open.
                tracing::error!("Waiting for faults: {error}");
                std::thread::sleep(TICK);
            }
            now = Instant::now();
            let Some(slot) = set.begin(&events, now) else { continue };
            if !self.0.is_watched.load(Ordering::Relaxed) {
                self.arm_watchdog();
            }
            let after = slot.visit(now);
            let begun = std::mem::replace(&mut now, Instant::now());
            let spent = now.saturating_duration_since(begun);
            if spent >= TICK {
                stuck = now;
            }
            set = me.book(set, &slot, spent, &after);
            is_eager = after.is_eager;
            if let Some(to) = self.target(&set, &slot, after.placement)
                && let Err(error) = self.start(to).and_then(|()| slot.relocate(&set, to))
            {
                tracing::debug!("Moving a userfaultfd to another worker: {error}");
            }
        }
    }

    /// Moves a slot back from a set apart. Returns whether it was moved.
    fn bring_home(&self, slot: &Arc<Slot>, from: &Arc<Set>) -> bool {
        let to = self.home(slot);
        let moved = self.start(to).and_then(|()| slot.relocate(from, to));
        moved.unwrap_or_else(|error| {
            tracing::debug!("Moving a userfaultfd back: {error}");
            false
        })
    }

    fn arm_watchdog(&self) {
        if !self.0.is_watched.swap(true, Ordering::SeqCst) {
            let tick = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
            let once = Itimerspec { it_interval: Timespec::default(), it_value: tick };
            // If arming our own timer fails, the watchdog checks within `LONGEST_SLEEP`.
            let _ = timerfd_settime(&self.0.timer, TimerfdTimerFlags::empty(), &once);
        }
    }

    /// Sleeps until the timer has fired, or for [`LONGEST_SLEEP`]. Returns whether it has fired.
    fn sleep_as_watchdog(&self) -> bool {
        let mut fds = [PollFd::new(&self.0.timer, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&LONGEST_SLEEP));
        let mut fired = [0; 8];
        rustix::io::read(&self.0.timer, &mut fired).is_ok()
    }

    fn watch(self) {
        run_first();
        let mut seen = vec![(0, 0); self.0.sets.len()];
        let mut starved = vec![(0, 0); self.0.sets.len()];
        let (mut quiet, mut looked, mut may_starve) = (0, Instant::now(), false);
        loop {
            if quiet > QUIET_TICKS && !may_starve {
                // The next visit arms its timer, which costs the fault served then some 2 us.
                // This thread clears the flag and then checks the sets; a thread that begins a visit does so under its
                // set's lock, and then reads the flag. So one of the two sees the other.
                self.0.is_watched.store(false, Ordering::SeqCst);
                let visited = self.check(&mut seen) || self.sleep_as_watchdog() && self.check(&mut seen);
                self.0.is_watched.store(true, Ordering::SeqCst);
                if visited {
                    quiet = 0;
                }
            } else {
                std::thread::sleep(TICK);
                quiet = if self.check(&mut seen) { 0 } else { quiet + 1 };
            }
            // By the clock, not by ticks: visits on one CPU keep the watchdog awake, whatever another's worker does.
            if looked.elapsed() >= STARVED_EVERY {
                looked = Instant::now();
                may_starve = self.find_starved(&mut starved);
            }
        }
    }

    /// Unpins workers without CPU time. `starved`: visits and ticks of each set. Returns whether one may be starved.
    fn find_starved(&self, starved: &mut [(u64, u32)]) -> bool {
        let mut any = false;
        for (set, starved) in self.0.sets.iter().zip(starved) {
            let Some((visits, worker)) = set.waits() else {
                starved.1 = 0;
                continue;
            };
            any = true;
            *starved = (visits, if visits == starved.0 { starved.1 + 1 } else { 0 });
            if starved.1 == STARVED_TICKS {
                tracing::warn!(cpu = set.cpu, "A fault worker gets no CPU time where it is; it may run on any CPU now");
                self.unpin(&worker);
            }
        }
        any
    }

    fn unpin(&self, worker: &Worker) {
        let number = worker.number.load(Ordering::Acquire);
        if number != 0 {
            let _ = self.0.all.hold(number);
        }
    }

    /// Checks all sets once. `seen`: for each set, visits so far, and ticks that found the same visit. Returns whether
    /// there was a visit since the last check.
    fn check(&self, seen: &mut [(u64, u32)]) -> bool {
        let mut any = false;
        for (set, seen) in self.0.sets.iter().zip(seen) {
            let (visits, visit) = set.current_visit();
            any |= visits != seen.0 || visit.is_some();
            *seen = (visits, if visits == seen.0 && visit.is_some() { seen.1 + 1 } else { 0 });
            let Some((visit, worker)) = visit.filter(|(visit, _)| visit.since.elapsed() >= TICK) else { continue };
            if (seen.1 >= TOO_MANY_TICKS || sleeps(worker.number.load(Ordering::Acquire)))
                && let Err(error) = self.replace(set, &visit, &worker)
            {
                tracing::error!("Another thread for a fault worker that is stuck: {error}");
            }
        }
        any
    }

    /// The worker of this set is stuck in this visit: it stays with the visited slot, and another worker takes the set.
    fn replace(&self, set: &Arc<Set>, visit: &Visit, stuck: &Worker) -> io::Result<()> {
        let apart = Set::new(None, true)?;
        // The new thread ends if the visit has ended.
        let (worker, begin) = self.spawn(set)?;
        if !visit.slot.part(set, visit, &apart, &worker)? {
            return Ok(());
        }
        let _ = begin.send(());
        // The stuck worker's CPU has another worker now.
        self.unpin(stuck);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
