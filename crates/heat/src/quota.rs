//! How much may be looked into at a time: what a fine cycle will cost is guessed from what the last ones did.
//!
//! Before: a fine cycle said what it cost. After: the next one watches no more than its budget probably pays for, so that a
//! guest is not stopped by thousands of faults at once and then left alone for a minute.
//! Units: seconds. Promise: pure. It is a guess: [`crate::pace`] sees to it that budgets hold.

use std::time::Duration;

use crate::pace::Budget;
use crate::source::{Cost, Report, Seen, UnitId};

/// Weight of the last cycle in what is remembered.
const NEWS: f64 = 0.5;
/// With fewer faults, how long they take is chance.
const ENOUGH: u64 = 64;
/// Weight of the last unit in what the next one is expected to be like that was never looked into.
const LOOK_NEWS: f64 = 1.0 / 16.0;
/// Where fewer of their pages are touched than this share, a sample of a unit would only say that it is to be scanned. A
/// sample costs as much as the scan of such a unit (300 us here: each gap between its pages is mapped by a call of its own).
const SPARSE: f64 = 0.2;

/// What looking into units costs.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// A thread waits so long for each page it touches, and a CPU works for it.
    per_fault: f64,
    /// A CPU works so long for each unit that is sampled, and for each that is scanned, whatever is touched.
    per_sample: f64,
    per_scan: f64,
    /// Share of its watched pages that are touched of a unit that is looked into for the first time.
    share: f64,
}

impl Default for Quota {
    /// Before anything is known: a dear fault (design §4), a sample, which maps the pages it does not watch, and units of
    /// which everything is touched.
    fn default() -> Self {
        Self { per_fault: 6e-6, per_sample: 3e-4, per_scan: 1e-4, share: 1.0 }
    }
}

impl Quota {
    /// What a cycle may cost that comes once in a period.
    pub fn purse(&self, budget: Budget, period: Duration) -> Purse {
        let of = |share: f64| share * period.as_secs_f64();
        Purse { quota: *self, cpu: of(budget.cpu), guest: of(budget.guest) }
    }

    /// The share of a unit's watched pages that will be touched, if it was never looked into: as of those that were of late.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Is there no use in a sample of a unit that was never looked into?
    pub fn is_sparse(&self) -> bool {
        self.share < SPARSE
    }

    /// Of so many pages of a unit that were watched for the first time, so many were touched.
    pub fn looked(&mut self, touched: u64, watched: u64) {
        self.share += LOOK_NEWS * (touched as f64 / watched.max(1) as f64 - self.share);
    }

    /// A fine cycle is over. `pages_of` answers how many pages a unit has.
    pub fn learn(&mut self, report: &Report, pages_of: impl Fn(UnitId) -> u64) {
        let Cost { cpu, guest, faults } = report.cost;
        if faults >= ENOUGH {
            self.per_fault += NEWS * (guest.as_secs_f64() / faults as f64 - self.per_fault);
        }
        let is_sample = |(unit, seen): &&(UnitId, Seen)| match seen {
            Seen::Fine { watched, .. } => watched.count() < pages_of(*unit),
            _ => false,
        };
        let samples = report.units.iter().filter(is_sample).count() as f64;
        let scans = report.units.len() as f64 - samples;
        let expected = samples * self.per_sample + scans * self.per_scan;
        if expected > 0.0 {
            // Which of the two was dearer than expected, nobody knows: both, then, where both were there.
            let times = cpu.saturating_sub(guest).as_secs_f64() / expected;
            let news = |each: f64| each * (1.0 + NEWS * (times - 1.0)).max(0.1);
            if samples > 0.0 {
                self.per_sample = news(self.per_sample);
            }
            if scans > 0.0 {
                self.per_scan = news(self.per_scan);
            }
        }
    }
}

/// What is left for one cycle.
#[derive(Clone, Copy, Debug)]
pub struct Purse {
    quota: Quota,
    cpu: f64,
    guest: f64,
}

impl Purse {
    /// Pay for one unit in which so many touches are expected, sampled or scanned; false if there is too little left.
    pub fn pay(&mut self, touches: f64, is_sample: bool) -> bool {
        let waits = touches * self.quota.per_fault;
        self.guest -= waits;
        self.cpu -= waits + if is_sample { self.quota.per_sample } else { self.quota.per_scan };
        self.guest >= 0.0 && self.cpu >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::PageMap;

    #[test]
    fn a_unit_of_which_nothing_is_known_is_expected_to_be_like_those_looked_into_of_late() {
        let mut quota = Quota::default();
        assert_eq!((quota.share(), quota.is_sparse()), (1.0, false), "everything may be touched");
        (0..100).for_each(|_| quota.looked(3, 32));
        assert!((quota.share() - 3.0 / 32.0).abs() < 0.01 && quota.is_sparse(), "{quota:?}");
        (0..10).for_each(|_| quota.looked(512, 512));
        assert!(quota.share() > 0.4 && !quota.is_sparse(), "{quota:?}");
        quota.looked(0, 0);
    }

    #[test]
    fn samples_and_scans_have_prices_of_their_own() {
        let mut quota = Quota::default();
        let cycle = |samples: u32, scans: u32| {
            let seen = |watched| Seen::Fine { watched: PageMap::first(watched), touched: PageMap::NONE };
            let of = |unit| seen(if unit < samples { 32 } else { 512 });
            let units = (0..samples + scans).map(|unit| (UnitId { region: 0, unit }, of(unit))).collect();
            // 300 us and 30.
            let cpu = Duration::from_micros(u64::from(300 * samples + 30 * scans));
            Report { units, cost: Cost { cpu, ..Cost::default() } }
        };
        for (samples, scans) in [(100, 0), (0, 50), (0, 70), (0, 70), (100, 30), (0, 80), (0, 80)] {
            quota.learn(&cycle(samples, scans), |_| 512);
        }
        assert!((250e-6..350e-6).contains(&quota.per_sample) && (25e-6..40e-6).contains(&quota.per_scan), "{quota:?}");
        quota.learn(&Report::default(), |_| 512);
    }

    #[test]
    fn what_cycles_cost_decides_how_many_units_fit_into_the_next() {
        let units = |budget| {
            let mut quota = Quota::default();
            let scan = Seen::Fine { watched: PageMap::ALL, touched: PageMap::first(100) };
            let units = (0..10).map(|unit| (UnitId { region: 0, unit }, scan)).collect();
            // A fault takes 10 us, a unit 1 ms besides.
            let (cpu, guest) = (Duration::from_millis(20), Duration::from_millis(10));
            let report = Report { units, cost: Cost { cpu, guest, faults: 1000 } };
            (0..20).for_each(|_| quota.learn(&report, |_| 512));
            quota.learn(&Report::default(), |_| 512);
            let mut purse = quota.purse(budget, Duration::from_secs(2));
            (0..).take_while(|_| purse.pay(100.0, false)).count()
        };
        // 40 ms of CPU at 2 ms, 10 ms of waiting at 1 ms.
        assert!((19..=20).contains(&units(Budget { cpu: 0.02, guest: 1.0 })));
        assert!((9..=10).contains(&units(Budget { cpu: 1.0, guest: 0.005 })));
    }
}
