//! A clock hand over the pages of one VM, with a second chance that grows for pages that keep being rescued.
//!
//! Being zapped and left alone for the quarantine time is the test of coldness; this file only decides who is tested
//! next. A page that fails the test (it was touched) is passed over for 1, 3, 7, then 15 rounds of the hand, so that
//! the hot set of a VM under pressure pays for a minor fault ever more seldom, and a page that cools down is found
//! again within 15 rounds.
//!
//! Units: ages are rounds of the hand, not seconds.

use ballast_base::PageIdx;

use crate::{ColdRun, ColdSource, Pages, Pick};

/// The age byte of a page: rounds to be passed over yet, and how often in a row it was rescued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// Rounds of the hand that still pass the page over.
    pub credit: u8,
    /// Rescues in a row, 0 to [`Age::MAX_LEVEL`].
    pub level: u8,
}

impl Age {
    /// Rescues beyond this many earn no more credit: 2^4 - 1 = 15 rounds fill the four bits of the credit.
    pub const MAX_LEVEL: u8 = 4;

    /// Unpack.
    pub const fn from_byte(byte: u8) -> Self {
        Self { credit: byte & 0xF, level: byte >> 4 }
    }

    /// Pack.
    pub const fn byte(self) -> u8 {
        self.level << 4 | self.credit
    }
}

/// The age of a page that was touched in quarantine.
pub fn touched(age: u8) -> u8 {
    let level = (Age::from_byte(age).level + 1).min(Age::MAX_LEVEL);
    Age { credit: (1 << level) - 1, level }.byte()
}

/// The hand: where the next look begins.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    region: u32,
    page: PageIdx,
}

impl ColdSource for Clock {
    fn pick(&mut self, pages: &dyn Pages, want: u64, pick: Pick, out: &mut Vec<ColdRun>) {
        let mut left = want;
        // One round at most, so that a VM whose every page is hot costs a bounded look per call.
        let mut wraps = 0;
        let start = *self;
        while left > 0 && pages.regions() > 0 {
            if self.region >= pages.regions() {
                *self = Self::default();
                wraps += 1;
            }
            if wraps > 1 || (wraps == 1 && (self.region, self.page) >= (start.region, start.page)) {
                return;
            }
            let home = wraps == 1 && self.region == start.region;
            let stop = if home { start.page.0 } else { pages.len(self.region) };
            match pages.next_present(self.region, self.page) {
                Some((first, end)) if first.0 < stop => {
                    let run = (first, PageIdx(end.0.min(stop)));
                    self.page = self.sweep(pages, run, pick, &mut left, out);
                }
                _ if home => {
                    self.page = start.page;
                }
                _ => *self = Self { region: self.region + 1, page: PageIdx(0) },
            }
        }
    }
}

impl Clock {
    /// Move the hand through the run `first..end` and stop when enough is found. Answers where it stopped.
    fn sweep(
        self,
        pages: &dyn Pages,
        (first, end): (PageIdx, PageIdx),
        pick: Pick,
        left: &mut u64,
        out: &mut Vec<ColdRun>,
    ) -> PageIdx {
        let granule = pages.granule(self.region);
        for page in (first.0.next_multiple_of(granule)..end.0).step_by(granule as usize).map(PageIdx) {
            if *left == 0 {
                return page;
            }
            let Some(byte) = pages.age(self.region, page) else { continue };
            let age = Age::from_byte(byte);
            if age.credit > 0 && pick == Pick::Cold {
                pages.set_age(self.region, page, Age { credit: age.credit - 1, ..age }.byte());
                continue;
            }
            *left = left.saturating_sub(granule);
            match out.last_mut() {
                Some(run) if run.region == self.region && run.first.0 + run.count == page.0 => run.count += granule,
                _ => out.push(ColdRun { region: self.region, first: page, count: granule }),
            }
        }
        end
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::cell::RefCell;

    /// `None` is a page that is absent or not Resident.
    struct Table(Vec<RefCell<Vec<Option<u8>>>>);

    impl Pages for Table {
        fn regions(&self) -> u32 {
            self.0.len() as u32
        }
        fn len(&self, region: u32) -> u64 {
            self.0[region as usize].borrow().len() as u64
        }
        fn next_present(&self, region: u32, from: PageIdx) -> Option<(PageIdx, PageIdx)> {
            let pages = self.0[region as usize].borrow();
            let first = (from.0 as usize..pages.len()).find(|page| pages[*page].is_some())?;
            let end = (first..pages.len()).find(|page| pages[*page].is_none()).unwrap_or(pages.len());
            Some((PageIdx(first as u64), PageIdx(end as u64)))
        }
        fn age(&self, region: u32, page: PageIdx) -> Option<u8> {
            self.0[region as usize].borrow()[page.0 as usize]
        }
        fn set_age(&self, region: u32, page: PageIdx, age: u8) {
            self.0[region as usize].borrow_mut()[page.0 as usize] = Some(age);
        }
    }

    fn table(regions: &[&[Option<u8>]]) -> Table {
        Table(regions.iter().map(|pages| RefCell::new(pages.to_vec())).collect())
    }

    fn pick(clock: &mut Clock, table: &Table, want: u64) -> Vec<ColdRun> {
        let mut out = Vec::new();
        clock.pick(table, want, Pick::Cold, &mut out);
        out
    }

    #[test]
    fn the_hand_goes_round_all_regions_and_skips_holes() {
        let table = table(&[&[Some(0), None, Some(0), Some(0)], &[], &[Some(0)]]);
        let mut clock = Clock::default();
        let run = |region, first, count| ColdRun { region, first: PageIdx(first), count };
        assert_eq!(pick(&mut clock, &table, 2), [run(0, 0, 1), run(0, 2, 1)]);
        assert_eq!(pick(&mut clock, &table, 9), [run(0, 3, 1), run(2, 0, 1), run(0, 0, 1), run(0, 2, 1)]);
    }

    #[test]
    fn a_page_that_keeps_being_rescued_is_passed_over_for_1_3_7_then_15_rounds() {
        let mut byte = 0;
        for rounds in [1, 3, 7, 15, 15] {
            byte = touched(byte);
            assert_eq!(Age::from_byte(byte).credit, rounds);
            let table = table(&[&[Some(byte)]]);
            let mut clock = Clock::default();
            let passed_over = (0..100).take_while(|_| pick(&mut clock, &table, 1).is_empty()).count();
            assert_eq!(passed_over, rounds as usize);
        }
    }

    #[test]
    fn a_pick_of_any_pages_takes_rescued_ones_too() {
        let table = table(&[&[Some(touched(0)), Some(0), Some(touched(touched(0)))]]);
        let mut out = Vec::new();
        Clock::default().pick(&table, 9, Pick::Any, &mut out);
        assert_eq!(out, [ColdRun { region: 0, first: PageIdx(0), count: 3 }]);
    }

    proptest! {
        #[test]
        fn a_pick_proposes_only_takeable_pages_once_and_at_most_what_was_wanted(
            regions in proptest::collection::vec(proptest::collection::vec(proptest::option::of(any::<u8>()), 0..40), 0..4),
            wants in proptest::collection::vec(0u64..50, 1..10),
        ) {
            let table = Table(regions.into_iter().map(RefCell::new).collect());
            let mut clock = Clock::default();
            for want in wants {
                let picked = pick(&mut clock, &table, want);
                let pages: Vec<_> = picked.iter()
                    .flat_map(|run| (0..run.count).map(move |i| (run.region, run.first.0 + i))).collect();
                prop_assert!(pages.len() as u64 <= want);
                for (region, page) in &pages {
                    prop_assert!(table.age(*region, PageIdx(*page)).is_some());
                }
                let mut unique = pages.clone();
                unique.sort_unstable();
                unique.dedup();
                prop_assert_eq!(unique.len(), pages.len());
            }
        }

        #[test]
        fn every_takeable_page_is_proposed_within_sixteen_rounds(ages in proptest::collection::vec(any::<u8>(), 1..40)) {
            let table = Table(vec![RefCell::new(ages.iter().map(|age| Some(*age)).collect())]);
            let mut clock = Clock::default();
            let mut seen = vec![false; ages.len()];
            for _ in 0..16 * ages.len() {
                for run in pick(&mut clock, &table, ages.len() as u64) {
                    (run.first.0..run.first.0 + run.count).for_each(|page| seen[page as usize] = true);
                }
            }
            prop_assert!(seen.iter().all(|seen| *seen));
        }
    }
}
