//! The place of a VM: the engine that has it, or will get it, and why no engine has it if none does.
//!
//! Before: the VM is new, or was brought back. After: the place is after one more step of the VM's way between two
//! engines; the tables of [`crate::stage`] have the steps.
//! Threads: the keeper's one. Nothing here waits.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use ballast_sys::clock;
use ballast_sys::memfd::FileId;
use ballast_sys::process::Process;

use crate::engine::Who;
use crate::lost::{Found, Search};

/// How long a VM waits before operators are told.
const TELL_AFTER: Duration = Duration::from_secs(2);

/// Time until an engine that could not serve all of a VM is given the VM again. While the VM is opened, none of its
/// faults is served, so it is not tried continuously.
pub(crate) const AGAIN_AFTER: Duration = Duration::from_secs(2);

pub(crate) struct Place {
    at: At,
    /// Set while some of the VM's regions are missing: no engine has the VM then.
    search: Option<Search>,
    /// Set while a thread of the VM's last, dead engine may still change it: no other engine has the VM then.
    fenced: Option<Fenced>,
    /// The number of the last question to an upgrade's new engine about this VM. A reply to an earlier question is
    /// about the VM before its processes went and attached again.
    question: Option<u64>,
    /// The engine lacked a resource for the VM, and will open it again.
    lost: Option<Lost>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Engine,
    /// The order with this number tells the keeper's engine to do nothing for the VM but serve its faults.
    Resting(u64),
    /// Both engines serve its faults. When the keeper's engine has closed it, the next engine has it alone.
    Both,
    /// The keeper's engine closes it, since this time and by this order. Then the next engine gets it.
    Parting(Instant, u64),
    Next,
}

/// A VM for which the engine lacked a resource.
struct Lost {
    /// When the engine is given the VM again.
    again_at: Instant,
    /// Since when one of its processes is not served, on the monotonic clock.
    unserved_since_ns: u64,
}

struct Fenced {
    since: Instant,
    /// Since when no engine serves the VM, on the monotonic clock.
    unserved_since_ns: Option<u64>,
    /// The engine in whose event list the wait is noted; the next engine has a new list.
    told: Option<Process>,
}

impl Place {
    pub fn with(who: Who) -> Self {
        let at = if who == Who::Next { At::Next } else { At::Engine };
        Self { at, search: None, fenced: None, question: None, lost: None }
    }

    /// The engine that has the VM, or will get it.
    pub fn who(&self) -> Who {
        if matches!(self.at, At::Both | At::Next) { Who::Next } else { Who::Engine }
    }

    pub fn at(&self) -> At {
        self.at
    }

    /// Whether the VM is on its way from the keeper's engine to the next one.
    pub fn is_moving(&self) -> bool {
        matches!(self.at, At::Resting(_) | At::Both | At::Parting(..))
    }

    /// Whether the engine has the orders to serve the VM.
    pub fn is_handed_over(&self) -> bool {
        let is_on_its_way = matches!(self.at, At::Resting(_) | At::Parting(..));
        self.search.is_none() && self.fenced.is_none() && !is_on_its_way
    }

    /// Whether the VM is with the keeper's engine and waits for nothing.
    pub fn is_at_rest(&self) -> bool {
        self.fenced.is_none() && self.search.is_none() && self.lost.is_none() && self.at == At::Engine
    }

    /// The keeper's engine must only serve the VM's faults, by this order.
    pub fn rest(&mut self, seq: u64) {
        self.at = At::Resting(seq);
    }

    /// The next engine will serve the VM's faults as well.
    pub fn share(&mut self) {
        self.at = At::Both;
    }

    /// The keeper's engine must close the VM, by this order.
    pub fn part(&mut self, seq: u64) {
        self.at = At::Parting(Instant::now(), seq);
    }

    /// The keeper's engine has closed the VM by this order: the VM is with the next engine. Returns since when no
    /// engine serves it; `None` if the VM has gone and come back.
    pub fn parted(&mut self, seq: u64) -> Option<Instant> {
        match self.at {
            At::Parting(since, by) if by == seq => {
                self.at = At::Next;
                Some(since)
            }
            _ => None,
        }
    }

    /// The keeper's engine has closed a VM that both had: the next engine has it alone. Returns whether both had it.
    pub fn left(&mut self) -> bool {
        let was_shared = self.at == At::Both;
        if was_shared {
            self.at = At::Next;
        }
        was_shared
    }

    /// Puts the VM with the keeper's engine. Returns where it was.
    pub fn go_back(&mut self) -> At {
        std::mem::replace(&mut self.at, At::Engine)
    }

    /// No process of the VM is left, so one engine has it from now on; of two, the next one. That engine gets orders to
    /// close the VM as if it moved, to open it again, and to end it. Returns where the VM was.
    pub fn end(&mut self) -> At {
        self.lost = None;
        let at = if self.who() == Who::Next { At::Next } else { At::Engine };
        std::mem::replace(&mut self.at, at)
    }

    pub fn ask(&mut self, seq: u64) {
        self.question = Some(seq);
    }

    pub fn is_asked(&self, seq: u64) -> bool {
        self.question == Some(seq)
    }

    /// Some regions of the VM are missing: no engine has it before this search ends.
    pub fn begin_search(&mut self, search: Search) {
        self.search = Some(search);
    }

    pub fn is_searched(&self) -> bool {
        self.search.is_some()
    }

    /// The result of the search; `None` before it ends, and after it was returned once. `missing` are the files that
    /// are still missing.
    pub fn found(&mut self, missing: HashSet<FileId>) -> Option<Found> {
        let search = self.search.as_mut()?;
        let found = if missing.is_empty() { Found::Nobody } else { search.ask(|| missing) };
        self.search.take_if(|_| found != Found::Waiting).map(|_| found)
    }

    /// An engine was given the VM.
    pub fn opens(&mut self) {
        (self.fenced, self.lost) = (None, None);
    }

    /// Since when the VM waits for the end of its last engine, and since when no engine serves it.
    pub fn fenced(&self) -> Option<(Instant, Option<u64>)> {
        self.fenced.as_ref().map(|fenced| (fenced.since, fenced.unserved_since_ns))
    }

    /// The VM waits for the end of its last engine. Returns how long it has waited, if that must be noted in the event
    /// list of this engine.
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

    /// This engine lacked a resource for the VM. Returns whether that is news. It is ignored while the VM moves: then
    /// the VM goes back to an engine that can serve it.
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

    /// If its engine lacked a resource for the VM, makes the VM due at once.
    pub fn try_now(&mut self) {
        if let Some(lost) = &mut self.lost {
            lost.again_at = Instant::now();
        }
    }

    /// If the keeper's engine lacked a resource for the VM and must open it again now: since when one of its processes
    /// is not served.
    pub fn try_again(&mut self, now: Instant) -> Option<u64> {
        if self.is_moving() {
            // An engine that does not serve all of the VM does not get it, or opens it in any case.
            self.lost = None;
        }
        // A VM of the next engine becomes due when that is the keeper's engine.
        let is_due = self.at == At::Engine;
        self.lost.take_if(|lost| is_due && lost.again_at <= now).map(|lost| lost.unserved_since_ns)
    }
}
