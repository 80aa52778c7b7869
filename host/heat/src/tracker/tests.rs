//! The tracker, driven as by its worker, with a made-up clock and scripted sources.

use super::*;
use crate::generations::OLDEST;
use crate::scripted::Scripted;
use crate::source::Cost;
use crate::{AccessSource, Pages};
use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};
use proptest::collection::vec;
use proptest::prelude::*;

struct Guest(u64);

impl Pages for Guest {
    fn regions(&self) -> u32 {
        1
    }
    fn len(&self, _: u32) -> u64 {
        self.0 * PAGES_PER_UNIT
    }
    fn next_present(&self, _: u32, pages: PageRange) -> Option<PageRange> {
        Some(pages.before(PageIdx(self.len(0)))).filter(|pages| !pages.is_empty())
    }
    fn age(&self, _: u32, _: PageIdx) -> Option<u8> {
        Some(0)
    }
    fn set_age(&self, _: u32, _: PageIdx, _: u8) {}
}

fn unit(unit: u32) -> UnitId {
    UnitId { region: 0, unit }
}

/// Runs source and tracker as the tracking worker does, with a made-up clock, until `until`.
fn drive(tracker: &mut Tracker, source: &mut Scripted, guest: &Guest, now: &mut Duration, until: Duration) {
    while *now < until {
        match tracker.next(*now, guest) {
            Step::Rest(pause) => {
                assert!(!pause.is_zero(), "a rest that never ends");
                *now += pause;
            }
            Step::Watch { phase, watch, window } => {
                source.start(&watch).expect("start");
                *now += window;
                let report = source.end().expect("end");
                tracker.absorb(*now, phase, &report);
            }
        }
    }
}

#[test]
fn after_three_cycles_hot_units_are_young_cold_ones_oldest_and_bloat_is_known() {
    let guest = Guest(64);
    let mut source = Scripted::default();
    // 8 units evenly hot, 8 hot in 5 pages each, the rest cold.
    (0..8).for_each(|index| source.touch(unit(index), PageMap::ALL));
    (8..16).for_each(|index| source.touch(unit(index), PageMap::first(5)));
    let mut tracker = Tracker::new(Settings::default());
    drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(20));
    assert!(tracker.cycles().0 >= 4, "{:?}", tracker.cycles());
    let units = tracker.units();
    for index in 0..64 {
        assert_eq!(units.generation(unit(index)), Some(if index < 16 { 0 } else { 3 }), "unit {index}");
    }
    for index in 0..16 {
        let hot = if index < 8 { PageMap::ALL } else { PageMap::first(5) };
        let scanned = units.scanned(unit(index)).expect("scanned");
        assert_eq!(scanned.hot(), hot, "unit {index}");
        assert_eq!(scanned.bloat(512), (index >= 8).then(|| PageMap::ALL.without(hot)), "unit {index}");
    }
}

#[test]
fn pages_are_watched_about_as_long_as_units_and_not_beyond_the_next_cycle() {
    let guest = Guest(8);
    let mut source = Scripted::default();
    (0..8).for_each(|index| source.touch(unit(index), PageMap::first(9)));
    let mut tracker = Tracker::new(Settings::default());
    let (mut now, mut begun, mut coarse, mut scans) = (Duration::ZERO, Duration::ZERO, Duration::ZERO, 0);
    while scans < 5 {
        match tracker.next(now, &guest) {
            Step::Rest(pause) => now += pause,
            Step::Watch { phase, watch, window } => {
                if phase == Phase::Coarse {
                    (coarse, begun) = (window, now);
                } else {
                    assert!(window >= coarse / 2 && now + window <= begun + coarse * 2, "{window:?}");
                    scans += 1;
                }
                source.start(&watch).expect("start");
                now += window;
                tracker.absorb(now, phase, &source.end().expect("end"));
            }
        }
    }
}

#[test]
fn a_tracker_without_fine_cycles_knows_units_only() {
    let mut source = Scripted::default();
    source.touch(unit(0), PageMap::first(5));
    let mut tracker = Tracker::new(Settings { fine_share: 0.0, ..Settings::default() });
    drive(&mut tracker, &mut source, &Guest(4), &mut Duration::ZERO.clone(), Duration::from_secs(20));
    assert!(tracker.cycles().0 >= 4 && tracker.cycles().1 == 0, "{:?}", tracker.cycles());
    assert_eq!(tracker.units().all_scanned().count(), 0);
}

#[test]
fn missed_pages_are_cold_only_if_all_scans_see_the_same_pages_touched() {
    let guest = Guest(4);
    let mut tracker = Tracker::new(Settings::default());
    let _ = tracker.next(Duration::ZERO, &guest);
    let fifth = |number: u64| PageMap::first((number + 1) * 102).without(PageMap::first(number * 102));
    let of = |index: u32, number: u64| if index < 2 { fifth(number) } else { fifth(0) };
    for number in 0..3 {
        let units = (0..4).map(|index| (unit(index), Seen::Fine { touched: of(index, number) })).collect();
        let report = CycleReport { units, ..CycleReport::default() };
        tracker.absorb(Duration::from_secs(number), Phase::Fine, &report);
    }
    let cold = PageMap::ALL.without(fifth(0));
    let found = [0, 1, 2, 3].map(|index| tracker.units().scanned(unit(index)).and_then(|scanned| scanned.cold(512)));
    assert_eq!(found, [None, None, Some(cold), Some(cold)]);
}

#[test]
fn where_plans_take_the_rest_of_each_period_a_fine_cycle_runs_between_coarse_ones() {
    let mut tracker = Tracker::new(Settings { is_placed: true, ..Settings::default() });
    let (mut now, mut phases) = (Duration::ZERO, Vec::new());
    while phases.len() < 20 {
        match tracker.next(now, &Guest(64)) {
            Step::Rest(pause) => now += pause,
            Step::Watch { phase, watch, window } => {
                let seen = |unit: &UnitId| (*unit, Seen::Fine { touched: PageMap::first(1) });
                let coarse = watch.coarse.iter().map(|unit| (*unit, Seen::Coarse { touched: true }));
                let units = coarse.chain(watch.fine.iter().map(seen)).collect();
                now += window;
                tracker.absorb(now, phase, &CycleReport { units, ..CycleReport::default() });
                // Pages are moved between nodes.
                now += if phase == Phase::Coarse { Duration::from_secs(3) } else { Duration::ZERO };
                phases.push(phase);
            }
        }
    }
    assert_eq!(phases.iter().filter(|phase| **phase == Phase::Fine).count(), 10, "{phases:?}");
}

#[test]
fn an_expensive_source_runs_less_often() {
    let guest = Guest(40_000);
    let mut source = Scripted::default();
    (0..40_000).for_each(|index| source.touch(unit(index), PageMap::ALL));
    let mut tracker = Tracker::new(Settings::default());
    drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(300));
    // 40,000 touches of 5.6 us are 0.22 s: at 1.5 % that is one cycle in 15 s.
    assert!((Duration::from_secs(14)..Duration::from_secs(20)).contains(&tracker.period()), "{:?}", tracker.period());
    assert!(tracker.spent().guest <= 0.03, "{:?}", tracker.spent());
}

#[test]
fn a_guest_with_a_long_survey_is_tracked_within_the_budget_and_stays_fresh() {
    const SURVEY: Duration = Duration::from_secs(12);
    let (guest, settings) = (Guest(4), Settings::default());
    let mut tracker = Tracker::new(settings);
    let mut now = Duration::ZERO;
    for cycle in 0..30 {
        let window = loop {
            match tracker.next(now, &guest) {
                Step::Rest(pause) => now += pause,
                Step::Watch { phase: Phase::Coarse, window, .. } => break window,
                Step::Watch { phase, .. } => tracker.absorb(now, phase, &CycleReport::default()),
            }
        };
        assert!(cycle == 0 || tracker.is_fresh(now), "{now:?}");
        assert!(window <= LONGEST_WINDOW, "all would be touched");
        now += window;
        let cost = Cost { cpu: SURVEY, ..Cost::default() };
        tracker.absorb(now, Phase::Coarse, &CycleReport { cost, ..CycleReport::default() });
    }
    assert!(tracker.spent().cpu <= settings.budget, "{:?}", tracker.spent());
    assert!((Duration::from_secs(800)..Duration::from_secs(1000)).contains(&tracker.period()));
}

#[test]
fn a_cycle_that_failed_changes_nothing_and_tracking_continues() {
    let guest = Guest(4);
    let mut tracker = Tracker::new(Settings::default());
    let mut source = Scripted::default();
    source.touch(unit(0), PageMap::ALL);
    let mut now = Duration::ZERO;
    drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(10));
    let before = (0..4).map(|index| tracker.units().generation(unit(index))).collect::<Vec<_>>();
    let Step::Watch { phase: Phase::Coarse, .. } = (loop {
        match tracker.next(now, &guest) {
            Step::Rest(pause) => now += pause,
            step @ Step::Watch { phase: Phase::Coarse, .. } => break step,
            Step::Watch { phase, .. } => tracker.absorb(now, phase, &CycleReport::default()),
        }
    }) else {
        unreachable!()
    };
    tracker.absorb(now, Phase::Coarse, &CycleReport::default());
    assert_eq!((0..4).map(|index| tracker.units().generation(unit(index))).collect::<Vec<_>>(), before);
    assert!(matches!(tracker.next(now, &guest), Step::Rest(_) | Step::Watch { phase: Phase::Fine, .. }));
}

proptest! {
    #[test]
    fn any_history_leaves_known_units_with_consistent_entries_and_generations(
        history in vec((any::<bool>(), vec((0u32..20, 0u64..600, any::<bool>()), 0..30)), 0..60),
    ) {
        let guest = Guest(16);
        let mut tracker = Tracker::new(Settings::default());
        let _ = tracker.next(Duration::ZERO, &guest);
        let mut touches = [0u32; 16];
        for (turn, (coarse, reports)) in history.into_iter().enumerate() {
            let mut units: Vec<(UnitId, Seen)> = reports.into_iter().map(|(index, touched, is_coarse)| {
                let seen = match is_coarse {
                    true => Seen::Coarse { touched: touched % 2 == 0 },
                    false => Seen::Fine { touched: PageMap::first(touched) },
                };
                (unit(index), seen)
            }).collect();
            units.sort_unstable_by_key(|(unit, _)| *unit);
            units.dedup_by_key(|(unit, _)| *unit);
            let phase = if coarse { Phase::Coarse } else { Phase::Fine };
            for (unit, seen) in &units {
                if coarse && unit.unit < 16 && seen.touched() {
                    touches[unit.unit as usize] += 1;
                }
            }
            let report = CycleReport { units, ..CycleReport::default() };
            tracker.absorb(Duration::from_secs(turn as u64 + 1), phase, &report);
        }
        for index in 0..16 {
            let entry = tracker.units().entry(unit(index)).expect("known");
            prop_assert!(entry.frequency() <= touches[index as usize].min(32));
            prop_assert!(tracker.units().generation(unit(index)).expect("known") <= OLDEST);
            if let Some(scanned) = tracker.units().scanned(unit(index)) {
                prop_assert!(scanned.cold(512).unwrap_or_default().and(scanned.hot()).is_empty());
            }
        }
        for index in 16..20 {
            prop_assert!(tracker.units().entry(unit(index)).is_none());
        }
    }
}
