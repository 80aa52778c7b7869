//! The exchange of messages with a guest's agent.
//!
//! Before: the VM is served. After: while its VMM has a port and an agent replies there, its reports become hints
//! (`hints`), the agent is told which pages were restored, and the host does not track the VM's accesses.
//! Threads: one task per VM, which runs when there is input and once a second; without a port, ever more rarely.
//! Promise: a guest costs no more time and memory than its bucket allows. Reports of an agent that is silent for
//! [`SILENT`] are no longer used. When this engine or the agent ends, the other side starts a new session: messages of
//! an old session are ignored.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_base::store::PageBytes;
use ballast_messages::frame::Next as NextFrame;
use ballast_messages::message::{MAX_PIECES, MAX_RUNS, NONCE, Tracking};
use ballast_messages::run::push;
use ballast_messages::{Frame, Frames, Run, ToGuest, ToHost};
use ballast_page::memory::{Backing, ReadOutcome};

use super::bucket::{Bucket, MESSAGE};
use super::channel::{Channel, Read};
use super::link::{Link, Parts, TICK};
use super::services::Services;
use crate::run::queue::Next;
use crate::vm::Vm;
use crate::vm::guest::hints::{Hints, MOST_RUNS};
use crate::vm::guest::places::Places;
use crate::vm::guest::told::{State, Told};
use crate::vm::stats::Counter;

/// An agent without a valid message for the time `SILENT` counts as absent. A report is used up to the age
/// `REPORT_OLD`: reports of the largest guests come rarely.
const SILENT: Duration = Duration::from_secs(10);
const REPORT_OLD: Duration = Duration::from_secs(180);
/// Time between hellos, which tell an agent that its host is there (the port does not show it), and between requests to
/// prove a piece, in which the guest may have had no page.
const EVERY: Duration = Duration::from_secs(5);
/// Longest pause between two searches for a port; the first is [`TICK`].
const POLL_MOST: Duration = Duration::from_secs(60);
/// A report that follows the last one sooner than this is dropped.
const REPORT_EVERY: Duration = Duration::from_millis(500);
const SLICE: Duration = Duration::from_millis(2);
const BUFFER: usize = 32 << 10;

#[derive(Debug)]
pub(crate) struct AgentWorker {
    vm: Arc<Vm>,
    told: Arc<Told>,
    link: Option<Link>,
    bucket: Bucket,
    places: Places,
    /// Generation of the views at the last search for a port.
    generation: u64,
    poll_at: Instant,
    pause: Duration,
    tick_at: Instant,
    failures: u64,
}

impl AgentWorker {
    pub fn new(vm: Arc<Vm>) -> Self {
        let now = Instant::now();
        let (told, bucket) = (vm.mail.agent.clone(), Bucket::new(now));
        Self {
            vm,
            told,
            link: None,
            bucket,
            places: Places::default(),
            generation: 0,
            poll_at: now,
            pause: TICK,
            tick_at: now,
            failures: 0,
        }
    }

    pub fn run(&mut self, now: Instant) -> Next {
        if self.vm.is_stopping() {
            self.lose(State::Silent);
            return Next::Done;
        }
        if self.link.is_none() {
            if std::mem::replace(&mut self.generation, self.vm.memory.generation()) != self.vm.memory.generation() {
                (self.poll_at, self.pause) = (now, TICK);
            }
            if !self.connect(now) {
                if now >= self.poll_at {
                    self.ask();
                    let pause = self.pause;
                    self.pause = (pause * 2).min(POLL_MOST);
                    let next = Next::about(now, pause);
                    self.poll_at = if let Next::At(at) = next { at } else { now };
                }
                return Next::At(self.poll_at);
            }
        }
        let is_open = match self.converse(now) {
            Ok(is_open) => is_open,
            Err(error) => {
                if error.kind() != io::ErrorKind::UnexpectedEof {
                    self.failed("Talking to", &error);
                }
                self.lose(State::Silent);
                self.poll_at = now + TICK;
                return Next::At(self.poll_at);
            }
        };
        match is_open {
            // There is more input, to be read now or when there are tokens.
            Some(true) => Next::Again,
            Some(false) => Next::At(self.bucket.opens().min(self.tick_at)),
            None => Next::At(self.tick_at),
        }
    }

    /// Asks the clients for the port. A reply notifies this task.
    fn ask(&mut self) {
        for view in self.vm.views() {
            if let Err(error) = view.peer().ask_agent_port() {
                self.failed("Looking for", &error);
            }
        }
    }

    /// Opens the port if a client has replied with one. Returns whether a session began.
    fn connect(&mut self, now: Instant) -> bool {
        for view in self.vm.views() {
            let channel = match view.peer().take_agent_port() {
                None => continue,
                Some(Ok(None)) => {
                    self.told.set_port(false);
                    continue;
                }
                Some(Ok(Some(port))) => Channel::open(port, self.vm.group(), &self.told),
                Some(Err(error)) => Err(error),
            };
            match channel {
                Ok(channel) => return self.begin(channel, now),
                Err(error) => self.failed("Looking for", &error),
            }
        }
        false
    }

    fn begin(&mut self, channel: Channel, now: Instant) -> bool {
        let (mut session, mut nonce) = ([0; 8], [0; NONCE]);
        for bytes in [&mut session[..], &mut nonce[..]] {
            match rustix::rand::getrandom(&mut *bytes, rustix::rand::GetRandomFlags::empty()) {
                Ok(count) if count == bytes.len() => {}
                _ => {
                    self.failed("Greeting", &io::Error::other("the kernel gives no random bytes"));
                    return false;
                }
            }
        }
        let session = u64::from_le_bytes(session);
        let link = self.link.insert(Link {
            channel,
            session,
            nonce,
            frames: Frames::default(),
            since: now,
            ticked: None,
            reported: None,
            parts: Parts::default(),
            prove_at: now,
            hello_at: now + EVERY,
            balloon: BTreeMap::new(),
            services: Services::default(),
        });
        link.hello();
        // Another process may map the guest's memory at other addresses.
        self.places = Places::of(&self.vm.state);
        (self.pause, self.tick_at) = (TICK, now);
        self.told.set_port(true);
        let mut shown = self.told.show();
        shown.state = State::Silent;
        shown.pieces = (0, 0);
        true
    }

    fn lose(&mut self, state: State) {
        self.link = None;
        self.told.show().state = state;
        self.set_reporting(false);
    }

    fn set_reporting(&self, is_reporting: bool) {
        if self.told.set_reporting(is_reporting) {
            self.vm.mail.track.notify();
        }
    }

    fn failed(&mut self, doing: &str, error: &io::Error) {
        self.failures += 1;
        if self.failures.is_power_of_two() {
            tracing::warn!(vm = self.vm.state.name(), "{doing} the agent of its guest: {error}");
        }
    }

    /// Reads messages of the guest as far as there are tokens, and sends ours. Returns whether more input can be read
    /// now; `None` if there is none.
    fn converse(&mut self, now: Instant) -> io::Result<Option<bool>> {
        let mut buffer = [0; BUFFER];
        let began = Instant::now();
        let mut has_more = None;
        while let Some(link) = &mut self.link {
            // Frames that were read before come first.
            if !self.bucket.is_open(now) {
                has_more = Some(false);
                break;
            }
            if began.elapsed() >= SLICE {
                has_more = Some(true);
                break;
            }
            match link.frames.next_frame() {
                Some(next) => {
                    self.heard(next, now);
                    continue;
                }
                None => self.told.show().garbage_bytes += link.frames.take_garbage(),
            }
            match link.channel.read(&mut buffer)? {
                Read::Bytes(count) => {
                    self.bucket.charge_read(count as u64);
                    link.frames.push(&buffer[..count]);
                }
                Read::Nothing => break,
                Read::Gone => return Err(io::ErrorKind::UnexpectedEof.into()),
            }
        }
        if now >= self.tick_at {
            self.tick_at = now + TICK;
            self.tick(now);
        }
        match &mut self.link {
            Some(link) => link.channel.flush().map(|()| has_more),
            None => Ok(None),
        }
    }

    fn heard(&mut self, next: NextFrame, now: Instant) {
        let Some(link) = &mut self.link else { return };
        self.bucket.charge(MESSAGE);
        let mut shown = self.told.show();
        shown.messages += 1;
        let frame = match next {
            NextFrame::Frame(frame) if frame.session == link.session => frame,
            NextFrame::Frame(_) => return,
            NextFrame::Unreadable(version, least) => {
                shown.rejected_messages += 1;
                shown.tick.note = format!("it speaks version {version} and wants a reader of at least {least}");
                return;
            }
        };
        drop(shown);
        if self.take(&frame, now).is_none() {
            self.told.show().rejected_messages += 1;
        }
    }

    /// Handles a message; `None` if it is invalid now.
    fn take(&mut self, frame: &Frame, now: Instant) -> Option<()> {
        let link = self.link.as_mut()?;
        // A kind of message that this program does not know is ignored.
        let Some(message) = ToHost::decode(frame).ok()? else { return Some(()) };
        match message {
            ToHost::Hello { agent, kernel } => {
                let mut shown = self.told.show();
                (shown.version, shown.kernel) = (agent, kernel);
            }
            ToHost::Tick(tick) => {
                if link.ticked.replace(now).is_none() {
                    for node in tick.nodes.iter().filter(|node| node.ballooned > 0) {
                        self.told.adopt_balloon(node.node, node.ballooned);
                    }
                }
                let has_far = self.vm.stats().get(Counter::Far) > 0;
                if link.services.look(&tick, has_far, now) {
                    link.hello();
                }
                let mut shown = self.told.show();
                (shown.tick, shown.heard) = (tick, Some(now));
            }
            ToHost::Report { number, last, runs } => return self.report(number, last, runs, now),
            ToHost::Proof(runs) => return self.proof(&runs),
            // Pages of the balloon go first, but with a copy: the guest uses them if the agent was killed.
            ToHost::Taken { node, runs } => {
                self.bucket.charge(runs.len() as u64 * 16);
                if let Some(most) = link.balloon.get(&node).filter(|_| self.told.is_reporting())
                    && self.told.hints().hold((node, *most), runs, &self.places)
                {
                    self.vm.mail.reclaim.notify();
                }
            }
        }
        Some(())
    }

    fn report(&mut self, number: u32, last: bool, runs: Vec<Run>, now: Instant) -> Option<()> {
        let link = self.link.as_mut()?;
        if link.parts.number != number {
            link.parts = Parts { number, runs: Vec::new() };
        }
        // Charged again here: the runs are checked when the report is complete.
        self.bucket.charge(runs.len() as u64 * 16);
        let room = MOST_RUNS - link.parts.runs.len();
        let fits = runs.len() <= room;
        link.parts.runs.extend(runs.into_iter().take(room));
        if !last {
            return fits.then_some(());
        }
        let runs = std::mem::take(&mut link.parts.runs);
        if link.reported.is_some_and(|before| now.saturating_duration_since(before) < REPORT_EVERY) {
            return None;
        }
        link.reported = Some(now);
        let (hints, tally) = Hints::new(runs, &self.places);
        self.told.show().reported(tally);
        self.judge(now);
        if self.told.is_reporting() {
            *self.told.hints() = hints;
            self.vm.mail.reclaim.notify();
        }
        fits.then_some(())
    }

    fn proof(&mut self, runs: &[Run]) -> Option<()> {
        let nonce = self.link.as_ref()?.nonce;
        let mut all = Some(());
        for run in runs.iter().take(MAX_PIECES) {
            let found = self.places.expected(run.page);
            let is_there = found.filter(|(_, region, page)| {
                let mut bytes: [PageBytes; 1] = [[0; PAGE_SIZE]];
                let region = self.vm.region(*region).filter(|region| !region.is_removed() && page.0 < region.pages().0);
                let read = region.map(|region| region.read(*page, &mut bytes));
                matches!(read, Some(Ok(ReadOutcome::Done))) && bytes[0].starts_with(&nonce)
            });
            match is_there {
                Some((piece, ..)) => self.places.prove(piece),
                None => all = None,
            }
        }
        self.told.show().pieces = self.places.count();
        all
    }

    fn tick(&mut self, now: Instant) {
        let mut places = Places::of(&self.vm.state);
        places.take_after(&self.places);
        self.places = places;
        self.judge(now);
        // Pages restored while there was no agent are dropped.
        let back = self.told.take_restored();
        let Some(link) = &mut self.link else { return };
        let last = link.ticked.unwrap_or(link.since);
        if now.saturating_duration_since(last) > SILENT * 2 {
            // The port may be open to a restarted agent, which does not know this session.
            self.lose(State::Silent);
            self.poll_at = now;
            return;
        }
        self.told.show().pieces = self.places.count();
        if now >= link.hello_at {
            link.hello_at = now + EVERY;
            link.hello();
        }
        if link.ticked.is_none() {
            return;
        }
        let open = self.places.unproved();
        if !open.is_empty() && now >= link.prove_at {
            link.prove_at = now + EVERY;
            link.channel.send(&ToGuest::Prove { nonce: link.nonce, pieces: open }.frame(link.session));
        }
        for (node, pages) in self.told.balloon() {
            let before = link.balloon.get(&node).copied().unwrap_or(0);
            if before != pages && link.channel.send(&ToGuest::Balloon { node, pages }.frame(link.session)) {
                link.balloon.insert(node, pages);
                if pages < before {
                    self.told.hints().forget_held(node);
                }
            }
        }
        let mut pages: Vec<u64> =
            back.into_iter().filter_map(|(region, page)| self.places.guest_page(region, page)).collect();
        pages.sort_unstable();
        pages.dedup();
        let mut runs = Vec::new();
        pages.iter().for_each(|page| push(&mut runs, Run::of(*page, 1)));
        for runs in runs.chunks(MAX_RUNS) {
            if link.channel.send(&ToGuest::Restored(runs.to_vec()).frame(link.session)) {
                let told: u64 = runs.iter().map(|run| u64::from(run.count)).sum();
                self.told.show().restored_pages += told;
            }
        }
    }

    /// Decides whether the agent's reports are used now.
    fn judge(&mut self, now: Instant) {
        let Some(link) = &self.link else { return };
        let is_within = |at: Option<Instant>, most| at.is_some_and(|at| now.saturating_duration_since(at) <= most);
        let mut shown = self.told.show();
        let is_alive = is_within(link.ticked, SILENT);
        let reports = shown.tick.tracking != Tracking::Off && is_within(link.reported, REPORT_OLD);
        let is_ignored = shown.ignored_until.is_some_and(|until| now < until);
        shown.state = match () {
            () if !is_alive => State::Silent,
            () if is_ignored => State::Ignored,
            () if reports && self.places.count().1 > 0 => State::Reporting,
            () => State::Idle,
        };
        let is_reporting = shown.state == State::Reporting;
        drop(shown);
        self.set_reporting(is_reporting);
    }
}
