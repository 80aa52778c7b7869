//! Trust: samples of evicted pages tell whether they stay far, and whether a guest's reports are wrong.
//!
//! Before: reclaim has picked pages, by the agent's report or by the host's own knowledge. After: the share of them
//! that was touched again soon is known; a guest most of whose cold pages are touched at once is ignored for a while
//! (as in Demeter, section 7.2), because its reports are worse than none.
//! Threads: the VM's reclaim worker. Units: pages.
//! Promise: the number of samples is bounded; a page with an unknown outcome (say, an aborted eviction) does not count.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use ballast_base::PageIdx;
use ballast_heat::{Age, ColdRun, Pages};

use crate::vm::guest::told::Picked;

/// A page touched again within this time was a wrong choice (Blowfish, section 5, has a figure of this kind).
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// A page that the guest called cold was hot if it is touched again within this time: twice the default quarantine.
const AT_ONCE: Duration = Duration::from_secs(2);
/// Most samples that wait for judgement, and about how many a pick yields: each stands for the pages up to the next.
const SAMPLES: usize = 4096;
const OF_A_PICK: u64 = 64;
/// Samples of an agent's pages before a verdict; after it, half of them are forgotten.
const JUDGED: u32 = 128;
/// Time for which a guest is ignored: the first time, and at most; it doubles each time.
const IGNORED: Duration = Duration::from_secs(60);
const IGNORED_MOST: Duration = Duration::from_secs(3600);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    Agent,
    Host,
}

#[derive(Debug)]
struct Sample {
    place: (u32, PageIdx),
    by: By,
    at: Instant,
    age: Age,
    /// Number of pages that it stands for.
    weight: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Trust {
    waiting: VecDeque<Sample>,
    /// Sampled pages; the time of the first restore, if there was one.
    back: HashMap<(u32, PageIdx), Option<Instant>>,
    by_agent: Picked,
    by_host: Picked,
    /// Samples of the agent's pages since the last verdict: all; those touched at once.
    judged: u32,
    lies: u32,
    /// Number of verdicts against the guest.
    ignored: u32,
}

impl Trust {
    /// Samples a few of the pages that were picked.
    pub fn picked(&mut self, by: By, runs: &[ColdRun], pages: &dyn Pages, now: Instant) {
        let all: u64 = runs.iter().map(|run| run.pages.count()).sum();
        let step = (all / OF_A_PICK).max(1);
        let mut skip = 0;
        for run in runs {
            let first = run.pages.start().0;
            let mut at = skip;
            while at < run.pages.count() {
                self.sample(by, (run.region, PageIdx(first + at)), step, pages, now);
                at += step;
            }
            skip = at - run.pages.count();
        }
    }

    fn sample(&mut self, by: By, place: (u32, PageIdx), weight: u64, pages: &dyn Pages, now: Instant) {
        let Some(age) = pages.age(place.0, place.1) else { return };
        if self.waiting.len() >= SAMPLES || self.back.contains_key(&place) {
            return;
        }
        let mut age = Age::from_byte(age);
        // A hit raises the level up to its maximum, and rounds spend the credit: another hit of a page at the maximum
        // would leave no trace. From one level lower, a hit raises the level, and earns as many rounds.
        if by == By::Agent && age.level == Age::MAX_LEVEL {
            age.level -= 1;
            pages.set_age(place.0, place.1, age.byte());
        }
        self.back.insert(place, None);
        self.waiting.push_back(Sample { place, by, at: now, age, weight });
    }

    pub fn restored(&mut self, place: (u32, PageIdx), now: Instant) {
        if let Some(back) = self.back.get_mut(&place) {
            back.get_or_insert(now);
        }
    }

    /// Judges samples that are old enough. Returns for how long the guest is to be ignored, after a verdict against it.
    pub fn judge(&mut self, pages: &dyn Pages, now: Instant) -> Option<Duration> {
        while let Some(sample) = self.waiting.pop_front_if(|sample| now.saturating_duration_since(sample.at) >= SOON) {
            let Sample { place, by, at, age: before, weight } = sample;
            let back = self.back.remove(&place).flatten();
            let interval = back.map(|back| back.saturating_duration_since(at));
            let age = if place.0 < pages.regions() && place.1.0 < pages.len(place.0) {
                pages.age(place.0, place.1).map(Age::from_byte)
            } else {
                None
            };
            let (is_wrong, is_lie) = match (interval, age) {
                (Some(interval), _) => (interval < SOON, interval < AT_ONCE),
                // A higher age means a quarantine hit. Otherwise the page is in memory, and no touch is known.
                (None, Some(age)) if age.level > before.level || age.credit > before.credit => (true, true),
                (None, Some(_)) => continue,
                (None, None) => (false, false),
            };
            let picked = if by == By::Agent { &mut self.by_agent } else { &mut self.by_host };
            picked.judged += weight;
            picked.wrong += if is_wrong { weight } else { 0 };
            // A verdict needs many samples, whatever their weights.
            if by == By::Agent {
                self.judged += 1;
                self.lies += u32::from(is_lie);
            }
        }
        if self.judged < JUDGED {
            return None;
        }
        let lies = self.lies * 2 > self.judged;
        (self.judged, self.lies) = (self.judged / 2, self.lies / 2);
        if !lies {
            return None;
        }
        // Waiting samples were picked from the rejected reports, too.
        (self.judged, self.lies) = (0, 0);
        self.waiting.retain(|sample| sample.by == By::Host);
        let waiting = &self.waiting;
        self.back.retain(|place, _| waiting.iter().any(|sample| sample.place == *place));
        self.ignored = self.ignored.saturating_add(1);
        let doubled = IGNORED.saturating_mul(1 << (self.ignored - 1).min(8));
        Some(doubled.min(IGNORED_MOST))
    }

    /// The samples of pages that the agent reported, and of pages that the host picked.
    pub fn figures(&self) -> (Picked, Picked) {
        (self.by_agent, self.by_host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::PageRange;
    use ballast_heat::touched;
    use std::cell::RefCell;

    /// One region; `None`: the page is far.
    struct Table(RefCell<Vec<Option<u8>>>);

    impl Pages for Table {
        fn regions(&self) -> u32 {
            1
        }
        fn len(&self, _: u32) -> u64 {
            self.0.borrow().len() as u64
        }
        fn next_present(&self, _: u32, _: PageRange) -> Option<PageRange> {
            None
        }
        fn age(&self, _: u32, page: PageIdx) -> Option<u8> {
            self.0.borrow()[page.0 as usize]
        }
        fn set_age(&self, _: u32, page: PageIdx, age: u8) {
            self.0.borrow_mut()[page.0 as usize] = Some(age);
        }
    }

    fn run(first: u64, count: u64) -> Vec<ColdRun> {
        vec![ColdRun { region: 0, pages: PageRange::of(PageIdx(first), count) }]
    }

    /// Runs rounds with 16 picked pages, of which `touched_of_16` are touched: in quarantine, or after this time.
    fn after(touched_of_16: u64, back_after: Option<Duration>) -> (Option<Duration>, Picked) {
        let (mut trust, start) = (Trust::default(), Instant::now());
        let mut verdict = None;
        for round in 0..20 {
            let table = Table(RefCell::new(vec![Some(0); 16]));
            let at = start + SOON * round;
            trust.picked(By::Agent, &run(0, 16), &table, at);
            for page in 0..16 {
                let is_touched = page < touched_of_16;
                let age = (is_touched && back_after.is_none()).then(|| touched(0));
                table.0.borrow_mut()[page as usize] = age;
                if let Some(interval) = back_after.filter(|_| is_touched) {
                    trust.restored((0, PageIdx(page)), at + interval);
                }
            }
            verdict = verdict.or(trust.judge(&table, at + SOON));
        }
        (verdict, trust.figures().0)
    }

    #[test]
    fn a_guest_whose_cold_pages_are_touched_at_once_is_ignored_and_others_are_not() {
        let (verdict, figures) = after(16, None);
        assert!(verdict == Some(IGNORED) && figures.wrong == figures.judged, "{figures:?}");
        assert_eq!(after(12, Some(Duration::from_millis(1500))).0, Some(IGNORED));
        assert_eq!(after(4, None), (None, Picked { judged: 320, wrong: 80 }));
        let later = Duration::from_secs(5);
        assert_eq!(after(16, Some(later)), (None, Picked { judged: 320, wrong: 320 }), "wrong, and no lie");
        assert_eq!(after(16, Some(SOON)), (None, Picked { judged: 320, wrong: 0 }));
    }

    #[test]
    fn touches_of_pages_with_the_highest_level_and_no_credit_left_are_seen() {
        let mut trust = Trust::default();
        let start = Instant::now();
        let hit = |age: u8| Age { credit: 0, ..Age::from_byte(touched(age)) }.byte();
        let table = Table(RefCell::new(vec![Some((0..4).fold(0, |age, _| hit(age))); 16]));
        let verdict = (0..20).find_map(|round| {
            let at = start + SOON * round;
            trust.picked(By::Agent, &run(0, 16), &table, at);
            let hits: Vec<_> = table.0.borrow().iter().map(|age| age.map(hit)).collect();
            *table.0.borrow_mut() = hits;
            trust.judge(&table, at + SOON)
        });
        assert_eq!(verdict, Some(IGNORED));
    }

    #[test]
    fn a_page_with_an_unknown_outcome_does_not_count_and_the_hosts_picks_are_no_lies() {
        let (mut trust, start) = (Trust::default(), Instant::now());
        let table = Table(RefCell::new(vec![Some(0); 600]));
        trust.picked(By::Agent, &run(0, 16), &table, start);
        assert_eq!(trust.judge(&table, start + SOON), None);
        assert_eq!(trust.figures(), (Picked::default(), Picked::default()), "still there, and not touched");
        for at in 0..40 {
            trust.picked(By::Host, &run(at * 15, 15), &table, start);
        }
        *table.0.borrow_mut() = vec![Some(touched(0)); 600];
        assert_eq!(trust.judge(&table, start + SOON), None);
        assert_eq!(trust.figures().1, Picked { judged: 600, wrong: 600 });
    }

    #[test]
    fn a_sample_weighs_as_much_as_the_pages_that_it_stands_for() {
        let (mut trust, start) = (Trust::default(), Instant::now());
        let table = Table(RefCell::new(vec![Some(0); 6464]));
        trust.picked(By::Host, &run(0, 6400), &table, start);
        trust.picked(By::Host, &run(6400, 64), &table, start);
        *table.0.borrow_mut() = vec![None; 6464];
        (6400..6464).for_each(|page| trust.restored((0, PageIdx(page)), start + SOON / 2));
        assert_eq!(trust.judge(&table, start + SOON), None);
        assert_eq!(trust.figures().1, Picked { judged: 6464, wrong: 64 });
    }

    #[test]
    fn samples_are_spread_and_bounded() {
        let (mut trust, start) = (Trust::default(), Instant::now());
        let table = Table(RefCell::new(vec![Some(0); 1 << 16]));
        let runs: Vec<_> = (0..8).flat_map(|part| run(part << 13, 1 << 13)).collect();
        trust.picked(By::Agent, &runs, &table, start);
        let regions: Vec<u64> = trust.waiting.iter().map(|sample| sample.place.1.0 >> 13).collect();
        assert_eq!(regions, (0..OF_A_PICK).map(|at| at / 8).collect::<Vec<_>>());
        for round in 1..200 {
            trust.picked(By::Agent, &run(round * 64, 64), &table, start);
        }
        assert!(trust.waiting.len() <= SAMPLES && trust.back.len() == trust.waiting.len());
    }
}
