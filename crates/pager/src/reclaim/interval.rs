//! The refault interval: how long restored pages had been far.
//!
//! Before: a page's word was stamped as it became Far. After: the VM's counters hold the sum of the refault intervals
//! of all restored pages. From these, policies compute how much of the far memory is in use (Little's law: the number
//! of pages restored in a second, times their refault interval, is the number of them that are far at a time).
//! Threads: any. Units: milliseconds, in steps of 256, modulo [`WRAPS_MS`].
//! Promise: the stamp is the age byte, which a far page does not otherwise use; a later engine reads it the same way.
//! An engine knows more about pages that it evicted itself ([`Departures`]: steps of 16 ms, for 17 minutes), in 2 bytes
//! for each page of a chunk (32 MiB) with an evicted page.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use ballast_base::PageRange;
use ballast_handover::table::PAGES_PER_CHUNK;
use ballast_sys::clock;

/// Step of the stamps in milliseconds: a byte of steps is 65 s.
const STEP_MS: u64 = 256;
/// Intervals between stamps count modulo this, in milliseconds.
pub const WRAPS_MS: u64 = 256 * STEP_MS;

/// The stamp of the present time.
pub fn stamp() -> u8 {
    (now_ms() / STEP_MS) as u8
}

/// Milliseconds since the host started.
pub fn now_ms() -> u64 {
    clock::monotonic_ns() / 1_000_000
}

/// Milliseconds from one stamp to another: off by up to a step, exact on average.
pub fn between_ms(from: u8, to: u8) -> u64 {
    u64::from(to.wrapping_sub(from)) * STEP_MS
}

/// The reciprocal of a refault interval, in thousandths of 1/s.
pub fn milli_hz(interval_ms: u64) -> u64 {
    // An interval of less than a step is half a step on average.
    1_000_000 / interval_ms.max(STEP_MS / 2)
}

/// Step of the finer times in milliseconds: 2 bytes of steps are 17 minutes.
const FINE_MS: u64 = 16;
/// A departure up to this many steps in the future (4 s) was stored after the clock was read.
const AHEAD: u16 = 256;

/// The time at which this engine evicted each page of a region: finer than stamps, and over a quarter of an hour.
#[derive(Debug)]
pub struct Departures {
    /// For each chunk with an evicted page: steps of [`FINE_MS`], modulo 2^16; 0 is unknown.
    chunks: Box<[OnceLock<Box<[AtomicU16]>>]>,
}

impl Departures {
    /// The departures of a region of this many pages.
    pub fn new(pages: u64) -> Self {
        Self { chunks: (0..pages.div_ceil(PAGES_PER_CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    /// Notes that these pages, of one chunk, are about to be evicted.
    pub fn go(&self, pages: PageRange) {
        let Some(chunk) = self.chunks.get((pages.start().0 / PAGES_PER_CHUNK) as usize) else { return };
        let chunk = chunk.get_or_init(|| (0..PAGES_PER_CHUNK).map(|_| AtomicU16::new(0)).collect());
        let now = fine(now_ms());
        pages.iter().for_each(|page| chunk[(page.0 % PAGES_PER_CHUNK) as usize].store(now, Ordering::Relaxed));
    }

    /// The refault interval in milliseconds of a page that is restored now, and whose word has this stamp.
    pub fn refault_ms(&self, page: u64, stamp: u8, now_ms: u64) -> u64 {
        let chunk = self.chunks.get((page / PAGES_PER_CHUNK) as usize).and_then(OnceLock::get);
        match chunk.map_or(0, |chunk| chunk[(page % PAGES_PER_CHUNK) as usize].load(Ordering::Relaxed)) {
            0 => between_ms(stamp, (now_ms / STEP_MS) as u8),
            went => match fine(now_ms).wrapping_sub(went) {
                // It was restored and evicted again after the clock was read.
                ahead if ahead > u16::MAX - AHEAD => 0,
                steps => u64::from(steps) * FINE_MS,
            },
        }
    }
}

/// The step of this time; never 0.
fn fine(now_ms: u64) -> u16 {
    ((now_ms / FINE_MS) as u16).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PageIdx;

    #[test]
    fn intervals_between_stamps_are_right_across_the_wrap() {
        assert_eq!(between_ms(3, 3), 0);
        assert_eq!(between_ms(250, 4), 2560);
        assert!(between_ms(stamp(), stamp()) <= STEP_MS);
    }

    #[test]
    fn an_engine_knows_finer_times_of_pages_that_it_evicted_and_otherwise_reads_the_stamp() {
        let departures = Departures::new(1000);
        let stamp = super::stamp().wrapping_sub(8);
        assert!((2048..=2048 + 512).contains(&departures.refault_ms(999, stamp, now_ms())));
        departures.go(PageRange::of(PageIdx(990), 10));
        assert!(departures.refault_ms(999, stamp, now_ms()) < 1000, "it was evicted just now");
        assert!(departures.refault_ms(700, stamp, now_ms()) >= 2048, "of the same chunk, and not known");
        assert_eq!(departures.refault_ms(999, stamp, now_ms() - 100), 0, "it was evicted after the clock was read");
        departures.go(PageRange::one(PageIdx(1 << 20)));
        assert!(departures.refault_ms(1 << 20, stamp, now_ms()) >= 2048, "there is no such page");
    }

    #[test]
    fn a_page_that_refaults_sooner_weighs_more_and_at_once_is_half_a_step() {
        assert_eq!([0, 128, 256, 1000, 60_000].map(milli_hz), [7812, 7812, 3906, 1000, 16]);
    }
}
