//! State that the worker of an agent, reclaim and the API share.
//!
//! Before: an agent reports. After: reclaim finds hints, the API the state, and the agent's worker the restored pages.
//! Threads: any; locks are held briefly, that of the hints for one pick.
//! Promise: no fault waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use ballast_base::PageIdx;
use ballast_messages::message::Tick;
pub use ballast_messages::message::{Node, TierUse, Tiering, TieringState};

use super::hints::{Hints, Tally};
use crate::run::pool::Notifier;

/// Most restored pages that wait to be reported to the agent.
const RESTORED: usize = 4096;

/// Picked pages, estimated from samples that were judged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Picked {
    /// Pages judged.
    pub judged: u64,
    /// Pages touched again within ten seconds.
    pub wrong: u64,
}

/// State of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// The VMM has no port for one.
    #[default]
    NoPort,
    /// There is a port, but no agent has replied on it yet, or lately.
    Silent,
    /// An agent runs and reports nothing.
    Idle,
    /// Its reports are hints.
    Reporting,
    /// Its reports are ignored for a time, because pages that it reported as cold were touched at once.
    Ignored,
}

/// The agent's state for the API. Counters start with this engine.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    /// See [`State`].
    pub state: State,
    /// Version of the agent.
    pub version: String,
    /// The release of the guest's kernel.
    pub kernel: String,
    /// Last regular message of the agent.
    pub tick: Tick,
    /// Time of that message.
    pub heard: Option<Instant>,
    /// Complete reports.
    pub reports: u64,
    /// Messages of any kind.
    pub messages: u64,
    /// Messages that were invalid or exceeded the rate limit.
    pub rejected_messages: u64,
    /// Bytes that belonged to no message.
    pub garbage_bytes: u64,
    /// Reported pages that are not the guest's, were named twice, or are in no proved piece.
    pub rejected_pages: u64,
    /// Cold pages of the last report.
    pub cold_pages: u64,
    /// Free pages among them.
    pub free_pages: u64,
    /// Restored pages that were reported to the agent.
    pub restored_pages: u64,
    /// Pieces of guest-physical memory; those that are proved.
    pub pieces: (u32, u32),
    /// Number of times that the host began to ignore the agent's reports.
    pub times_ignored: u64,
    /// End of the time in which its reports are ignored.
    pub ignored_until: Option<Instant>,
    /// A sample of the pages that were evicted because the agent reported them as cold.
    pub by_agent: Picked,
    /// A sample of the pages that the host picked.
    pub by_host: Picked,
}

impl Shown {
    pub(crate) fn reported(&mut self, tally: Tally) {
        self.reports += 1;
        // The sum saturates, because a guest may name 2^47 pages in each report.
        self.rejected_pages = self.rejected_pages.saturating_add(tally.rejected);
        (self.cold_pages, self.free_pages) = (tally.cold, tally.free);
    }
}

/// By guest node, pages that the agent is to hold. Node numbers are bounded (`guest`), and the maps with them.
#[derive(Debug, Default)]
struct Balloon {
    /// Set by an earlier engine.
    adopted: BTreeMap<u32, u64>,
    /// Overrides `adopted`.
    by_policy: BTreeMap<u32, u64>,
    /// Overrides both.
    by_operator: BTreeMap<u32, u64>,
}

/// The shared state of an agent's worker, reclaim and the API.
#[derive(Debug, Default)]
pub struct Told {
    pub(crate) notifier: Notifier,
    hints: Mutex<Hints>,
    has_port: AtomicBool,
    is_reporting: AtomicBool,
    shown: Mutex<Shown>,
    balloon: Mutex<Balloon>,
    restored: Mutex<VecDeque<(u32, PageIdx)>>,
}

impl Told {
    pub(crate) fn has_port(&self) -> bool {
        self.has_port.load(Ordering::Relaxed)
    }

    pub(crate) fn set_port(&self, has_port: bool) {
        self.has_port.store(has_port, Ordering::Relaxed);
        if !has_port {
            self.show().state = State::NoPort;
        }
    }

    /// Returns whether the agent's reports are used as hints, so that the host need not track accesses.
    pub fn is_reporting(&self) -> bool {
        self.is_reporting.load(Ordering::Acquire)
    }

    pub(crate) fn set_reporting(&self, is_reporting: bool) -> bool {
        if !is_reporting {
            *self.hints() = Hints::default();
        }
        self.is_reporting.swap(is_reporting, Ordering::AcqRel) != is_reporting
    }

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

    /// Sets the samples of evicted pages, and the end of a new time in which the agent is ignored.
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

    /// By guest node, pages that the agent is to hold; without nodes that were never named.
    pub fn balloon(&self) -> BTreeMap<u32, u64> {
        let balloon = self.balloon.lock().expect("no panic while held");
        let all = [&balloon.adopted, &balloon.by_policy, &balloon.by_operator];
        all.into_iter().flatten().map(|(node, pages)| (*node, *pages)).collect()
    }

    /// Sets, for an operator, the pages of a node that the agent is to hold, as far as the guest can spare them.
    pub fn set_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").by_operator.insert(node, pages);
        self.notifier.notify();
    }

    /// Like [`Told::set_balloon`], for a policy. An operator's number for the node overrides it.
    pub fn set_policy_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").by_policy.insert(node, pages);
    }

    /// No policy decides any more: returns the pages to the guest that a policy asked for.
    pub fn end_policy_balloon(&self) {
        self.balloon.lock().expect("no panic while held").by_policy.values_mut().for_each(|pages| *pages = 0);
    }

    /// An agent holds pages that an earlier engine asked for: it keeps them until this engine sets another number.
    pub(crate) fn adopt_balloon(&self, node: u32, pages: u64) {
        self.balloon.lock().expect("no panic while held").adopted.entry(node).or_insert(pages);
    }

    pub(crate) fn restored(&self, place: (u32, PageIdx)) {
        let mut restored = self.restored.lock().expect("no panic while held");
        if restored.len() < RESTORED {
            restored.push_back(place);
        }
    }

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
