//! Promises of every classifier for any samples, and the paper's claims for its own classifier (Demeter §3.2.1).

use ballast_ranges::{Fitted, Roots, SAMPLE, UNIT, rank};
use ballast_testkit::published::{Classifier, Published};
use proptest::prelude::*;

const TIB: u64 = 1 << 40;
/// A heap, and 64 TiB of mappings.
const ROOTS: [(u64, u64); 2] = [(1 << 29, 5 << 29), (16 * TIB, 80 * TIB)];

fn roots(ranges: &[(u64, u64)]) -> Roots {
    Roots::new(ranges).expect("roots")
}

fn both(ranges: &[(u64, u64)]) -> [Box<dyn Classifier>; 2] {
    [Box::new(Published::new(roots(ranges), 1)), Box::new(Fitted::new(roots(ranges)))]
}

fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ *state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

fn tile(classifier: &dyn Classifier, roots: &[(u64, u64)]) -> bool {
    let mut at = 0;
    let ranges = classifier.ranges();
    let is_tiled = roots.iter().all(|&(start, end)| {
        let mut next = start;
        while next < end {
            let Some(range) = ranges.get(at).filter(|range| range.start == next && range.start < range.end) else {
                return false;
            };
            (next, at) = (range.end, at + 1);
        }
        next == end
    });
    is_tiled && at == ranges.len() && ranges.iter().all(|range| range.bytes().is_multiple_of(UNIT))
}

fn any_sample() -> impl Strategy<Value = (u64, u32)> {
    let address = prop_oneof![
        4 => (0u64..40).prop_map(|unit| (1 << 29) + unit * UNIT),
        4 => (0u64..20, 0u64..4).prop_map(|(unit, at)| (16 + at) * TIB + unit * UNIT + 7),
        1 => any::<u64>(),
        1 => Just(80 * TIB),
    ];
    let count = prop_oneof![6 => 0u32..100, 1 => any::<u32>(), 1 => Just(u32::MAX)];
    (address, count)
}

proptest! {
    #[test]
    fn ranges_tile_the_roots_and_nothing_panics(
        epochs in proptest::collection::vec(proptest::collection::vec(any_sample(), 0..60), 1..16),
    ) {
        for mut classifier in both(&ROOTS) {
            for epoch in &epochs {
                epoch.iter().for_each(|(address, count)| classifier.record(*address, *count));
                classifier.end_epoch();
                prop_assert!(tile(classifier.as_ref(), &ROOTS), "{}", classifier.name());
                prop_assert_eq!(rank(classifier.ranges()).len(), classifier.ranges().len());
            }
        }
    }

    #[test]
    fn no_sample_is_lost_but_by_halving(
        epochs in proptest::collection::vec(proptest::collection::vec((0u64..1280, 0u32..100), 0..50), 1..12),
    ) {
        for mut classifier in both(&ROOTS) {
            // The exact count, and how much of it the rounding of all epochs may have taken.
            let (mut expected, mut lost) = (0.0, 0.0);
            for epoch in &epochs {
                for (unit, count) in epoch {
                    classifier.record((1 << 29) + unit * UNIT % (4 << 29), *count);
                    expected += f64::from(*count);
                }
                classifier.end_epoch();
                let counted = classifier.ranges().iter().map(|range| range.count as f64).sum::<f64>() / SAMPLE as f64;
                prop_assert!(counted <= expected + 1e-6 && counted >= expected - lost - 1e-6, "{counted} {expected}");
                // Every count is rounded down once: of a range by half a sample, of a unit by a 32nd.
                lost = lost / 2.0 + if classifier.name() == "published" { 0.5 * 4096.0 } else { 1280.0 / 32.0 };
                expected /= 2.0;
            }
        }
    }

    #[test]
    fn equal_samples_make_equal_ranges(seed: u64) {
        for (mut one, mut other) in both(&ROOTS).into_iter().zip(both(&ROOTS)) {
            let mut state = seed;
            for _ in 0..10 {
                for _ in 0..300 {
                    let address = 16 * TIB + random(&mut state) % (1 << 30);
                    one.record(address, 1);
                    other.record(address, 1);
                }
                one.end_epoch();
                other.end_epoch();
                prop_assert_eq!(one.ranges(), other.ranges());
            }
        }
    }
}

#[test]
fn as_published_2_mib_in_64_tib_are_found_by_some_25_splits_in_13_s_with_fewer_than_50_ranges() {
    const SPOT: u64 = 16 * TIB + 45 * TIB + 3 * UNIT;
    let mut published = Published::new(roots(&[ROOTS[1]]), 4);
    let mut epochs = 0;
    let found = |classifier: &dyn Classifier| {
        let hottest = rank(classifier.ranges())[0];
        hottest.start == SPOT && hottest.bytes() == UNIT
    };
    while !found(&published) {
        published.record(SPOT + 99, 1000);
        published.end_epoch();
        epochs += 1;
        assert!(epochs <= 26, "{:?}", rank(published.ranges())[0]);
    }
    assert_eq!((published.splits, epochs), (25, 25));
    assert!(published.ranges().len() <= 26, "{}", published.ranges().len());
    // The fitted classifier needs one epoch: it waits for no split.
    let mut fitted = Fitted::new(roots(&[ROOTS[1]]));
    fitted.record(SPOT + 99, 1000, 1);
    fitted.end_epoch();
    assert!(found(&fitted) && fitted.ranges().len() == 3, "{:?}", fitted.ranges());
}

/// Records samples for some epochs: nine of ten are in `spots` of 32 MiB that lie evenly in 16 GiB. Returns the
/// percentage of the hot memory that is in the hottest ranges, as many as have the size of all spots.
fn found_pct(classifier: &mut dyn Classifier, spots: u64, epochs: u32) -> f64 {
    const MEMORY: u64 = 16 << 30;
    const SPOT: u64 = 32 << 20;
    let (base, mut state) = (48 * TIB, 7);
    let spot = |index: u64| base + index * (MEMORY / spots) + 6 * UNIT;
    for _ in 0..epochs {
        for _ in 0..10_000 {
            let (is_hot, at, offset) = (!random(&mut state).is_multiple_of(10), random(&mut state), random(&mut state));
            let address = if is_hot { spot(at % spots) + offset % SPOT } else { base + at % MEMORY };
            classifier.record(address, 1);
        }
        classifier.end_epoch();
    }
    let (mut room, mut hot) = (spots * SPOT, 0);
    for range in rank(classifier.ranges()) {
        let taken = range.bytes().min(room);
        let common =
            |index: u64| (range.start + taken).min(spot(index) + SPOT).saturating_sub(range.start.max(spot(index)));
        hot += (0..spots).map(common).sum::<u64>();
        room -= taken;
    }
    hot as f64 / (spots * SPOT) as f64 * 100.0
}

#[test]
fn hot_spots_are_found_however_many_there_are() {
    for spots in [1, 16, 64, 256] {
        let found = found_pct(&mut Fitted::new(roots(&ROOTS)), spots, 4);
        assert!(found > 98.0, "{spots} spots: {found} %");
    }
}

#[test]
fn evenly_spread_heat_stays_in_few_ranges() {
    let (mut fitted, mut state) = (Fitted::new(roots(&ROOTS)), 1);
    for epoch in 0..20 {
        (0..10_000).for_each(|_| fitted.record(40 * TIB + random(&mut state) % (16 << 30), 1, 1));
        fitted.end_epoch();
        assert!(fitted.ranges().len() < 60, "epoch {epoch}: {} ranges", fitted.ranges().len());
    }
}

#[test]
fn more_memory_than_can_be_counted_unit_by_unit_does_not_look_scattered() {
    let (mut fitted, mut state) = (Fitted::new(roots(&ROOTS)), 1);
    for _ in 0..3 {
        (0..400_000).for_each(|_| fitted.record(16 * TIB + random(&mut state) % (64 * TIB), 1, 1));
        (0..4_000).for_each(|_| fitted.record(50 * TIB + random(&mut state) % (512 << 20), 1, 1));
        fitted.end_epoch();
    }
    let hottest = rank(fitted.ranges())[0];
    assert!(fitted.ranges().len() < 400, "{}", fitted.ranges().len());
    assert!((50 * TIB..50 * TIB + (512 << 20)).contains(&hottest.start) && hottest.bytes() > 64 << 20, "{hottest:?}");
}

#[test]
fn heat_that_moves_is_followed_within_two_epochs() {
    let (mut fitted, mut state) = (Fitted::new(roots(&ROOTS)), 3);
    for epoch in 0..20u64 {
        let hot = 40 * TIB + epoch / 5 * (1 << 30);
        (0..5_000).for_each(|_| fitted.record(hot + random(&mut state) % (256 << 20), 1, 1));
        fitted.end_epoch();
        let hottest = rank(fitted.ranges())[0];
        assert!(epoch % 5 == 0 || (hot..hot + (256 << 20)).contains(&hottest.start), "{epoch}: {hottest:?}");
    }
}
