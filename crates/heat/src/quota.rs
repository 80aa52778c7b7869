//! How much may be looked into at a time: what a fine cycle will cost is guessed from what the last ones did.
//!
//! Before: a fine cycle said what it cost. After: the next one watches no more than its budget probably pays for, so that a
//! guest is not stopped by thousands of faults at once and then left alone for a minute.
//! Units: seconds. Promise: pure. It is a guess: [`crate::pace`] sees to it that budgets hold.

use std::time::Duration;

use crate::pace::Budget;
use crate::source::{Cost, Report};

/// Weight of the last cycle in what is remembered.
const NEWS: f64 = 0.5;
/// With fewer faults, how long they take is chance.
const ENOUGH: u64 = 64;
/// Weight of the last sample in what the next unit is expected to be like.
const SAMPLE_NEWS: f64 = 1.0 / 16.0;

/// What looking into units costs.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// A thread waits so long for each page it touches, and a CPU works for it.
    per_fault: f64,
    /// A CPU works so long for each unit, whatever is touched.
    per_unit: f64,
    /// Share of its watched pages that are touched of a unit of which nothing is known.
    share: f64,
}

impl Default for Quota {
    /// Before anything is known: a dear fault (design §4), a sample, which maps the pages it does not watch, and units of
    /// which everything is touched.
    fn default() -> Self {
        Self { per_fault: 6e-6, per_unit: 1e-4, share: 1.0 }
    }
}

impl Quota {
    /// What a cycle may cost that comes once in a period.
    pub fn purse(&self, budget: Budget, period: Duration) -> Purse {
        let of = |share: f64| share * period.as_secs_f64();
        Purse { quota: *self, cpu: of(budget.cpu), guest: of(budget.guest) }
    }

    /// The share of a unit's watched pages that will be touched, if it was never looked into: as of those sampled of late.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// So many of a unit's random pages were watched, and so many of them touched.
    pub fn sampled(&mut self, touched: u64, watched: u64) {
        self.share += SAMPLE_NEWS * (touched as f64 / watched.max(1) as f64 - self.share);
    }

    /// A fine cycle is over.
    pub fn learn(&mut self, report: &Report) {
        let Cost { cpu, guest, faults } = report.cost;
        if faults >= ENOUGH {
            self.per_fault += NEWS * (guest.as_secs_f64() / faults as f64 - self.per_fault);
        }
        if !report.units.is_empty() {
            let each = cpu.saturating_sub(guest).as_secs_f64() / report.units.len() as f64;
            self.per_unit += NEWS * (each - self.per_unit);
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
    /// Pay for one unit in which so many touches are expected; false if there is too little left.
    pub fn pay(&mut self, touches: f64) -> bool {
        let waits = touches * self.quota.per_fault;
        self.guest -= waits;
        self.cpu -= waits + self.quota.per_unit;
        self.guest >= 0.0 && self.cpu >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::{PageMap, Seen, UnitId};

    #[test]
    fn a_unit_of_which_nothing_is_known_is_expected_to_be_like_those_sampled_of_late() {
        let mut quota = Quota::default();
        assert_eq!(quota.share(), 1.0, "everything may be touched");
        (0..100).for_each(|_| quota.sampled(3, 32));
        assert!((quota.share() - 3.0 / 32.0).abs() < 0.01, "{quota:?}");
        (0..10).for_each(|_| quota.sampled(32, 32));
        assert!(quota.share() > 0.4, "{quota:?}");
        quota.sampled(0, 0);
    }

    #[test]
    fn what_cycles_cost_decides_how_many_units_fit_into_the_next() {
        let units = |budget| {
            let mut quota = Quota::default();
            let scan = Seen::Fine { watched: PageMap::ALL, touched: PageMap::first(100), written: None };
            let units = (0..10).map(|unit| (UnitId { region: 0, unit }, scan)).collect();
            // A fault takes 10 us, a unit 1 ms besides.
            let (cpu, guest) = (Duration::from_millis(20), Duration::from_millis(10));
            let report = Report { units, length: Duration::from_secs(1), cost: Cost { cpu, guest, faults: 1000 } };
            (0..20).for_each(|_| quota.learn(&report));
            quota.learn(&Report::default());
            let mut purse = quota.purse(budget, Duration::from_secs(2));
            (0..).take_while(|_| purse.pay(100.0)).count()
        };
        // 40 ms of CPU at 2 ms, 10 ms of waiting at 1 ms.
        assert!((19..=20).contains(&units(Budget { cpu: 0.02, guest: 1.0 })));
        assert!((9..=10).contains(&units(Budget { cpu: 1.0, guest: 0.005 })));
    }
}
