//! The refault interval: how long restored pages had been far.
//!
//! Before: a page's word was stamped as it became Far. After: the VM's counters hold the sum of the refault intervals
//! of all restored pages. From these, policies compute how much of the far memory is in use (Little's law: the number
//! of pages restored in a second, times their refault interval, is the number of them that are far at a time).
//! Threads: any. Units: milliseconds.
//! Promise: the stamp is the age byte, which a far page does not otherwise use; a later engine reads it the same way.
//! It counts steps of 256 ms, modulo [`WRAPS_MS`]. An engine knows more about pages that it evicted itself
//! ([`Departures`]: steps of 16 ms, modulo 17 minutes), in 2 bytes for each page of a chunk (32 MiB) with an evicted
//! page. How often a time has wrapped is not known, but how often at least: a page that was far for long never looks
//! like one that was wanted at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use ballast_base::PageRange;
use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_sys::clock;

/// Step of the stamps in milliseconds: a byte of steps is 65 s.
const STEP_MS: u64 = 256;
/// Intervals between stamps count modulo this, in milliseconds.
const WRAPS_MS: u64 = 256 * STEP_MS;

/// The stamp of the present time.
pub fn stamp() -> u8 {
    (now_ms() / STEP_MS) as u8
}

/// Milliseconds since the host started.
pub fn now_ms() -> u64 {
    clock::monotonic_ns() / 1_000_000
}

/// Milliseconds from one stamp to another: off by up to a step, exact on average.
fn between_ms(from: u8, to: u8) -> u64 {
    u64::from(to.wrapping_sub(from)) * STEP_MS
}

/// The reciprocal of a refault interval, in thousandths of 1/s.
pub fn milli_hz(interval_ms: u64) -> u64 {
    // An interval of less than a step is half a step on average.
    1_000_000 / interval_ms.max(STEP_MS / 2)
}

/// A page that is restored sooner than this after its eviction was a wrong choice.
pub const SOON_MS: u64 = 10_000;

/// Step of the finer times in milliseconds.
const FINE_MS: u64 = 16;
/// Finer times count modulo this, in milliseconds: 17 minutes.
const FINE_WRAPS_MS: u64 = (1 << 16) * FINE_MS;

/// The time at which this engine evicted each page of a region: finer than stamps.
#[derive(Debug)]
pub struct Departures {
    /// When this engine opened the region.
    opened_ms: u64,
    chunks: Box<[OnceLock<Chunk>]>,
}

/// A chunk with an evicted page.
#[derive(Debug)]
struct Chunk {
    /// The last departure of a page of it.
    last_ms: AtomicU64,
    /// Steps of [`FINE_MS`], modulo 2^16; 0 is unknown.
    pages: Box<[AtomicU16]>,
}

impl Departures {
    /// The departures of a region of this many pages.
    pub fn new(pages: u64) -> Self {
        Self::opened(pages, now_ms())
    }

    fn opened(pages: u64, opened_ms: u64) -> Self {
        Self { opened_ms, chunks: (0..pages.div_ceil(PAGES_PER_CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    /// Notes that these pages, of one chunk, are about to be evicted.
    pub fn go(&self, pages: PageRange) {
        self.go_at(pages, now_ms());
    }

    fn go_at(&self, pages: PageRange, now_ms: u64) {
        let Some(chunk) = self.chunks.get((pages.start().0 / PAGES_PER_CHUNK) as usize) else { return };
        let chunk = chunk.get_or_init(|| Chunk {
            last_ms: AtomicU64::new(0),
            pages: (0..PAGES_PER_CHUNK).map(|_| AtomicU16::new(0)).collect(),
        });
        chunk.last_ms.fetch_max(now_ms, Ordering::Relaxed);
        let at = |page: u64| &chunk.pages[(page % PAGES_PER_CHUNK) as usize];
        // Release: who reads the time of a page finds at least that time as the chunk's last one.
        pages.iter().for_each(|page| at(page.0).store(fine(now_ms), Ordering::Release));
    }

    /// The refault interval in milliseconds of a page that is restored now, and whose word has this stamp.
    pub fn refault_ms(&self, page: u64, stamp: u8, now_ms: u64) -> u64 {
        let chunk = self.chunks.get((page / PAGES_PER_CHUNK) as usize).and_then(OnceLock::get);
        let went = chunk.map(|chunk| (chunk, chunk.pages[(page % PAGES_PER_CHUNK) as usize].load(Ordering::Acquire)));
        let Some((chunk, went)) = went.filter(|(_, went)| *went != 0) else {
            // An earlier engine evicted it: a while ago, and nobody knows how long before this engine opened the VM.
            // If it was just before, this makes it look colder once; else it would look up to 500 times as hot.
            let least = now_ms.saturating_sub(self.opened_ms).max(WRAPS_MS);
            return unwrapped(between_ms(stamp, (now_ms / STEP_MS) as u8), WRAPS_MS, least, STEP_MS);
        };
        let last_ms = chunk.last_ms.load(Ordering::Relaxed);
        let ahead_ms = u64::from(went.wrapping_sub(fine(now_ms))) * FINE_MS;
        if last_ms > now_ms && ahead_ms <= last_ms - now_ms + FINE_MS {
            // It was restored and evicted again after the clock was read.
            return 0;
        }
        let interval = u64::from(fine(now_ms).wrapping_sub(went)) * FINE_MS;
        unwrapped(interval, FINE_WRAPS_MS, now_ms.saturating_sub(last_ms), 2 * FINE_MS)
    }
}

/// An interval that counts modulo `wraps`, is `least` at least, and may be up to `off` too short.
fn unwrapped(interval: u64, wraps: u64, least: u64, off: u64) -> u64 {
    interval + least.saturating_sub(interval + off).div_ceil(wraps) * wraps
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
        let (now, stamp) = (now_ms(), super::stamp().wrapping_sub(8));
        let read = |page| departures.refault_ms(page, stamp, now_ms());
        let expected = WRAPS_MS + 2048..=WRAPS_MS + 2048 + 512;
        assert!(expected.contains(&read(999)));
        departures.go(PageRange::of(PageIdx(990), 10));
        assert!(read(999) < 1000, "it was evicted just now");
        assert!(expected.contains(&read(700)), "of the same chunk, and not known");
        assert_eq!(departures.refault_ms(999, stamp, now - 100), 0, "it was evicted after the clock was read");
        departures.go(PageRange::one(PageIdx(1 << 20)));
        assert!(expected.contains(&read(1 << 20)), "there is no such page");
    }

    #[test]
    fn no_page_that_was_far_for_long_looks_like_one_that_was_wanted_at_once() {
        const OPENED: u64 = 1_000_000_000;
        let stamp = |at_ms: u64| (at_ms / STEP_MS) as u8;
        for far_ms in [0, 100, WRAPS_MS - 1, WRAPS_MS, WRAPS_MS + 90, FINE_WRAPS_MS + 20, 7 * FINE_WRAPS_MS + 1] {
            // This engine evicted it, and no other page of its chunk since.
            let departures = Departures::opened(1000, OPENED);
            departures.go_at(PageRange::of(PageIdx(5), 3), OPENED + 10);
            let read = departures.refault_ms(6, stamp(OPENED + 10), OPENED + 10 + far_ms);
            assert!(read.abs_diff(far_ms) <= 2 * FINE_MS, "{far_ms} reads {read}");
            // An earlier engine did, just before this one opened the VM, or long before.
            for before_ms in [0, 10 * WRAPS_MS + 3] {
                let went = OPENED - before_ms;
                let read = departures.refault_ms(600, stamp(went), OPENED + far_ms);
                assert!(read >= far_ms.saturating_sub(STEP_MS).max(WRAPS_MS - STEP_MS), "{far_ms} reads {read}");
                let off = (far_ms + before_ms).abs_diff(read) % WRAPS_MS;
                assert!(off.min(WRAPS_MS - off) <= STEP_MS, "{far_ms} reads {read}");
            }
        }
    }

    #[test]
    fn a_page_that_refaults_sooner_weighs_more_and_at_once_is_half_a_step() {
        assert_eq!([0, 128, 256, 1000, 60_000].map(milli_hz), [7812, 7812, 3906, 1000, 16]);
    }
}
