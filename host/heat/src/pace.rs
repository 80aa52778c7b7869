//! Pace: how often tracking may run.
//!
//! Before: a cycle reported its cost. After: the next one starts so much later that the cost is within a budget. For
//! cycles over all memory, which cost about the same each time, there is a period that adapts ([`Pace`]); a cycle over
//! chosen units pays for itself ([`Paid`]). Promise: pure; the period stays within its bounds and changes by at most a
//! factor of four at a time.

use std::time::Duration;

use crate::source::Cost;

/// What tracking may cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// Share of one CPU that our own threads may take.
    pub cpu: f64,
    /// Share of the time that guest threads may wait, as the sum of their waits.
    pub guest: f64,
}

impl Budget {
    /// What this costs as shares of a time.
    fn spent(cost: Cost, time: Duration) -> Self {
        let share = |spent: Duration| spent.as_secs_f64() / time.as_secs_f64();
        Self { cpu: share(cost.cpu), guest: share(cost.guest) }
    }
}

/// A period under a budget.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    period: Duration,
    shortest: Duration,
    longest: Duration,
    /// How much longer it may be, because of a cost that no shorter period keeps within the budget.
    beyond: Duration,
    budget: Budget,
    spent: Budget,
}

/// Slightly below the budget, so that noise does not exceed it. For the same reason the period shrinks slowly. It grows
/// fast: a guest in base pages costs many times what a guest in huge pages does.
const AIM: f64 = 0.9;

impl Pace {
    /// Starts with the shortest period.
    pub fn new(shortest: Duration, longest: Duration, budget: Budget) -> Self {
        let nothing = Budget { cpu: 0.0, guest: 0.0 };
        Self {
            period: shortest,
            shortest,
            longest: longest.max(shortest),
            beyond: Duration::ZERO,
            budget,
            spent: nothing,
        }
    }

    /// From the start of one cycle to the start of the next.
    pub fn period(&self) -> Duration {
        self.period
    }

    /// Cost of the last cycle, as shares of the time from its start to the next.
    pub fn spent(&self) -> Budget {
        self.spent
    }

    /// Record the cost of a cycle, and set the period to the next.
    pub fn record(&mut self, cost: Cost) {
        self.spent = Budget::spent(cost, self.period);
        let share = |spent: f64, budget: f64| if budget > 0.0 { spent / budget } else { f64::INFINITY };
        let load = share(self.spent.cpu, self.budget.cpu).max(share(self.spent.guest, self.budget.guest));
        let factor = (load / AIM).clamp(0.8, 4.0);
        self.period = self.period.mul_f64(factor).clamp(self.shortest, self.longest + self.beyond);
    }

    /// Each cycle costs this much of a CPU before it begins, however little it watches: the period may be that much
    /// longer. The longest one alone would exceed the budget for guests of a TiB and more.
    pub fn allow(&mut self, cpu: Duration) {
        let beyond = if self.budget.cpu > 0.0 { cpu.as_secs_f64() / (AIM * self.budget.cpu) } else { 0.0 };
        self.beyond = Duration::try_from_secs_f64(beyond).unwrap_or_default();
    }
}

/// Cycles whose costs differ much: after each there is a pause until its own cost is within the budget.
#[derive(Clone, Copy, Debug)]
pub struct Paid {
    longest: Duration,
    budget: Budget,
    /// When the last one began.
    begun: Option<Duration>,
    spent: Budget,
}

impl Paid {
    /// Nothing is spent yet.
    pub fn new(longest: Duration, budget: Budget) -> Self {
        Self { longest, budget, begun: None, spent: Budget { cpu: 0.0, guest: 0.0 } }
    }

    /// Cost of the last cycle, as shares of the time since the one before began; of the first, of the pause after it.
    pub fn spent(&self) -> Budget {
        self.spent
    }

    /// Records the cost of a cycle that began then. Returns the time from its start to the next one, `least` or more.
    pub fn record(&mut self, begun: Duration, cost: Cost, least: Duration) -> Duration {
        let pays = |spent: Duration, budget: f64| match budget > 0.0 {
            true => Duration::try_from_secs_f64(spent.as_secs_f64() / (AIM * budget)).unwrap_or(self.longest),
            false => self.longest,
        };
        let time =
            pays(cost.cpu, self.budget.cpu).max(pays(cost.guest, self.budget.guest)).min(self.longest).max(least);
        let since = self.begun.replace(begun).map_or(time, |before| begun.saturating_sub(before));
        self.spent = Budget::spent(cost, since.max(Duration::from_millis(1)));
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BUDGET: Budget = Budget { cpu: 0.02, guest: 0.01 };

    #[test]
    fn a_cycle_pays_for_itself_and_a_cheap_one_after_an_expensive_one_waits_no_longer_for_that() {
        let mut paid = Paid::new(Duration::from_secs(60), BUDGET);
        let (least, mut begun) = (Duration::from_millis(100), Duration::ZERO);
        let mut sum = 0;
        for (guest_ms, ms) in [(450, 50_000), (9, 1000), (0, 100), (9, 1000)] {
            let cost = Cost { cpu: Duration::ZERO, guest: Duration::from_millis(guest_ms), faults: 0 };
            let time = paid.record(begun, cost, least);
            assert!(time.abs_diff(Duration::from_millis(ms)) < Duration::from_millis(1), "{time:?}");
            (begun, sum) = (begun + time, sum + guest_ms);
        }
        assert!(Duration::from_millis(sum) <= begun.mul_f64(BUDGET.guest), "{begun:?}");
        assert!((paid.spent().guest - 0.09).abs() < 0.001, "9 ms in the 100 ms since the last began: {paid:?}");
        let cost = Cost { cpu: Duration::ZERO, guest: Duration::from_secs(9), faults: 0 };
        assert_eq!(paid.record(begun, cost, least), Duration::from_secs(60), "the longest");
    }

    proptest! {
        #[test]
        fn a_steady_cost_ends_within_budget_or_at_the_longest_period(cpu_ms in 0u64..2000, guest_ms in 0u64..2000) {
            let (shortest, longest) = (Duration::from_secs(1), Duration::from_secs(60));
            let mut pace = Pace::new(shortest, longest, BUDGET);
            let cost = Cost { cpu: Duration::from_millis(cpu_ms), guest: Duration::from_millis(guest_ms), faults: 0 };
            for _ in 0..50 {
                pace.record(cost);
                prop_assert!((shortest..=longest).contains(&pace.period()));
            }
            let within = pace.spent().cpu <= BUDGET.cpu && pace.spent().guest <= BUDGET.guest;
            prop_assert!(within || pace.period() == longest, "{:?}", pace);
            // And no slower than needed.
            let used = (pace.spent().cpu / BUDGET.cpu).max(pace.spent().guest / BUDGET.guest);
            prop_assert!(used > 0.7 || pace.period() == shortest, "{:?}", pace);
        }
    }
}
