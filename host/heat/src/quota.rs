//! Quota: how many units a fine cycle may watch. Its cost is estimated from the cost of the last ones.
//!
//! Before: a fine cycle reported its cost. After: the next one watches no more than its budget probably covers. Without
//! this a guest would get thousands of faults at once, and then none for a minute.
//! Units: seconds. Promise: pure. It is an estimate: [`crate::pace`] keeps the budget.

use std::time::Duration;

use crate::pace::Budget;
use crate::source::{Cost, CycleReport, Seen, UnitId};

/// Weight of the last cycle in the running averages.
const WEIGHT: f64 = 0.5;
/// Fewer faults than this tell less of the time of one.
const FULL_WEIGHT: f64 = 64.0;
/// Weight of the last unit that had its first fine scan, in what is expected of the next.
const FIRST_WEIGHT: f64 = 1.0 / 16.0;
/// If fewer units than this are told by samples of their blocks, samples only lead to full scans.
const TOLD: f64 = 0.25;
/// If a smaller share of their pages is touched, a sample of a unit would only lead to a full scan. The sample costs as
/// much as the full scan of such a unit (300 us here: each gap between its pages is mapped by a call of its own).
const SPARSE: f64 = 0.2;
/// Share of a window that threads may wait in sum, as if the guest had one thread.
const WAITS: f64 = 0.25;

/// The cost of fine scans.
#[derive(Clone, Copy, Debug)]
pub struct Quota {
    /// Time that a thread waits, and that a CPU works, for each page it touches.
    per_fault: f64,
    /// CPU time of each sample, and of each full scan, without the touches.
    per_sample: f64,
    per_scan: f64,
    /// Share of the watched pages that are touched, of a unit in its first fine scan.
    share: f64,
    /// Share of the units whose samples made a full scan needless.
    told: f64,
}

impl Default for Quota {
    /// The start: an expensive fault; a sample, which also maps the pages that it does not watch; and units of which
    /// every page is touched.
    fn default() -> Self {
        Self { per_fault: 6e-6, per_sample: 3e-4, per_scan: 1e-4, share: 1.0, told: 0.0 }
    }
}

impl Quota {
    /// The most that a cycle which runs once in a period may cost.
    pub fn allowance(&self, budget: Budget, period: Duration) -> Allowance {
        let of = |share: f64| share * period.as_secs_f64();
        Allowance { quota: *self, cpu: of(budget.cpu), guest: of(budget.guest), start: f64::INFINITY }
    }

    /// The share of the watched pages of a unit that will be touched in its first fine scan, as in other units
    /// recently.
    pub fn share(&self) -> f64 {
        self.share
    }

    /// Is a sample of a unit without a fine scan useless?
    pub fn is_sparse(&self) -> bool {
        self.share < SPARSE && self.told < TOLD
    }

    /// Samples may tell blocks apart: it is tried with the first units.
    pub fn expect_told(&mut self) {
        self.told = 1.0;
    }

    /// Record whether a sample that calls for a full scan told the unit's blocks apart instead.
    pub fn told(&mut self, is_told: bool) {
        self.told += FIRST_WEIGHT * (f64::from(u8::from(is_told)) - self.told);
    }

    /// Record the first fine scan of a unit.
    pub fn first_scan(&mut self, touched: u64, watched: u64) {
        self.share += FIRST_WEIGHT * (touched as f64 / watched.max(1) as f64 - self.share);
    }

    /// Record a fine cycle. `pages_of` returns how many pages a unit has.
    pub fn learn(&mut self, report: &CycleReport, pages_of: impl Fn(UnitId) -> u64) {
        let Cost { cpu, guest, faults } = report.cost;
        if faults > 0 {
            let weight = WEIGHT * (faults as f64 / FULL_WEIGHT).min(1.0);
            self.per_fault += weight * (guest.as_secs_f64() / faults as f64 - self.per_fault);
        }
        let is_sample = |(unit, seen): &&(UnitId, Seen)| match seen {
            Seen::Fine { watched, .. } => watched.count() < pages_of(*unit),
            _ => false,
        };
        let samples = report.units.iter().filter(is_sample).count() as f64;
        let scans = report.units.len() as f64 - samples;
        let expected = samples * self.per_sample + scans * self.per_scan;
        if expected > 0.0 {
            // The costs of a sample and of a full scan cannot be told apart: both change, if there were both.
            let times = cpu.saturating_sub(guest).as_secs_f64() / expected;
            let updated = |each: f64| each * (1.0 + WEIGHT * (times - 1.0)).max(0.1);
            if samples > 0.0 {
                self.per_sample = updated(self.per_sample);
            }
            if scans > 0.0 {
                self.per_scan = updated(self.per_scan);
            }
        }
    }
}

/// The allowance that one cycle has left.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    quota: Quota,
    cpu: f64,
    guest: f64,
    /// Time until the last unit is watched.
    start: f64,
}

impl Allowance {
    /// Threads of the guest may wait for a part of this window, else they touch less in it than they would.
    pub fn within(self, window: Duration) -> Self {
        Self { guest: self.guest.min(window.as_secs_f64() * WAITS), ..self }
    }

    /// The cycle must have started within this time: its first units are watched from the beginning.
    pub fn starting_within(self, time: Duration) -> Self {
        Self { start: time.as_secs_f64(), ..self }
    }

    /// Charge one unit of which this number of touches is expected. Returns false if the allowance is used up.
    pub fn charge(&mut self, touches: f64, is_sample: bool) -> bool {
        let waits = touches * self.quota.per_fault;
        self.guest -= waits;
        let own = if is_sample { self.quota.per_sample } else { self.quota.per_scan };
        self.cpu -= waits + own;
        self.start -= own;
        self.guest >= 0.0 && self.cpu >= 0.0 && self.start >= 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::source::PageMap;

    #[test]
    fn a_unit_without_a_fine_scan_is_expected_to_be_like_those_that_had_their_first_recently() {
        let mut quota = Quota::default();
        assert_eq!((quota.share(), quota.is_sparse()), (1.0, false), "everything may be touched");
        (0..100).for_each(|_| quota.first_scan(3, 32));
        assert!((quota.share() - 3.0 / 32.0).abs() < 0.01 && quota.is_sparse(), "{quota:?}");
        (0..10).for_each(|_| quota.first_scan(512, 512));
        assert!(quota.share() > 0.4 && !quota.is_sparse(), "{quota:?}");
        quota.first_scan(0, 0);
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
            CycleReport { units, cost: Cost { cpu, ..Cost::default() } }
        };
        for (samples, scans) in [(100, 0), (0, 50), (0, 70), (0, 70), (100, 30), (0, 80), (0, 80)] {
            quota.learn(&cycle(samples, scans), |_| 512);
        }
        assert!((250e-6..350e-6).contains(&quota.per_sample) && (25e-6..40e-6).contains(&quota.per_scan), "{quota:?}");
        quota.learn(&CycleReport::default(), |_| 512);
    }

    #[test]
    fn what_cycles_cost_decides_how_many_units_fit_into_the_next() {
        const BUDGET: Budget = Budget { cpu: 1.0, guest: 1.0 };
        let units = |budget| {
            let mut quota = Quota::default();
            let scan = Seen::Fine { watched: PageMap::ALL, touched: PageMap::first(100) };
            let units = (0..10).map(|unit| (UnitId { region: 0, unit }, scan)).collect();
            // A fault takes 10 us, a unit another 1 ms.
            let (cpu, guest) = (Duration::from_millis(20), Duration::from_millis(10));
            let report = CycleReport { units, cost: Cost { cpu, guest, faults: 1000 } };
            (0..20).for_each(|_| quota.learn(&report, |_| 512));
            quota.learn(&CycleReport::default(), |_| 512);
            let mut allowance = quota.allowance(budget, Duration::from_secs(2));
            (0..).take_while(|_| allowance.charge(100.0, false)).count()
        };
        // 40 ms of CPU at 2 ms, 10 ms of waiting at 1 ms.
        assert!((19..=20).contains(&units(Budget { cpu: 0.02, guest: 1.0 })));
        assert!((9..=10).contains(&units(Budget { cpu: 1.0, guest: 0.005 })));
        let mut short =
            Quota::default().allowance(BUDGET, Duration::from_secs(9)).starting_within(Duration::from_millis(3));
        assert_eq!((0..).take_while(|_| short.charge(1.0, true)).count(), 10, "a sample takes 0.3 ms to start");
        let mut short = Quota::default().allowance(BUDGET, Duration::from_secs(9)).within(Duration::from_millis(3));
        assert_eq!((0..).take_while(|_| short.charge(50.0, false)).count(), 2, "0.75 ms are 125 faults of 6 us");
    }
}
