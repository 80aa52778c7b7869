//! Promises of a plan for any ranking and any placement.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use ballast_ranges::relocate::{Limits, Placement, Plan, Tier, plan};
use ballast_ranges::{Fitted, Range, Roots, SAMPLE, UNIT, rank};
use proptest::prelude::*;

/// A page table: a page that is not in it is not present.
#[derive(Debug)]
struct Pages(BTreeMap<u64, Tier>);

impl Placement for Pages {
    fn program(&self, _: &Range) -> (usize, u64) {
        (0, u64::MAX)
    }

    fn count(&self, range: &Range) -> (u64, u64) {
        let tiers = || self.0.range(range.start..range.end).map(|(_, tier)| *tier);
        (tiers().count() as u64, tiers().filter(|tier| *tier == Tier::Fast).count() as u64)
    }

    fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>) {
        let mut there = self.0.range(range.start..range.end).filter(|(_, tier)| **tier == wanted);
        let _ = there.try_for_each(|(address, _)| each(*address));
    }
}

impl Pages {
    fn fast(&self) -> u64 {
        self.0.values().filter(|tier| **tier == Tier::Fast).count() as u64
    }

    /// Makes the moves as an agent does. Returns the most pages that the fast tier held.
    fn apply(&mut self, plan: &Plan, turn: usize) -> u64 {
        let mut most = self.fast();
        let part = |list: &[u64], at: usize| list[at.min(list.len())..(at + turn).min(list.len())].to_vec();
        for at in (0..plan.promote.len().max(plan.demote.len())).step_by(turn) {
            let (demote, promote) = (part(&plan.demote, at), part(&plan.promote, at));
            for (list, from, to) in [(demote, Tier::Fast, Tier::Slow), (promote, Tier::Slow, Tier::Fast)] {
                for address in &list {
                    assert_eq!(self.0.insert(*address, to), Some(from), "{address:#x}");
                }
            }
            most = most.max(self.fast());
        }
        most
    }
}

fn ranges() -> impl Strategy<Value = Vec<Range>> {
    proptest::collection::vec((1u64..6, 0u64..100), 1..12).prop_map(|list| {
        let mut start = UNIT;
        let range = |(units, count)| {
            let end = start + units * UNIT;
            let range = Range { start, end, count, variance: count, born: 0 };
            start = end;
            range
        };
        list.into_iter().map(range).collect()
    })
}

fn pages() -> impl Strategy<Value = Pages> {
    let page = prop_oneof![Just(None), Just(Some(Tier::Fast)), Just(Some(Tier::Slow)), Just(Some(Tier::Slow))];
    proptest::collection::vec(page, 72)
        .prop_map(|list| Pages((1..).zip(list).filter_map(|(unit, tier)| Some((unit * UNIT, tier?))).collect()))
}

/// Heat in the fast tier, as far as is known.
fn heat(pages: &Pages, ranges: &[Range]) -> f64 {
    let of = |address: &u64| ranges.iter().find(|range| (range.start..range.end).contains(address));
    let rate = |range: &Range| range.count as f64 / range.bytes() as f64;
    pages.0.iter().filter(|(_, tier)| **tier == Tier::Fast).filter_map(|(address, _)| of(address).map(rate)).sum()
}

proptest! {
    #[test]
    fn a_plan_moves_what_it_may_and_never_more_than_fits(
        ranges in ranges(), mut pages in pages(), free in 0u64..10, reserve in 1u64..6, most in 0u64..20,
    ) {
        let limits = Limits { fast: pages.fast() + free, free, reserve, most };
        let ranked = rank(&ranges);
        let plan = plan(&ranked, &pages, limits);
        let (promoted, demoted) = (plan.promote.len() as u64, plan.demote.len() as u64);
        prop_assert!(promoted <= most && demoted <= most + reserve, "{plan:?}");
        prop_assert!(promoted <= demoted + free.saturating_sub(reserve), "{plan:?}");
        prop_assert!(demoted <= promoted + reserve.saturating_sub(free), "{plan:?}");
        let all: BTreeSet<u64> = plan.promote.iter().chain(&plan.demote).copied().collect();
        prop_assert_eq!(all.len() as u64, promoted + demoted, "a page moves once");
        let before = heat(&pages, &ranges);
        let most_fast = pages.apply(&plan, reserve as usize);
        prop_assert!(most_fast <= limits.fast);
        if free >= reserve {
            prop_assert!(limits.fast - pages.fast() >= reserve, "the reserve is free again");
            prop_assert!(heat(&pages, &ranges) >= before - 1e-9);
        }
    }

    #[test]
    fn with_a_full_fast_tier_both_lists_are_as_long(ranges in ranges(), pages in pages()) {
        let limits = Limits { fast: pages.fast() + 4, free: 4, reserve: 4, most: u64::MAX };
        let plan = plan(&rank(&ranges), &pages, limits);
        prop_assert_eq!(plan.promote.len(), plan.demote.len());
    }

    #[test]
    fn plans_come_to_an_end(ranges in ranges(), mut pages in pages()) {
        let limits = Limits { fast: pages.fast() + 2, free: 2, reserve: 2, most: 7 };
        let ranked = rank(&ranges);
        for _ in 0..40 {
            pages.apply(&plan(&ranked, &pages, limits), 2);
        }
        prop_assert_eq!(plan(&ranked, &pages, limits), Plan::default());
    }
}

fn one_page_each(counts: &[u64], fast: &[usize]) -> (Vec<Range>, Pages) {
    let range = |(at, count): (usize, &u64)| {
        let start = (at as u64 + 1) * UNIT;
        Range { start, end: start + UNIT, count: *count, variance: *count, born: 0 }
    };
    let ranges: Vec<Range> = counts.iter().enumerate().map(range).collect();
    let tier = |at: usize| if fast.contains(&at) { Tier::Fast } else { Tier::Slow };
    let pages = ranges.iter().enumerate().map(|(at, range)| (range.start, tier(at))).collect();
    (rank(&ranges), Pages(pages))
}

fn lists(plan: &Plan) -> (&[u64], &[u64]) {
    (&plan.promote, &plan.demote)
}

#[test]
fn the_hottest_goes_first_and_changes_places_with_the_coldest() {
    let (ranked, pages) = one_page_each(&[10, 900, 20, 700, 30], &[0, 2, 4]);
    let limits = Limits { fast: 3, free: 0, reserve: 0, most: 9 };
    let ours = plan(&ranked, &pages, limits);
    assert_eq!(lists(&ours), (&[2 * UNIT, 4 * UNIT][..], &[UNIT, 3 * UNIT][..]));
    let gained: Vec<f64> = ours.gains.iter().map(|gain| gain * (SAMPLE * UNIT) as f64).collect();
    assert!((gained[0] - 890.0).abs() < 0.1 && (gained[1] - 680.0).abs() < 0.1, "{gained:?}");
    assert_eq!(
        ours.demote.iter().copied().zip(ours.promote.iter().copied()).max_by_key(|pair| Reverse(*pair)),
        Some((UNIT, 2 * UNIT))
    );
    // If one page may move, the hottest one moves.
    let one = plan(&ranked, &pages, Limits { most: 1, ..limits });
    assert_eq!(lists(&one), (&[2 * UNIT][..], &[UNIT][..]));
}

#[test]
fn a_difference_that_may_be_noise_moves_nothing() {
    let (ranked, pages) = one_page_each(&[100, 120], &[0]);
    let limits = Limits { fast: 1, free: 0, reserve: 0, most: 9 };
    assert_eq!(plan(&ranked, &pages, limits), Plan::default());
}

#[test]
fn a_range_that_does_not_fit_is_taken_in_part() {
    let hot = Range { start: UNIT, end: 5 * UNIT, count: 1000, variance: 1000, born: 0 };
    let cold = Range { start: 5 * UNIT, end: 9 * UNIT, count: 1, variance: 1, born: 0 };
    let pages = Pages((1..9).map(|at| (at * UNIT, if at >= 6 { Tier::Fast } else { Tier::Slow })).collect());
    let limits = Limits { fast: 3, free: 0, reserve: 0, most: 9 };
    let ranked = rank(&[hot, cold]);
    let ours = plan(&ranked, &pages, limits);
    assert_eq!(lists(&ours), (&[UNIT, 2 * UNIT, 3 * UNIT][..], &[6 * UNIT, 7 * UNIT, 8 * UNIT][..]));
}

/// Two programs: one page may be promoted at even addresses, all at odd ones.
struct TwoPrograms(Pages);

impl Placement for TwoPrograms {
    fn program(&self, range: &Range) -> (usize, u64) {
        let is_odd = (range.start / UNIT) % 2 == 1;
        (usize::from(is_odd), if is_odd { u64::MAX } else { 1 })
    }

    fn count(&self, range: &Range) -> (u64, u64) {
        self.0.count(range)
    }

    fn visit_in(&self, range: &Range, wanted: Tier, each: &mut dyn FnMut(u64) -> ControlFlow<()>) {
        self.0.visit_in(range, wanted, each);
    }
}

#[test]
fn a_program_that_may_have_few_promoted_leaves_the_others_theirs() {
    let (ranked, pages) = one_page_each(&[0, 900, 0, 800, 500, 700], &[0, 2]);
    let limits = Limits { fast: 2, free: 0, reserve: 0, most: 9 };
    let plan = plan(&ranked, &TwoPrograms(pages), limits);
    // The program at even addresses may have one of its three hot pages promoted.
    assert_eq!(lists(&plan), (&[2 * UNIT, 5 * UNIT][..], &[3 * UNIT, UNIT][..]));
}

#[test]
fn a_small_difference_moves_nothing_however_sure_it_is() {
    let million = 1_000_000 * SAMPLE;
    let (ranked, pages) = one_page_each(&[million, million * 12 / 10], &[0]);
    let limits = Limits { fast: 1, free: 0, reserve: 0, most: 9 };
    assert_eq!(plan(&ranked, &pages, limits), Plan::default());
    let (ranked, pages) = one_page_each(&[million, million * 13 / 10], &[0]);
    assert_eq!(plan(&ranked, &pages, limits).promote, [2 * UNIT]);
}

#[test]
fn one_observation_that_was_counted_for_each_unit_of_a_large_range_moves_nothing() {
    let mut classifier = Fitted::new(Roots::new(&[(UNIT, 201 * UNIT)]).expect("roots"));
    let pages = Pages((1..201).map(|at| (at * UNIT, if at < 100 { Tier::Fast } else { Tier::Slow })).collect());
    let limits = Limits { fast: 99, free: 0, reserve: 0, most: 50 };
    let mut seen_accessed = |count: u32| {
        (110..150).for_each(|unit| classifier.record(unit * UNIT, count, 40));
        classifier.end_epoch();
        plan(&rank(classifier.ranges()), &pages, limits).promote
    };
    // It was accessed once, others never: that may be chance, though there are 40 samples.
    assert_eq!(seen_accessed(1), []);
    assert_eq!(seen_accessed(9), (110..150).map(|unit| unit * UNIT).collect::<Vec<_>>());
}

#[test]
fn free_fast_memory_is_for_what_is_touched_and_nothing_is_demoted_for_want_of_accesses() {
    // The last was touched once, which may be chance.
    let counts = [0, 900, 0, 700, 0, SAMPLE];
    let (ranked, pages) = one_page_each(&counts, &[0]);
    let limits = Limits { fast: 6, free: 5, reserve: 1, most: 9 };
    let ours = plan(&ranked, &pages, limits);
    assert_eq!(lists(&ours), (&[2 * UNIT, 4 * UNIT][..], &[][..]));
}

#[test]
fn pages_that_change_places_know_each_other_and_those_that_move_alone_have_no_partner() {
    let plan = |promote: usize, demote: usize, pairs: usize| Plan {
        promote: (0..promote as u64).collect(),
        demote: (0..demote as u64).collect(),
        gains: vec![1.0; pairs],
    };
    let partners = |plan: &Plan, to, count| (0..count).map(|at| plan.partner(to, at)).collect::<Vec<_>>();
    let spare = plan(3, 2, 2);
    assert_eq!(partners(&spare, Tier::Fast, 3), [None, Some(0), Some(1)]);
    assert_eq!(partners(&spare, Tier::Slow, 2), [Some(1), Some(2)]);
    let owed = plan(1, 3, 1);
    assert_eq!(partners(&owed, Tier::Fast, 1), [Some(2)]);
    assert_eq!(partners(&owed, Tier::Slow, 3), [None, None, Some(0)]);
}
