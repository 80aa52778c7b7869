//! A guest's report, as runs of pages in the order of eviction.
//!
//! Before: a guest has reported the heat and the contents of its memory. After: the reclaim worker takes candidates
//! from here, each run once per report. Units: pages of regions.
//! Promise: a bounded number of runs; no page twice in a report, except that pages taken for the balloon later are
//! named again; proposed pages are in the file, Resident and unlocked, as with any other source.
//!
//! Within a level of heat the agent names free pages first, then the pages least likely to be accessed soon: clean page
//! cache, which the guest could read again, then dirty page cache, then programs' pages (Blowfish, section 4.4: *free
//! memory first*). A free page is copied out like any other: only the guest says that its bytes are not needed, and
//! that may change at any moment.

use std::collections::BTreeMap;

use ballast_base::{PageIdx, PageRange};
use ballast_heat::{ColdRun, Pages, Pick, is_candidate, push_run};
use ballast_messages::run::COLD;
use ballast_messages::{Kind, Run};

use super::places::Places;

/// Most runs of a report: twice as many as an agent sends.
pub(crate) const MOST_RUNS: usize = 32 << 10;
const MOST_QUERIES: u64 = 4096;
/// Most pages that one pick examines: 1 GiB, at some 10 ns each, in one slice of a thread that serves other VMs, too.
const MOST_EXAMINED: u64 = 1 << 18;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Hint {
    level: u8,
    order: usize,
    /// Memory of the guest's kernel: the agent cannot see accesses to it.
    is_unseen: bool,
    region: u32,
    pages: PageRange,
    /// The guest's node for whose balloon the agent took it after the report.
    held_of: Option<u32>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Cold pages, with free ones.
    pub cold: u64,
    /// Free pages among them.
    pub free: u64,
    /// Pages that are not this guest's, were named twice, or are in no proved piece.
    pub rejected: u64,
}

/// Runs of a report that were not picked yet.
#[derive(Debug, Default)]
pub(crate) struct Hints {
    /// The last element is the next to be picked.
    runs: Vec<Hint>,
    /// By node, pages that the agent named as taken since the report.
    named: BTreeMap<u32, u64>,
}

impl Hints {
    pub fn new(report: Vec<Run>, places: &Places) -> (Self, Tally) {
        let mut tally = Tally::default();
        let mut report: Vec<(Run, usize)> = report.into_iter().zip(0..).collect();
        report.sort_unstable();
        let (mut runs, mut end) = (Vec::with_capacity(report.len()), 0u64);
        for (run, order) in report {
            // Pages that were named before do not count again.
            let twice = end.saturating_sub(run.page).min(run.count.into());
            end = end.max(run.end());
            let fresh = Run { page: run.page + twice, count: run.count - twice as u32, ..run };
            let mut known = 0;
            for (region, pages) in places.parts(fresh) {
                known += pages.count();
                if runs.len() < MOST_RUNS {
                    let is_unseen = run.kind == Kind::Other;
                    runs.push(Hint { level: run.level, order, is_unseen, region, pages, held_of: None });
                }
            }
            tally.rejected += u64::from(run.count) - known;
            tally.cold += if run.level == COLD { known } else { 0 };
            tally.free += if run.kind == Kind::Free { known } else { 0 };
        }
        runs.sort_unstable_by(|one, other| other.cmp(one));
        (Self { runs, named: BTreeMap::new() }, tally)
    }

    /// Adds pages that the agent took since the report for the balloon of this node, which is to have `most` pages;
    /// they are picked first. Pages named beyond that number, or beyond the guest's size, are ignored, because each
    /// named page costs an examination. Returns whether any was added.
    pub fn hold(&mut self, (node, most): (u32, u64), taken: Vec<Run>, places: &Places) -> bool {
        let taken = taken.into_iter().map(|run| Run { kind: Kind::Free, level: COLD, ..run });
        let held = Self::new(taken.collect(), places).0.runs;
        let room = MOST_RUNS.saturating_sub(self.runs.len());
        let of_all = places.pages().saturating_sub(self.named.values().sum());
        let named = self.named.entry(node).or_default();
        let (mut left, before) = (most.saturating_sub(*named).min(of_all), self.runs.len());
        for hint in held.into_iter().take(room) {
            let pages = PageRange::of(hint.pages.start(), left).before(hint.pages.end());
            left -= pages.count();
            *named += pages.count();
            if !pages.is_empty() {
                self.runs.push(Hint { pages, held_of: Some(node), ..hint });
            }
        }
        self.runs.len() > before
    }

    /// Forgets the pages of this node's balloon: the guest is to get some of them back.
    pub fn forget_held(&mut self, node: u32) {
        self.runs.retain(|hint| hint.held_of != Some(node));
        self.named.remove(&node);
    }

    /// Proposes up to about `want` pages, the coldest first: only cold ones, or with [`Pick::Any`] warmer ones after
    /// them. The next call continues behind the examined pages, even if this one proposed none of them.
    pub fn pick(&mut self, pages: &dyn Pages, want: u64, pick: Pick) -> Proposed {
        let mut bounds = Bounds { left: want, examine: MOST_EXAMINED, queries: MOST_QUERIES };
        let mut proposed = Proposed::default();
        while !bounds.are_reached() {
            let Some(hint) = self.runs.pop_if(|hint| pick == Pick::Any || hint.level == COLD) else { break };
            let mut of_this = Vec::new();
            self.runs.extend(take(pages, hint, &mut bounds, &mut of_this));
            for run in of_this {
                let out = if hint.is_unseen { &mut proposed.unseen } else { &mut proposed.seen };
                push_run(out, run.region, run.pages);
                if hint.level == COLD && !hint.is_unseen {
                    proposed.claimed.push(run);
                }
            }
        }
        proposed
    }
}

#[derive(Debug, Default)]
pub(crate) struct Proposed {
    pub seen: Vec<ColdRun>,
    /// Pages of `seen` that the agent reported as cold.
    pub claimed: Vec<ColdRun>,
    pub unseen: Vec<ColdRun>,
}

/// What a pick may still do: propose, examine, query the file.
struct Bounds {
    left: u64,
    examine: u64,
    queries: u64,
}

impl Bounds {
    fn are_reached(&self) -> bool {
        self.left == 0 || self.examine == 0 || self.queries == 0
    }
}

/// Proposes pages of one run until a bound is reached. Returns the rest of the run.
fn take(pages: &dyn Pages, hint: Hint, bounds: &mut Bounds, out: &mut Vec<ColdRun>) -> Option<Hint> {
    if hint.region >= pages.regions() {
        return None;
    }
    let granule = pages.granule(hint.region);
    let stop = hint.pages.end().0.min(pages.len(hint.region));
    let mut at = hint.pages.start().0.next_multiple_of(granule);
    let rest = |page: u64| Some(Hint { pages: PageRange::new(PageIdx(page), PageIdx(stop)), ..hint });
    while at < stop {
        if bounds.are_reached() {
            return rest(at);
        }
        // Most pages that a guest keeps reporting are far: those need no query of the file.
        if pages.age(hint.region, PageIdx(at)).is_none() {
            bounds.examine = bounds.examine.saturating_sub(granule);
            at += granule;
            continue;
        }
        bounds.queries -= 1;
        let run = pages.next_present(hint.region, PageRange::new(PageIdx(at), PageIdx(stop)))?;
        let mut page = run.start().0.next_multiple_of(granule);
        while page < run.end().0 && page + granule <= stop {
            if bounds.are_reached() {
                return rest(page);
            }
            bounds.examine = bounds.examine.saturating_sub(granule);
            // Rounds of protection after a quarantine hit count more than the guest's report. If such a page must go
            // nevertheless, the host's own picks propose it.
            if is_candidate(pages, hint.region, PageIdx(page)) {
                bounds.left = bounds.left.saturating_sub(granule);
                push_run(out, hint.region, PageRange::of(PageIdx(page), granule));
            }
            page += granule;
        }
        // Present pages may come in smaller runs than the file has.
        at = run.end().0.max(at + 1).next_multiple_of(granule);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_base::guest::GuestRange;
    use ballast_heat::touched;
    use proptest::collection::vec;
    use proptest::prelude::*;
    use std::cell::RefCell;

    /// One region; `None`: the page is absent or not Resident.
    struct Table(RefCell<Vec<Option<u8>>>, u64);

    impl Pages for Table {
        fn regions(&self) -> u32 {
            1
        }
        fn len(&self, _: u32) -> u64 {
            self.0.borrow().len() as u64
        }
        fn granule(&self, _: u32) -> u64 {
            self.1
        }
        fn next_present(&self, _: u32, range: PageRange) -> Option<PageRange> {
            let pages = self.0.borrow();
            let until = pages.len().min(range.end().0 as usize);
            let first = (range.start().0 as usize..until).find(|page| pages[*page].is_some())?;
            let end = (first..until).find(|page| pages[*page].is_none()).unwrap_or(until);
            Some(PageRange::new(PageIdx(first as u64), PageIdx(end as u64)))
        }
        fn age(&self, _: u32, page: PageIdx) -> Option<u8> {
            self.0.borrow()[page.0 as usize]
        }
        fn set_age(&self, _: u32, page: PageIdx, age: u8) {
            self.0.borrow_mut()[page.0 as usize] = Some(age);
        }
    }

    const PAGES: u64 = 64;

    /// The guest sees the region from page 100 on.
    fn places() -> Places {
        let range = GuestRange { address: 100 << 12, offset: Bytes(0), len: Bytes(PAGES << 12) };
        let mut places = Places::new([(0, vec![range])].into_iter());
        places.prove(0);
        places
    }

    fn run(page: u64, count: u32, kind: Kind, level: u8) -> Run {
        Run { page, count, kind, level }
    }

    fn pick(hints: &mut Hints, table: &Table, want: u64, pick: Pick) -> Vec<(u64, u64)> {
        let Proposed { seen, unseen, .. } = hints.pick(table, want, pick);
        seen.iter().chain(&unseen).map(|run| (run.pages.start().0, run.pages.count())).collect()
    }

    #[test]
    fn the_agents_balloon_goes_first_until_the_guest_gets_it_back() {
        let (mut hints, _) = Hints::new(vec![run(100, 2, Kind::Free, COLD)], &places());
        let taken = |page| vec![run(page, 2, Kind::Anon, 9), run(page, 2, Kind::Anon, 9), run(1, 9, Kind::Free, COLD)];
        hints.hold((0, 8), taken(110), &places());
        hints.hold((1, 8), taken(120), &places());
        let table = Table(RefCell::new(vec![Some(0); PAGES as usize]), 1);
        assert_eq!(pick(&mut hints, &table, 1, Pick::Cold), [(20, 1)]);
        hints.forget_held(1);
        assert_eq!(pick(&mut hints, &table, 9, Pick::Cold), [(10, 2), (0, 2)], "each once, and none that is not its");
        for _ in 0..2 {
            hints.hold((0, 8), (0..MOST_RUNS as u64).map(|_| run(100, 1, Kind::Free, 0)).collect(), &places());
        }
        assert!(hints.runs.len() <= MOST_RUNS);
    }

    #[test]
    fn an_agent_that_keeps_naming_all_memory_adds_no_more_than_its_balloon() {
        let (mut hints, _) = Hints::new(Vec::new(), &places());
        let table = Table(RefCell::new(vec![Some(0); PAGES as usize]), 1);
        let all = || vec![run(100, 9, Kind::Free, COLD), run(110, 9, Kind::Free, COLD)];
        let named = |hints: &mut Hints, most: u64| {
            for _ in 0..100 {
                hints.hold((0, most), all(), &places());
            }
            pick(hints, &table, 99, Pick::Cold)
        };
        assert_eq!(named(&mut hints, 0), [], "it was asked for nothing");
        assert!(!hints.hold((0, 0), all(), &places()));
        let first = named(&mut hints, 3);
        assert_eq!(first.iter().map(|(_, pages)| pages).sum::<u64>(), 3, "{first:?}");
        assert_eq!(named(&mut hints, 3), [], "those were named");
        assert_eq!(named(&mut hints, 5).iter().map(|(_, pages)| pages).sum::<u64>(), 2, "it is to hold more");
        hints.forget_held(0);
        assert_eq!(named(&mut hints, 1).iter().map(|(_, pages)| pages).sum::<u64>(), 1, "it took others");
        let added = (0..1000).filter(|node| hints.hold((*node, u64::MAX), all(), &places())).count();
        assert_eq!(added, 4, "more nodes have no more than all of its memory, and these runs are 18 of 64 pages");
    }

    #[test]
    fn cold_pages_go_first_in_the_order_of_the_report_and_warm_ones_only_on_demand() {
        let report = vec![
            run(100, 4, Kind::Anon, 9),
            run(108, 4, Kind::Free, COLD),
            run(112, 4, Kind::FileClean, COLD),
            run(104, 4, Kind::Anon, COLD),
        ];
        let (mut hints, tally) = Hints::new(report, &places());
        assert_eq!(tally, Tally { cold: 12, free: 4, rejected: 0 });
        let table = Table(RefCell::new(vec![Some(0); PAGES as usize]), 1);
        assert_eq!(pick(&mut hints, &table, 6, Pick::Cold), [(8, 6)]);
        assert_eq!(pick(&mut hints, &table, 99, Pick::Cold), [(14, 2), (4, 4)]);
        assert_eq!(pick(&mut hints, &table, 99, Pick::Cold), []);
        assert_eq!(pick(&mut hints, &table, 99, Pick::Any), [(0, 4)]);
        assert_eq!(pick(&mut hints, &table, 99, Pick::Any), [], "each run once");
    }

    #[test]
    fn one_pick_examines_a_bounded_part_of_a_run_that_covers_all_memory() {
        let count = MOST_EXAMINED + 10;
        let range = GuestRange { address: 0, offset: Bytes(0), len: Bytes(count << 12) };
        let mut places = Places::new([(0, vec![range])].into_iter());
        places.prove(0);
        let (mut hints, _) = Hints::new(vec![run(0, count as u32, Kind::Anon, COLD)], &places);
        // Only the last page was not touched in quarantine.
        let mut ages = vec![Some(touched(0)); count as usize];
        ages[count as usize - 1] = Some(0);
        let table = Table(RefCell::new(ages), 1);
        assert_eq!(pick(&mut hints, &table, 9, Pick::Cold), []);
        assert_eq!(pick(&mut hints, &table, 9, Pick::Cold), [(count - 1, 1)]);
    }

    #[test]
    fn runs_that_are_far_already_hide_no_page_that_is_not() {
        let count = 2 * MOST_QUERIES + 2;
        let range = GuestRange { address: 0, offset: Bytes(0), len: Bytes(count << 12) };
        let mut places = Places::new([(0, vec![range])].into_iter());
        places.prove(0);
        // Every other page is a run.
        let report = (0..count / 2).map(|number| run(2 * number, 1, Kind::Anon, COLD)).collect();
        let (mut hints, _) = Hints::new(report, &places);
        let mut ages = vec![None; count as usize];
        ages[count as usize - 2] = Some(0);
        assert_eq!(pick(&mut hints, &Table(RefCell::new(ages), 1), 9, Pick::Cold), [(count - 2, 1)]);
    }

    #[test]
    fn a_granule_is_proposed_whole_or_not_at_all() {
        let (mut hints, _) = Hints::new(vec![run(101, 20, Kind::Anon, COLD)], &places());
        let table = Table(RefCell::new(vec![Some(0); PAGES as usize]), 8);
        assert_eq!(pick(&mut hints, &table, 99, Pick::Cold), [(8, 8)]);
    }

    proptest! {
        #[test]
        fn no_report_makes_a_page_proposed_twice_or_while_it_is_absent(
            runs in vec((prop_oneof![0u64..300, Just(1u64 << 39)], 1u32..200, 0u8..16), 0..40),
            there in vec(proptest::option::of(any::<u8>()), PAGES as usize), wants in vec(0u64..50, 1..5),
        ) {
            let kinds = [Kind::Free, Kind::FileClean, Kind::Anon];
            let report: Vec<Run> = runs.iter()
                .map(|(page, count, level)| run(*page, *count, kinds[usize::from(level % 3)], *level)).collect();
            let told: u64 = report.iter().map(|run| u64::from(run.count)).sum();
            let (mut hints, tally) = Hints::new(report, &places());
            let known: u64 = hints.runs.iter().map(|hint| hint.pages.count()).sum();
            prop_assert!(known <= PAGES && known + tally.rejected == told);
            let table = Table(RefCell::new(there), 1);
            let mut seen = vec![false; PAGES as usize];
            for want in wants {
                for (first, count) in pick(&mut hints, &table, want, Pick::Any) {
                    for page in first..first + count {
                        prop_assert!(table.0.borrow()[page as usize].is_some());
                        prop_assert!(!std::mem::replace(&mut seen[page as usize], true));
                    }
                }
            }
        }
    }
}
