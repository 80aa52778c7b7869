//! Refault intervals: the time from a page's eviction to the touch that restored it.
//!
//! Before: a page's word was stamped as it became Far. After: the VM's counters have the sum of the intervals of all
//! restored pages. From it, policies compute the far memory that is in use, by Little's law: the pages restored in a
//! second, times their refault interval, is the number of them that are far at a time.
//! Threads: any. Units: milliseconds.
//! Promise: the stamp is the age byte, which a far page does not use otherwise; a later engine reads it, too. It counts
//! steps of 256 ms, modulo [`WRAPS_MS`]. For pages that this engine evicted, [`Departures`] has steps of 16 ms, modulo
//! 17 minutes, in 2 bytes for each page of a chunk (32 MiB) with an evicted page. The number of wraps is unknown but
//! has a lower bound: a page that was far for long never looks like one that refaulted at once.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, AtomicU64, Ordering};

use ballast_base::PageRange;
use ballast_base::stripes::PAGES_PER_CHUNK;
use ballast_sys::clock;

/// Step of the stamps in milliseconds: one byte spans 65 s.
const STEP_MS: u64 = 256;
/// Intervals between stamps are modulo this, in milliseconds.
const WRAPS_MS: u64 = 256 * STEP_MS;

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
    // An interval below one step is half a step on average.
    1_000_000 / interval_ms.max(STEP_MS / 2)
}

/// A page with a shorter refault interval than this was a wrong choice for eviction.
pub const SOON_MS: u64 = 10_000;

/// Step of [`Departures`] in milliseconds.
const FINE_MS: u64 = 16;
/// Times in [`Departures`] are modulo this, in milliseconds: 17 minutes.
const FINE_WRAPS_MS: u64 = (1 << 16) * FINE_MS;

/// The time at which this engine evicted each page of a region, in finer steps than the stamps.
#[derive(Debug)]
pub struct Departures {
    opened_ms: u64,
    chunks: Box<[OnceLock<Chunk>]>,
}

#[derive(Debug)]
struct Chunk {
    last_ms: AtomicU64,
    /// Steps of [`FINE_MS`], modulo 2^16; 0: unknown.
    pages: Box<[AtomicU16]>,
}

impl Departures {
    pub fn new(pages: u64) -> Self {
        Self::opened(pages, now_ms())
    }

    fn opened(pages: u64, opened_ms: u64) -> Self {
        Self { opened_ms, chunks: (0..pages.div_ceil(PAGES_PER_CHUNK)).map(|_| OnceLock::new()).collect() }
    }

    /// Notes that these pages, all of one chunk, are about to be evicted.
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
        // Release: a reader of a page's time also sees a `last_ms` that is no earlier.
        pages.iter().for_each(|page| at(page.0).store(fine(now_ms), Ordering::Release));
    }

    /// The refault interval, in milliseconds, of a page that is restored at `now_ms` and whose word has this stamp.
    pub fn refault_ms(&self, page: u64, stamp: u8, now_ms: u64) -> u64 {
        let chunk = self.chunks.get((page / PAGES_PER_CHUNK) as usize).and_then(OnceLock::get);
        let went = chunk.map(|chunk| (chunk, chunk.pages[(page % PAGES_PER_CHUNK) as usize].load(Ordering::Acquire)));
        let Some((chunk, went)) = went.filter(|(_, went)| *went != 0) else {
            // An earlier engine evicted it, an unknown time before this engine opened the VM. `least` may make the page
            // look colder than it is, once; without it, it could look up to 500 times as hot.
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

/// An interval known modulo `wraps`, up to `off` too short, made at least `least` long by adding wraps.
fn unwrapped(interval: u64, wraps: u64, least: u64, off: u64) -> u64 {
    interval + least.saturating_sub(interval + off).div_ceil(wraps) * wraps
}

/// The step of a time; never 0.
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
    fn intervals_are_fine_for_pages_that_this_engine_evicted_and_else_from_stamps() {
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
            // An earlier engine evicted it, just before this engine opened the VM, or long before.
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
