//! How long an adopted VM waits for its memory, and how its refaults look to a policy.
//!
//! The kernel tells how long threads waited only of a VM in a cgroup of its own. Of others it tells how many pages they
//! waited for, and how long one takes was measured on this host's swap. It tells no interval of a refault: what is
//! wanted of far memory is taken to be all of it, once any comes back (Little's law then gives the mean interval).
//!
//! Before: sums of the kernel. After: the stall in the form of PSI, and the sums that policies read.
//! Threads: any, under the VM's lock. Units: in the names. Promise: sums only grow.

use std::time::Instant;

use ballast_api::Psi;
use ballast_pager::vm::stats::Averages;

/// Sums and averages of one VM.
#[derive(Debug)]
pub struct Waits {
    at: Instant,
    total_us: u64,
    averages: Averages,
    restored: u64,
    refault_page_ms: f64,
    refault_milli_hz: f64,
}

/// Sums of refaults, as policies read them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refaults {
    /// Pages times milliseconds.
    pub page_ms: u64,
    /// One over each interval, in 1/1000 Hz.
    pub milli_hz: u64,
}

impl Waits {
    /// Nothing has been waited for.
    pub fn new(total_us: u64, now: Instant) -> Self {
        let [refault_page_ms, refault_milli_hz] = [0.0; 2];
        Self { at: now, total_us, averages: Averages::default(), restored: 0, refault_page_ms, refault_milli_hz }
    }

    /// The sums are now these, and this number of pages is far.
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
            // At least what came was far.
            let far = (far_pages as f64).max(came);
            self.refault_page_ms += far * seconds * 1e3;
            self.refault_milli_hz += came * came / (far * seconds) * 1e3;
        }
        (self.at, self.total_us, self.restored) = (now, total_us.max(self.total_us), restored.max(self.restored));
    }

    /// The stall in the form of PSI.
    pub fn psi(&self) -> Psi {
        let Averages { avg10, avg60, avg300 } = self.averages;
        Psi { avg10, avg60, avg300, total_us: self.total_us }
    }

    /// The refaults.
    pub fn refaults(&self) -> Refaults {
        Refaults { page_ms: self.refault_page_ms as u64, milli_hz: self.refault_milli_hz as u64 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn averages_follow_the_share_that_is_waited_and_refaults_have_the_mean_interval() {
        let begun = Instant::now();
        let mut waits = Waits::new(5, begun);
        for second in 1..=20 {
            // A fifth of each second; 100 pages come back, of 400 that are far: each after 4 s.
            waits.add(5 + second * 200_000, second * 100, 400, begun + Duration::from_secs(second));
        }
        let Psi { avg10, avg60, avg300, total_us } = waits.psi();
        assert!((avg10 - 17.3).abs() < 0.1 && avg60 < avg10 && avg300 < avg60, "{:?}", waits.psi());
        assert_eq!(total_us, 4_000_005);
        let Refaults { page_ms, milli_hz } = waits.refaults();
        assert_eq!((page_ms / 2000, milli_hz / 2000), (4000, 250));
    }

    #[test]
    fn sums_that_go_back_and_no_time_change_nothing() {
        let begun = Instant::now();
        let mut waits = Waits::new(100, begun);
        waits.add(0, 0, 0, begun + Duration::from_secs(1));
        waits.add(900, 50, 0, begun + Duration::from_secs(1));
        assert_eq!((waits.psi().total_us, waits.psi().avg10, waits.refaults()), (100, 0.0, Refaults::default()));
    }
}
