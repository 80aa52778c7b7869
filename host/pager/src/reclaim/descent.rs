//! The descent: how far above its limit a VM's ceiling still is after the limit was cut.
//!
//! Before: a policy or an operator cut the limit of a VM that holds more. After: its faults wait for credits only above
//! a ceiling that falls from what the VM held then to its place within [`DESCENT`].
//! Threads: the VM's reclaim worker. Units: bytes. Promise: without a further cut the ceiling is in its place after
//! [`DESCENT`], and it is never above what the VM held at the last one.
//!
//! The reason: reclaim needs some hundred milliseconds to find out which pages are cold. If faults wait meanwhile,
//! reclaim must take what it finds first, mostly hot pages. Their refaults look like a need, a policy gives the memory
//! back, cuts another VM, and limits move for ever.

use std::time::{Duration, Instant};

/// The time that reclaim has for a cut.
const DESCENT: Duration = Duration::from_secs(1);

/// The descent of one VM.
#[derive(Debug)]
pub(super) struct Descent {
    /// The limit of the last round.
    limit: u64,
    /// How far above its limit the VM was at the last cut, and when that was.
    above: u64,
    cut_at: Instant,
}

impl Descent {
    /// The descent of a VM that had no limit yet.
    pub fn new(now: Instant) -> Self {
        Self { limit: u64::MAX, above: 0, cut_at: now }
    }

    /// Returns how far above this limit the ceiling is now, for a VM that holds this much.
    pub fn above(&mut self, limit: u64, resident: u64, now: Instant) -> u64 {
        if limit < self.limit {
            (self.above, self.cut_at) = (resident.saturating_sub(limit), now);
        } else {
            self.above = self.above.saturating_sub(limit - self.limit);
        }
        self.limit = limit;
        let left = DESCENT.saturating_sub(now.saturating_duration_since(self.cut_at));
        (u128::from(self.above) * left.as_micros() / DESCENT.as_micros()) as u64
    }

    /// The VM has no limit any more: the next one is a cut.
    pub fn end(&mut self) {
        self.limit = u64::MAX;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ceiling_falls_from_what_the_vm_held_at_the_cut_to_the_limit_and_never_rises() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut descent = Descent::new(start);
        assert_eq!(descent.above(100, 50, start), 0, "it holds less");
        assert_eq!(descent.above(40, 80, after(0)), 40);
        assert_eq!(descent.above(40, 200, after(250)), 30, "what it holds later does not matter");
        assert_eq!(descent.above(60, 70, after(500)), 10, "the limit was raised by half of the way");
        assert_eq!(descent.above(50, 70, after(600)), 20, "it was cut again");
        assert_eq!(descent.above(50, 70, after(1600)), 0);
        descent.end();
        assert_eq!(descent.above(60, 90, after(2000)), 30, "a first limit is a cut");
    }
}
