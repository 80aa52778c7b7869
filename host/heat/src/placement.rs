//! Placement: which memory of a VM belongs into fast memory, and what to move for it (HugeScope's HS-TMM, 3.6).
//!
//! Before: the tracker knows how warm units and their pages are ([`crate::Tracker::warmth`]), and the caller where they
//! lie. After: the caller moves what [`plan`] says, splits a huge page of which it moves a part, and joins others.
//! Units: pages; values are shares of 1, relative to each other. Promise: a pure function. Moves that are carried out
//! in their order keep fast memory within its limit, once it is; a huge page is moved in part only if
//! [`crate::size_policy`] has it split.
//!
//! The value of a page is the share of recent cycles that saw its unit touched, times the share of recent scans that
//! saw the page touched. A huge page has the average of its pages: it needs room for all of them. Fast memory gets what
//! is most valuable, so a huge page of which a tenth is hot loses to the hot tenths of ten that are split.

use std::collections::HashSet;

use crate::size_policy::{self, Candidate};
use crate::source::{PageMap, UnitId};

/// Memory that is in fast memory counts as this much warmer, by a factor and by a value: two units that are nearly as
/// warm do not change places, nor do cold ones by the chance of stray accesses (one of 32 pages, in one of eight scans,
/// is 0.004). A unit of which a fiftieth is hot is worth more than that.
const STAYS: f64 = 1.25;
const PAYS: f64 = 0.01;
/// Units are joined only while hot memory is below this part of the limit, so that they are not split again at once.
const ROOMY: (u64, u64) = (15, 16);
/// Most units joined by one plan: the kernel copies a unit for it, which takes milliseconds.
const MOST_JOINED: usize = 4;
/// Value of the cold pages of a unit that is to be joined: any page that is touched is worth more.
const JOINED: f64 = 1e-9;

/// How warm a unit is.
#[derive(Clone, Debug, PartialEq)]
pub struct Warmth {
    /// Share of the recent cycles that saw it touched.
    pub rate: f64,
    /// All of its pages, by the share of recent scans that saw them touched. One level if scans do not tell them apart.
    pub levels: Vec<(f64, PageMap)>,
    /// Some of its pages are known to be colder than the rest, and not only by chance.
    pub has_cold: bool,
}

/// A unit, and where it lies.
#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// Which.
    pub id: UnitId,
    /// Its pages that are in memory and may be moved.
    pub here: PageMap,
    /// Those of them that are in slow memory.
    pub slow: PageMap,
    /// It is one huge page.
    pub huge: bool,
    /// How warm it is.
    pub warmth: Warmth,
}

/// Pages that are to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Their unit.
    pub unit: UnitId,
    /// The pages. If they are a part of a huge page, it is split first.
    pub pages: PageMap,
    /// To slow memory; else to fast memory.
    pub down: bool,
}

/// What to do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Moves, in this order: those to slow memory first, the coldest first; then the others, the warmest first.
    pub moves: Vec<Move>,
    /// Units in base pages that are to be one huge page again. All of their pages are in fast memory.
    pub join: Vec<UnitId>,
    /// Hot memory above the limit, in pages, with huge pages counted as wholes (hot pressure).
    pub pressure: i64,
}

/// Pages that are placed together.
struct Item<'a> {
    value: f64,
    unit: &'a Unit,
    pages: PageMap,
    /// It is placed whole or not at all.
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

/// Decide for all units of a VM. `limit` is how many pages it may have in fast memory, `most` how many may be moved
/// each way now.
pub fn plan(units: &[Unit], limit: u64, most: u64) -> Plan {
    let (sizes, pressure) = sizes(units, limit);
    let (split, join) = (sorted(sizes.split), sorted(sizes.coalesce));
    let mut items = Vec::new();
    for unit in units {
        let whole = unit.huge && split.binary_search(&unit.id).is_err();
        let joins = join.binary_search(&unit.id).is_ok();
        if whole {
            let share = |(share, pages): &(f64, PageMap)| share * pages.and(unit.here).count() as f64;
            let share: f64 = unit.warmth.levels.iter().map(share).sum::<f64>() / unit.here.count().max(1) as f64;
            items.push(Item { value: unit.warmth.rate * share, unit, pages: unit.here, whole });
            continue;
        }
        for (share, pages) in &unit.warmth.levels {
            let value = (unit.warmth.rate * share).max(if joins { JOINED } else { 0.0 });
            items.push(Item { value, unit, pages: pages.and(unit.here), whole });
        }
    }
    items.retain(|item| !item.pages.is_empty());
    // Cold memory that is in fast memory stays there while there is room.
    items.sort_by(|a, b| b.weight().total_cmp(&a.weight()).then_with(|| b.fast().cmp(&a.fast())));
    let mut room = limit;
    let mut plan = Plan { pressure, ..Plan::default() };
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for item in &items {
        let fast = item.pages.without(item.unit.slow);
        let taken = if item.value == 0.0 { fast } else { item.pages };
        let taken = match taken.count() {
            count if count <= room => taken,
            _ if item.whole => PageMap::NONE,
            // What is there already first.
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
    plan.join = join.into_iter().filter(stays).take(MOST_JOINED).collect();
    plan
}

/// The page-size policy over these units: what to split and to join, and the pressure at this limit.
fn sizes(units: &[Unit], limit: u64) -> (size_policy::Plan, i64) {
    // As many as a scan sees touched on average: stray accesses touch each page at some time.
    let touched = |unit: &Unit| {
        let seen = |(share, pages): &(f64, PageMap)| share * pages.and(unit.here).count() as f64;
        unit.warmth.levels.iter().map(seen).sum::<f64>().ceil() as u64
    };
    let is_hot = |unit: &&Unit| unit.warmth.rate > 0.0;
    let hot = |unit: &Unit| if unit.huge { unit.here.count() } else { touched(unit) };
    let all: u64 = units.iter().filter(is_hot).map(hot).sum();
    let may_change = |unit: &&Unit| if unit.huge { unit.warmth.has_cold } else { unit.here == PageMap::ALL };
    let candidate = |unit: &Unit| Candidate { unit: unit.id, touched: touched(unit), huge: unit.huge };
    let candidates: Vec<Candidate> = units.iter().filter(is_hot).filter(may_change).map(candidate).collect();
    let sizes = size_policy::plan(all, limit, &candidates);
    let pressure = sizes.pressure;
    if pressure > 0 {
        return (sizes, pressure);
    }
    (size_policy::plan(all, (limit * ROOMY.0 / ROOMY.1).max(all), &candidates), pressure)
}

fn sorted(mut units: Vec<UnitId>) -> Vec<UnitId> {
    units.sort_unstable();
    units
}

fn push<'a>(list: &mut Vec<(&'a Item<'a>, Move)>, item: &'a Item<'a>, pages: PageMap, down: bool) {
    if !pages.is_empty() {
        list.push((item, Move { unit: item.unit.id, pages, down }));
    }
}

/// Add moves of at most this many pages. Returns how many pages they are.
fn take<'a>(moves: &mut Vec<Move>, from: impl Iterator<Item = (&'a Item<'a>, Move)>, most: u64) -> u64 {
    let mut left = most;
    for (item, mut one) in from {
        let count = one.pages.count();
        if count > left {
            if item.whole {
                // A smaller one may fit.
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
    use crate::sample::SplitMix64;
    use proptest::prelude::*;

    fn id(unit: usize) -> UnitId {
        UnitId { region: 0, unit: unit as u32 }
    }

    /// A unit of which `hot` pages, anywhere in it, are touched.
    fn unit(number: usize, hot: u64, huge: bool, is_slow: bool) -> Unit {
        let hot = SplitMix64::new(number as u64).pages(hot, 512);
        let levels = vec![(1.0, hot), (0.0, PageMap::ALL.without(hot))];
        let has_cold = hot != PageMap::ALL;
        let rate = if hot.is_empty() { 0.0 } else { 1.0 };
        let slow = if is_slow { PageMap::ALL } else { PageMap::NONE };
        Unit { id: id(number), here: PageMap::ALL, slow, huge, warmth: Warmth { rate, levels, has_cold } }
    }

    #[test]
    fn a_unit_of_which_little_is_hot_takes_the_place_of_one_that_nobody_touches() {
        let mut units: Vec<Unit> =
            (0..10).map(|number| unit(number, if number < 2 { 512 } else { 0 }, true, false)).collect();
        units.extend((10..18).map(|number| unit(number, 24, true, true)));
        let plan = plan(&units, 10 * 512, u64::MAX);
        carry_out(&mut units, &plan);
        assert!(units[10..].iter().all(|unit| unit.slow.is_empty()), "{:?}", plan.moves.len());
    }

    /// Carries out all moves, and returns how many pages were moved.
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
    fn of_bloated_units_the_hot_pages_stay_and_without_bloat_nothing_is_split() {
        // Of ten units a tenth is hot, and there is room for two units.
        let mut units: Vec<Unit> = (0..10).map(|number| unit(number, 51, true, number > 1)).collect();
        let first = plan(&units, 1024, 10_000);
        assert_eq!(first.pressure, 8 * 512);
        carry_out(&mut units, &first);
        assert_eq!((served(&units), in_fast(&units) <= 1024), (510, true));
        let evenly: Vec<Unit> =
            (0..10).map(|number| unit(number, if number > 7 { 512 } else { 0 }, true, number > 1)).collect();
        let even = plan(&evenly, 1024, 10_000);
        assert!(even.moves.iter().all(|one| one.pages == PageMap::ALL), "{even:?}");
        assert_eq!(even.moves.len(), 4);
    }

    #[test]
    fn a_unit_that_is_hot_all_over_again_comes_back_and_is_joined() {
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
        fn moves_keep_the_limit_are_bounded_each_way_and_come_to_rest(
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
