//! Recent: pages that came back of late, the other guess at what may go.
//!
//! Before: a fault or a prefetch brought a page back. After: reclaim proposes it again, beside what the clock hand finds.
//! Threads: fault, slow and prefetch lanes push, the reclaim lane takes; atomics only. Units: pages of a region.
//! Promise: pushing never waits. What is not taken in time is forgotten, and then the hand finds it.
//!
//! A guest that goes round through more memory than it may have gets nothing out of the rest if what it touched longest ago
//! goes first: each page goes just before its turn. If instead what has just come back goes again, the rest stays and
//! serves one touch for each of its pages in every round. For a guest that comes back to what it touched last it is the
//! other way round. Nobody need know which of the two a guest is: [`Guesses`] samples pages that went by either guess, and
//! prefers the one whose pages stay away longer.
//!
//! What comes back much sooner than the rest is not proposed again: it is touched more often than what stays in its place, so it
//! went by mistake. In this way what is away becomes what is touched most rarely, as with LIRS (Jiang and Zhang, SIGMETRICS
//! 2002), which tells pages by the time between two touches; here that time is known of what went, and of nothing else.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_heat::{ColdRun, Pages, push_run};

/// Pages on their way to the reclaim lane at most: 64 MiB of them, in 128 KiB.
const UNDER_WAY: u64 = 1 << 14;
/// Bits of a page number (256 TiB of a region), and of how long it was away, in steps; above them is the region's number.
const PAGE_BITS: u32 = 36;
const AWAY_BITS: u32 = 16;
const AWAY_STEP_MS: u64 = 16;

/// Region number and page.
pub type Place = (u32, PageIdx);

/// The pages that came back last.
#[derive(Debug)]
pub struct Recent {
    /// Region, page and how long it was away, plus one; 0 is none.
    slots: Box<[AtomicU64]>,
    /// Pages pushed so far, and taken or forgotten.
    pushed: AtomicU64,
    taken: AtomicU64,
}

impl Default for Recent {
    fn default() -> Self {
        let slots = (0..UNDER_WAY).map(|_| AtomicU64::new(0)).collect();
        Self { slots, pushed: AtomicU64::new(0), taken: AtomicU64::new(0) }
    }
}

impl Recent {
    /// This page came back, after so many milliseconds.
    pub fn push(&self, (region, page): Place, away_ms: u64) {
        let at = self.pushed.fetch_add(1, Ordering::Relaxed) % UNDER_WAY;
        let steps = (away_ms / AWAY_STEP_MS).min((1 << AWAY_BITS) - 1);
        let entry = (u64::from(region) << PAGE_BITS | page.0) << AWAY_BITS | steps;
        self.slots[at as usize].store(entry + 1, Ordering::Relaxed);
    }

    /// The one that came back longest ago and was not taken yet, and for how many milliseconds it had been away. For the
    /// reclaim lane alone.
    pub fn take(&self) -> Option<(Place, u64)> {
        let pushed = self.pushed.load(Ordering::Relaxed);
        loop {
            let at = self.taken.load(Ordering::Relaxed).max(pushed.saturating_sub(UNDER_WAY));
            if at == pushed {
                return None;
            }
            self.taken.store(at + 1, Ordering::Relaxed);
            // Empty: counted, but not written yet. The hand will find it.
            if let Some(entry) = self.slots[(at % UNDER_WAY) as usize].swap(0, Ordering::Relaxed).checked_sub(1) {
                let (place, steps) = (entry >> AWAY_BITS, entry & ((1 << AWAY_BITS) - 1));
                let page = PageIdx(place & ((1 << PAGE_BITS) - 1));
                return Some((((place >> PAGE_BITS) as u32, page), steps * AWAY_STEP_MS));
            }
        }
    }
}

/// Whose guess it is that a page may go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guess {
    /// The clock hand's, or tracking's.
    Hand,
    /// It came back of late.
    Recent,
}

/// A page that went.
#[derive(Debug)]
struct Sample {
    place: Place,
    went: Instant,
    /// How long it was away.
    away: Option<Duration>,
}

/// Samples of one guess.
#[derive(Debug, Default)]
struct Record {
    /// Sampled so far.
    count: u64,
    /// The last of them.
    last: VecDeque<Sample>,
}

impl Record {
    /// How often pages of this guess come back, in a second that one of them is away; `None` if too few are known.
    fn returns_per_s(&self, now: Instant) -> Option<f64> {
        let away = |sample: &Sample| sample.away.unwrap_or_else(|| now.saturating_duration_since(sample.went));
        let all: Duration = self.last.iter().map(away).sum();
        let back = self.last.iter().filter(|sample| sample.away.is_some()).count();
        (self.last.len() >= FEWEST && !all.is_zero()).then(|| back as f64 / all.as_secs_f64())
    }
}

/// What the reclaim lane knows of pages that came back.
#[derive(Debug)]
pub struct Returned {
    /// Those that came back of late, the last at the end.
    of_late: VecDeque<Place>,
    /// For how long pages that come back were away, in milliseconds, on average over about the last [`AWAY_OVER`].
    away_ms: f64,
    /// Which guess is the better one.
    pub guesses: Guesses,
}

impl Default for Returned {
    fn default() -> Self {
        Self { of_late: VecDeque::new(), away_ms: 0.0, guesses: Guesses::new() }
    }
}

/// One part in this many of what a VM may hold can have come back *of late*, and this many pages in any case. With more, what
/// came back longest ago of that is what a guest that goes round and round wants next.
const OF_LATE_PART: u64 = 16;
const OF_LATE_LEAST: u64 = 256;
/// So many times sooner than others on average comes back what should stay; and over about how many pages that is averaged.
/// With 2, a guest that touches its cold pages at random keeps too many of them, and loses hot ones to the hand.
const SOONER: f64 = 4.0;
const AWAY_OVER: f64 = 1024.0;

impl Returned {
    /// Take note of what came back since the last time, to a VM that may hold so many pages.
    pub fn take_note(&mut self, recent: &Recent, limit_pages: u64, now: Instant) {
        while let Some((place, away_ms)) = recent.take() {
            self.guesses.came(place, now);
            self.away_ms += (away_ms as f64 - self.away_ms) / AWAY_OVER;
            // What is wanted much sooner than the rest went by mistake. (A step more, because times are told in steps.)
            if (away_ms + AWAY_STEP_MS) as f64 >= self.away_ms / SOONER {
                self.of_late.push_back(place);
            }
        }
        let most = (limit_pages / OF_LATE_PART).max(OF_LATE_LEAST);
        let stayed = self.of_late.len().saturating_sub(most as usize);
        self.of_late.drain(..stayed);
    }

    /// Up to about so many pages that came back of late and were not touched in quarantine since, in runs.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64) -> Vec<ColdRun> {
        let mut picked = Vec::new();
        let mut left = want;
        while left > 0 {
            let Some((region, page)) = self.of_late.pop_front() else { break };
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
            let count = pages.granule(region);
            // What was discarded meanwhile is Resident, too, but there is nothing of it to take.
            if pages.next_present(region, first, PageIdx(first.0 + 1)).is_none() {
                continue;
            }
            push_run(&mut runs, region, first, count);
        }
        runs
    }
}

/// Samples kept of each guess, the fewest that say anything, and the time between two of one guess at least.
const SAMPLES: usize = 512;
const FEWEST: usize = 16;
const SAMPLE_EVERY: Duration = Duration::from_millis(4);
/// The share of a guess is told in so many parts, and changed by some for each so many samples. The worse guess keeps one
/// and no more: what it takes for nothing comes back, and more often than once.
const PARTS: u64 = 64;
const STEP: u64 = 4;
const STEP_EVERY: u64 = 8;

/// Which guess has been the better one.
#[derive(Debug, Default)]
pub struct Guesses {
    records: [Record; 2],
    /// Where pages that are away are among the samples: guess and number.
    away: HashMap<Place, (usize, u64)>,
    /// Parts that are taken from what came back of late, and what was left over when that was reckoned last.
    recent: u64,
    rest: u64,
    /// Samples when that was changed last.
    stepped_at: u64,
}

impl Guesses {
    /// These two are as good.
    pub fn new() -> Self {
        Self { recent: PARTS / 2, ..Self::default() }
    }

    /// A page went by this guess. Only some are looked at.
    pub fn went(&mut self, guess: Guess, place: Place, now: Instant) {
        let record = &mut self.records[guess as usize];
        if record.last.back().is_some_and(|last| now.saturating_duration_since(last.went) < SAMPLE_EVERY) {
            return;
        }
        self.away.insert(place, (guess as usize, record.count));
        record.last.push_back(Sample { place, went: now, away: None });
        record.count += 1;
        if record.last.len() > SAMPLES
            && let Some(oldest) = record.last.pop_front()
            && self.away.get(&oldest.place) == Some(&(guess as usize, record.count - 1 - SAMPLES as u64))
        {
            self.away.remove(&oldest.place);
        }
    }

    /// A page came back.
    pub fn came(&mut self, place: Place, now: Instant) {
        let Some((guess, number)) = self.away.remove(&place) else { return };
        let record = &mut self.records[guess];
        let first = record.count - record.last.len() as u64;
        let at = number.checked_sub(first).and_then(|at| record.last.get_mut(at as usize));
        if let Some(sample) = at {
            sample.away = Some(now.saturating_duration_since(sample.went));
        }
    }

    /// How many of these pages should be such as came back of late. However few they are at a time, both guesses are
    /// always tried.
    pub fn recent(&mut self, pages: u64, now: Instant) -> u64 {
        let count = self.records.iter().map(|record| record.count).sum::<u64>();
        if count >= self.stepped_at + STEP_EVERY {
            self.stepped_at = count;
            let [hand, recent] = [0, 1].map(|guess| self.records[guess].returns_per_s(now));
            if hand.zip(recent).is_some_and(|(hand, recent)| hand > recent) {
                self.recent = (self.recent + STEP).min(PARTS - 1);
            } else if hand.zip(recent).is_some_and(|(hand, recent)| hand < recent) {
                self.recent = self.recent.saturating_sub(STEP).max(1);
            }
        }
        let parts = pages * self.recent + self.rest;
        self.rest = parts % PARTS;
        (parts / PARTS).min(pages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_taken_in_the_order_they_came_back_and_the_oldest_are_forgotten() {
        let recent = Recent::default();
        assert_eq!(recent.take(), None);
        recent.push((3, PageIdx(7)), 1 << 40);
        recent.push((3, PageIdx(0)), 15);
        let taken = [recent.take(), recent.take(), recent.take()];
        assert_eq!(taken, [Some(((3, PageIdx(7)), 65535 * 16)), Some(((3, PageIdx(0)), 0)), None]);
        (0..UNDER_WAY + 5).for_each(|page| recent.push((0, PageIdx(page)), 32));
        assert_eq!(recent.take(), Some(((0, PageIdx(5)), 32)));
        assert_eq!(std::iter::from_fn(|| recent.take()).count() as u64, UNDER_WAY - 1);
    }

    /// Pages of the hand come back after so long, those of late after so long.
    fn share_after(hand_ms: u64, recent_ms: u64) -> u64 {
        let (mut guesses, start) = (Guesses::new(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        for step in 0..2000 {
            for (guess, region, away) in [(Guess::Hand, 0, hand_ms), (Guess::Recent, 1, recent_ms)] {
                guesses.went(guess, (region, PageIdx(step)), at(step * 5));
                if let Some(back) = (step * 5).checked_sub(away) {
                    guesses.came((region, PageIdx(back / 5)), at(step * 5));
                }
            }
            let _ = guesses.recent(1, at(step * 5));
        }
        assert!(guesses.away.len() <= 2 * SAMPLES);
        guesses.recent(1600, at(10_000))
    }

    #[test]
    fn the_guess_whose_pages_stay_away_longer_is_preferred_and_the_other_one_still_tried() {
        assert_eq!(Guesses::new().recent(1600, Instant::now()), 800);
        assert_eq!(share_after(500, 1000), 1575);
        assert_eq!(share_after(1000, 500), 25);
        assert_eq!(share_after(1 << 30, 1000), 25, "what never comes back was the best guess");
    }

    #[test]
    fn what_comes_back_much_sooner_than_the_rest_is_not_proposed_again() {
        let (recent, mut returned) = (Recent::default(), Returned::default());
        for page in 0..8 * OF_LATE_LEAST {
            recent.push((0, PageIdx(page)), if page % 4 == 0 { 100 } else { 1000 });
            returned.take_note(&recent, 0, Instant::now());
        }
        assert_eq!(returned.of_late.len() as u64, OF_LATE_LEAST);
        assert!(returned.of_late.iter().all(|(_, page)| page.0 % 4 != 0));
        let mut returned = Returned::default();
        (0..100).for_each(|page| recent.push((0, PageIdx(page)), 10));
        returned.take_note(&recent, 0, Instant::now());
        assert_eq!(returned.of_late.len(), 100, "all at once is not sooner than the rest");
    }
}
