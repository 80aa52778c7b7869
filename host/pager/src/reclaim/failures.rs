//! Failures of reclaim, which may recur every second for hours, for example while a VMM is stopped.
//!
//! Before: a round failed, or the store refused a page. After: it is an event, or a similar one was reported before.
//! Threads: the VM's reclaim worker.
//! Promise: one VM's failures do not push out other VMs' events; the first failure after a quiet time is reported.

use std::io;
use std::time::{Duration, Instant};

use crate::vm::Vm;

/// Failures closer together than this are one series.
const SERIES: Duration = Duration::from_secs(60);

#[derive(Debug, Default)]
pub(super) struct Failures {
    last: Option<Instant>,
    count: u64,
}

impl Failures {
    pub fn report(&mut self, vm: &Vm, now: Instant, error: &io::Error) {
        if let Some(times) = self.add(now) {
            vm.report("reclaim-failed", format!("Reclaiming memory{times}: {error}"));
        }
    }

    /// Counts a failure. Returns whether it is the first of a series.
    pub fn begins(&mut self, now: Instant) -> bool {
        self.add(now).is_some() && self.count == 1
    }

    /// Counts a failure. Returns `None` if it is not to be reported; the 1st, 2nd, 4th, 8th ... of a series is, with
    /// the returned text appended: the number of failures, if there was more than one.
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
    fn failures_of_a_series_are_reported_ever_more_rarely_and_a_new_one_at_once() {
        let (mut failures, begun) = (Failures::default(), Instant::now());
        let mut told = (0..1000).filter_map(|second| failures.add(begun + Duration::from_secs(second)));
        assert_eq!(told.next().as_deref(), Some(""));
        assert_eq!(told.next().as_deref(), Some(" (2 times)"));
        assert_eq!((told.next().as_deref(), told.count()), (Some(" (4 times)"), 7));
        assert_eq!(failures.add(begun + Duration::from_secs(999) + SERIES).as_deref(), Some(""));
    }
}
