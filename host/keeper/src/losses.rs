//! Losses: how often in a row an engine could not serve a VM whole, and so how soon it is given the VM again.
//!
//! Before: the engine lacked something for a VM (`again`). After: the time until the next try is known.
//! Threads: the keeper's one. Promise: a VM that fails again and again is tried ever more rarely, down to every 8 s.

use std::time::{Duration, Instant};

/// Time until the engine, which may have room by then, is given a VM again. While the VM is opened, none of its faults
/// is served, so this is not done all the time: each time in a row takes twice as long, up to [`LONGEST`].
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(8);
/// A VM that was whole for this long counts as one that never failed.
const WHOLE: Duration = Duration::from_secs(30);

/// How often in a row the engine could not serve a VM whole.
#[derive(Debug, Default)]
pub(crate) struct Losses {
    count: u32,
    last: Option<Instant>,
}

impl Losses {
    /// Have there been this many in a row?
    pub fn are(&self, many: u32) -> bool {
        self.count >= many
    }

    /// Counts one more; returns when the VM is tried again.
    pub fn again_after(&mut self, now: Instant) -> Duration {
        if self.last.is_none_or(|last| now.saturating_duration_since(last) > WHOLE) {
            self.count = 0;
        }
        let after = (AGAIN_AFTER * 2_u32.saturating_pow(self.count)).min(LONGEST);
        (self.count, self.last) = (self.count.saturating_add(1).min(16), Some(now));
        after
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vm_that_fails_again_and_again_is_tried_ever_more_rarely_until_it_was_whole_for_a_while() {
        let (mut losses, mut now) = (Losses::default(), Instant::now());
        for seconds in [1, 2, 4, 8, 8, 8] {
            let after = losses.again_after(now);
            assert_eq!(after, Duration::from_secs(seconds));
            now += after;
        }
        (0..100).for_each(|_| assert!(losses.again_after(now) == LONGEST));
        now += WHOLE + Duration::from_millis(1);
        assert!(losses.are(16));
        assert_eq!(losses.again_after(now), AGAIN_AFTER);
        assert!(losses.are(1) && !losses.are(2));
    }
}
