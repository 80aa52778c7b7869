//! An adopted VM of this engine: its terms, and the work that holds it to them.
//!
//! Before: an operator adopted it, or the settings say all. After: [`AdoptedVm::work`] is called when it says so.
//! Threads: API threads and the governor change terms; the worker of adopted VMs works. Units: bytes.
//! Promise: its memory is never below what the terms allow by more than a step. A reason why nothing goes is in its
//! status, and is an event when it begins and when it ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ballast_adopt::swap::Swap;
use ballast_adopt::{Adopted, Memory};
use ballast_api::{Psi, StallSource};
use ballast_base::{Bytes, MIB, PAGE_SIZE};
use ballast_policy::Settings;
use ballast_sys::clock;
use ballast_sys::process::Process;

use super::stall::{Refaults, Waits};
use crate::events::Events;

/// Most memory that goes in one call of the kernel's: others wait for it.
const STEP: u64 = 8 * MIB;
/// It goes down to 1/MARGIN below the limit, and that is at least so much.
const MARGIN: u64 = 64;
const LEAST_MARGIN: u64 = MIB;
/// Times between two looks at a VM that is below its limit: shortest after it was above, doubled up to the longest, and
/// on to the idle one while its resident memory stays as it is.
const SHORTEST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_secs(1);
/// Resident memory of an idle VM differs by less than this between two looks.
const FEW: u64 = MIB / 4;
/// VMs whose next look is later than this have it together, so that the worker wakes up once for all of them.
const TOGETHER: Duration = Duration::from_millis(250);
/// Time after which what failed is tried again.
const AGAIN: Duration = Duration::from_secs(1);
/// Steps without progress, one after the other, until that is said.
const IDLE_STEPS: u32 = 4;

/// What operators and policies want of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Terms {
    /// Its name here.
    pub name: String,
    /// The operator's limit.
    pub limit: Option<Bytes>,
    /// The limit of the last plan.
    pub target: Option<Bytes>,
    /// The operator's settings.
    pub settings: Settings,
}

impl Terms {
    /// The lower of both limits.
    pub fn effective_limit(&self) -> Option<Bytes> {
        self.limit.into_iter().chain(self.target).min()
    }
}

/// An adopted VM.
#[derive(Debug)]
pub struct AdoptedVm {
    /// Its process and its memory.
    pub vm: Adopted,
    /// Unique; never used again.
    pub id: String,
    /// An operator wants it released with all of its memory in DRAM.
    pub leaves: AtomicBool,
    since: Instant,
    terms: Mutex<Terms>,
    pace: Mutex<Pace>,
    waits: Mutex<Waits>,
    blocked: Mutex<Option<String>>,
    work_us: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// How often terms have changed. What was found under other terms does not count.
    changes: u64,
    pause: Duration,
    due: Option<Instant>,
    idle_steps: u32,
    /// What was resident at the last look below the limit.
    resident: u64,
}

/// Figures of now.
#[derive(Clone, Copy, Debug)]
pub struct Figures {
    /// Where its memory is.
    pub memory: Memory,
    /// Pages that were restored.
    pub restored_pages: u64,
    /// Its stall.
    pub stall: Psi,
    /// Where that comes from.
    pub stall_source: StallSource,
    /// Its refaults.
    pub refaults: Refaults,
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The identity of a process of this boot: half of the boot's, then start time and pid.
fn identity(Process { pid, start }: Process) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    format!("{boot:0>16}{:016x}", (start << 22) | u64::from(pid))
}

/// Time from then until the next look at all VMs that may wait for each other.
fn until_all_look(then: Instant) -> Duration {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    let since = then.saturating_duration_since(*BEGUN.get_or_init(|| then));
    TOGETHER - Duration::from_nanos((since.as_nanos() % TOGETHER.as_nanos()) as u64)
}

impl AdoptedVm {
    /// A VM with these terms.
    pub fn new(vm: Adopted, terms: Terms) -> Self {
        Self {
            id: identity(vm.process),
            waits: Mutex::new(Waits::new(0, Instant::now())),
            leaves: AtomicBool::new(false),
            since: Instant::now(),
            terms: Mutex::new(terms),
            pace: Mutex::default(),
            blocked: Mutex::default(),
            work_us: AtomicU64::new(0),
            vm,
        }
    }

    /// Its terms.
    pub fn terms(&self) -> Terms {
        locked(&self.terms).clone()
    }

    /// Its name.
    pub fn name(&self) -> String {
        locked(&self.terms).name.clone()
    }

    /// Change its terms. The caller wakes the worker.
    pub fn change(&self, change: impl FnOnce(&mut Terms)) {
        change(&mut locked(&self.terms));
        let pace = &mut *locked(&self.pace);
        *pace = Pace { changes: pace.changes + 1, ..Pace::default() };
    }

    /// Why nothing of it goes, if so.
    pub fn blocked(&self) -> Option<String> {
        if self.leaves.load(Ordering::Acquire) {
            return Some("all of its memory comes back, then it is released".into());
        }
        locked(&self.blocked).clone()
    }

    /// Its figures; `restore_us` is what one page takes to come back.
    ///
    /// # Errors
    /// Its VMM has ended.
    pub fn figures(&self, restore_us: f64) -> std::io::Result<Figures> {
        let memory = self.vm.memory()?;
        let restored_pages = self.vm.restored_pages();
        let (total_us, stall_source) = match self.vm.stall_us() {
            Some(us) => (us, StallSource::Cgroup),
            None => ((restored_pages as f64 * restore_us) as u64, StallSource::Estimated),
        };
        let waits = &mut *locked(&self.waits);
        waits.add(total_us, restored_pages, memory.far / PAGE_SIZE as u64, Instant::now());
        Ok(Figures { memory, restored_pages, stall: waits.psi(), stall_source, refaults: waits.refaults() })
    }

    /// When there is work, if ever.
    pub fn due(&self) -> Option<Instant> {
        let has_limit = locked(&self.terms).effective_limit().is_some();
        has_limit.then(|| locked(&self.pace).due.unwrap_or(self.since))
    }

    /// Hold it to its limit: one step at most.
    pub fn work(&self, swap: &Swap, events: &Events) {
        // A copy: a step may take the kernel long, and who changes the terms must not wait for it.
        let mut pace = *locked(&self.pace);
        let Some(limit) = locked(&self.terms).effective_limit() else { return };
        let begun = clock::cpu_time();
        let pause = match self.try_work(limit.0, swap, &mut pace) {
            Ok(Outcome::Below(resident)) => {
                let is_idle = resident.abs_diff(pace.resident) < FEW;
                pace.pause = (pace.pause * 2).clamp(SHORTEST, if is_idle { IDLE } else { LONGEST });
                pace.resident = resident;
                self.say(None, events);
                pace.pause
            }
            Ok(Outcome::Went) => {
                pace.pause = Duration::ZERO;
                self.say(None, events);
                Duration::ZERO
            }
            Ok(Outcome::Again) => Duration::ZERO,
            Ok(Outcome::Blocked(why)) => {
                self.say(Some(why), events);
                AGAIN
            }
            Err(error) => {
                // It may have mapped its RAM anew. If it ended, its descriptor says so.
                if !self.vm.has_ended() {
                    let why = self.vm.look_again().err().map_or_else(|| error.to_string(), |why| why.to_string());
                    self.say(self.vm.pinned().or(Some(why)), events);
                }
                AGAIN
            }
        };
        let now = Instant::now();
        pace.due = Some(now + if pause < TOGETHER { pause } else { pause + until_all_look(now + pause) });
        let held = &mut *locked(&self.pace);
        if held.changes == pace.changes {
            *held = pace;
        }
        let took = clock::cpu_time().saturating_sub(begun);
        self.work_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

    /// CPU time of the engine's work for it, in microseconds.
    pub fn work_us(&self) -> u64 {
        self.work_us.load(Ordering::Relaxed)
    }

    fn try_work(&self, limit: u64, swap: &Swap, pace: &mut Pace) -> std::io::Result<Outcome> {
        if let Some(why) = self.vm.pinned() {
            return Ok(Outcome::Blocked(why));
        }
        let margin = (limit / MARGIN).max(LEAST_MARGIN).min(limit / 4);
        let resident = self.vm.memory()?.resident;
        if resident <= limit - margin / 2 {
            pace.idle_steps = 0;
            return Ok(Outcome::Below(resident));
        }
        if let Some(why) = self.vm.blocked(swap) {
            return Ok(Outcome::Blocked(why));
        }
        let step = self.vm.step((resident - (limit - margin)).min(STEP))?;
        if step.out_pages * 8 >= step.asked_pages.max(1) {
            pace.idle_steps = 0;
            return Ok(Outcome::Went);
        }
        pace.idle_steps += 1;
        if pace.idle_steps < IDLE_STEPS {
            // What is resident was an estimate: only a count shows that there is nothing to take.
            self.vm.scan()?;
            return Ok(Outcome::Again);
        }
        self.vm.look_again().map_err(std::io::Error::other)?;
        let stays = || format!("the kernel keeps {} of it in memory", Bytes(resident));
        Ok(Outcome::Blocked(self.vm.pinned().unwrap_or_else(stays)))
    }

    /// What its status says from now on.
    fn say(&self, why: Option<String>, events: &Events) {
        let before = std::mem::replace(&mut *locked(&self.blocked), why.clone());
        let name = self.name();
        match (before, why) {
            (None, Some(why)) => events.add(Some(name), "adopted-blocked", why),
            (Some(_), None) => events.add(Some(name), "adopted-unblocked", "memory goes to swap again".into()),
            _ => {}
        }
    }
}

/// The outcome of one piece of work.
enum Outcome {
    /// It is below its limit, with this much resident.
    Below(u64),
    /// Some memory went.
    Went,
    /// Nothing went this time.
    Again,
    /// Nothing can go.
    Blocked(String),
}
