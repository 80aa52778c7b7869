//! The ledger: books each move of a page once.
//!
//! Before: a fault, readahead, an eviction or a discard has changed words. After: gauges, counters, latencies, the
//! refault history and the fault throttle include it.
//! Threads: any; counters are relaxed atomics. Units: pages.
//! Promise: a gauge changes by the word that was replaced under its lock, so gauges are exact while no page moves.

use std::sync::atomic::Ordering;
use std::time::Instant;

use ballast_base::PageIdx;

use super::Vm;
use crate::vm::interval;
use crate::vm::region::Region;
use crate::vm::stats::{Counter, Latency};
use ballast_page::discard::Discarded;
use ballast_page::outcome::{Move, Outcome, Served};
use ballast_page::page_state::State;
use ballast_page::punch::Evicted;

/// The gauge that counts pages in this state; `None` for Resident, which the files know.
fn gauge(state: State) -> Option<Counter> {
    match state {
        State::Resident => None,
        State::Quarantine | State::Evicting => Some(Counter::Quarantined),
        State::Far | State::Restoring => Some(Counter::Far),
        State::Zero => Some(Counter::Zero),
        State::Poisoned => Some(Counter::Poisoned),
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Ledger<'a> {
    vm: &'a Vm,
}

impl Vm {
    pub(crate) fn ledger(&self) -> Ledger<'_> {
        Ledger { vm: self }
    }
}

impl Ledger<'_> {
    pub fn moved(self, from: State, to: State, pages: u64) {
        if to == State::Resident {
            self.vm.mail.became_resident();
        }
        let (from, to) = (gauge(from), gauge(to));
        if from == to {
            return;
        }
        let stats = self.vm.stats();
        if let Some(from) = from {
            stats.sub(from, pages);
        }
        if let Some(to) = to {
            stats.add(to, pages);
        }
    }

    /// Books a try to serve a fault that was read at `since`.
    pub fn fault(self, region: &Region, page: PageIdx, outcome: &Outcome, since: Instant) {
        let pages = region.granule_pages();
        self.brought_in(region, page, outcome);
        let Ok(served) = outcome.served else { return };
        let stats = self.vm.stats();
        if served == Served::Later {
            return stats.add(Counter::FaultDeferred, 1);
        }
        let took = since.elapsed();
        if matches!(served, Served::Restored | Served::Filled { .. } | Served::Zeroed | Served::Fresh) {
            self.vm.mail.charge(pages);
        }
        let is_restore = matches!(served, Served::Restored | Served::Filled { .. });
        stats.record(if is_restore { Latency::Restore } else { Latency::Other }, took);
        if let Some(moved) = outcome.moved.filter(|_| served == Served::Restored) {
            self.refaulted(region, page, &[moved]);
        }
    }

    /// Books a try to bring a granule in, whether a thread waits for it or not.
    pub fn brought_in(self, region: &Region, page: PageIdx, outcome: &Outcome) {
        let (stats, pages) = (self.vm.stats(), region.granule_pages());
        if let Some(moved) = outcome.moved {
            self.moved(moved.from.state(), moved.to.state(), pages);
            if moved.is_quarantine_hit() {
                stats.add(Counter::QuarantineHits, pages);
            }
        }
        let Ok(served) = outcome.served else { return };
        match served {
            Served::Mapped => stats.add(Counter::FaultMinor, 1),
            Served::Fresh => stats.add(Counter::FaultFresh, 1),
            Served::Zeroed => {
                stats.add(Counter::ZeroedPages, pages);
                stats.add(Counter::FaultZero, 1);
            }
            Served::Restored | Served::Filled { .. } => {
                stats.add(Counter::RestoredPages, pages);
                stats.add(Counter::FaultRestore, 1);
            }
            Served::Poisoned { .. } | Served::Failed | Served::Later | Served::Gone => {}
        }
        self.report(served, region.number, page);
    }

    /// Books base pages, from `first` on, that were restored before a touch.
    pub fn prefetched(self, region: &Region, first: PageIdx, moves: &[Move]) {
        for moved in moves {
            self.moved(moved.from.state(), moved.to.state(), 1);
        }
        self.vm.mail.charge(moves.len() as u64);
        self.refaulted(region, first, moves);
        self.vm.stats().add(Counter::Prefetched, moves.len() as u64);
    }

    /// Books base pages that readahead mapped out of quarantine: a thread that touches pages in order will touch them.
    pub fn mapped_ahead(self, moves: &[Move]) {
        moves.iter().for_each(|moved| self.moved(moved.from.state(), moved.to.state(), 1));
        self.vm.stats().add(Counter::QuarantineHits, moves.len() as u64);
    }

    /// Books holes of base pages that readahead filled with zeros.
    pub fn zeroed_ahead(self, moves: &[Move]) {
        let zero = moves.iter().filter(|moved| moved.from.state() == State::Zero).count() as u64;
        self.moved(State::Zero, State::Resident, zero);
        self.vm.stats().add(Counter::ZeroedPages, zero);
        self.vm.mail.charge(moves.len() as u64);
    }

    /// Books the refaults of neighbouring granules from `first` on.
    fn refaulted(self, region: &Region, first: PageIdx, moves: &[Move]) {
        let (now_ms, mut interval_ms, mut milli_hz, mut soon) = (interval::now_ms(), 0, 0, 0);
        let has_agent = self.vm.mail.agent.has_port();
        for (at, moved) in moves.iter().enumerate() {
            let page = PageIdx(first.0 + at as u64 * region.granule_pages());
            let this_ms = region.departures().refault_ms(page.0, moved.from.age(), now_ms);
            if has_agent {
                self.vm.mail.refaults.push((region.number, page));
            }
            interval_ms += this_ms;
            milli_hz += interval::milli_hz(this_ms);
            soon += if this_ms < interval::SOON_MS { region.granule_pages() } else { 0 };
        }
        self.vm.stats().add(Counter::RefaultMs, interval_ms);
        self.vm.stats().add(Counter::RefaultMilliHz, milli_hz);
        self.vm.stats().add(Counter::RestoredSoon, soon);
    }

    /// Books the eviction of a run of granules of `granule` pages each.
    pub fn evicted(self, evicted: &Evicted, granule: u64) {
        let stats = self.vm.stats();
        let held = evicted.held.len() as u64 * granule;
        self.moved(State::Quarantine, State::Far, evicted.far);
        self.moved(State::Quarantine, State::Zero, evicted.zero);
        self.moved(State::Quarantine, State::Resident, held + evicted.refused + evicted.stuck);
        stats.add(Counter::Evicted, evicted.far);
        stats.add(Counter::EvictedZero, evicted.zero);
        stats.add(Counter::Aborted, evicted.aborted);
        stats.add(Counter::Failed, evicted.stuck);
        self.vm.mail.throttle.evicted(evicted.far + evicted.zero);
    }

    pub fn discarded(self, discarded: &Discarded) {
        self.vm.stats().add(Counter::Discarded, discarded.counts.iter().sum());
        for state in State::ALL {
            self.moved(state, State::Resident, discarded.counts[state as usize]);
        }
    }

    /// Reports an event for operators if a page was lost, or another process has filled its hole.
    fn report(self, served: Served, region: u32, page: PageIdx) {
        match served {
            Served::Poisoned { newly: true } => {
                let text = "the guest gets a memory error when it touches it";
                self.vm.report("page-lost", format!("the store lost page {page} of region {region}: {text}"));
            }
            Served::Failed => {
                let text = "memory of the host failed: the guest gets a memory error when it touches";
                self.vm.report("memory-error", format!("{text} page {page} of region {region}"));
            }
            Served::Filled { zeros } => {
                let times = self.vm.filled.fetch_add(1, Ordering::Relaxed) + 1;
                if times.is_power_of_two() {
                    let found = match zeros {
                        true => {
                            "zeros, which the page's bytes have replaced: a process that is not of the VM reads its RAM"
                        }
                        false => "bytes, which the guest gets: a process that is not of the VM writes to its RAM",
                    };
                    let text = format!("page {page} of region {region} was far, and in its file were {found}");
                    self.vm.report("far-filled", format!("{text} ({times} pages so far)"));
                }
            }
            _ => {}
        }
    }
}
