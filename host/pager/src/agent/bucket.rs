//! Rate limit of a guest's messages: a token bucket of bytes.
//!
//! Before: bytes of a guest wait in a socket. After: they are read and handled, or stay until there are tokens; a full
//! socket makes the guest wait (backpressure). Units: bytes.
//! Promise: in the long run a guest costs at most the work of [`RATE`] bytes a second.

use std::time::{Duration, Instant};

/// Bytes per second: a report of the largest guest is 512 KiB, and comes every two seconds.
const RATE: u64 = 1 << 20;
const BURST: i64 = 1 << 20;
/// Cost of a message beside its bytes: at most 128 empty messages a second.
pub(crate) const MESSAGE: u64 = 8 << 10;
/// Least cost of a read: at most 1,024 reads a second. Each read is two thread wake-ups and three system calls.
const READ: u64 = 1 << 10;

#[derive(Debug)]
pub(crate) struct Bucket {
    /// Negative after a message that cost more tokens than there were.
    tokens: i64,
    at: Instant,
}

impl Bucket {
    pub fn new(now: Instant) -> Self {
        Self { tokens: BURST, at: now }
    }

    pub fn is_open(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.at);
        let gained = passed.as_nanos().saturating_mul(u128::from(RATE)) / 1_000_000_000;
        if gained > 0 {
            self.tokens = self.tokens.saturating_add(i64::try_from(gained).unwrap_or(BURST)).min(BURST);
            self.at = now;
        }
        self.tokens > 0
    }

    pub fn charge_read(&mut self, bytes: u64) {
        self.charge(bytes.max(READ));
    }

    pub fn charge(&mut self, bytes: u64) {
        self.tokens = self.tokens.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    }

    pub fn opens(&self) -> Instant {
        let owed = u64::try_from(1 - self.tokens).unwrap_or(0);
        self.at + Duration::from_nanos(owed.saturating_mul(1_000_000_000) / RATE + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_that_sends_as_much_as_it_can_is_held_to_the_rate_in_the_long_run() {
        let start = Instant::now();
        let (mut bucket, mut now, mut said) = (Bucket::new(start), start, 0);
        while now < start + Duration::from_secs(10) {
            if !bucket.is_open(now) {
                now = bucket.opens();
                assert!(bucket.is_open(now), "it opens when it says so");
            }
            bucket.charge(MESSAGE);
            said += MESSAGE;
        }
        assert!((10 * RATE..=12 * RATE).contains(&said), "{said}");
    }

    #[test]
    fn a_guest_that_sends_single_bytes_is_read_no_more_often_than_the_rate_allows() {
        let start = Instant::now();
        let (mut bucket, mut now, mut reads) = (Bucket::new(start), start, 0);
        while now < start + Duration::from_secs(10) {
            // The next byte arrives immediately.
            now = if bucket.is_open(now) { now + Duration::from_micros(20) } else { bucket.opens() };
            bucket.charge_read(1);
            reads += 1;
        }
        assert!(reads <= 12 * RATE / READ, "{reads}");
    }

    #[test]
    fn unused_tokens_are_saved_up_to_a_bound() {
        let start = Instant::now();
        let mut bucket = Bucket::new(start);
        bucket.charge(u64::MAX);
        assert!(!bucket.is_open(start + Duration::from_secs(3600)));
        let mut bucket = Bucket::new(start);
        assert!(bucket.is_open(start + Duration::from_secs(3600)));
        bucket.charge(BURST as u64);
        assert!(!bucket.is_open(start + Duration::from_secs(3600)));
    }
}
