//! The keeper's engines: the one that serves, the one that will follow it, and those that have been replaced.
//!
//! Before: the keeper has a program. After: an engine of that program serves, or is started again.
//! Threads: the keeper's one. Nothing here waits.
//! Promise: the first order of an engine is [`Begin`], and each order that is answered has its own number. No message
//! of an engine that was killed counts. An engine is on a list until it has ended and is reaped; an engine that is told
//! to leave and does not is killed after 5 s.

use std::ffi::OsString;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ballast_handover::kept::Kept;
use ballast_handover::orders::{Begin, Order};
use ballast_sys::clock;
use ballast_sys::priority::run_first;
use ballast_sys::process::Process;
use ballast_sys::scm::Received;
use ballast_sys::spawn::Child;

use crate::engine::{Engine, Health, Who};
use crate::program::Program;
use crate::stage::Deadline;
use crate::taken;
use ballast_sys::slow_fd::SlowFd;

/// Longest pause before a start. The pause grows with each engine that dies before it serves.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// How long an engine that was replaced may take to end.
const LEAVES_WITHIN: Duration = Duration::from_secs(5);

pub(crate) struct Engines {
    program: Program,
    own_program: Program,
    /// The program before the last upgrade, until the new one has served once.
    last_program: Option<Program>,
    /// The settings that engines begin with: those of the program's start until an operator changed them.
    settings: Vec<u8>,
    api: Arc<SlowFd>,
    since_unix_s: u64,
    serving: Option<Engine>,
    next: Option<Engine>,
    /// Engines that were replaced and have not ended.
    leaving: Vec<(Engine, Deadline)>,
    /// Children that died and have not been reaped: the kernel may keep threads of them.
    zombies: Vec<Child>,
    /// Pidfds of killed engines of earlier keepers. Each is readable when its engine is gone.
    dying: Vec<OwnedFd>,
    restarts: u64,
    /// Engines in a row that died before they served.
    young_deaths: u32,
    died: Option<(Instant, String)>,
    /// Notes for the next engine's event list.
    unsaid: Vec<Order>,
    next_number: u64,
}

impl Engines {
    /// No engine yet. Engines are started from this program, with these settings.
    pub fn new(program: Program, settings: Vec<u8>, api: OwnedFd) -> Self {
        Self {
            own_program: program.clone(),
            program,
            last_program: None,
            settings,
            api: Arc::new(SlowFd::from(api)),
            since_unix_s: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            serving: None,
            next: None,
            leaving: Vec::new(),
            zombies: Vec::new(),
            dying: Vec::new(),
            restarts: 0,
            young_deaths: 0,
            died: None,
            unsaid: Vec::new(),
            next_number: 0,
        }
    }

    /// The engines of this record. `own_program` is the program of this process. `is_back`: the program before this one
    /// could not be the keeper, and the engine is started from it.
    pub fn of(kept: &Kept, own_program: Program, is_back: bool) -> anyhow::Result<Self> {
        let mut engines = Self::new(own_program, kept.settings.clone(), taken::fd(kept.api)?);
        (engines.since_unix_s, engines.restarts) = (kept.since_unix_s, kept.restarts);
        engines.next_number = kept.next_seq;
        engines.serving = Some(Engine::of(&kept.engine)?);
        for (pid, pidfd) in &kept.zombies {
            engines.zombies.push(taken::child(*pid, *pidfd)?);
        }
        if is_back {
            match Program::at(OsString::from_vec(kept.program.clone()).into()) {
                Ok(program) => engines.program = program,
                Err(error) => tracing::warn!("The program that the engine was started from: {error}"),
            }
        }
        Ok(engines)
    }

    /// Records the engines. Returns `None` if none serves.
    pub fn record(&self, kept: &mut Kept) -> Option<()> {
        kept.engine = self.serving.as_ref()?.kept();
        kept.api = self.api.as_fd().as_raw_fd();
        kept.program = self.program.path().as_os_str().as_bytes().to_vec();
        kept.own_program = self.own_program.path().as_os_str().as_bytes().to_vec();
        kept.settings.clone_from(&self.settings);
        (kept.since_unix_s, kept.restarts, kept.next_seq) = (self.since_unix_s, self.restarts, self.next_number);
        kept.zombies = self.zombies.iter().map(|child| (child.id(), child.pidfd().as_raw_fd())).collect();
        Some(())
    }

    pub fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    pub fn program(&self) -> &Program {
        &self.program
    }

    pub fn settings(&self) -> &[u8] {
        &self.settings
    }

    pub fn set_settings(&mut self, settings: Vec<u8>) {
        self.settings = settings;
    }

    pub fn get(&self, who: Who) -> Option<&Engine> {
        match who {
            Who::Engine => self.serving.as_ref(),
            Who::Next => self.next.as_ref(),
        }
    }

    fn engine(&mut self, who: Who) -> Option<&mut Engine> {
        match who {
            Who::Engine => self.serving.as_mut(),
            Who::Next => self.next.as_mut(),
        }
    }

    pub fn process(&self, who: Who) -> Option<Process> {
        self.get(who).map(Engine::process)
    }

    /// The serving and the next engine.
    pub fn ours(&self) -> Vec<Process> {
        self.serving.iter().chain(&self.next).map(Engine::process).collect()
    }

    /// Whether an engine serves, and answers operators as well.
    pub fn serves(&self) -> bool {
        self.serving.as_ref().is_some_and(Engine::serves)
    }

    pub fn have_left(&self) -> bool {
        self.leaving.is_empty()
    }

    /// Gives an order to this engine, if it exists. A new engine is told everything anyway.
    pub fn give(&mut self, who: Who, order: &Order, fds: &[Arc<SlowFd>]) {
        if let Some(engine) = self.engine(who) {
            engine.give(order, fds);
        }
    }

    /// Adds an event to the event list of the serving engine; without one, of the next.
    pub fn note(&mut self, note: Order) {
        match &mut self.serving {
            Some(engine) => engine.give(&note, &[]),
            None => self.unsaid.push(note),
        }
    }

    /// Tells the engine that serves how its predecessor died, and the events that no engine has heard of.
    pub fn catch_up(&mut self, successor: &str) {
        if let Some((at, how)) = self.died.take() {
            let took = at.elapsed().as_secs_f64() * 1e3;
            let message = format!("the engine {how}; {successor} took over after {took:.1} ms");
            self.note(Order::Note { vm: None, kind: "engine-replaced".into(), message });
        }
        for note in std::mem::take(&mut self.unsaid) {
            self.note(note);
        }
    }

    /// Since when no engine serves, on the monotonic clock; `None` unless the last one has died.
    pub fn unserved_since_ns(&self) -> Option<u64> {
        self.died.as_ref().map(|(at, _)| clock::monotonic_ns_at(*at))
    }

    pub fn hear(&mut self, who: Who) -> Option<Received> {
        self.engine(who)?.hear()
    }

    pub fn flush(&mut self, who: Who) {
        if let Some(engine) = self.engine(who) {
            engine.flush();
        }
    }

    /// Pings an engine if it is time. Returns `None` if there is none.
    pub fn health(&mut self, who: Who) -> Option<Health> {
        Some(self.engine(who)?.keep(Instant::now()))
    }

    pub fn begin_to_serve(&mut self, who: Who, has_all: bool) {
        if let Some(engine) = self.engine(who) {
            engine.serve(has_all);
        }
    }

    pub fn has_started(&mut self, who: Who) {
        if let Some(engine) = self.engine(who) {
            engine.has_started();
        }
        if who == Who::Engine {
            (self.young_deaths, self.last_program) = (0, None);
        }
    }

    /// Starts the engine that will serve, if there is none and it is time. Returns whether it was started.
    pub fn start(&mut self) -> bool {
        let wait = self.died.as_ref().filter(|_| self.young_deaths > 0).map_or(Duration::ZERO, |(died, _)| {
            let pause = Duration::from_millis(10) * (1 << self.young_deaths.min(7));
            pause.min(LONGEST_PAUSE).saturating_sub(died.elapsed())
        });
        if self.serving.is_some() || !wait.is_zero() {
            return false;
        }
        let started = self.spawn(&self.program.clone()).or_else(|error| {
            // The program of an upgrade may have become unusable, and guests wait.
            if self.program.is_file_of(&self.own_program) {
                return Err(error);
            }
            tracing::error!("Starting the engine: {error:#}; starting {} instead", self.own_program.path().display());
            self.spawn(&self.own_program.clone())
        });
        match started {
            Ok(engine) => {
                tracing::info!(pid = engine.process().pid, "engine started");
                self.serving = Some(engine);
                true
            }
            Err(error) => {
                tracing::error!("Starting the engine: {error:#}; trying again");
                self.young_deaths += 1;
                self.died.get_or_insert((Instant::now(), "could not be started".into())).0 = Instant::now();
                false
            }
        }
    }

    pub fn start_next(&mut self, program: &Program) -> anyhow::Result<()> {
        let next = self.spawn(program)?;
        let (pid, program) = (next.process().pid, program.path().display());
        tracing::info!(pid, %program, "an engine that is to follow is started");
        self.next = Some(next);
        Ok(())
    }

    fn spawn(&mut self, program: &Program) -> anyhow::Result<Engine> {
        let mut engine = Engine::start(program)?;
        let begin = Begin {
            keeper_pid: std::process::id(),
            restarts: self.restarts,
            since_unix_s: self.since_unix_s,
            settings: self.settings.clone(),
        };
        engine.give(&Order::Begin(begin), std::slice::from_ref(&self.api));
        Ok(engine)
    }

    /// Kills the serving engine, which is silent. It is buried when it is dead: the keeper does not wait for that.
    pub fn kill(&mut self, how: &'static str) {
        if let Some(engine) = &mut self.serving {
            tracing::error!(pid = engine.process().pid, "the engine is alive but {how}: ending it");
            engine.kill(how);
        }
    }

    pub fn end_next(&mut self, why: &str) {
        if let Some(mut next) = self.next.take() {
            tracing::error!(pid = next.process().pid, "the engine that was to follow is ended: {why}");
            next.kill("was ended");
            self.zombies.push(next.into_child());
        }
    }

    /// Removes the serving engine, which is dead except for threads that the kernel keeps. Returns whether the next
    /// engine is again started from the program before the last upgrade; `None` if none served.
    pub fn bury(&mut self) -> Option<bool> {
        let engine = self.serving.take()?;
        let how = engine.end();
        tracing::error!(pid = engine.process().pid, "the engine {how}: starting another");
        // Until the next engine serves, all guests wait for this thread.
        run_first();
        self.restarts += 1;
        self.young_deaths += u32::from(engine.is_starting());
        let back = self.last_program.take().filter(|_| engine.is_starting());
        let is_back = back.is_some();
        if let Some(last) = back {
            let failed = std::mem::replace(&mut self.program, last);
            let [failed, last] = [&failed, &self.program].map(|program| program.path().display());
            tracing::error!("engines of {failed} do not come to serve: back to {last}");
        }
        self.died = Some((Instant::now(), how));
        self.zombies.push(engine.into_child());
        Some(is_back)
    }

    /// Puts the next engine in the place of the serving one, which leaves if it lives. From now on engines are started
    /// from this program.
    pub fn follow(&mut self, program: Program) {
        let Some(next) = self.next.take() else { return };
        let is_starting = next.is_starting();
        if let Some(mut old) = self.serving.replace(next) {
            old.give(&Order::Leave, &[]);
            self.leaving.push((old, Deadline::new(Instant::now())));
        }
        let last = std::mem::replace(&mut self.program, program);
        self.last_program = Some(last).filter(|last| is_starting && !last.is_file_of(&self.program));
    }

    /// Reaps children that have ended, and kills engines that were replaced and do not leave.
    pub fn reap(&mut self) {
        self.zombies.retain(|child| matches!(child.try_wait(), Ok(None)));
        for (mut engine, mut deadline) in std::mem::take(&mut self.leaving) {
            engine.flush();
            if engine.is_reaped() {
                continue;
            }
            if !deadline.is_over(Instant::now(), LEAVES_WITHIN) {
                self.leaving.push((engine, deadline));
                continue;
            }
            tracing::error!(pid = engine.process().pid, "an engine that was followed does not end: killing it");
            engine.kill("did not leave");
            self.zombies.push(engine.into_child());
        }
    }

    pub fn await_end(&mut self, pidfd: OwnedFd) {
        self.dying.push(pidfd);
    }

    pub fn dying(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.dying.iter().map(AsFd::as_fd)
    }

    pub fn forget_dying(&mut self, gone: &[bool]) {
        let mut gone = gone.iter();
        self.dying.retain(|_| gone.next() == Some(&false));
    }
}

#[cfg(test)]
impl Engines {
    pub fn forget_deaths(&mut self) {
        self.young_deaths = 0;
    }

    pub fn restarts(&self) -> u64 {
        self.restarts
    }

    pub fn unsaid(&self) -> &[Order] {
        &self.unsaid
    }

    pub fn last_program(&self) -> Option<&Program> {
        self.last_program.as_ref()
    }
}
