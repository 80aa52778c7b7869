//! The adaptive quarantine: how far reclaim goes for a VM above its limit.
//!
//! Before: the reclaim worker reports what its round met: faults that wait for credits, pages that the guest touched in
//! quarantine, or a VM within its limit. After: T, the number of pages to keep in quarantine, and whether reclaim is
//! forced hold for the next round.
//! Threads: the VM's reclaim worker. Units: pages; T is a `Duration`.
//! Promise: T is never longer than the one that the VM is configured with, and all three return to their first values
//! when the VM stays within its limit.

use std::time::Duration;

use ballast_base::Bytes;
use ballast_base::units::MIB;

/// Pages put into quarantine in one round: 32 MiB, some milliseconds of picking and zapping. While the first of them
/// wait for T, more are picked.
const BATCH: u64 = Bytes(32 * MIB).pages_floor().0;
/// The same while the guest touches everything sooner: 1 ms of evicting, so that the last page of a batch was zapped
/// hardly longer ago than the first.
const BATCH_SHORT: u64 = 256;
/// While faults wait for credits, the supply may grow to 1/N of the pages that a VM may hold.
const SUPPLY_PART: u64 = 4;
/// The supply loses 1/N in each round within the limit.
const SUPPLY_LESS: u64 = 8;
/// T grows by 1/N in each round within the limit. While faults wait now and then, T stays near the value that served
/// them.
const LONGER: u32 = 16;
/// A shortened T below this counts as none.
const SHORTEST: Duration = Duration::from_micros(50);

/// How far reclaim goes for one VM.
#[derive(Debug)]
pub(super) struct Adaptive {
    /// T as configured.
    longest: Duration,
    /// T above the limit, where T is no safety matter.
    wait: Duration,
    /// Pages in quarantine beyond those of the margin.
    supply: u64,
    is_forced: bool,
}

impl Adaptive {
    /// The state of a VM that was never above its limit.
    pub fn new(longest: Duration) -> Self {
        Self { longest, wait: longest, supply: 0, is_forced: false }
    }

    /// Returns T above the limit, where T is no safety matter.
    pub fn wait(&self) -> Duration {
        self.wait
    }

    /// Returns the number of pages to keep in quarantine beyond those of the margin.
    pub fn supply(&self) -> u64 {
        self.supply
    }

    /// Returns whether pages are locked while they are copied. Even with no T at all, the guest touched nearly all of
    /// them before.
    pub fn is_forced(&self) -> bool {
        self.is_forced
    }

    /// Returns the number of pages that one round may put into quarantine.
    pub fn batch(&self) -> u64 {
        if self.wait < self.longest { BATCH_SHORT } else { BATCH }
    }

    /// Adapts to faults that wait for credits, in a VM that may hold this many pages. The supply is raised first,
    /// because a larger one still tells hot pages from cold ones; then T is halved.
    pub fn faults_wait(&mut self, limit_pages: u64) {
        let most = limit_pages / SUPPLY_PART;
        if self.supply >= most {
            self.halve();
        }
        self.supply = (self.supply * 2).clamp(BATCH_SHORT.min(most), most);
    }

    /// Returns a step towards the first values: the VM is within its limit, and no fault waits.
    pub fn relax(&mut self) {
        self.supply -= self.supply.div_ceil(SUPPLY_LESS);
        self.wait = (self.wait + self.wait / LONGER).max(SHORTEST).min(self.longest);
        self.is_forced = false;
    }

    /// Adapts to a guest that touched nearly all pages of the quarantine before they were copied.
    pub fn nearly_all_touched(&mut self) {
        self.is_forced |= self.wait.is_zero();
        self.halve();
    }

    fn halve(&mut self) {
        let half = self.wait / 2;
        self.wait = if half < SHORTEST { Duration::ZERO } else { half };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const T: Duration = Duration::from_millis(10);

    #[test]
    fn reclaim_is_forced_only_when_even_no_quarantine_leaves_a_page_untouched() {
        let mut adaptive = Adaptive::new(T);
        while !adaptive.wait().is_zero() {
            adaptive.nearly_all_touched();
            assert!(!adaptive.is_forced() && adaptive.wait() < T && adaptive.batch() == BATCH_SHORT, "{adaptive:?}");
        }
        adaptive.nearly_all_touched();
        assert!(adaptive.is_forced(), "{adaptive:?}");
    }

    #[test]
    fn faults_that_wait_raise_the_supply_to_its_bound_before_they_shorten_the_quarantine() {
        let mut adaptive = Adaptive::new(T);
        let limit_pages = 4096;
        while adaptive.supply() < limit_pages / SUPPLY_PART {
            assert_eq!(adaptive.wait(), T);
            adaptive.faults_wait(limit_pages);
        }
        adaptive.faults_wait(limit_pages);
        assert_eq!((adaptive.supply(), adaptive.wait()), (limit_pages / SUPPLY_PART, T / 2));
        // A VM that may hold next to nothing has no supply, and nothing panics.
        let mut tiny = Adaptive::new(Duration::ZERO);
        tiny.faults_wait(1);
        tiny.relax();
        assert_eq!((tiny.supply(), tiny.wait()), (0, Duration::ZERO));
    }

    #[test]
    fn within_the_limit_everything_returns_to_its_first_value() {
        let mut adaptive = Adaptive::new(T);
        (0..40).for_each(|_| adaptive.faults_wait(1 << 20));
        (0..2).for_each(|_| adaptive.nearly_all_touched());
        assert!(adaptive.is_forced() && adaptive.supply() > 0, "{adaptive:?}");
        (0..400).for_each(|_| adaptive.relax());
        assert_eq!((adaptive.wait(), adaptive.supply(), adaptive.is_forced()), (T, 0, false));
        assert_eq!(adaptive.batch(), BATCH);
    }
}
