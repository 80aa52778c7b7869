//! An adopted VM of this engine: its terms (limits and settings), and the work that holds it to the terms.
//!
//! Before: an operator adopted it, or the settings adopt all. After: [`AdoptedVm::work`] is called when it is due.
//! Threads: API threads and the governor change terms; the worker of adopted VMs works. Units: bytes.
//! Promise: its memory is never below the terms by more than a step. If nothing can be reclaimed, the reason is in its
//! status, and there is an event when that begins and when it ends.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use ballast_adopt::swap::Swap;
use ballast_adopt::{Adopted, Memory};
use ballast_api::{Psi, StallSource};
use ballast_base::{Bytes, MIB, PAGE_SIZE};
use ballast_policy::Settings;
use ballast_sys::clock;
use ballast_sys::lock::Lock;
use ballast_sys::process::Process;

use super::stall::{Refaults, Waits};
use crate::events::Events;

/// Most memory reclaimed by one write to `memory.reclaim`: other VMs wait until the write returns.
const STEP: u64 = 8 * MIB;
/// Reclaim goes to 1/MARGIN below the limit, or to LEAST_MARGIN below it if that is more.
const MARGIN: u64 = 64;
const LEAST_MARGIN: u64 = MIB;
/// Time between two checks of a VM below its limit: SHORTEST after it was above, doubled up to LONGEST, and on to IDLE
/// while its resident memory does not change.
const SHORTEST: Duration = Duration::from_millis(5);
const LONGEST: Duration = Duration::from_millis(250);
const IDLE: Duration = Duration::from_millis(500);
/// Between two checks, resident memory of an idle VM changes by less than this.
const FEW: u64 = MIB / 4;
/// Idle VMs are checked together, at the next multiple of this, so that the worker wakes up once for all of them.
const TOGETHER: Duration = Duration::from_secs(1);
const AGAIN: Duration = Duration::from_secs(1);
/// Steps in a row without progress after which that is reported.
const IDLE_STEPS: u32 = 4;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Terms {
    pub name: String,
    pub limit: Option<Bytes>,
    /// The limit of the last plan.
    pub target: Option<Bytes>,
    pub settings: Settings,
}

impl Terms {
    pub fn effective_limit(&self) -> Option<Bytes> {
        self.limit.into_iter().chain(self.target).min()
    }
}

#[derive(Debug)]
pub struct AdoptedVm {
    pub vm: Adopted,
    pub id: String,
    /// Whether it is released, at once or when all of its memory is in DRAM. Then nothing more is reclaimed from it.
    pub leaves: AtomicBool,
    /// The worker holds this during its work.
    working: Mutex<()>,
    since: Instant,
    terms: Mutex<Terms>,
    pace: Mutex<Pace>,
    waits: Mutex<Waits>,
    blocked: Mutex<Option<String>>,
    work_us: AtomicU64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// Counts the changes of terms: results under earlier terms do not count.
    changes: u64,
    pause: Duration,
    due: Option<Instant>,
    idle_steps: u32,
    resident: u64,
}

#[derive(Clone, Copy, Debug)]
pub struct Figures {
    pub memory: Memory,
    pub restored_pages: u64,
    pub stall: Psi,
    pub stall_source: StallSource,
    pub refaults: Refaults,
}

/// The id of a process of this boot: half of the boot's id, then start time and pid.
fn identity(Process { pid, start }: Process) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    format!("{boot:0>16}{:016x}", (start << 22) | u64::from(pid))
}

fn until_all_look(then: Instant) -> Duration {
    static BEGUN: OnceLock<Instant> = OnceLock::new();
    let since = then.saturating_duration_since(*BEGUN.get_or_init(|| then));
    TOGETHER - Duration::from_nanos((since.as_nanos() % TOGETHER.as_nanos()) as u64)
}

impl AdoptedVm {
    pub fn new(vm: Adopted, terms: Terms) -> Self {
        Self {
            id: identity(vm.process),
            waits: Mutex::new(Waits::new(0, Instant::now())),
            leaves: AtomicBool::new(false),
            working: Mutex::default(),
            since: Instant::now(),
            terms: Mutex::new(terms),
            pace: Mutex::default(),
            blocked: Mutex::default(),
            work_us: AtomicU64::new(0),
            vm,
        }
    }

    pub fn terms(&self) -> Terms {
        self.terms.locked().clone()
    }

    pub fn name(&self) -> String {
        self.terms.locked().name.clone()
    }

    pub fn change(&self, change: impl FnOnce(&mut Terms)) {
        change(&mut self.terms.locked());
        let pace = &mut *self.pace.locked();
        *pace = Pace { changes: pace.changes + 1, ..Pace::default() };
    }

    /// Why none of its memory can be reclaimed now, if that is so.
    pub fn blocked(&self) -> Option<String> {
        if self.leaves.load(Ordering::Acquire) {
            return Some("all of its memory comes back, then it is released".into());
        }
        self.blocked.locked().clone()
    }

    /// Current figures; an error if the VMM has ended. `restore_us`: time to restore one page.
    pub fn figures(&self, restore_us: f64) -> std::io::Result<Figures> {
        let memory = self.vm.memory()?;
        let restored_pages = self.vm.restored_pages();
        let (total_us, stall_source) = match self.vm.stall_us() {
            Some(us) => (us, StallSource::Cgroup),
            None => ((restored_pages as f64 * restore_us) as u64, StallSource::Estimated),
        };
        let waits = &mut *self.waits.locked();
        waits.add(total_us, restored_pages, memory.far / PAGE_SIZE as u64, Instant::now());
        Ok(Figures { memory, restored_pages, stall: waits.psi(), stall_source, refaults: waits.refaults() })
    }

    pub fn due(&self) -> Option<Instant> {
        let has_limit = self.limit().is_some();
        has_limit.then(|| self.pace.locked().due.unwrap_or(self.since))
    }

    /// The limit to which it is held: none if it leaves, whatever a plan or an operator sets meanwhile.
    fn limit(&self) -> Option<Bytes> {
        let leaves = self.leaves.load(Ordering::Acquire);
        self.terms.locked().effective_limit().filter(|_| !leaves)
    }

    /// Waits until the step that is under way has ended, if there is one.
    pub fn finish_step(&self) {
        drop(self.working.locked());
    }

    /// Reclaims from the VM if it is above its limit, at most one step.
    pub fn work(&self, swap: &Swap, events: &Events) {
        let _working = self.working.locked();
        // A copy, because the kernel may take long for a step, and a change of the terms must not wait for the step.
        let mut pace = *self.pace.locked();
        let Some(limit) = self.limit() else { return };
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
                // The VMM may have mapped its RAM anew. If it has ended, its pidfd reports that.
                if !self.vm.has_ended() {
                    let why = self.vm.look_again().err().map_or_else(|| error.to_string(), |why| why.to_string());
                    self.say(self.vm.pinned().or(Some(why)), events);
                }
                AGAIN
            }
        };
        let now = Instant::now();
        pace.due = Some(now + if pause < IDLE { pause } else { pause + until_all_look(now + pause) });
        let held = &mut *self.pace.locked();
        if held.changes == pace.changes {
            *held = pace;
        }
        let took = clock::cpu_time().saturating_sub(begun);
        self.work_us.fetch_add(took.as_micros() as u64, Ordering::Relaxed);
    }

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
            // Resident memory was an estimate: only a count shows that nothing can be reclaimed.
            self.vm.scan()?;
            return Ok(Outcome::Again);
        }
        self.vm.look_again().map_err(std::io::Error::other)?;
        let stays = || format!("the kernel keeps {} of it in memory", Bytes(resident));
        Ok(Outcome::Blocked(self.vm.pinned().unwrap_or_else(stays)))
    }

    fn say(&self, why: Option<String>, events: &Events) {
        let before = std::mem::replace(&mut *self.blocked.locked(), why.clone());
        let name = self.name();
        match (before, why) {
            (None, Some(why)) => events.add(Some(name), "adopted-blocked", why),
            (Some(_), None) => events.add(Some(name), "adopted-unblocked", "memory goes to swap again".into()),
            _ => {}
        }
    }
}

enum Outcome {
    /// It is below its limit, with this many bytes resident.
    Below(u64),
    Went,
    Again,
    Blocked(String),
}
