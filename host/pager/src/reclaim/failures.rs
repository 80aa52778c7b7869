//! Failures of reclaim, which may come each second for hours: of a VMM that is stopped, for one.
//!
//! Before: a round failed, or the store refused a page. After: it is an event, or one like it was a short time ago.
//! Threads: the VM's reclaim worker.
//! Promise: the events of other VMs are not pushed out by those of one, and a failure after a time without is reported.

use std::io;
use std::time::{Duration, Instant};

use crate::vm::Vm;

/// Failures that are not further apart than this are one series.
const SERIES: Duration = Duration::from_secs(60);

/// Counts them.
#[derive(Debug, Default)]
pub(super) struct Failures {
    last: Option<Instant>,
    count: u64,
}

impl Failures {
    /// One more.
    pub fn report(&mut self, vm: &Vm, now: Instant, error: &io::Error) {
        if let Some(times) = self.add(now) {
            vm.report("reclaim-failed", format!("Reclaiming memory{times}: {error}"));
        }
    }

    /// One more. Is it the first of a series?
    pub fn begins(&mut self, now: Instant) -> bool {
        self.add(now).is_some() && self.count == 1
    }

    /// One more. If it is to be reported, which the 1st, 2nd, 4th, 8th ... of a series is, returns what to add to the
    /// text: how often it was, if more than once.
    fn add(&mut self, now: Instant) -> Option<String> {
        let goes_on = self.last.replace(now).is_some_and(|last| now.saturating_duration_since(last) < SERIES);
        self.count = if goes_on { self.count + 1 } else { 1 };
        let times = || if self.count > 1 { format!(" ({} times)", self.count) } else { String::new() };
        self.count.is_power_of_two().then(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_each_second_is_reported_ever_less_often_and_one_after_a_while_at_once() {
        let (mut failures, begun) = (Failures::default(), Instant::now());
        let mut told = (0..1000).filter_map(|second| failures.add(begun + Duration::from_secs(second)));
        assert_eq!(told.next().as_deref(), Some(""));
        assert_eq!(told.next().as_deref(), Some(" (2 times)"));
        assert_eq!((told.next().as_deref(), told.count()), (Some(" (4 times)"), 7));
        assert_eq!(failures.add(begun + Duration::from_secs(999) + SERIES).as_deref(), Some(""));
    }
}
