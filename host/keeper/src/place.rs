//! The place of a VM: the engine that has it, or is to get it, and what keeps it from one.
//!
//! Before: the VM is new, or was brought back. After: each step of its way between two engines (the tables of
//! [`crate::stage`]) is taken from the step before it.
//! Threads: the keeper's one. Nothing here waits.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use ballast_sys::clock;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;

use crate::engine::Who;
use crate::lost::{Found, Search};

/// When operators are told that a VM waits.
const TELL_AFTER: Duration = Duration::from_secs(2);

/// Time until an engine that could not serve a VM whole is given it again. While the VM is opened, none of its faults
/// is served, so this is not done all the time.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_secs(2);

pub(crate) struct Place {
    at: At,
    /// Set while some of its regions are missing: no engine has it then.
    search: Option<Search>,
    /// Set while a thread of its last, dead engine may still change it: no other engine has it then.
    fenced: Option<Fenced>,
    /// The number of the last question to an upgrade's new engine about this VM. The reply to an earlier question is
    /// about the VM before its processes went and attached again.
    question: Option<u64>,
    /// Its engine lacked something for it, and is to open it again.
    lost: Option<Lost>,
}

/// The engine that has a VM, or will get it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Engine,
    /// This order tells the keeper's engine to do nothing for it any more except to serve its faults.
    Resting(u64),
    /// The keeper's engine serves its faults, and so does the next one, which has it when the first has closed it.
    Both,
    /// The keeper's engine closes it: since when, and by which order. The next engine gets it then.
    Parting(Instant, u64),
    Next,
}

/// The engine lacked something for a VM.
struct Lost {
    /// When it is given the VM again.
    again_at: Instant,
    /// Since when a process of it is not served, on the monotonic clock.
    unserved_since_ns: u64,
}

/// A VM that waits for the end of its last engine.
struct Fenced {
    since: Instant,
    /// Since when no engine serves it, on the monotonic clock.
    unserved_since_ns: Option<u64>,
    /// The engine that got the event; the next one has a new list.
    told: Option<Process>,
}

impl Place {
    pub fn with(who: Who) -> Self {
        let at = if who == Who::Next { At::Next } else { At::Engine };
        Self { at, search: None, fenced: None, question: None, lost: None }
    }

    /// The engine that has it, or is to get it.
    pub fn who(&self) -> Who {
        if matches!(self.at, At::Both | At::Next) { Who::Next } else { Who::Engine }
    }

    pub fn at(&self) -> At {
        self.at
    }

    /// Is it on its way from the keeper's engine to the next one?
    pub fn is_moving(&self) -> bool {
        matches!(self.at, At::Resting(_) | At::Both | At::Parting(..))
    }

    /// Has the engine been given it?
    pub fn is_handed_over(&self) -> bool {
        let is_on_its_way = matches!(self.at, At::Resting(_) | At::Parting(..));
        self.search.is_none() && self.fenced.is_none() && !is_on_its_way
    }

    /// Is it with the keeper's engine, and waits for nothing?
    pub fn is_at_rest(&self) -> bool {
        self.fenced.is_none() && self.search.is_none() && self.lost.is_none() && self.at == At::Engine
    }

    /// The keeper's engine is to serve its faults only, by this order.
    pub fn rest(&mut self, seq: u64) {
        self.at = At::Resting(seq);
    }

    /// The next engine is to serve its faults as well.
    pub fn share(&mut self) {
        self.at = At::Both;
    }

    /// The keeper's engine is to close it, by this order.
    pub fn part(&mut self, seq: u64) {
        self.at = At::Parting(Instant::now(), seq);
    }

    /// The keeper's engine has closed it by this order: it is with the next one. Returns since when no engine serves
    /// it; `None` if the VM has gone and come back.
    pub fn parted(&mut self, seq: u64) -> Option<Instant> {
        match self.at {
            At::Parting(since, by) if by == seq => {
                self.at = At::Next;
                Some(since)
            }
            _ => None,
        }
    }

    /// The keeper's engine has closed what both had: it is with the next one. Returns whether both had it.
    pub fn left(&mut self) -> bool {
        let was_shared = self.at == At::Both;
        if was_shared {
            self.at = At::Next;
        }
        was_shared
    }

    /// It is with the keeper's engine from now on. Returns where it was.
    pub fn go_back(&mut self) -> At {
        std::mem::replace(&mut self.at, At::Engine)
    }

    /// No process of the VM is left: one engine keeps it, which is told to close it as if it moved, opens it again and
    /// ends it. Returns where it was.
    pub fn end(&mut self) -> At {
        self.lost = None;
        let at = if self.who() == Who::Next { At::Next } else { At::Engine };
        std::mem::replace(&mut self.at, at)
    }

    /// The last question to an upgrade's new engine about it has this number.
    pub fn ask(&mut self, seq: u64) {
        self.question = Some(seq);
    }

    /// Is this the last question about it?
    pub fn is_asked(&self, seq: u64) -> bool {
        self.question == Some(seq)
    }

    /// Some of its regions are missing: no engine has it until this has ended.
    pub fn begin_search(&mut self, search: Search) {
        self.search = Some(search);
    }

    pub fn is_searched(&self) -> bool {
        self.search.is_some()
    }

    /// The result of the search, once: then it has ended. `missing` are the files that are still missing.
    pub fn found(&mut self, missing: HashSet<FileId>) -> Option<Found> {
        let search = self.search.as_mut()?;
        let found = if missing.is_empty() { Found::Nobody } else { search.ask(|| missing) };
        self.search.take_if(|_| found != Found::Waiting).map(|_| found)
    }

    /// An engine was given it.
    pub fn opens(&mut self) {
        (self.fenced, self.lost) = (None, None);
    }

    /// Since when it waits for the end of its last engine, and since when no engine serves it.
    pub fn fenced(&self) -> Option<(Instant, Option<u64>)> {
        self.fenced.as_ref().map(|fenced| (fenced.since, fenced.unserved_since_ns))
    }

    /// It waits for the end of its last engine. Returns for how long, if the list of this engine must tell.
    pub fn wait_for_end(&mut self, unserved_since_ns: Option<u64>, list: Option<Process>) -> Option<Duration> {
        let since = Instant::now();
        let fenced = self.fenced.get_or_insert(Fenced { since, unserved_since_ns, told: None });
        let waited = fenced.since.elapsed();
        if fenced.told == list || waited < TELL_AFTER {
            return None;
        }
        fenced.told = list;
        Some(waited)
    }

    /// This engine lacked something for it. Returns whether that is news; while VMs move, one goes back to the engine
    /// that can serve it.
    pub fn lacks(&mut self, who: Who, now: Instant) -> bool {
        let has_it = self.at == if who == Who::Engine { At::Engine } else { At::Next };
        let is_news = has_it && self.lost.is_none();
        if is_news {
            self.lost = Some(Lost { again_at: now + AGAIN_AFTER, unserved_since_ns: clock::monotonic_ns() });
        }
        is_news
    }

    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// If its engine lacked something for it, it is tried again as soon as possible.
    pub fn try_now(&mut self) {
        if let Some(lost) = &mut self.lost {
            lost.again_at = Instant::now();
        }
    }

    /// If the keeper's engine lacked something for it, and it is time that this engine opens it again: since when a
    /// process of it is not served.
    pub fn try_again(&mut self, now: Instant) -> Option<u64> {
        if self.is_moving() {
            // An engine that does not serve it whole does not get it, or opens it anyway.
            self.lost = None;
        }
        // Those of the next engine have their turn when it is the keeper's.
        let is_due = self.at == At::Engine;
        self.lost.take_if(|lost| is_due && lost.again_at <= now).map(|lost| lost.unserved_since_ns)
    }
}
