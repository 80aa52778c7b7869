//! The governor: once per tick, it samples all VMs, decides, and applies the decisions.
//!
//! ```text
//! sample (counters) ─► decide (a policy, or a program with a lease) ─► apply (a word per VM, notify) ─► log, events
//! ```
//!
//! Before: the engine serves VMs, and an operator named a policy. After: each VM has a target beside its operator's
//! limit; the lower one holds, and the reclaim worker does the rest.
//! Threads: one runs the loop; API threads make requests under its lock. No worker ever calls this: the pager cannot
//! name it.
//! Units: milliseconds of the monotonic clock.
//! Promise: with the policy *none* and no lease it sleeps, and no VM has a target, unless the pool's memory on demand
//! is divided ([`demand`]). A VM that is held, pinned, or left with an orphaned engine keeps what it has. A policy that
//! panics changes nothing and raises an event; when a program stops sending plans, the policy decides again.

mod balloon;
pub mod demand;
pub mod far;
mod guarded;
mod log;
pub mod operator;
pub mod rates;
pub mod requests;
mod sample;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ballast_base::Bytes;
use ballast_policy::admission::Admission;
use ballast_policy::{Action, Decision, External, HostState, Kind, Plan, Setup, Snapshot, State, check_external};
use ballast_sys::lock::Lock;
use ballast_sys::priority::run_first;

use crate::engine::host::Host;
use crate::engine::served::Served;
use demand::Divisions;
use guarded::guarded;
use log::Log;
use sample::{Sampler, now_ms};

const DIVIDES_EVERY_MS: u64 = 500;

pub struct Governor {
    inner: Mutex<Inner>,
    changed: Condvar,
    /// The last value of [`Inner::decides`], readable without the lock, which a tick may hold while it waits for the
    /// kernel's figures of a VM.
    decides: AtomicBool,
    mapper_scan: OnceLock<mpsc::Sender<Arc<Served>>>,
    /// Called with new settings, so that the next engine begins with them.
    keep: Box<dyn Fn(Setup) + Send + Sync>,
}

#[derive(Debug)]
struct Inner {
    setup: Setup,
    state: State,
    sampler: Sampler,
    log: Log,
    lease: Option<Lease>,
    last: Option<Snapshot>,
    /// When the next tick is due; `None` while the policy is `none` and there is no lease.
    due_ms: Option<u64>,
    host_state: HostState,
    exhaustion_ms: Option<u64>,
    overcommitted: bool,
    /// Whether another engine has, or will soon have, some of the VMs.
    rests: bool,
    divisions: Divisions,
    ticks: u64,
    changed: u64,
    failures: u64,
}

#[derive(Debug)]
struct Lease {
    wanted: External,
    length_ms: u64,
    until_ms: u64,
}

impl std::fmt::Debug for Governor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Governor").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Inner {
    fn is_active(&self) -> bool {
        self.setup.policy != Kind::None || self.lease.is_some()
    }

    fn decides(&self) -> bool {
        self.is_active() || self.divisions.divides()
    }

    /// The last tick's snapshot. Without ticks: a new one, with rates since the last call.
    fn snapshot(&mut self, host: &Host) -> Snapshot {
        match self.last.clone().filter(|_| self.is_active()) {
            Some(last) => last,
            None => self.sampler.take(host, &self.setup, now_ms()).unwrap_or_else(|| self.seen(host)),
        }
    }

    /// Like [`Self::snapshot`], for callers that need no rates.
    fn seen(&self, host: &Host) -> Snapshot {
        let last = self.last.clone().filter(|_| self.is_active());
        last.unwrap_or_else(|| self.sampler.peek(host, &self.setup, now_ms()))
    }
}

impl Governor {
    pub fn new(setup: Setup, keep: impl Fn(Setup) + Send + Sync + 'static) -> Self {
        let inner = Inner {
            setup,
            state: State::default(),
            sampler: Sampler::default(),
            log: Log::default(),
            lease: None,
            last: None,
            due_ms: Some(0),
            host_state: HostState::High,
            exhaustion_ms: None,
            overcommitted: false,
            rests: false,
            divisions: Divisions::default(),
            ticks: 0,
            changed: 0,
            failures: 0,
        };
        let (decides, inner) = (AtomicBool::new(inner.decides()), Mutex::new(inner));
        Self { inner, changed: Condvar::new(), decides, mapper_scan: OnceLock::new(), keep: Box::new(keep) }
    }

    pub fn start(self: &Arc<Self>, host: Arc<Host>, mapper_scan: mpsc::Sender<Arc<Served>>) -> std::io::Result<()> {
        let _ = self.mapper_scan.set(mapper_scan);
        let governor = self.clone();
        std::thread::Builder::new().name("governor".into()).spawn(move || {
            // API requests wait for the lock that this thread holds.
            run_first();
            loop {
                governor.wait();
                governor.tick(&host);
            }
        })?;
        Ok(())
    }

    fn wait(&self) {
        let mut inner = self.inner.locked();
        loop {
            let lease = inner.lease.as_ref().map(|lease| lease.until_ms);
            let due_ms = inner.due_ms.into_iter().chain(lease).min().filter(|_| !inner.rests);
            let Some(due_ms) = due_ms else {
                inner = self.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = due_ms.saturating_sub(now_ms());
            if left == 0 {
                return;
            }
            let waited = self.changed.wait_timeout(inner, Duration::from_millis(left));
            inner = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn notify(&self, inner: &mut Inner) {
        inner.due_ms = Some(0);
        self.decides.store(inner.decides(), Ordering::Release);
        self.changed.notify_all();
    }

    /// The pool has little left for touches of VMs on demand: divides its memory now, unless that is already being
    /// done. The pool does not wait for a decision in progress; it repeats the call.
    pub fn pool_is_short(&self) {
        if let Ok(mut inner) = self.inner.try_lock()
            && !inner.divisions.divides()
        {
            self.notify(&mut inner);
        }
    }

    /// Makes no decisions while VMs move between engines: an engine that has some of the VMs would divide all memory
    /// among them. Returns when no tick is running.
    pub fn rest(&self) {
        self.inner.locked().rests = true;
    }

    pub fn is_resting(&self) -> bool {
        self.inner.locked().rests
    }

    pub fn resume(&self) {
        let mut inner = self.inner.locked();
        if std::mem::replace(&mut inner.rests, false) {
            self.changed.notify_all();
        }
    }

    /// A VM was opened: without a policy and a lease, a target that an earlier engine left is removed. Does not wait
    /// for a tick; if a policy begins at this moment, its next tick sets the target again.
    pub fn opened(&self, served: &Served) {
        if !self.decides.load(Ordering::Acquire) {
            served.vm.state.set_target(None);
        }
    }

    fn tick(&self, host: &Host) {
        let mut guard = self.inner.locked();
        let inner = &mut *guard;
        if inner.rests {
            return;
        }
        let at_ms = now_ms();
        let mut next_ms = at_ms + inner.setup.tick_ms;
        let Some(snapshot) = inner.sampler.take(host, &inner.setup, at_ms) else {
            inner.due_ms = Some(next_ms);
            return;
        };
        let mut plan = lease_plan(inner, host, &snapshot, at_ms).or_else(|| built_in(inner, host, &snapshot));
        if let Some(plan) = &mut plan {
            let said = inner.divisions.add(plan, &snapshot, host, &inner.setup);
            said.into_iter().for_each(|said| host.events.add(None, "pool-divided", said));
        }
        if inner.divisions.divides() {
            next_ms = next_ms.min(at_ms + DIVIDES_EVERY_MS);
        }
        inner.due_ms = inner.decides().then_some(next_ms);
        self.decides.store(inner.decides(), Ordering::Release);
        if let Some(plan) = plan {
            let vms: HashMap<String, Arc<Served>> =
                host.all().into_iter().map(|served| (served.vm.state.id().to_string(), served)).collect();
            let is_short = inner.is_active() && plan.host_state >= HostState::Hard;
            vms.iter().for_each(|(id, served)| served.vm.set_others_wait(is_short || inner.divisions.limits(id)));
            let apply = |decision: &&Decision| match vms.get(&decision.id) {
                Some(vm) => self.apply(vm, decision),
                None => host.adopted.apply(decision).unwrap_or(false),
            };
            // If nothing sets targets, no VM has one, not even a VM that was opened since the snapshot was taken.
            let free = Decision { action: Action::Free, ..Decision::default() };
            let changed = match inner.decides() {
                true => plan.decisions.iter().filter(apply).count(),
                false => {
                    let adopted = host.adopted.free_all();
                    vms.values().filter(|vm| self.apply(vm, &free)).count() + adopted
                }
            };
            vms.values().for_each(|served| balloon::ask(&served.vm, inner.is_active()));
            inner.ticks += 1;
            inner.changed += changed as u64;
            if inner.decides() {
                let new = inner.log.add(&snapshot, &plan, unix_ms());
                new.into_iter().for_each(|(vm, text)| host.events.decided(vm, text));
            }
            if inner.is_active() {
                tell_host_state(inner, host, &snapshot, &plan);
            }
        }
        inner.last = Some(snapshot);
    }

    pub fn request_scan(&self, served: &Arc<Served>) -> anyhow::Result<()> {
        served.hold_unchecked();
        let is_sent = self.mapper_scan.get().is_some_and(|mapper_scan| mapper_scan.send(served.clone()).is_ok());
        anyhow::ensure!(is_sent, "foreign mappers cannot be found: the scan has ended");
        Ok(())
    }

    /// Gives a VM the decided limit. Returns whether the limit changed.
    fn apply(&self, served: &Arc<Served>, decision: &Decision) -> bool {
        let (vm, before) = (&served.vm, served.vm.state.target());
        let after = match decision.action {
            Action::Limit => decision.limit_bytes.map(Bytes),
            Action::Free => None,
            Action::Leave => return false,
        };
        if after == before {
            return false;
        }
        if vm.effective_limit().is_none() && after.is_some_and(|after| after < vm.size().bytes()) {
            // There are no scans for foreign mappers while no page may be evicted, so one is needed before the first
            // eviction.
            if self.request_scan(served).is_err() {
                return false;
            }
        }
        vm.state.set_target(after);
        vm.notify_reclaim();
        true
    }
}

/// The plan of the program that holds the lease, if there is one and its plan is valid.
fn lease_plan(inner: &mut Inner, host: &Host, snapshot: &Snapshot, at_ms: u64) -> Option<Plan> {
    let lease = inner.lease.as_ref()?;
    let holder = lease.wanted.policy.clone();
    let why = if at_ms >= lease.until_ms {
        format!("put no plan for {} ms", lease.length_ms)
    } else {
        match check_external(snapshot, &lease.wanted, &mut inner.state, false) {
            Ok(plan) => return Some(plan),
            Err(why) => format!("has a plan that keeps the rules no more ({why})"),
        }
    };
    inner.lease = None;
    let next = inner.setup.policy;
    let text = format!("the program {holder} {why}: the policy {next} decides again");
    tracing::warn!("{text}");
    host.events.add(None, "policy-lease-lost", text);
    None
}

/// The plan of the policy. Without a policy, the plan removes each target.
fn built_in(inner: &mut Inner, host: &Host, snapshot: &Snapshot) -> Option<Plan> {
    if inner.setup.policy == Kind::None {
        return Some(free_all(snapshot));
    }
    let plan = guarded(&inner.setup, snapshot, &mut inner.state);
    if plan.is_none() {
        // Reported at the 1st, 2nd, 4th, 8th ... time.
        inner.failures += 1;
        if inner.failures.is_power_of_two() {
            let text = format!("the policy {} panicked; all limits stay as they are", inner.setup.policy);
            tracing::error!("{text}");
            host.events.add(None, "policy-failed", text);
        }
    }
    plan
}

fn free_all(snapshot: &Snapshot) -> Plan {
    let decisions = snapshot.vms.iter().map(|vm| Decision {
        name: vm.name.clone(),
        id: vm.id.clone(),
        action: Action::Free,
        before_bytes: vm.target_bytes,
        ..Decision::default()
    });
    Plan { at_ms: snapshot.at_ms, policy: Kind::None.to_string(), decisions: decisions.collect(), ..Plan::default() }
}

fn tell_host_state(inner: &mut Inner, host: &Host, snapshot: &Snapshot, plan: &Plan) {
    inner.exhaustion_ms = plan.exhaustion_ms;
    let before = std::mem::replace(&mut inner.host_state, plan.host_state);
    if before != plan.host_state {
        let [free, budget] = [snapshot.host.free_bytes, snapshot.host.budget_bytes].map(Bytes);
        let soon = plan.exhaustion_ms.map_or(String::new(), |ms| format!(", gone in {:.1} s", ms as f64 / 1e3));
        let text = format!("the host is {} (was {before}): {free} free of {budget}{soon}", plan.host_state);
        host.events.add(None, "host-state", text);
    }
    let warning = Admission::of(snapshot).warning();
    if warning.is_some() && !inner.overcommitted {
        host.events.add(None, "overcommitted", warning.clone().unwrap_or_default());
    }
    inner.overcommitted = warning.is_some();
}

fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis() as u64)
}
