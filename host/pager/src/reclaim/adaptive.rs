//! The adaptive quarantine: how far reclaim goes for a VM above its limit.
//!
//! Before: the reclaim worker reports what its round met: faults that wait for credits, pages that the guest touched in
//! quarantine, or a VM within its limit. After: T, the number of pages to keep in quarantine, and whether reclaim is
//! forced hold for the next round.
//! Threads: the VM's reclaim worker. Units: pages; T is a `Duration`.
//! Promise: T is never longer than the one that the VM is configured with, and all three return to their first values
//! when the VM stays within its limit, at once if that is for [`UNSEEN`]. Memory that nobody sees keeps a VM above its
//! limit for as long at most.

use std::time::{Duration, Instant};

use ballast_base::Bytes;
use ballast_base::units::MIB;

/// Pages put into quarantine in one round: 32 MiB, some milliseconds of picking and zapping. While the first of them
/// wait for T, more are picked.
const BATCH: u64 = Bytes(32 * MIB).pages_floor().0;
/// The same while the guest touches everything sooner: 1 ms of evicting, so that the last page of a batch was zapped
/// hardly longer ago than the first.
const BATCH_SHORT: u64 = 256;
/// The supply may grow to 1/N of the pages that a VM may hold.
const SUPPLY_PART: u64 = 4;
/// The time over which the rate of evictions is averaged, in seconds.
const RATE_OVER_S: f64 = 1.0;
/// While faults wait for credits, supply and T change once in 1/N of T: a change shows only after T.
const STEP_PART: u32 = 8;
/// The supply loses 1/N in each round within the limit.
const SUPPLY_LESS: u64 = 8;
/// T grows by 1/N in each round within the limit. While faults wait now and then, T stays near the value that served
/// them.
const LONGER: u32 = 16;
/// See [`Adaptive::calm`].
const CALM: Duration = Duration::from_secs(1);
/// T of memory of which a guest's agent cannot see whether it is used: as long as memory that it sees must be idle
/// before it is cold. In a Linux of 320 MiB whose limit takes 80, some 350 pages of the kernel are used within this
/// time, half of them in the first 3 s.
const UNSEEN: Duration = Duration::from_secs(10);
/// A shortened T below this counts as none.
const SHORTEST: Duration = Duration::from_micros(50);

/// How far reclaim goes for one VM.
#[derive(Debug)]
pub(super) struct Adaptive {
    /// T as configured.
    longest: Duration,
    /// T above the limit, where T is no safety matter.
    wait: Duration,
    /// Pages in quarantine beyond those of the margin, because faults waited.
    supply: u64,
    /// Pages evicted a second, and when that was computed.
    rate: f64,
    rated_at: Option<Instant>,
    /// When supply or T was changed last because faults waited.
    stepped_at: Option<Instant>,
    is_forced: bool,
    /// Since when the VM has been above its limit but for moments, and when it was last.
    above: Option<(Instant, Instant)>,
    is_above: bool,
    /// A fault of the VM waits for credits, or others wait for its memory.
    is_urgent: bool,
}

impl Adaptive {
    /// The state of a VM that was never above its limit.
    pub fn new(longest: Duration) -> Self {
        Self {
            longest,
            wait: longest,
            supply: 0,
            rate: 0.0,
            rated_at: None,
            stepped_at: None,
            is_forced: false,
            above: None,
            is_above: false,
            is_urgent: false,
        }
    }

    /// Returns T above the limit, where T is no safety matter.
    pub fn wait(&self) -> Duration {
        self.wait
    }

    /// Adapts at the beginning of a round to a VM that may hold this many pages: is it above its limit, does a fault
    /// wait, and do others wait for its memory?
    pub fn begin(&mut self, is_above: bool, is_short: bool, others_wait: bool, limit_pages: u64, now: Instant) {
        if is_above {
            let last = |last| now.saturating_duration_since(last) < UNSEEN;
            let Some((since, _)) = self.above.filter(|above| last(above.1)) else {
                // What it met so long ago says nothing now. Reclaim does not ask while the VM is far below its limit.
                let (rate, rated_at) = (self.rate, self.rated_at);
                *self = Self { above: Some((now, now)), rate, rated_at, ..Self::new(self.longest) };
                return self.begin(is_above, is_short, others_wait, limit_pages, now);
            };
            self.above = Some((since, now));
        }
        (self.is_above, self.is_urgent) = (is_above, is_short || others_wait);
        if is_short {
            self.faults_wait(limit_pages, now);
        } else if !is_above {
            self.relax();
        } else {
            self.calm(now);
        }
    }

    /// Returns the least T of memory that nobody sees: none if the VM has been above its limit for as long, or somebody
    /// waits, since a guest must gain nothing by memory of this kind.
    pub fn unseen(&self, now: Instant) -> Duration {
        let is_over = self.above.is_some_and(|(since, _)| now.saturating_duration_since(since) >= UNSEEN);
        if is_over && self.is_above || self.is_urgent { Duration::ZERO } else { UNSEEN }
    }

    /// This many pages were evicted in a round that ends now.
    pub fn evicted(&mut self, pages: u64, now: Instant) {
        let passed = self.rated_at.map_or(f64::INFINITY, |at| now.saturating_duration_since(at).as_secs_f64());
        self.rate = self.rate * (1.0 - passed / RATE_OVER_S).max(0.0) + pages as f64 / RATE_OVER_S;
        self.rated_at = Some(now);
    }

    /// Returns the number of pages to keep in quarantine beyond those of the margin: as many as are evicted while one
    /// is in quarantine for `wait`. With fewer, a VM that restores 6,000 pages a second has too few that are due, and
    /// its faults wait for credits. `limit_pages`: what the VM may hold.
    pub fn supply(&self, wait: Duration, limit_pages: u64) -> u64 {
        let flow = (self.rate * wait.as_secs_f64()) as u64;
        self.supply.max(flow.min(limit_pages / SUPPLY_PART))
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
    fn faults_wait(&mut self, limit_pages: u64, now: Instant) {
        if self.stepped_at.is_some_and(|at| now.saturating_duration_since(at) < self.wait / STEP_PART) {
            return;
        }
        self.stepped_at = Some(now);
        let most = limit_pages / SUPPLY_PART;
        if self.supply >= most {
            self.halve();
        }
        self.supply = (self.supply * 2).clamp(BATCH_SHORT.min(most), most);
    }

    /// Doubles T once in [`CALM`] without a fault that waits, in a VM that stays above its limit: one moment of
    /// pressure must not end all looks for ever.
    fn calm(&mut self, now: Instant) {
        let is_calm = self.stepped_at.is_none_or(|at| now.saturating_duration_since(at) >= CALM);
        if is_calm && !self.is_forced && self.wait < self.longest {
            self.stepped_at = Some(now);
            self.wait = (self.wait * 2).clamp(SHORTEST.min(self.longest), self.longest);
        }
    }

    /// Returns a step towards the first values: the VM is within its limit, and no fault waits.
    fn relax(&mut self) {
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
    fn memory_that_nobody_sees_stays_for_longer_until_the_vm_was_above_its_limit_for_as_long_or_a_fault_waits() {
        let (mut adaptive, start) = (Adaptive::new(T), Instant::now());
        let mut unseen = |is_above, is_short, after| {
            adaptive.begin(is_above, is_short, false, 0, start + after);
            adaptive.unseen(start + after)
        };
        let within = UNSEEN - T;
        assert_eq!(unseen(false, false, UNSEEN * 9), UNSEEN);
        assert_eq!([Duration::ZERO, within].map(|after| unseen(true, false, after)), [UNSEEN; 2]);
        assert_eq!(unseen(true, true, within), Duration::ZERO);
        let above = [2, 3, 4].map(|halves| unseen(true, false, UNSEEN / 2 * halves));
        assert_eq!(above, [Duration::ZERO; 3]);
        assert_eq!(unseen(false, false, UNSEEN * 2), UNSEEN);
        assert_eq!(unseen(true, false, UNSEEN * 3 - T), Duration::ZERO, "it was within it for a moment");
        assert_eq!(unseen(true, false, UNSEEN * 4), UNSEEN, "it was not above it for long");
    }

    #[test]
    fn what_was_learned_above_the_limit_is_forgotten_when_the_vm_was_not_above_it_for_long() {
        let (mut adaptive, start) = (Adaptive::new(T), Instant::now());
        adaptive.begin(true, true, false, 1 << 20, start);
        while !adaptive.is_forced() {
            adaptive.nearly_all_touched();
        }
        adaptive.begin(true, false, false, 1 << 20, start + UNSEEN / 2);
        assert!(adaptive.is_forced() && adaptive.wait().is_zero() && adaptive.supply > 0, "{adaptive:?}");
        adaptive.begin(true, false, true, 1 << 20, start + UNSEEN / 2);
        assert!(adaptive.unseen(start + UNSEEN / 2).is_zero(), "others wait");
        // No round asked in between: the VM was far below its limit.
        adaptive.begin(true, false, false, 1 << 20, start + UNSEEN * 2);
        assert_eq!((adaptive.wait(), adaptive.supply, adaptive.is_forced()), (T, 0, false));
    }

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
        let (mut adaptive, mut now) = (Adaptive::new(T), Instant::now());
        let limit_pages = 4096;
        while adaptive.supply < limit_pages / SUPPLY_PART {
            assert_eq!(adaptive.wait(), T);
            now += T;
            adaptive.faults_wait(limit_pages, now);
            let supply = adaptive.supply;
            adaptive.faults_wait(limit_pages, now);
            assert_eq!(adaptive.supply, supply, "no page of the last step can be due yet");
        }
        adaptive.faults_wait(limit_pages, now + T);
        assert_eq!((adaptive.supply, adaptive.wait()), (limit_pages / SUPPLY_PART, T / 2));
        // A VM that may hold next to nothing has no supply, and nothing panics.
        let mut tiny = Adaptive::new(Duration::ZERO);
        tiny.faults_wait(1, now);
        tiny.relax();
        assert_eq!((tiny.supply, tiny.wait()), (0, Duration::ZERO));
    }

    #[test]
    fn t_grows_again_above_the_limit_when_no_fault_waits_any_more() {
        let (mut adaptive, mut now) = (Adaptive::new(T), Instant::now());
        for _ in 0..40 {
            adaptive.begin(true, true, false, 1 << 20, now);
            now += T;
        }
        assert!(adaptive.wait().is_zero());
        for _ in 0..20 {
            adaptive.begin(true, false, false, 1 << 20, now);
            now += CALM;
        }
        assert_eq!(adaptive.wait(), T);
    }

    #[test]
    fn the_supply_is_what_is_evicted_in_the_time_of_a_quarantine() {
        let (mut adaptive, start) = (Adaptive::new(T), Instant::now());
        let second = Duration::from_secs(1);
        (0..100).for_each(|round| adaptive.evicted(60, start + second / 10 * round));
        let supply = adaptive.supply(second, 1 << 20);
        assert!((580..=620).contains(&supply), "{supply} at 600 pages a second");
        assert_eq!(adaptive.supply(second, 400), 100, "a quarter of what the VM may hold");
        adaptive.evicted(0, start + second * 20);
        assert_eq!(adaptive.supply(second, 1 << 20), 0);
    }

    #[test]
    fn within_the_limit_everything_returns_to_its_first_value() {
        let (mut adaptive, now) = (Adaptive::new(T), Instant::now());
        (0..40).for_each(|step| adaptive.faults_wait(1 << 20, now + T * step));
        (0..2).for_each(|_| adaptive.nearly_all_touched());
        assert!(adaptive.is_forced() && adaptive.supply > 0, "{adaptive:?}");
        (0..400).for_each(|_| adaptive.relax());
        assert_eq!((adaptive.wait(), adaptive.supply, adaptive.is_forced()), (T, 0, false));
        assert_eq!(adaptive.batch(), BATCH);
    }
}
