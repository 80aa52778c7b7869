//! A report: runs of pages, with their content and their heat.
//!
//! Before: `look` says how hot each page is, `memory` what it holds. After: a bounded number of runs, the cheapest to
//! lose first within each level: free pages, then those that are least likely to be accessed soon.
//! Units: pages. Promise: no page is in two runs. A reserve of free memory is never reported, so that the guest's next
//! allocations find pages that the host has.
//!
//! Nothing in the guest shows whether the kernel's own memory (slab, stacks, text) is used: looks do not see accesses
//! to it. Most of it is not used, so it counts as cold, with a chance of access of one in six. A page of it counts as
//! warm for some time after it was restored. Page tables, and memory that the kernel took at boot except for its code
//! and data, are not reported: they are used at any time.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ballast_messages::run::{COLD, HOTTEST};
use ballast_messages::{Kind, Run};

use crate::look::Heat;
use crate::{memory, vital};

/// Most runs of a report: 256 KiB on the way to the host.
pub const MOST_RUNS: usize = 16 << 10;
/// Most free pages that are not reported (Blowfish, section 4.6, leaves 100 MB).
const FREE_MOST: u64 = 100 << 8;
/// Free memory in shorter runs than this is soon allocated again.
const FREE_RUN: u32 = 16;
/// Time for which restored memory of the kernel counts as warm.
const BACK: Duration = Duration::from_secs(600);
const BACK_MOST: usize = 64 << 10;

/// Heat of a free page, and of memory of the kernel that was restored.
const COLDEST: Heat = Heat { level: COLD, rank: 0 };
const RESTORED: Heat = Heat { level: HOTTEST / 2, rank: 0 };

/// Pages that the guest touched while they were far.
#[derive(Debug, Default)]
pub struct Back(HashMap<u64, Instant>);

impl Back {
    pub fn add(&mut self, run: &Run, now: Instant) {
        if self.0.len() + run.count as usize > BACK_MOST {
            self.0.retain(|_, at| now.saturating_duration_since(*at) < BACK);
        }
        for page in run.page..run.end() {
            if self.0.len() < BACK_MOST || self.0.contains_key(&page) {
                self.0.insert(page, now);
            }
        }
    }

    pub fn is_since(&self, page: u64, time: Instant) -> bool {
        !self.0.is_empty() && self.0.get(&page).is_some_and(|at| *at > time)
    }

    /// Returns whether the page counts as warm because it was restored, if nothing else is known of it.
    fn is_warm(&self, page: u64, now: Instant) -> bool {
        !self.0.is_empty() && self.0.get(&page).is_some_and(|at| now.saturating_duration_since(*at) < BACK)
    }
}

#[derive(Debug, Default)]
pub struct Sorting<'a> {
    runs: Vec<(u8, Run)>,
    head: Option<Kind>,
    image: &'a [(u64, u64)],
}

impl<'a> Sorting<'a> {
    /// An empty report of a guest whose kernel has its code and data in these pages.
    pub fn new(image: &'a [(u64, u64)]) -> Self {
        Self { image, ..Self::default() }
    }

    /// Adds a page with these flags and this heat; `None`: it is unknown. Pages come in ascending order.
    pub fn page(&mut self, page: u64, flags: u64, heat: Option<Heat>, back: &Back, now: Instant) {
        let class = memory::class(flags, self.head);
        self.head = class;
        let Some(kind) = class.filter(|_| !memory::is_in_use(page, flags, self.image)) else { return };
        let Heat { level, rank } = match (kind, heat) {
            (Kind::Free, _) => COLDEST,
            (Kind::Other, _) if back.is_warm(page, now) => RESTORED,
            (Kind::Other, _) => Heat::UNKNOWN,
            (_, None) => return,
            (_, Some(heat)) => heat,
        };
        match self.runs.last_mut() {
            Some((same, last)) if *same == rank && last.end() == page && (last.kind, last.level) == (kind, level) => {
                last.count += 1;
            }
            _ => self.runs.push((rank, Run { page, count: 1, kind, level })),
        }
    }

    /// Returns at most `most` runs to report, for a guest with this much memory, `free` of it free.
    pub fn finish(self, total: u64, free: u64, most: usize) -> Vec<Run> {
        let reserve = vital::least_free(total).min(FREE_MOST);
        let (of_nobody, runs): (Vec<_>, Vec<_>) = self.runs.into_iter().partition(|(_, run)| run.kind == Kind::Free);
        let mut of_nobody: Vec<Run> = of_nobody.into_iter().map(|(_, run)| run).collect();
        of_nobody.retain(|run| run.count >= FREE_RUN);
        of_nobody.sort_unstable_by_key(|run| std::cmp::Reverse(run.count));
        let mut left = free.saturating_sub(reserve);
        for run in &mut of_nobody {
            run.count = u64::from(run.count).min(left) as u32;
            left -= u64::from(run.count);
        }
        of_nobody.retain(|run| run.count > 0);
        of_nobody.truncate(most / 2);
        let most = most - of_nobody.len();
        // Runs of unknown heat get the room that the others leave.
        let (mut unknown, mut runs): (Vec<_>, Vec<_>) = runs.into_iter().partition(|(_, run)| run.kind == Kind::Other);
        longest(&mut runs, most);
        longest(&mut unknown, most - runs.len());
        runs.extend(unknown);
        runs.sort_unstable_by_key(|(rank, run)| (run.level, *rank, run.kind, run.page));
        of_nobody.extend(runs.into_iter().map(|(_, run)| run));
        of_nobody
    }
}

/// If there are too many runs, the shortest are left out.
fn longest(runs: &mut Vec<(u8, Run)>, most: usize) {
    let mut least = 1;
    while runs.len() > most {
        least *= 2;
        runs.retain(|(_, run)| run.count >= least);
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
    const SLAB: u64 = 1 << 7;

    #[test]
    fn what_is_cheapest_to_lose_comes_first() {
        let (back, now) = (Back::default(), Instant::now());
        let mut report = Sorting::default();
        let (young, old) = (Heat { level: COLD, rank: 1 }, COLDEST);
        let locked = LRU | 1 << 18;
        for (page, flags, heat) in
            [(0, LRU | ANON, young), (1, LRU | ANON, young), (2, LRU, young), (3, locked, old), (4, LRU | ANON, old)]
        {
            report.page(page, flags, Some(heat), &back, now);
        }
        for page in 100..200 {
            report.page(page, BUDDY, None, &back, now);
        }
        let told = report.finish(1 << 18, (1 << 13) + 64, 99);
        let told: Vec<_> = told.iter().map(|run| (run.page, run.count, run.kind, run.level)).collect();
        let anon = |page, count| (page, count, Kind::Anon, 0);
        assert_eq!(told, [(100, 64, Kind::Free, 0), anon(4, 1), (2, 1, Kind::FileClean, 0), anon(0, 2)]);
    }

    #[test]
    fn memory_of_the_kernel_is_cold_but_for_a_while_after_it_was_restored() {
        let (mut back, start) = (Back::default(), Instant::now());
        let levels = |back: &Back, after: Duration| {
            let (mut report, warm) = (Sorting::default(), Heat { level: COLD, rank: Heat::UNKNOWN.rank + 1 });
            report.page(0, SLAB, None, back, start + after);
            report.page(1, LRU | ANON, Some(warm), back, start + after);
            report.page(2, LRU, Some(COLDEST), back, start + after);
            let told = report.finish(1 << 18, 0, 99);
            told.iter().map(|run| run.page).collect::<Vec<_>>()
        };
        assert_eq!(levels(&back, Duration::ZERO), [2, 0, 1]);
        back.add(&Run::of(0, 1), start);
        assert_eq!([Duration::ZERO, BACK / 2, BACK].map(|after| levels(&back, after)[2]), [0, 0, 1]);
    }

    #[test]
    fn page_tables_and_what_the_kernel_took_at_boot_are_not_told_but_for_its_code_and_data() {
        let image = [(2, 4)];
        let mut report = Sorting::new(&image);
        for page in 0..6 {
            report.page(page, memory::RESERVED, None, &Back::default(), Instant::now());
        }
        report.page(6, memory::PAGE_TABLE, None, &Back::default(), Instant::now());
        let told = report.finish(1 << 18, 0, 99);
        assert_eq!(told, [Run { page: 2, count: 2, kind: Kind::Other, level: COLD }]);
    }

    #[test]
    fn memory_of_the_kernel_takes_no_room_from_what_is_known() {
        let mut report = Sorting::default();
        for page in 0..64 {
            let flags = if page % 4 == 0 { LRU } else { SLAB };
            report.page(page, flags, Some(COLDEST), &Back::default(), Instant::now());
        }
        let told = report.finish(1 << 18, 0, 16);
        assert!(told.len() == 16 && told.iter().all(|run| run.kind == Kind::FileClean), "{told:?}");
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
                let heat = Heat { level: (page % 16) as u8, rank: (page % 3) as u8 };
                report.page(page as u64, *flags, Some(heat), &Back::default(), Instant::now());
            }
            let mut told = report.finish(1 << 16, free, 64);
            prop_assert!(told.len() <= 64);
            told.sort_unstable();
            prop_assert!(told.array_windows().all(|[one, next]: &[Run; 2]| one.end() <= next.page));
            let of_nobody: u64 = told.iter().filter(|run| run.kind == Kind::Free).map(|run| u64::from(run.count)).sum();
            prop_assert!(of_nobody + vital::least_free(0) <= free || of_nobody == 0);
        }
    }
}
