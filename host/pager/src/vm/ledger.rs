//! The ledger: books every move of a page, once.
//!
//! Before: a fault, a prefetch, an eviction or a discard has moved words. After: the gauges, the counters, the
//! latencies, the refault history and the fault throttle know of it.
//! Threads: any; counters are relaxed atomics. Units: pages.
//! Promise: a gauge changes by the words that were replaced, under their lock, so the gauges are exact while nothing
//! moves; [`Vm::census`] is the slow truth to compare them with.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use ballast_base::PageIdx;

use super::Vm;
use crate::vm::interval;
use crate::vm::region::Region;
use crate::vm::stats::{Counter, Latency};
use ballast_page::discard::Discarded;
use ballast_page::outcome::{Move, Outcome, Served};
use ballast_page::page_state::State;
use ballast_page::punch::Evicted;

/// The gauge that counts pages in this state.
fn gauge(state: State) -> Option<Counter> {
    match state {
        State::Resident => None,
        State::Quarantine | State::Evicting => Some(Counter::Quarantined),
        State::Far | State::Restoring => Some(Counter::Far),
        State::Zero => Some(Counter::Zero),
        State::Poisoned => Some(Counter::Poisoned),
    }
}

/// The ledger of one VM.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ledger<'a> {
    vm: &'a Vm,
}

impl Vm {
    /// Where moves are booked.
    pub(crate) fn ledger(&self) -> Ledger<'_> {
        Ledger { vm: self }
    }
}

impl Ledger<'_> {
    /// This many pages moved from one state to another.
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

    /// A fault that was read at `since` was tried. Returns the refault interval of a page that was restored.
    pub fn fault(self, region: &Region, page: PageIdx, outcome: &Outcome, since: Instant) -> Duration {
        let pages = region.granule_pages();
        self.brought_in(region, page, outcome);
        let Ok(served) = outcome.served else { return Duration::ZERO };
        let stats = self.vm.stats();
        if served == Served::Later {
            stats.add(Counter::FaultDeferred, 1);
            return Duration::ZERO;
        }
        let took = since.elapsed();
        if matches!(served, Served::Restored | Served::Filled { .. } | Served::Zeroed | Served::Fresh) {
            self.vm.mail.charge(pages);
        }
        let is_restore = matches!(served, Served::Restored | Served::Filled { .. });
        stats.record(if is_restore { Latency::Restore } else { Latency::Other }, took);
        match outcome.moved {
            Some(moved) if served == Served::Restored => self.refaulted(region, page, &[moved]),
            _ => Duration::ZERO,
        }
    }

    /// A granule was brought in, or a try failed: books what counts whether a thread waits for it or not.
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

    /// Base pages were restored before they were touched, from `first` on.
    pub fn prefetched(self, region: &Region, first: PageIdx, moves: &[Move]) {
        for moved in moves {
            self.moved(moved.from.state(), moved.to.state(), 1);
        }
        self.vm.mail.charge(moves.len() as u64);
        self.refaulted(region, first, moves);
        self.vm.stats().add(Counter::Prefetched, moves.len() as u64);
    }

    /// Base pages left quarantine before they were touched: a thread in order will touch them.
    pub fn mapped_ahead(self, moves: &[Move]) {
        moves.iter().for_each(|moved| self.moved(moved.from.state(), moved.to.state(), 1));
        self.vm.stats().add(Counter::QuarantineHits, moves.len() as u64);
    }

    /// Holes of base pages were filled with zeros before they were touched.
    pub fn zeroed_ahead(self, moves: &[Move]) {
        let zero = moves.iter().filter(|moved| moved.from.state() == State::Zero).count() as u64;
        self.moved(State::Zero, State::Resident, zero);
        self.vm.stats().add(Counter::ZeroedPages, zero);
        self.vm.mail.charge(moves.len() as u64);
    }

    /// Neighbouring granules were restored, from `first` on. Returns the sum of their refault intervals.
    fn refaulted(self, region: &Region, first: PageIdx, moves: &[Move]) -> Duration {
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
        Duration::from_millis(interval_ms)
    }

    /// A run of granules of this many pages each went through an eviction.
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

    /// The VMM gave pages up.
    pub fn discarded(self, discarded: &Discarded) {
        self.vm.stats().add(Counter::Discarded, discarded.counts.iter().sum());
        for state in State::ALL {
            self.moved(state, State::Resident, discarded.counts[state as usize]);
        }
    }

    /// Reports events for operators: a page was lost, or another process filled its hole.
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
                // Reported at the 1st, 2nd, 4th, 8th ... time.
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
