//! The tracker, driven as its worker does, on a made-up clock, by scripted sources.

use super::*;
use crate::record::Recording;
use crate::scripted::Scripted;
use crate::source::Cost;
use crate::{AccessSource, Pages};
use ballast_base::{PAGES_PER_UNIT, PageIdx, PageRange};
use proptest::collection::vec;
use proptest::prelude::*;

/// One region, all of it in memory.
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

/// Run source and tracker as the tracking worker does, on a made-up clock, until `until`.
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
fn after_three_cycles_hot_units_are_young_cold_ones_oldest_and_bloat_is_known_page_by_page() {
    let guest = Guest(64);
    let mut source = Scripted::default();
    // 8 units evenly hot, 8 hot in 5 pages each, the rest cold.
    (0..8).for_each(|index| source.touch(unit(index), PageMap::ALL));
    (8..16).for_each(|index| source.touch(unit(index), PageMap::first(5)));
    let mut tracker = Tracker::new(Settings::default(), 1);
    drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(20));
    assert!(tracker.cycles().0 >= 4, "{:?}", tracker.cycles());
    for index in 0..64 {
        assert_eq!(tracker.generation(unit(index)), Some(if index < 16 { 0 } else { 3 }), "unit {index}");
    }
    for index in 0..16 {
        let candidates = tracker.candidates(unit(index));
        assert_eq!(candidates, (index >= 8).then(|| PageMap::ALL.without(PageMap::first(5))), "unit {index}");
    }
    let hot: Vec<_> = tracker.hot_pages().collect();
    let pages = |index| if index < 8 { PageMap::ALL } else { PageMap::first(5) };
    assert_eq!(hot, (0..16).map(|index| (unit(index), pages(index))).collect::<Vec<_>>());
}

#[test]
fn pages_are_watched_about_as_long_as_units_are_and_no_longer_than_until_the_next_cycle() {
    let guest = Guest(8);
    let mut source = Scripted::default();
    (0..8).for_each(|index| source.touch(unit(index), PageMap::first(9)));
    let mut tracker = Tracker::new(Settings::default(), 1);
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
fn where_memory_is_placed_samples_that_tell_blocks_apart_make_full_scans_needless() {
    let hot = PageMap::first(64);
    for is_placed in [true, false] {
        let mut source = Scripted::default();
        (0..16).for_each(|index| source.touch(unit(index), hot));
        let mut tracker = Tracker::new(Settings { is_placed, ..Settings::default() }, 1);
        drive(&mut tracker, &mut source, &Guest(32), &mut Duration::ZERO.clone(), Duration::from_secs(30));
        let units = tracker.units();
        let scanned = (0..16).filter(|index| matches!(units.inside(unit(*index)), Some(Inside::Scanned(_)))).count();
        assert_eq!(scanned, if is_placed { 0 } else { 16 });
        for index in 0..16 {
            let warmth = tracker.warmth(unit(index)).expect("in memory");
            assert!(warmth.has_cold && warmth.levels[0] == (1.0, hot), "{is_placed} {index} {warmth:?}");
        }
    }
}

#[test]
fn where_memory_is_placed_a_fine_window_gets_longer_while_nothing_is_touched_and_shorter_while_much_is() {
    let settings = Settings { is_placed: true, ..Settings::default() };
    let mut tracker = Tracker::new(settings, 1);
    let mut now = Duration::ZERO;
    // Returns the last of this number of fine windows of a guest that touches all of its pages once in this time.
    let mut window = |every: Duration, cycles: usize| {
        let mut windows = Vec::new();
        while windows.len() < cycles {
            match tracker.next(now, &Guest(16)) {
                Step::Rest(pause) => now += pause,
                Step::Watch { phase, watch, window } => {
                    now += window;
                    let part = (window.as_secs_f64() / every.as_secs_f64()).min(1.0);
                    let coarse = watch.coarse.iter().map(|unit| (*unit, Seen::Coarse { touched: true }));
                    let fine = watch.fine.iter().map(|fine| {
                        let touched: Vec<u64> = fine.pages.iter().collect();
                        let mut map = PageMap::NONE;
                        touched.iter().take((touched.len() as f64 * part) as usize).for_each(|page| map.set(*page));
                        (fine.unit, Seen::Fine { watched: fine.pages, touched: map })
                    });
                    let units = coarse.chain(fine).collect();
                    tracker.absorb(now, phase, &CycleReport { units, ..CycleReport::default() });
                    if phase == Phase::Fine {
                        windows.push(window);
                    }
                }
            }
        }
        windows.last().copied().expect("a cycle")
    };
    let whole = settings.period.mul_f64(settings.fine_share);
    assert_eq!(window(Duration::from_millis(1), 1), settings.subpages.every, "it begins short");
    assert_eq!(window(Duration::from_secs(600), 20), whole, "hardly anything is touched");
    assert_eq!(window(Duration::from_millis(1), 20), settings.subpages.every, "all is touched at once");
    let between = window(Duration::from_secs(4), 20);
    assert!(settings.subpages.every < between && between < whole, "{between:?}");
}

#[test]
fn a_tracker_without_fine_cycles_knows_units_only() {
    let mut source = Scripted::default();
    source.touch(unit(0), PageMap::first(5));
    let mut tracker = Tracker::new(Settings { fine_share: 0.0, ..Settings::default() }, 1);
    drive(&mut tracker, &mut source, &Guest(4), &mut Duration::ZERO.clone(), Duration::from_secs(20));
    assert!(tracker.cycles().0 >= 4 && tracker.cycles().1 == 0, "{:?}", tracker.cycles());
    assert_eq!(tracker.hot_pages().collect::<Vec<_>>(), [(unit(0), PageMap::ALL)]);
}

#[test]
fn pages_that_scans_missed_are_hot_where_each_scan_sees_others_and_cold_where_all_see_the_same() {
    let guest = Guest(4);
    let mut tracker = Tracker::new(Settings::default(), 1);
    let _ = tracker.next(Duration::ZERO, &guest);
    let fifth = |number: u64| PageMap::first((number + 1) * 102).without(PageMap::first(number * 102));
    let of = |index: u32, number: u64| if index < 2 { fifth(number) } else { fifth(0) };
    for number in 0..3 {
        let start = Duration::from_secs(number * 2);
        let units = (0..4).map(|index| (unit(index), Seen::Coarse { touched: true })).collect();
        tracker.begun = start;
        tracker.absorb(start + Duration::from_secs(1), Phase::Coarse, &CycleReport { units, ..CycleReport::default() });
        let seen = |index| Seen::Fine { watched: PageMap::ALL, touched: of(index, number) };
        let units = (0..4).map(|index| (unit(index), seen(index))).collect();
        tracker.begun = start + Duration::from_secs(1);
        tracker.absorb(
            start + Duration::from_millis(1500),
            Phase::Fine,
            &CycleReport { units, ..CycleReport::default() },
        );
    }
    let hot: Vec<_> = tracker.hot_pages().map(|(_, pages)| pages).collect();
    assert_eq!(hot, [PageMap::ALL, PageMap::ALL, fifth(0), fifth(0)]);
    let cold = PageMap::ALL.without(fifth(0));
    assert_eq!([0, 1, 2, 3].map(|index| tracker.candidates(unit(index))), [None, None, Some(cold), Some(cold)]);
    let touched = |index| tracker.touched_pages(unit(index), tracker.units().inside(unit(index)).expect("scanned"));
    let touched = [0, 1, 2, 3].map(touched);
    assert!(touched[..2].iter().all(|pages| *pages > 400), "{touched:?}");
    assert!(touched[2..].iter().all(|pages| *pages < 200), "{touched:?}");
}

#[test]
fn a_recording_replays_to_the_same_heat() {
    let guest = Guest(64);
    let mut source = Scripted::default();
    (0..8).for_each(|index| source.touch(unit(index), PageMap::first(u64::from(index) * 64)));
    source.touch(unit(20), PageMap::first(3));
    let mut tracker = Tracker::new(Settings::default(), 1);
    let mut now = Duration::ZERO;
    assert_eq!(Recording::decode(&tracker.cycles_after(now, 0, "scripted")).expect("empty").cycles().count(), 0);
    drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(20));
    source.touch(unit(3), PageMap::NONE);
    drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(29));
    let recording = Recording::decode(&tracker.cycles_after(now, 0, "scripted")).expect("whole");
    assert_eq!(recording.cycles().count() as u64, tracker.version());
    let replayed = recording.replay(Settings::default(), |_, _| ());
    assert_eq!(crate::heat(&replayed, now, 16), crate::heat(&tracker, now, 16));
    let late = Recording::decode(&tracker.cycles_after(now, tracker.version() - 2, "scripted")).expect("whole");
    assert_eq!(late.cycles().count(), 2);
}

#[test]
fn where_plans_take_the_rest_of_each_period_there_is_a_fine_cycle_between_two_coarse_ones() {
    let mut tracker = Tracker::new(Settings { is_placed: true, ..Settings::default() }, 1);
    let (mut now, mut phases) = (Duration::ZERO, Vec::new());
    while phases.len() < 20 {
        match tracker.next(now, &Guest(64)) {
            Step::Rest(pause) => now += pause,
            Step::Watch { phase, watch, window } => {
                let seen = |fine: &crate::source::FineWatch| {
                    (fine.unit, Seen::Fine { watched: fine.pages, touched: PageMap::first(1) })
                };
                let coarse = watch.coarse.iter().map(|unit| (*unit, Seen::Coarse { touched: true }));
                let units = coarse.chain(watch.fine.iter().map(seen)).collect();
                now += window;
                tracker.absorb(now, phase, &CycleReport { units, ..CycleReport::default() });
                // Memory is moved.
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
    let mut tracker = Tracker::new(Settings { longest_period: Duration::from_secs(600), ..Settings::default() }, 1);
    drive(&mut tracker, &mut source, &guest, &mut Duration::ZERO.clone(), Duration::from_secs(300));
    // 40000 touches of 5.6 us are 0.22 s: at 1.5 % that is one cycle in 15 s.
    assert!((Duration::from_secs(14)..Duration::from_secs(20)).contains(&tracker.period()), "{:?}", tracker.period());
    assert!(tracker.spent().guest <= 0.03, "{:?}", tracker.spent());
}

#[test]
fn a_guest_whose_survey_takes_long_is_tracked_within_the_budget_and_what_is_known_stays_fresh() {
    const SURVEY: Duration = Duration::from_secs(12);
    let (guest, settings) = (Guest(4), Settings::default());
    let mut tracker = Tracker::new(settings, 1);
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
        assert!(window <= settings.longest_period.mul_f64(settings.coarse_share), "all would be touched");
        tracker.planned(SURVEY);
        now += window;
        let cost = Cost { cpu: SURVEY, ..Cost::default() };
        tracker.absorb(now, Phase::Coarse, &CycleReport { cost, ..CycleReport::default() });
    }
    assert!(tracker.spent().cpu <= settings.budget.cpu, "{:?}", tracker.spent());
    assert!((Duration::from_secs(800)..Duration::from_secs(1000)).contains(&tracker.period()));
}

#[test]
fn a_cycle_that_failed_changes_nothing_and_tracking_continues() {
    let guest = Guest(4);
    let mut tracker = Tracker::new(Settings::default(), 1);
    let mut source = Scripted::default();
    source.touch(unit(0), PageMap::ALL);
    let mut now = Duration::ZERO;
    drive(&mut tracker, &mut source, &guest, &mut now, Duration::from_secs(10));
    let before = (0..4).map(|index| tracker.generation(unit(index))).collect::<Vec<_>>();
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
    assert_eq!((0..4).map(|index| tracker.generation(unit(index))).collect::<Vec<_>>(), before);
    assert!(matches!(tracker.next(now, &guest), Step::Rest(_) | Step::Watch { phase: Phase::Fine, .. }));
}

proptest! {
    #[test]
    fn any_history_leaves_known_units_with_consistent_entries_and_generations(
        history in vec((any::<bool>(), vec((0u32..20, 0u64..600, 0u64..600, any::<bool>()), 0..30)), 0..60),
    ) {
        let guest = Guest(16);
        let mut tracker = Tracker::new(Settings::default(), 5);
        let _ = tracker.next(Duration::ZERO, &guest);
        let mut touches = [0u32; 16];
        for (turn, (coarse, reports)) in history.into_iter().enumerate() {
            let mut units: Vec<(UnitId, Seen)> = reports.into_iter().map(|(index, watched, touched, is_coarse)| {
                let seen = match is_coarse {
                    true => Seen::Coarse { touched: touched % 2 == 0 },
                    false => Seen::Fine {
                        watched: PageMap::first(watched), touched: PageMap::first(touched),
                    },
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
            prop_assert!(tracker.generation(unit(index)).expect("known") < GENERATIONS);
            if let Some(candidates) = tracker.candidates(unit(index)) {
                let Some(Inside::Scanned(scanned)) = tracker.units().inside(unit(index)) else { panic!("scanned") };
                prop_assert!(candidates.and(scanned.touched_within(RECENT)).is_empty());
            }
        }
        for index in 16..20 {
            prop_assert!(tracker.units().entry(unit(index)).is_none());
        }
    }
}
