//! Pace: whether a notified reclaim worker begins a round, or only takes a client's reply.
//!
//! Before: a round has ended and returned its pause, and a client may be zapping. After: the client's reply, which
//! notifies the worker, begins that pause and not a round.
//! Threads: the VM's reclaim worker. Units: time. Promise: any other notification begins a round: a limit, a fault that
//! waits for credits, pages that are due.
//!
//! The reason: a worker near the low watermark keeps a supply of pages in quarantine. With a round after each reply, it
//! would zap the few pages that are missing as soon as the client is ready. Each zap interrupts the guest and notifies
//! three threads.

use std::time::{Duration, Instant};

use ballast_base::Bytes;

/// The state that the last round left.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Its limit.
    pub held_to: Option<Bytes>,
    /// Its pause.
    pub pause: Duration,
    /// The end of that pause, if pages wait for T meanwhile.
    pub due: Option<Instant>,
    /// How long rounds in a row have taken of which each ended with more to do.
    pub searched: Duration,
}

impl Pace {
    /// Returns whether a round begins although a client has just replied. `is_short`: a fault waits for credits.
    pub fn is_round_due(&self, now: Instant, limit: Option<Bytes>, is_short: bool) -> bool {
        self.pause.is_zero() || self.due.is_some_and(|due| due <= now) || is_short || limit != self.held_to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAUSE: Duration = Duration::from_millis(20);

    #[test]
    fn a_reply_begins_no_round_but_any_other_work_does() {
        let (now, limit) = (Instant::now(), Some(Bytes(1 << 20)));
        let pace = |pause, due| Pace { held_to: limit, pause, due, ..Pace::default() };
        let waits = pace(PAUSE, Some(now + PAUSE));
        assert!(!waits.is_round_due(now, limit, false) && !pace(PAUSE, None).is_round_due(now, limit, false));
        assert!(waits.is_round_due(now + PAUSE, limit, false), "the pause is over");
        assert!(waits.is_round_due(now, limit, true), "a fault waits for credits");
        assert!(waits.is_round_due(now, None, false) && waits.is_round_due(now, Some(Bytes(1)), false), "a limit");
        assert!(pace(Duration::ZERO, None).is_round_due(now, limit, false), "no pause was wanted");
    }
}
