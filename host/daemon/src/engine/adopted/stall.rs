//! How long an adopted VM waits for its memory, and its refaults in the form that policies read.
//!
//! The kernel reports how long threads waited only for a VM in a cgroup of its own. For other VMs it reports the number
//! of pages for which threads waited; the time per page was measured on this host's swap. It reports no refault
//! intervals: once some pages are restored, all far memory counts as wanted (Little's law then gives the mean
//! interval).
//!
//! Before: sums from the kernel. After: the stall in the form of PSI, and the sums that policies read.
//! Threads: any, under the VM's lock. Units: in the names.
//! Promise: sums only grow.

use std::time::Instant;

use ballast_api::Psi;
use ballast_pager::vm::stats::Averages;

#[derive(Debug)]
pub struct Waits {
    at: Instant,
    total_us: u64,
    averages: Averages,
    restored: u64,
    refault_page_ms: f64,
    refault_milli_hz: f64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refaults {
    pub page_ms: u64,
    /// Sum of the inverse intervals, in 1/1000 Hz.
    pub milli_hz: u64,
}

impl Waits {
    pub fn new(total_us: u64, now: Instant) -> Self {
        let [refault_page_ms, refault_milli_hz] = [0.0; 2];
        Self { at: now, total_us, averages: Averages::default(), restored: 0, refault_page_ms, refault_milli_hz }
    }

    /// Adds the changes since the last call. `total_us` and `restored` are sums, and `far_pages` are far now.
    pub fn add(&mut self, total_us: u64, restored: u64, far_pages: u64, now: Instant) {
        let elapsed = now.saturating_duration_since(self.at);
        let seconds = elapsed.as_secs_f64();
        if seconds <= 0.0 {
            return;
        }
        let share = (total_us.saturating_sub(self.total_us) as f64 / (seconds * 1e6)).min(1.0);
        self.averages.add(share * 100.0, elapsed);
        let came = restored.saturating_sub(self.restored) as f64;
        if came > 0.0 {
            let far = (far_pages as f64).max(came);
            self.refault_page_ms += far * seconds * 1e3;
            self.refault_milli_hz += came * came / (far * seconds) * 1e3;
        }
        (self.at, self.total_us, self.restored) = (now, total_us.max(self.total_us), restored.max(self.restored));
    }

    pub fn psi(&self) -> Psi {
        let Averages { avg10, avg60, avg300 } = self.averages;
        Psi { avg10, avg60, avg300, total_us: self.total_us }
    }

    pub fn refaults(&self) -> Refaults {
        Refaults { page_ms: self.refault_page_ms as u64, milli_hz: self.refault_milli_hz as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn averages_follow_the_share_of_stalls_and_refaults_have_the_mean_interval() {
        let begun = Instant::now();
        let mut waits = Waits::new(5, begun);
        for second in 1..=20 {
            // A fifth of each second; 100 pages are restored, of 400 that are far: each after 4 s.
            waits.add(5 + second * 200_000, second * 100, 400, begun + Duration::from_secs(second));
        }
        let Psi { avg10, avg60, avg300, total_us } = waits.psi();
        assert!((avg10 - 17.3).abs() < 0.1 && avg60 < avg10 && avg300 < avg60, "{:?}", waits.psi());
        assert_eq!(total_us, 4_000_005);
        let Refaults { page_ms, milli_hz } = waits.refaults();
        assert_eq!((page_ms / 2000, milli_hz / 2000), (4000, 250));
    }

    #[test]
    fn sums_that_fall_and_an_interval_of_zero_change_nothing() {
        let begun = Instant::now();
        let mut waits = Waits::new(100, begun);
        waits.add(0, 0, 0, begun + Duration::from_secs(1));
        waits.add(900, 50, 0, begun + Duration::from_secs(1));
        assert_eq!((waits.psi().total_us, waits.psi().avg10, waits.refaults()), (100, 0.0, Refaults::default()));
    }
}
