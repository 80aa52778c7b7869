//! Refault history: pages that were restored recently, the second guess at what to evict.
//!
//! Before: a fault or a prefetch restored a page. After: reclaim proposes it again, together with pages that the clock
//! finds.
//! Threads: fault, slow and prefetch workers push, the reclaim worker takes; atomics only. Units: pages of a region.
//! Promise: a push never waits. A refault that is not taken in time is forgotten, and then the clock finds the page.
//!
//! A guest that cycles through more memory than its limit gains nothing from its resident pages if the least recently
//! touched ones are evicted first: each page is evicted just before its turn. If the pages that have just refaulted are
//! evicted again instead, the others stay and serve one touch each in every cycle. For a guest that returns to the
//! pages it touched last, the reverse holds. Reclaim need not know which of the two a guest is: [`Guesses`] samples
//! pages evicted by either guess, and prefers the guess with the longer refault interval.
//!
//! A page that refaults much sooner than the rest is not proposed again: the guest touches it more often than pages
//! that stay, so it was evicted by mistake. In this way the far pages become those that are touched most rarely, as
//! with LIRS (Jiang and Zhang, SIGMETRICS 2002), which ranks pages by the time between two touches. Here that time is
//! known for evicted pages only.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::{PageIdx, PageRange};
use ballast_heat::{ColdRun, Pages, push_run};

/// Most refaults that wait for the reclaim worker: 64 MiB of pages, in 128 KiB.
const CAPACITY: u64 = 1 << 14;
/// Bits of a page number (256 TiB of a region), and of the refault interval, in steps; above them is the region's
/// number.
const PAGE_BITS: u32 = 36;
const INTERVAL_BITS: u32 = 16;
const INTERVAL_STEP_MS: u64 = 16;

/// Region number and page.
pub type Place = (u32, PageIdx);

/// The last refaults of a VM.
#[derive(Debug)]
pub struct Refaults {
    /// Region, page and refault interval, plus one; 0 is an empty slot.
    slots: Box<[AtomicU64]>,
    /// Pages pushed so far, and pages taken or forgotten.
    pushed: AtomicU64,
    taken: AtomicU64,
}

impl Default for Refaults {
    fn default() -> Self {
        let slots = (0..CAPACITY).map(|_| AtomicU64::new(0)).collect();
        Self { slots, pushed: AtomicU64::new(0), taken: AtomicU64::new(0) }
    }
}

impl Refaults {
    /// Notes that this page refaulted, after this many milliseconds.
    pub fn push(&self, (region, page): Place, interval_ms: u64) {
        let at = self.pushed.fetch_add(1, Ordering::Relaxed) % CAPACITY;
        let steps = (interval_ms / INTERVAL_STEP_MS).min((1 << INTERVAL_BITS) - 1);
        let entry = (u64::from(region) << PAGE_BITS | page.0) << INTERVAL_BITS | steps;
        self.slots[at as usize].store(entry + 1, Ordering::Relaxed);
    }

    /// The oldest refault not yet taken, and its interval in milliseconds. Only the reclaim worker calls this.
    pub fn take(&self) -> Option<(Place, u64)> {
        let pushed = self.pushed.load(Ordering::Relaxed);
        loop {
            let at = self.taken.load(Ordering::Relaxed).max(pushed.saturating_sub(CAPACITY));
            if at == pushed {
                return None;
            }
            self.taken.store(at + 1, Ordering::Relaxed);
            // The slot is empty: the push was counted and not written yet. The clock will find the page.
            if let Some(entry) = self.slots[(at % CAPACITY) as usize].swap(0, Ordering::Relaxed).checked_sub(1) {
                let (place, steps) = (entry >> INTERVAL_BITS, entry & ((1 << INTERVAL_BITS) - 1));
                let page = PageIdx(place & ((1 << PAGE_BITS) - 1));
                return Some((((place >> PAGE_BITS) as u32, page), steps * INTERVAL_STEP_MS));
            }
        }
    }
}

/// The guess by which a page was evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guess {
    /// The clock, or tracking's oldest.
    Clock,
    /// The history of refaults.
    Refaulted,
    /// A guest's agent, of memory of which it cannot see whether it is used. No samples.
    Unseen,
}

/// An evicted page.
#[derive(Debug)]
struct Sample {
    place: Place,
    evicted_at: Instant,
    /// Its refault interval, once it has refaulted.
    interval: Option<Duration>,
}

/// Samples of one guess.
#[derive(Debug, Default)]
struct Record {
    /// Number of samples so far.
    count: u64,
    /// The last samples.
    last: VecDeque<Sample>,
}

impl Record {
    /// Refaults of this guess per second for which one of its pages is far; `None` if there are too few samples.
    fn refaults_per_s(&self, now: Instant) -> Option<f64> {
        let interval =
            |sample: &Sample| sample.interval.unwrap_or_else(|| now.saturating_duration_since(sample.evicted_at));
        let all: Duration = self.last.iter().map(interval).sum();
        let refaults = self.last.iter().filter(|sample| sample.interval.is_some()).count();
        (self.last.len() >= FEWEST && !all.is_zero()).then(|| refaults as f64 / all.as_secs_f64())
    }
}

/// The reclaim worker's knowledge of refaults.
#[derive(Debug)]
pub struct RefaultHistory {
    /// Pages that refaulted recently, the last at the end.
    recent: VecDeque<Place>,
    /// The refault interval in milliseconds, averaged over about the last [`AVERAGED_OVER`].
    interval_ms: f64,
    /// Samples that tell which guess is the better one.
    pub guesses: Guesses,
}

impl Default for RefaultHistory {
    fn default() -> Self {
        Self { recent: VecDeque::new(), interval_ms: 0.0, guesses: Guesses::new() }
    }
}

/// Up to 1/N of the pages that a VM may hold count as recently refaulted, and this many in any case. With more, the
/// oldest of them would be the pages that a cycling guest touches next.
const RECENT_PART: u64 = 16;
const RECENT_LEAST: u64 = 256;
/// A page that refaults this many times sooner than the average should stay; and the pages that the average is over.
/// With a factor of 2, a guest that touches its cold pages at random keeps too many of them, and the clock takes hot
/// ones.
const SOONER: f64 = 4.0;
const AVERAGED_OVER: f64 = 1024.0;

impl RefaultHistory {
    /// Takes the refaults since the last call, of a VM that may hold this many pages; `also` gets each.
    pub fn take_note(&mut self, refaults: &Refaults, limit_pages: u64, now: Instant, mut also: impl FnMut(Place)) {
        while let Some((place, interval_ms)) = refaults.take() {
            also(place);
            self.guesses.refaulted(place, now);
            self.interval_ms += (interval_ms as f64 - self.interval_ms) / AVERAGED_OVER;
            // A page that refaults much sooner than the rest was evicted by mistake. (One step is added, because
            // intervals are kept in steps.)
            if (interval_ms + INTERVAL_STEP_MS) as f64 >= self.interval_ms / SOONER {
                self.recent.push_back(place);
            }
        }
        let most = (limit_pages / RECENT_PART).max(RECENT_LEAST);
        let stayed = self.recent.len().saturating_sub(most as usize);
        self.recent.drain(..stayed);
    }

    /// Up to about `want` pages that refaulted recently and were not touched in quarantine since, in runs.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64) -> Vec<ColdRun> {
        let mut picked = Vec::new();
        let mut left = want;
        while left > 0 {
            let Some((region, page)) = self.recent.pop_front() else { break };
            let is_known = region < pages.regions() && page.0 < pages.len(region);
            if is_known && pages.age(region, page) == Some(0) {
                picked.push((region, page));
                left = left.saturating_sub(pages.granule(region));
            }
        }
        picked.sort_unstable();
        picked.dedup();
        let mut runs: Vec<ColdRun> = Vec::new();
        for (region, first) in picked {
            let granule = PageRange::of(first, pages.granule(region));
            // A page that was discarded meanwhile is Resident as well, but it is not in the file.
            if pages.next_present(region, PageRange::one(first)).is_none() {
                continue;
            }
            push_run(&mut runs, region, granule);
        }
        runs
    }
}

/// Samples kept of each guess, the fewest that suffice, and the least time between two of one guess.
const SAMPLES: usize = 512;
const FEWEST: usize = 16;
const SAMPLE_EVERY: Duration = Duration::from_millis(4);
/// The share of a guess is counted in PARTS, and changes by STEP every STEP_EVERY samples. The worse guess keeps one
/// part and no more: each page that it takes by mistake refaults, and more than once.
const PARTS: u64 = 64;
const STEP: u64 = 4;
const STEP_EVERY: u64 = 8;

/// Learns which guess is the better one.
#[derive(Debug, Default)]
pub struct Guesses {
    records: [Record; 2],
    /// The sample of each far page: guess and number.
    far: HashMap<Place, (usize, u64)>,
    /// Parts that are taken from the refaults, and the remainder of the last division.
    refaulted: u64,
    rest: u64,
    /// Number of samples at the last change of that share.
    stepped_at: u64,
}

impl Guesses {
    /// Both guesses begin with equal shares.
    pub fn new() -> Self {
        Self { refaulted: PARTS / 2, ..Self::default() }
    }

    /// Notes that a page was evicted by this guess. Only some are sampled.
    pub fn evicted(&mut self, guess: Guess, place: Place, now: Instant) {
        let Some(record) = self.records.get_mut(guess as usize) else { return };
        if record.last.back().is_some_and(|last| now.saturating_duration_since(last.evicted_at) < SAMPLE_EVERY) {
            return;
        }
        self.far.insert(place, (guess as usize, record.count));
        record.last.push_back(Sample { place, evicted_at: now, interval: None });
        record.count += 1;
        if record.last.len() > SAMPLES
            && let Some(oldest) = record.last.pop_front()
            && self.far.get(&oldest.place) == Some(&(guess as usize, record.count - 1 - SAMPLES as u64))
        {
            self.far.remove(&oldest.place);
        }
    }

    /// Notes that a page refaulted.
    pub fn refaulted(&mut self, place: Place, now: Instant) {
        let Some((guess, number)) = self.far.remove(&place) else { return };
        let record = &mut self.records[guess];
        let first = record.count - record.last.len() as u64;
        let at = number.checked_sub(first).and_then(|at| record.last.get_mut(at as usize));
        if let Some(sample) = at {
            sample.interval = Some(now.saturating_duration_since(sample.evicted_at));
        }
    }

    /// Returns how many of these pages to take from the refaults. Both guesses are always tried, even with few pages at
    /// a time.
    pub fn from_refaults(&mut self, pages: u64, now: Instant) -> u64 {
        let count = self.records.iter().map(|record| record.count).sum::<u64>();
        if count >= self.stepped_at + STEP_EVERY {
            self.stepped_at = count;
            let [clock, refaulted] = [0, 1].map(|guess| self.records[guess].refaults_per_s(now));
            if clock.zip(refaulted).is_some_and(|(clock, refaulted)| clock > refaulted) {
                self.refaulted = (self.refaulted + STEP).min(PARTS - 1);
            } else if clock.zip(refaulted).is_some_and(|(clock, refaulted)| clock < refaulted) {
                self.refaulted = self.refaulted.saturating_sub(STEP).max(1);
            }
        }
        let parts = pages * self.refaulted + self.rest;
        self.rest = parts % PARTS;
        (parts / PARTS).min(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_in_the_order_of_their_refaults_and_the_oldest_are_forgotten() {
        let refaults = Refaults::default();
        assert_eq!(refaults.take(), None);
        refaults.push((3, PageIdx(7)), 1 << 40);
        refaults.push((3, PageIdx(0)), 15);
        let taken = [refaults.take(), refaults.take(), refaults.take()];
        assert_eq!(taken, [Some(((3, PageIdx(7)), 65535 * 16)), Some(((3, PageIdx(0)), 0)), None]);
        (0..CAPACITY + 5).for_each(|page| refaults.push((0, PageIdx(page)), 32));
        assert_eq!(refaults.take(), Some(((0, PageIdx(5)), 32)));
        assert_eq!(std::iter::from_fn(|| refaults.take()).count() as u64, CAPACITY - 1);
    }

    /// The share of the refaults, if pages of the two guesses refault after these times.
    fn share_after(clock_ms: u64, refaulted_ms: u64) -> u64 {
        let (mut guesses, start) = (Guesses::new(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for step in 0..2000 {
            for (guess, region, interval) in [(Guess::Clock, 0, clock_ms), (Guess::Refaulted, 1, refaulted_ms)] {
                guesses.evicted(guess, (region, PageIdx(step)), at(step * 5));
                if let Some(refaulted) = (step * 5).checked_sub(interval) {
                    guesses.refaulted((region, PageIdx(refaulted / 5)), at(step * 5));
                }
            }
            let _ = guesses.from_refaults(1, at(step * 5));
        }
        assert!(guesses.far.len() <= 2 * SAMPLES);
        guesses.from_refaults(1600, at(10_000))
    }

    #[test]
    fn the_guess_whose_pages_stay_far_longer_is_preferred_and_the_other_one_still_tried() {
        assert_eq!(Guesses::new().from_refaults(1600, Instant::now()), 800);
        assert_eq!(share_after(500, 1000), 1575);
        assert_eq!(share_after(1000, 500), 25);
        assert_eq!(share_after(1 << 30, 1000), 25, "pages that never refault were the best guess");
    }

    #[test]
    fn a_page_that_refaults_much_sooner_than_the_rest_is_not_proposed_again() {
        let (refaults, mut history) = (Refaults::default(), RefaultHistory::default());
        for page in 0..8 * RECENT_LEAST {
            refaults.push((0, PageIdx(page)), if page % 4 == 0 { 100 } else { 1000 });
            history.take_note(&refaults, 0, Instant::now(), |_| ());
        }
        assert_eq!(history.recent.len() as u64, RECENT_LEAST);
        assert!(history.recent.iter().all(|(_, page)| page.0 % 4 != 0));
        let mut history = RefaultHistory::default();
        (0..100).for_each(|page| refaults.push((0, PageIdx(page)), 10));
        history.take_note(&refaults, 0, Instant::now(), |_| ());
        assert_eq!(history.recent.len(), 100, "all at once is not sooner than the rest");
    }
}
