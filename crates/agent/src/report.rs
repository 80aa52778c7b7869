//! A report: runs of pages, what is in them and how hot they are.
//!
//! Before: `damon` says how hot ranges are, `memory` what each page holds. After: a bounded number of runs, the
//! cheapest to lose first within each level.
//! Units: pages. Promise: no page is in two runs; of free memory a reserve is never told, so that the guest's next
//! allocations find pages that the host has; pages that were restored recently are not cold.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ballast_guest::run::{COLD, HOTTEST};
use ballast_guest::{Kind, Run};

use crate::damon::{MOST_ACCESSES, Range};
use crate::memory;

/// Most runs of a report: 256 KiB on the way to the host.
pub const MOST_RUNS: usize = 16 << 10;
/// Aggregations of DAMON's without an access after which memory is cold: 2 s.
const COLD_AGE: u32 = 10;
/// Free pages that are not reported: 1/N of memory, within these (Blowfish, section 4.6, leaves 100 MB).
const FREE_PART: u64 = 32;
const FREE_LEAST: u64 = 16 << 8;
const FREE_MOST: u64 = 100 << 8;
/// Free memory in shorter runs than this is soon allocated again.
const FREE_RUN: u32 = 16;
/// How long a page that was restored counts as hot, and how many are remembered.
const BACK: Duration = Duration::from_secs(30);
const BACK_MOST: usize = 64 << 10;

/// Returns the heat of a range.
pub fn level(range: &Range) -> u8 {
    match (range.accesses, range.age) {
        (0, COLD_AGE..) => COLD,
        (0, _) => 1,
        (accesses, _) => 2 + (accesses.min(MOST_ACCESSES) * u32::from(HOTTEST - 2) / MOST_ACCESSES) as u8,
    }
}

/// Pages that the guest touched while they were far.
#[derive(Debug, Default)]
pub struct Back(HashMap<u64, Instant>);

impl Back {
    /// Records that these were restored now.
    pub fn add(&mut self, run: &Run, now: Instant) {
        if self.0.len() + run.count as usize > BACK_MOST {
            self.0.retain(|_, at| now.saturating_duration_since(*at) < BACK);
        }
        let room = BACK_MOST.saturating_sub(self.0.len());
        self.0.extend((run.page..run.end()).take(room).map(|page| (page, now)));
    }

    fn has(&self, page: u64, now: Instant) -> bool {
        !self.0.is_empty() && self.0.get(&page).is_some_and(|at| now.saturating_duration_since(*at) < BACK)
    }
}

/// A report in the making.
#[derive(Debug, Default)]
pub struct Sorting {
    runs: Vec<Run>,
    head: Option<Kind>,
}

impl Sorting {
    /// Adds a page with these flags in a range of this level; `None`: its heat is unknown. Pages come in ascending
    /// order.
    pub fn page(&mut self, page: u64, flags: u64, level: Option<u8>, back: &Back, now: Instant) {
        let class = memory::class(flags, self.head);
        self.head = class;
        let Some(kind) = class else { return };
        let level = match (kind, level) {
            (Kind::Free, _) => COLD,
            (_, None) => return,
            (_, Some(level)) if back.has(page, now) => level.max(HOTTEST / 2),
            (_, Some(level)) => level,
        };
        ballast_guest::run::push(&mut self.runs, Run { page, count: 1, kind, level });
    }

    /// Returns at most `most` runs to report, for a guest with this much memory, `free` of it free.
    pub fn finish(self, total: u64, free: u64, most: usize) -> Vec<Run> {
        let reserve = (total / FREE_PART).clamp(FREE_LEAST, FREE_MOST);
        let (mut of_nobody, mut runs): (Vec<_>, Vec<_>) = self.runs.into_iter().partition(|run| run.kind == Kind::Free);
        of_nobody.retain(|run| run.count >= FREE_RUN);
        of_nobody.sort_unstable_by_key(|run| std::cmp::Reverse(run.count));
        let mut left = free.saturating_sub(reserve);
        for run in &mut of_nobody {
            run.count = u64::from(run.count).min(left) as u32;
            left -= u64::from(run.count);
        }
        of_nobody.retain(|run| run.count > 0);
        of_nobody.truncate(most / 2);
        // If there are too many runs, the shortest are left out.
        let most = most - of_nobody.len();
        let mut least = 1;
        while runs.len() > most {
            least *= 2;
            runs.retain(|run| run.count >= least);
        }
        runs.sort_unstable_by_key(|run| (run.level, run.kind, run.page));
        of_nobody.extend(runs);
        of_nobody
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const LRU: u64 = 1 << 5;
    const ANON: u64 = 1 << 12;
    const BUDDY: u64 = 1 << 10;

    fn range(accesses: u32, age: u32) -> Range {
        Range { page: 0, end: 1, accesses, age }
    }

    #[test]
    fn memory_is_cold_after_seconds_without_an_access_and_hotter_the_more_often_it_was_seen_accessed() {
        let levels = [(0, 99), (0, 3), (1, 99), (10, 0), (MOST_ACCESSES, 0), (u32::MAX, 0)];
        assert_eq!(levels.map(|(accesses, age)| level(&range(accesses, age))), [0, 1, 2, 8, 15, 15]);
    }

    #[test]
    fn what_is_cheapest_to_lose_comes_first_and_a_page_that_was_restored_is_not_cold() {
        let (mut back, now) = (Back::default(), Instant::now());
        back.add(&Run::of(1, 1), now);
        let mut report = Sorting::default();
        for (page, flags) in [(0, LRU | ANON), (1, LRU | ANON), (2, LRU), (3, 0)] {
            report.page(page, flags, Some(COLD), &back, now);
        }
        for page in 100..200 {
            report.page(page, BUDDY, None, &back, now);
        }
        let told = report.finish(1 << 18, (1 << 13) + 64, 99);
        let told: Vec<_> = told.iter().map(|run| (run.page, run.count, run.kind, run.level)).collect();
        let expected =
            [(100, 64, Kind::Free, 0), (2, 1, Kind::FileClean, 0), (0, 1, Kind::Anon, 0), (1, 1, Kind::Anon, 7)];
        assert_eq!(told, expected);
    }

    #[test]
    fn with_little_free_memory_none_of_it_is_told() {
        let mut report = Sorting::default();
        (0..4096).for_each(|page| report.page(page, BUDDY, None, &Back::default(), Instant::now()));
        assert_eq!(report.finish(1 << 18, 4096, 99), []);
    }

    #[test]
    fn pages_that_were_restored_are_remembered_up_to_a_bound() {
        let (mut back, now) = (Back::default(), Instant::now());
        (0..100).for_each(|number| back.add(&Run::of(number << 20, 1 << 12), now));
        assert!(back.0.len() <= BACK_MOST);
    }

    proptest! {
        #[test]
        fn a_report_is_bounded_and_no_page_is_in_it_twice(
            flags in vec(prop_oneof![Just(LRU), Just(LRU | ANON), Just(BUDDY), Just(0), any::<u64>()], 0..2000),
            free in 0u64..100_000,
        ) {
            let mut report = Sorting::default();
            for (page, flags) in flags.iter().enumerate() {
                report.page(page as u64, *flags, Some((page % 16) as u8), &Back::default(), Instant::now());
            }
            let mut told = report.finish(1 << 16, free, 64);
            prop_assert!(told.len() <= 64);
            told.sort_unstable();
            prop_assert!(told.array_windows().all(|[one, next]: &[Run; 2]| one.end() <= next.page));
            let of_nobody: u64 = told.iter().filter(|run| run.kind == Kind::Free).map(|run| u64::from(run.count)).sum();
            prop_assert!(of_nobody + FREE_LEAST <= free || of_nobody == 0);
        }
    }
}
