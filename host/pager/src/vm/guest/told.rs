//! State shared by the worker of an agent, reclaim and the API.
//!
//! Before: an agent reports. After: reclaim finds its hints, and the API its state; the agent is told which pages were
//! restored.
//! Threads: any; locks are held for a moment, that of the hints for one pick. Promise: no fault waits for any of it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use ballast_base::PageIdx;
use ballast_messages::message::Tick;
pub use ballast_messages::message::{Node, TierUse, Tiering, TieringState};

use super::hints::{Hints, Tally};
use crate::run::pool::Notifier;

/// Restored pages that wait to be told.
const RESTORED: usize = 4096;

/// The pages that were picked, estimated from samples: all but those that were not judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Picked {
    /// Judged.
    pub judged: u64,
    /// Touched again within ten seconds.
    pub wrong: u64,
}

/// State of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The VMM has no port for one.
    #[default]
    NoPort,
    /// There is a port, but no agent has replied on it for a while, or ever.
    Silent,
    /// It is there and reports nothing.
    Idle,
    /// Its reports are hints.
    Reporting,
    /// Pages that it reported as cold were touched at once.
    Ignored,
}

/// The agent's state for the API. Counters are of this engine.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    /// See [`State`].
    pub state: State,
    /// Version of the agent, and release of the guest's kernel.
    pub version: String,
    /// The release of the guest's kernel.
    pub kernel: String,
    /// The last state of the guest.
    pub tick: Tick,
    /// The time of it.
    pub heard: Option<Instant>,
    /// Whole reports taken, and messages of any kind.
    pub reports: u64,
    /// Messages of any kind.
    pub messages: u64,
    /// Messages that were invalid, or exceeded the rate limit.
    pub rejected_messages: u64,
    /// Bytes that belonged to no message.
    pub garbage_bytes: u64,
    /// Pages of reports that are not the guest's, named twice, or where nothing is proved.
    pub rejected_pages: u64,
    /// Pages of the last report that are cold, and of these, free.
    pub cold_pages: u64,
    /// Free pages among them.
    pub free_pages: u64,
    /// Pages told to it that were restored.
    pub restored_pages: u64,
    /// Parts of guest-physical memory, and those of them that are proved.
    pub pieces: (u32, u32),
    /// Times that it was ignored because it lied.
    pub times_ignored: u64,
    /// End of the time in which it is ignored.
    pub ignored_until: Option<Instant>,
    /// A sample of the pages that were evicted because it reported them as cold.
    pub by_agent: Picked,
    /// A sample of the pages that the host picked.
    pub by_host: Picked,
}

impl Shown {
    /// A report was taken.
    pub(crate) fn reported(&mut self, tally: Tally) {
        self.reports += 1;
        // A guest may name 2^47 pages in each report.
        self.rejected_pages = self.rejected_pages.saturating_add(tally.rejected);
        (self.cold_pages, self.free_pages) = (tally.cold, tally.free);
    }
}

/// Pages of each node of the guest that the agent is to hold. A guest's numbers of nodes are bounded (`guest`), so the
/// maps are, too.
#[derive(Debug, Default)]
struct Balloon {
    /// What an engine before this one asked for.
    adopted: BTreeMap<u32, u64>,
    /// Comes before that.
    by_policy: BTreeMap<u32, u64>,
    /// Comes before both.
    by_operator: BTreeMap<u32, u64>,
}

/// The shared state of an agent's worker, reclaim and the API.
#[derive(Debug, Default)]
pub struct Told {
    /// Notifies the worker.
    pub(crate) notifier: Notifier,
    hints: Mutex<Hints>,
    has_port: AtomicBool,
    is_reporting: AtomicBool,
    shown: Mutex<Shown>,
    balloon: Mutex<Balloon>,
    restored: Mutex<VecDeque<(u32, PageIdx)>>,
}

impl Told {
    /// Does the VMM show its port?
    pub(crate) fn has_port(&self) -> bool {
        self.has_port.load(Ordering::Relaxed)
    }

    /// Sets whether it does.
    pub(crate) fn set_port(&self, has_port: bool) {
        self.has_port.store(has_port, Ordering::Relaxed);
        if !has_port {
            self.show().state = State::NoPort;
        }
    }

    /// Are its reports hints now? Then the host need not track.
    pub fn is_reporting(&self) -> bool {
        self.is_reporting.load(Ordering::Acquire)
    }

    /// Its reports are hints from now on, or not. Returns whether that was otherwise.
    pub(crate) fn set_reporting(&self, is_reporting: bool) -> bool {
        if !is_reporting {
            *self.hints() = Hints::default();
        }
        self.is_reporting.swap(is_reporting, Ordering::AcqRel) != is_reporting
    }

    /// The hints.
    pub(crate) fn hints(&self) -> MutexGuard<'_, Hints> {
        self.hints.lock().expect("no panic while held")
    }

    /// The state for the API.
    pub fn shown(&self) -> Shown {
        self.show().clone()
    }

    pub(crate) fn show(&self) -> MutexGuard<'_, Shown> {
        self.shown.lock().expect("no panic while held")
    }

    /// Sets the samples of evicted pages, and the time until which the agent is ignored, if that is new.
    pub(crate) fn judged(&self, (by_agent, by_host): (Picked, Picked), ignored_until: Option<Instant>) {
        let mut shown = self.show();
        (shown.by_agent, shown.by_host) = (by_agent, by_host);
        if ignored_until.is_some() {
            shown.ignored_until = ignored_until;
            shown.times_ignored += 1;
            drop(shown);
            self.notifier.notify();
        }
    }

    /// Pages of each node of the guest that the agent is to hold. A node that was never named is in none.
    pub fn balloon(&self) -> BTreeMap<u32, u64> {
        let balloon = self.balloon.lock().expect("no panic while held");
        let all = [&balloon.adopted, &balloon.by_policy, &balloon.by_operator];
        all.into_iter().flatten().map(|(node, pages)| (*node, *pages)).collect()
    }

    /// The agent is to hold this many pages of a node from now on, as far as the guest can spare them.
    pub fn set_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").by_operator.insert(node, pages);
        self.notifier.notify();
    }

    /// The same for a policy, which leaves nodes alone that an operator named.
    pub fn set_policy_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").by_policy.insert(node, pages);
    }

    /// No policy decides any more: what one asked for is given back.
    pub fn end_policy_balloon(&self) {
        self.balloon.lock().expect("no panic while held").by_policy.values_mut().for_each(|pages| *pages = 0);
    }

    /// An agent holds pages that an engine before this one asked for: it goes on, unless something else was said.
    pub(crate) fn adopt_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").adopted.entry(node).or_insert(pages);
    }

    /// A page was restored that an agent should know of.
    pub(crate) fn restored(&self, place: (u32, PageIdx)) {
        let mut restored = self.restored.lock().expect("no panic while held");
        if restored.len() < RESTORED {
            restored.push_back(place);
        }
    }

    /// Pages restored since the last call.
    pub(crate) fn take_restored(&self) -> Vec<(u32, PageIdx)> {
        std::mem::take(&mut *self.restored.lock().expect("no panic while held")).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_names_foreign_pages_for_days_overflows_no_counter() {
        let mut shown = Shown::default();
        for _ in 0..2 {
            shown.reported(Tally { rejected: u64::MAX - 1, ..Tally::default() });
        }
        assert_eq!((shown.reports, shown.rejected_pages), (2, u64::MAX));
    }
}
