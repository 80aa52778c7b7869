//! Placement: which memory of a VM belongs in fast memory, and the moves for it (HugeScope's HS-TMM, 3.6).
//!
//! Before: the tracker knows how warm units and their pages are ([`crate::Tracker::warmth`]), and the caller where they
//! are. After: the caller carries out the moves of [`plan`], splits a huge page of which it moves a part, and joins
//! others. Units: pages; values are shares of 1, relative to each other.
//! Promise: a pure function. Moves carried out in order keep fast memory within its limit, once it is; a huge page is
//! moved in part only if the page-size policy has it split.
//!
//! The value of a page is the share of recent cycles that saw its unit touched, times the share of recent scans that
//! saw the page touched. A huge page has the average value of its pages, and needs room for all of them. The most
//! valuable memory is fast, so a huge page of which a tenth is hot loses to the hot tenths of ten split ones.
//!
//! The page-size policy (HugeScope, 3.4): a huge page counts as hot as a whole if one page in it is hot. *Hot pressure*
//! is the hot memory, counted in this way, above the limit. If it is positive, units are split, the most skewed first,
//! because their cold pages stop counting as hot and little speed is lost. If it is negative, units are joined, the
//! least skewed first, up to one that would be split again at once.

use std::collections::HashSet;

use crate::source::{PageMap, UnitId};

/// Memory that is fast already counts as this much warmer, by a factor and by a value: two units that are nearly as
/// warm do not change places, nor do cold ones by stray accesses (1 of 32 pages, in 1 of 8 scans, is 0.004). A unit
/// with 1/50 hot pages exceeds the value.
const STAYS: f64 = 1.25;
const PAYS: f64 = 0.01;
/// Units are joined only while hot memory is below this part of the limit, so that they are not split again at once.
const ROOMY: (u64, u64) = (15, 16);
/// Most units joined by one plan: the kernel copies a unit for it, which takes milliseconds.
const MOST_JOINED: usize = 4;
/// Value of the cold pages of a unit that is to be joined: any touched page is worth more.
const JOINED: f64 = 1e-9;

/// How warm a unit is.
#[derive(Clone, Debug, PartialEq)]
pub struct Warmth {
    /// Share of the recent cycles that saw it touched.
    pub rate: f64,
    /// All of its pages, by the share of recent scans that saw them touched; one level if scans do not tell them apart.
    pub levels: Vec<(f64, PageMap)>,
    /// Some of its pages are known to be colder than the rest, not only by chance.
    pub has_cold: bool,
}

/// A unit, and the place of its pages.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Region and number.
    pub id: UnitId,
    /// Its pages that are in memory and may be moved.
    pub here: PageMap,
    /// Those of them that are in slow memory.
    pub slow: PageMap,
    /// It is one huge page.
    pub huge: bool,
    /// Its warmth.
    pub warmth: Warmth,
}

impl Unit {
    /// The average number of its pages that a scan sees touched. Stray accesses touch each page at some time.
    fn touched(&self) -> f64 {
        let seen = |(share, pages): &(f64, PageMap)| share * pages.and(self.here).count() as f64;
        self.warmth.levels.iter().map(seen).sum()
    }
}

/// Pages to move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Their unit.
    pub unit: UnitId,
    /// The pages. If they are a part of a huge page, it is split first.
    pub pages: PageMap,
    /// To slow memory; otherwise to fast memory.
    pub down: bool,
}

/// The moves and joins to carry out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// In this order: moves to slow memory, the coldest first; then moves to fast memory, the warmest first.
    pub moves: Vec<Move>,
    /// Units in base pages to map huge again. All of their pages are in fast memory.
    pub join: Vec<UnitId>,
}

/// Pages that are placed together.
struct Item<'a> {
    value: f64,
    unit: &'a Unit,
    pages: PageMap,
    /// Placed as a whole or not at all.
    whole: bool,
}

impl Item<'_> {
    fn fast(&self) -> u64 {
        self.pages.without(self.unit.slow).count()
    }

    /// The value by which it competes.
    fn weight(&self) -> f64 {
        if 2 * self.fast() >= self.pages.count() { self.value * STAYS + PAYS } else { self.value }
    }
}

/// Plans the placement of all units of a VM. `limit` is the number of pages in fast memory, `most` the number that may
/// be moved in each direction.
pub fn plan(units: &[Unit], limit: u64, most: u64) -> Plan {
    let (split, join) = sizes(units, limit);
    let mut items = Vec::new();
    for unit in units {
        let whole = unit.huge && !split.contains(&unit.id);
        let joins = join.contains(&unit.id);
        if whole {
            let share = unit.touched() / unit.here.count().max(1) as f64;
            items.push(Item { value: unit.warmth.rate * share, unit, pages: unit.here, whole });
            continue;
        }
        for (share, pages) in &unit.warmth.levels {
            let value = (unit.warmth.rate * share).max(if joins { JOINED } else { 0.0 });
            items.push(Item { value, unit, pages: pages.and(unit.here), whole });
        }
    }
    items.retain(|item| !item.pages.is_empty());
    // Cold memory on the fast node stays there while there is room.
    items.sort_by(|a, b| b.weight().total_cmp(&a.weight()).then_with(|| b.fast().cmp(&a.fast())));
    let mut room = limit;
    let mut plan = Plan::default();
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for item in &items {
        let fast = item.pages.without(item.unit.slow);
        let taken = if item.value == 0.0 { fast } else { item.pages };
        let taken = match taken.count() {
            count if count <= room => taken,
            _ if item.whole => PageMap::NONE,
            // First the pages that are there already.
            _ => some(fast.and(taken), room).or(some(taken.without(fast), room.saturating_sub(fast.count()))),
        };
        room -= taken.count();
        push(&mut up, item, taken.and(item.unit.slow), false);
        push(&mut down, item, fast.without(taken), true);
    }
    let in_fast: u64 = units.iter().map(|unit| unit.here.without(unit.slow).count()).sum();
    let gone = take(&mut plan.moves, down.into_iter().rev(), most);
    let free = (limit + gone).saturating_sub(in_fast);
    take(&mut plan.moves, up.into_iter(), most.min(free));
    let fast: HashSet<UnitId> = units.iter().filter(|unit| unit.slow.is_empty()).map(|unit| unit.id).collect();
    let moved: HashSet<UnitId> = plan.moves.iter().map(|one| one.unit).collect();
    let stays = |id: &UnitId| fast.contains(id) && !moved.contains(id);
    let mut join: Vec<UnitId> = join.into_iter().filter(stays).collect();
    join.sort_unstable();
    join.truncate(MOST_JOINED);
    plan.join = join;
    plan
}

/// The page-size policy for these units at this limit: which to split, and which to join.
fn sizes(units: &[Unit], limit: u64) -> (HashSet<UnitId>, HashSet<UnitId>) {
    let touched = |unit: &Unit| unit.touched().ceil() as u64;
    // Pages that count as hot only while the unit is huge: skew times size.
    let bloat = |unit: &Unit| unit.here.count().saturating_sub(touched(unit));
    let is_hot = |unit: &&Unit| unit.warmth.rate > 0.0;
    let hot = |unit: &Unit| if unit.huge { unit.here.count() } else { touched(unit) };
    let mut hot: u64 = units.iter().filter(is_hot).map(hot).sum();
    let may_change = |unit: &&Unit| if unit.huge { unit.warmth.has_cold } else { unit.here == PageMap::ALL };
    let candidates = units.iter().filter(is_hot).filter(may_change).map(|unit| (bloat(unit), unit.id, unit.huge));
    let (mut huge, mut base): (Vec<_>, Vec<_>) = candidates.partition(|(.., huge)| *huge);
    huge.sort_unstable();
    base.sort_unstable();
    let (mut split, mut join) = (HashSet::new(), HashSet::new());
    if hot > limit {
        for (bloat, unit, _) in huge.into_iter().rev().take_while(|(bloat, ..)| *bloat > 0) {
            if hot <= limit {
                break;
            }
            hot -= bloat;
            split.insert(unit);
        }
        return (split, join);
    }
    for (bloat, unit, _) in base {
        hot += bloat;
        if hot > limit * ROOMY.0 / ROOMY.1 {
            break;
        }
        join.insert(unit);
    }
    (split, join)
}

fn push<'a>(list: &mut Vec<(&'a Item<'a>, Move)>, item: &'a Item<'a>, pages: PageMap, down: bool) {
    if !pages.is_empty() {
        list.push((item, Move { unit: item.unit.id, pages, down }));
    }
}

/// Adds moves of at most this number of pages. Returns their number.
fn take<'a>(moves: &mut Vec<Move>, from: impl Iterator<Item = (&'a Item<'a>, Move)>, most: u64) -> u64 {
    let mut left = most;
    for (item, mut one) in from {
        let count = one.pages.count();
        if count > left {
            if item.whole {
                // A smaller item may fit.
                continue;
            }
            one.pages = some(one.pages, left);
        }
        left -= one.pages.count();
        if !one.pages.is_empty() {
            moves.push(one);
        }
    }
    most - left
}

/// The first `count` of these pages.
fn some(pages: PageMap, count: u64) -> PageMap {
    let mut first = PageMap::NONE;
    pages.iter().take(count as usize).for_each(|page| first.set(page));
    first
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_testkit::random::Random;
    use proptest::prelude::*;

    fn id(unit: usize) -> UnitId {
        UnitId { region: 0, unit: unit as u32 }
    }

    fn unit(number: usize, hot: u64, huge: bool, is_slow: bool) -> Unit {
        let (mut random, count) = (Random(number as u64), hot);
        let mut hot = if count == 512 { PageMap::ALL } else { PageMap::NONE };
        while hot.count() < count {
            hot.set(random.below(512));
        }
        let levels = vec![(1.0, hot), (0.0, PageMap::ALL.without(hot))];
        let has_cold = hot != PageMap::ALL;
        let rate = if hot.is_empty() { 0.0 } else { 1.0 };
        let slow = if is_slow { PageMap::ALL } else { PageMap::NONE };
        Unit { id: id(number), here: PageMap::ALL, slow, huge, warmth: Warmth { rate, levels, has_cold } }
    }

    #[test]
    fn a_unit_of_which_little_is_hot_displaces_an_untouched_one() {
        let mut units: Vec<Unit> =
            (0..10).map(|number| unit(number, if number < 2 { 512 } else { 0 }, true, false)).collect();
        units.extend((10..18).map(|number| unit(number, 24, true, true)));
        let plan = plan(&units, 10 * 512, u64::MAX);
        carry_out(&mut units, &plan);
        assert!(units[10..].iter().all(|unit| unit.slow.is_empty()), "{:?}", plan.moves.len());
    }

    fn carry_out(units: &mut [Unit], plan: &Plan) -> u64 {
        for one in &plan.moves {
            let unit = units.iter_mut().find(|unit| unit.id == one.unit).expect("a unit of the plan");
            unit.huge &= one.pages == unit.here;
            unit.slow = if one.down { unit.slow.or(one.pages) } else { unit.slow.without(one.pages) };
        }
        for unit in units.iter_mut().filter(|unit| plan.join.contains(&unit.id)) {
            unit.huge = true;
        }
        plan.moves.iter().map(|one| one.pages.count()).sum()
    }

    fn in_fast(units: &[Unit]) -> u64 {
        units.iter().map(|unit| unit.here.without(unit.slow).count()).sum()
    }

    /// Hot pages in fast memory.
    fn served(units: &[Unit]) -> u64 {
        units.iter().map(|unit| unit.warmth.levels[0].1.without(unit.slow).count()).sum()
    }

    #[test]
    fn the_hot_pages_of_bloated_units_stay_and_without_bloat_nothing_is_split() {
        // A tenth of each of ten units is hot, and there is room for two units.
        let mut units: Vec<Unit> = (0..10).map(|number| unit(number, 51, true, number > 1)).collect();
        let first = plan(&units, 1024, 10_000);
        carry_out(&mut units, &first);
        assert_eq!((served(&units), in_fast(&units) <= 1024), (510, true));
        let evenly: Vec<Unit> =
            (0..10).map(|number| unit(number, if number > 7 { 512 } else { 0 }, true, number > 1)).collect();
        let even = plan(&evenly, 1024, 10_000);
        assert!(even.moves.iter().all(|one| one.pages == PageMap::ALL), "{even:?}");
        assert_eq!(even.moves.len(), 4);
    }

    #[test]
    fn a_unit_that_is_hot_all_over_again_is_moved_back_and_joined() {
        let mut units = vec![unit(0, 512, false, false), unit(1, 0, true, true)];
        units[0].slow = PageMap::first(500);
        let back = plan(&units, 1024, 10_000);
        assert_eq!(back.moves, [Move { unit: id(0), pages: PageMap::first(500), down: false }]);
        carry_out(&mut units, &back);
        let joined = plan(&units, 1024, 10_000);
        assert_eq!((joined.moves.len(), &joined.join[..]), (0, &[id(0)][..]));
        assert_eq!(plan(&units, 300, 10_000).join, [], "there is no room for it");
    }

    proptest! {
        #[test]
        fn the_most_skewed_are_split_the_least_skewed_joined_and_no_more_than_needed(
            of in proptest::collection::vec((0u64..=512, any::<bool>()), 0..60), limit in 0u64..30_000,
        ) {
            let units: Vec<Unit> =
                of.iter().enumerate().map(|(number, (hot, huge))| unit(number, *hot, *huge, false)).collect();
            let (split, join) = sizes(&units, limit);
            let touched = |unit: &Unit| unit.warmth.levels[0].1.count();
            let chosen = |of: &HashSet<UnitId>| units.iter().filter(|unit| of.contains(&unit.id)).collect::<Vec<_>>();
            prop_assert!(split.is_empty() || join.is_empty());
            prop_assert!(chosen(&split).iter().all(|unit| unit.huge) && chosen(&join).iter().all(|unit| !unit.huge));
            let counts = |unit: &&Unit| match touched(unit) {
                0 => 0,
                _ if join.contains(&unit.id) || (unit.huge && !split.contains(&unit.id)) => 512,
                touched => touched,
            };
            let hot: u64 = units.iter().map(|unit| counts(&unit)).sum();
            let least = chosen(&split).into_iter().map(touched).max();
            if let Some(least) = least {
                prop_assert!(hot + 512 - least > limit, "the last split was not needed");
                let spared = units.iter().filter(|unit| unit.huge && !split.contains(&unit.id) && touched(unit) > 0);
                prop_assert!(spared.map(touched).all(|touched| touched >= least));
            }
            if !join.is_empty() {
                prop_assert!(hot <= limit);
                let last = chosen(&join).into_iter().map(touched).min();
                let spared = units.iter().filter(|unit| !unit.huge && !join.contains(&unit.id) && touched(unit) > 0);
                prop_assert!(spared.map(touched).max() <= last);
            }
        }

        #[test]
        fn moves_keep_the_limit_are_bounded_each_way_and_end(
            of in proptest::collection::vec((0u64..=512, any::<bool>(), any::<bool>()), 1..30),
            limit in 0u64..12_000, most in 512u64..4000,
        ) {
            let mut units: Vec<Unit> = of.iter().enumerate()
                .map(|(number, (hot, huge, is_slow))| unit(number, *hot, *huge, *is_slow)).collect();
            let mut moved = u64::MAX;
            for _ in 0..80 {
                let before = in_fast(&units);
                let plan = plan(&units, limit, most);
                for down in [false, true] {
                    let moves = plan.moves.iter().filter(|one| one.down == down);
                    prop_assert!(moves.map(|one| one.pages.count()).sum::<u64>() <= most);
                }
                for one in &plan.moves {
                    let unit = units.iter().find(|unit| unit.id == one.unit).expect("a unit");
                    let from = if one.down { unit.here.without(unit.slow) } else { unit.slow };
                    prop_assert!(!one.pages.is_empty() && one.pages.without(from).is_empty(), "{one:?}");
                    prop_assert!(!unit.huge || one.pages == unit.here || unit.warmth.has_cold, "split needlessly");
                }
                moved = carry_out(&mut units, &plan);
                prop_assert!(in_fast(&units) <= before.max(limit));
                if moved == 0 && plan.join.is_empty() {
                    break;
                }
            }
            prop_assert_eq!(moved, 0, "it never settles");
            prop_assert!(in_fast(&units) <= limit);
        }
    }
}
