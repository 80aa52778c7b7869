//! The conversation with the host: the agent's main loop.
//!
//! Before: the port is open. After: the agent must end, or the port is gone.
//! Threads: one, which waits for the host and for the next tick; no other wait is long.
//! Promise: reports take at most 1/20 of a CPU here, and looks take as much in the kernel. The agent sends ticks
//! however long a report takes. If the host is silent for long, held memory is returned, and no reports are made.

use std::io;
use std::time::{Duration, Instant};

use ballast_messages::frame::Next;
use ballast_messages::message::{MAX_RUNS, Tracking, Wanted};
use ballast_messages::run::COLD;
use ballast_messages::{Frames, Kind, Run, ToGuest, ToHost};

use crate::balloon::Balloon;
use crate::look::{Looks, parts};
use crate::memory::{self, Flags};
use crate::pace::{AGAIN, CPU_PART};
use crate::port::Port;
use crate::prove::Proof;
use crate::report::{self, Back, Sorting};
use crate::services::Services;
use crate::setting::Setting;
use crate::tiering::Tiering;
use crate::{files, vital};

/// Time without a listening host after which held memory is returned. A replaced engine is back sooner.
const GONE: Duration = Duration::from_secs(20);
/// Pause while no host listens at the port.
const NOBODY: Duration = Duration::from_millis(500);
const REPORT_EVERY: Duration = Duration::from_secs(2);

/// Serves the host until the agent must end. Fails if there is no port, or it is gone.
pub fn run(path: Option<&str>, tiering: Option<&Tiering>) -> io::Result<()> {
    let mut port = Port::open(path)?;
    // If memory is short, the kernel is to kill this process first: it holds memory that others need.
    let _ = files::write("/proc/self/oom_score_adj", 1000);
    let mut guest = Guest::new(tiering);
    let mut buffer = vec![0; 32 << 10];
    while !files::ends() {
        let now = Instant::now();
        let pause = guest.pause(now, port.is_behind());
        if !port.wait(pause)? {
            guest.nobody(now);
            port.forget();
            std::thread::sleep(NOBODY);
            continue;
        }
        loop {
            let count = port.read(&mut buffer)?;
            if count == 0 {
                break;
            }
            guest.frames.push(&buffer[..count]);
            while let Some(next) = guest.frames.next_frame() {
                match next {
                    Next::Frame(frame) => guest.heard(&frame, &mut port),
                    Next::Unreadable(version, least) => eprintln!(
                        "ballast-agent: the host speaks version {version} and wants a reader of at least {least}"
                    ),
                }
            }
        }
        let now = Instant::now();
        if guest.is_left(now) {
            guest.nobody(now);
            port.forget();
        }
        guest.work(&mut port);
        port.flush()?;
    }
    Ok(())
}

#[derive(Debug)]
enum Source {
    /// The host wants no reports, or the source was not tried yet.
    None,
    Looks(Looks),
    /// DAMON is not available; the next try is at this time.
    Without(Instant),
}

impl Source {
    fn spent(&self) -> Duration {
        if let Self::Looks(looks) = self { looks.spent() } else { Duration::ZERO }
    }
}

/// Sends ticks while memory is read for a report.
struct Pulse<'a> {
    port: &'a mut Port,
    /// The last tick: its values are as old as the report that is being made.
    tick: &'a [u8],
    next: &'a mut Instant,
    every: Duration,
}

impl Pulse<'_> {
    fn beat(&mut self) {
        let now = Instant::now();
        if now >= *self.next && !self.port.is_behind() {
            *self.next = now + self.every;
            self.port.send(self.tick);
            // A port that is gone is noticed after the report.
            let _ = self.port.flush();
        }
    }
}

struct Guest<'a> {
    tiering: Option<&'a Tiering>,
    frames: Frames,
    session: Option<u64>,
    wanted: Wanted,
    heard_at: Instant,
    next_tick: Instant,
    last_tick: Vec<u8>,
    next_report: Instant,
    reports: u32,
    source: Source,
    /// Set while reports are wanted, without tiering.
    small_blocks: Option<Setting>,
    note: String,
    ram: Vec<(u64, u64)>,
    image: Vec<(u64, u64)>,
    flags: Option<Flags>,
    back: Back,
    restores: u64,
    proof: Proof,
    balloon: Balloon,
    services: Services,
}

impl<'a> Guest<'a> {
    fn new(tiering: Option<&'a Tiering>) -> Self {
        let now = Instant::now();
        let ram = memory::ram().unwrap_or_default();
        Self {
            tiering,
            frames: Frames::default(),
            session: None,
            wanted: Wanted::default(),
            heard_at: now,
            next_tick: now,
            last_tick: Vec::new(),
            next_report: now,
            reports: 0,
            source: Source::None,
            small_blocks: None,
            note: String::new(),
            services: Services::new(),
            ram,
            image: memory::image().unwrap_or_default(),
            flags: Flags::open().ok(),
            back: Back::default(),
            restores: 0,
            proof: Proof::default(),
            balloon: Balloon::default(),
        }
    }

    /// Returns the time until the agent has work, unless the host sends a message.
    fn pause(&self, now: Instant, is_behind: bool) -> Duration {
        if self.session.is_none() {
            return Duration::from_secs(5);
        }
        // The agent also wakes when the port takes the bytes that it has not taken yet.
        if self.balloon.is_busy(now) && !is_behind {
            return Duration::ZERO;
        }
        let next = if self.wanted.reports { self.next_tick.min(self.next_report) } else { self.next_tick };
        next.saturating_duration_since(now)
    }

    /// Returns whether the host, which says hello every few seconds, was silent for so long that there is none.
    fn is_left(&self, now: Instant) -> bool {
        self.session.is_some() && now.saturating_duration_since(self.heard_at) > GONE
    }

    fn nobody(&mut self, now: Instant) {
        self.session = None;
        if now.saturating_duration_since(self.heard_at) > GONE {
            self.rest();
        }
    }

    /// Stops all work, because no host wants any.
    fn rest(&mut self) {
        self.balloon.empty();
        self.make_room();
        self.services.tune(false);
        self.source = Source::None;
        self.small_blocks = None;
    }

    /// Has tiering free the memory that the balloon lacks: the balloon takes none from programs.
    fn make_room(&self) {
        if let Some(tiering) = self.tiering {
            tiering.make_room(self.balloon.lacks());
        }
    }

    fn say(&self, port: &mut Port, message: &ToHost) {
        if let Some(session) = self.session {
            port.send(&message.frame(session));
        }
    }

    fn heard(&mut self, frame: &ballast_messages::Frame, port: &mut Port) {
        let now = Instant::now();
        let Ok(Some(message)) = ToGuest::decode(frame) else { return };
        if !matches!(message, ToGuest::Hello(_)) && self.session != Some(frame.session) {
            return;
        }
        self.heard_at = now;
        match message {
            ToGuest::Hello(wanted) => self.begin(frame.session, wanted, now, port),
            ToGuest::Prove { nonce, pieces } => {
                let found = self.proof.find(&nonce, &pieces);
                self.say(port, &ToHost::Proof(found));
            }
            ToGuest::Balloon { node, pages } => self.balloon.want(node, pages),
            ToGuest::Restored(runs) => {
                for run in &runs {
                    self.back.add(run, now);
                    self.restores += u64::from(run.count);
                }
                if let Some(flags) = &self.flags {
                    self.services.restored(&runs, flags);
                }
            }
        }
    }

    fn begin(&mut self, session: u64, wanted: Wanted, now: Instant, port: &mut Port) {
        let is_new = self.session.replace(session) != Some(session);
        self.wanted = wanted;
        self.services.tune(wanted.services);
        if !wanted.reports {
            self.source = Source::None;
            self.small_blocks = None;
        } else if self.small_blocks.is_none() && self.tiering.is_none() {
            // Tiering moves pages all the time: the blocks that they leave would be reported, and then allocated again.
            self.small_blocks = Setting::small_blocks().inspect_err(|error| eprintln!("ballast-agent: {error}")).ok();
        }
        if !is_new {
            return;
        }
        port.forget();
        // The time of the next report stays: otherwise an agent whose reports take long would make one after the other.
        self.next_tick = now;
        self.last_tick.clear();
        let kernel = files::read("/proc/sys/kernel/osrelease").unwrap_or_default();
        self.say(port, &ToHost::Hello { agent: env!("CARGO_PKG_VERSION").into(), kernel });
        // The host no longer knows that it has these pages.
        for (node, runs) in self.balloon.all() {
            for runs in runs.chunks(MAX_RUNS) {
                self.say(port, &ToHost::Taken { node, runs: runs.to_vec() });
            }
        }
    }

    fn work(&mut self, port: &mut Port) {
        if self.session.is_none() {
            return;
        }
        let now = Instant::now();
        if self.balloon.is_busy(now)
            && !port.is_behind()
            && let Some((node, runs)) = self.balloon.step(now)
        {
            for runs in runs.chunks(MAX_RUNS) {
                self.say(port, &ToHost::Taken { node, runs: runs.to_vec() });
            }
        }
        if now >= self.next_tick {
            self.tick(now, port);
            // The host must not wait for a report. The caller's flush notices a port that is gone.
            let _ = port.flush();
        }
        if self.wanted.reports && now >= self.next_report {
            let of_looks = self.source.spent();
            if !port.is_behind() {
                self.look_for_ram();
                self.report(now, port);
            }
            // Looks have a pace of their own. Held and free pages are reported as often as possible.
            let took = now.elapsed().saturating_sub(self.source.spent().saturating_sub(of_looks));
            self.next_report = Instant::now() + REPORT_EVERY.max(took * CPU_PART);
        }
    }

    fn tick_every(&self) -> Duration {
        Duration::from_millis(self.wanted.tick_ms.clamp(100, 60_000).into())
    }

    fn tick(&mut self, now: Instant, port: &mut Port) {
        self.next_tick = now + self.tick_every();
        self.balloon.check_stall(now);
        self.make_room();
        if port.is_behind() {
            return;
        }
        let mut tick = vital::tick();
        let (tracking, of_damon) = match &self.source {
            Source::Looks(looks) => (Tracking::Damon, looks.cpu_us()),
            _ => (Tracking::Off, 0),
        };
        tick.tracking = tracking;
        tick.tiering = self.tiering.map(Tiering::told).unwrap_or_default();
        tick.cpu_us = vital::cpu_us() + of_damon;
        let note = Some(self.note.as_str()).filter(|note| !note.is_empty()).or_else(|| self.balloon.note());
        tick.note = note.map(str::to_owned).or_else(|| self.far_apart(now)).unwrap_or_default();
        for node in &mut tick.nodes {
            node.ballooned = self.balloon.held(node.node);
        }
        tick.restores = self.restores;
        self.services.count(&mut tick);
        if let Some(session) = self.session {
            self.last_tick = ToHost::Tick(tick).frame(session);
            port.send(&self.last_tick);
        }
    }

    fn far_apart(&self, now: Instant) -> Option<String> {
        let Source::Looks(looks) = &self.source else { return None };
        let apart = looks.far_apart(now)?.as_secs();
        Some(format!("looks at memory are {apart} s apart: memory that is used in turn may be reported as cold"))
    }

    /// Starts DAMON, if it is available.
    fn watch(&mut self, now: Instant) {
        match self.source {
            Source::Looks(_) => return,
            Source::Without(again) if now < again => return,
            _ => {}
        }
        // Tiering waits for DAMON while a look is being taken.
        let pause = if self.tiering.is_some() { AGAIN } else { Duration::ZERO };
        self.source = match Looks::start(&self.ram, pause) {
            Ok(looks) => {
                self.note.clear();
                Source::Looks(looks)
            }
            Err(error) => {
                self.note = error.to_string();
                Source::Without(now + AGAIN)
            }
        };
    }

    /// Memory may be plugged, or removed, at any time.
    fn look_for_ram(&mut self) {
        let Ok(ram) = memory::ram() else { return };
        if ram != self.ram {
            if let Source::Looks(looks) = &mut self.source {
                looks.set_ram(&ram);
            }
            self.ram = ram;
        }
    }

    fn report(&mut self, now: Instant, port: &mut Port) {
        self.watch(now);
        let every = self.tick_every();
        let Some(flags) = &self.flags else { return };
        let mut report = Sorting::new(&self.image);
        let mut pulse = Pulse { port, tick: &self.last_tick, next: &mut self.next_tick, every };
        let mut tell = |page, flags, heat| report.page(page, flags, heat, &self.back, now);
        let told = match &mut self.source {
            Source::Looks(looks) => {
                looks.each(flags, |page, time| self.back.is_since(page, time), tell, || pulse.beat())
            }
            // Free memory is reported even without looks.
            _ => parts(&self.ram).try_for_each(|part| {
                pulse.beat();
                flags.each(part, |page, flags| tell(page, flags, None))
            }),
        };
        if let Err(error) = told {
            // For example, another program has DAMON now.
            self.note = format!("looking at memory: {error}");
            self.source = Source::Without(now + AGAIN);
            return;
        }
        let vital = vital::tick();
        // Pages that the agent holds are zeros that no program needs.
        let mut runs: Vec<Run> = self.balloon.all().into_iter().flat_map(|(_, runs)| runs).collect();
        runs.sort_unstable_by_key(|run| std::cmp::Reverse(run.count));
        runs.truncate(report::MOST_RUNS / 2);
        runs.iter_mut().for_each(|run| (run.kind, run.level) = (Kind::Free, COLD));
        runs.extend(report.finish(vital.total, vital.free, report::MOST_RUNS - runs.len()));
        self.reports = self.reports.wrapping_add(1);
        let mut parts = runs.chunks(MAX_RUNS).peekable();
        if parts.peek().is_none() {
            return self.say(port, &ToHost::Report { number: self.reports, last: true, runs: Vec::new() });
        }
        while let Some(runs) = parts.next() {
            let last = parts.peek().is_none();
            self.say(port, &ToHost::Report { number: self.reports, last, runs: runs.to_vec() });
        }
    }
}

#[cfg(test)]
mod tests;
