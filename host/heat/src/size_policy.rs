//! Page-size policy: which units to map as huge pages and which in base pages (HugeScope, 3.4).
//!
//! Before: a back end (tiering, sharing, reclaim) knows how much hot memory it can hold, and which units may change.
//! After: it splits and coalesces what [`plan`] says. Promise: a pure function. It is the page-size policy of
//! HugeScope's Figure 5, and the candidates are its custom candidate set.
//!
//! A huge page counts as hot as a whole if one page in it is. *Hot pressure* is the hot memory, so counted, above the
//! limit of the back end. If it is above zero, units are split, the most skewed first, because their cold pages stop
//! counting as hot and little speed is lost. Below zero there is room to coalesce units, the least skewed first.

use ballast_base::PAGES_PER_UNIT;

use crate::source::UnitId;

/// A unit that may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which.
    pub unit: UnitId,
    /// Its pages that were touched; a split would make the others cold.
    pub touched: u64,
    /// True if it is a huge page now, false if it is in base pages.
    pub huge: bool,
}

impl Candidate {
    /// Pages that count as hot only while the unit is huge: skew times size.
    fn bloat(&self) -> i64 {
        PAGES_PER_UNIT.saturating_sub(self.touched) as i64
    }
}

/// The changes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Huge pages to split, in this order.
    pub split: Vec<UnitId>,
    /// Units to coalesce, in this order.
    pub coalesce: Vec<UnitId>,
    /// Hot pressure before, in pages.
    pub pressure: i64,
    /// Hot pressure when all of it is done, in pages.
    pub after: i64,
}

/// Decide. `hot` is the memory that counts as hot now (huge pages as a whole), `limit` how much of it the back end
/// wants, both in pages. Only candidates change.
///
/// The paper's loop coalesces while the pressure is below zero. This stops before a unit that would lift it above zero,
/// because that unit would be split again at once.
pub fn plan(hot: u64, limit: u64, candidates: &[Candidate]) -> Plan {
    let pressure = hot as i64 - limit as i64;
    let mut plan = Plan { pressure, after: pressure, ..Plan::default() };
    let wanted = |huge: bool| {
        let mut units: Vec<Candidate> = candidates.iter().filter(|unit| unit.huge == huge).copied().collect();
        units.sort_unstable_by_key(|unit| (unit.bloat(), unit.unit));
        units
    };
    if pressure > 0 {
        for unit in wanted(true).iter().rev().take_while(|unit| unit.bloat() > 0) {
            if plan.after <= 0 {
                break;
            }
            plan.after -= unit.bloat();
            plan.split.push(unit.unit);
        }
    } else {
        for unit in wanted(false) {
            if pressure == 0 || plan.after + unit.bloat() > 0 {
                break;
            }
            plan.after += unit.bloat();
            plan.coalesce.push(unit.unit);
        }
    }
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
        proptest::collection::vec((0..=PAGES_PER_UNIT, any::<bool>()), 0..60).prop_map(|units| {
            let number =
                |(unit, (touched, huge))| Candidate { unit: UnitId { region: 0, unit: unit as u32 }, touched, huge };
            units.into_iter().enumerate().map(number).collect()
        })
    }

    proptest! {
        #[test]
        fn the_most_skewed_are_split_the_least_skewed_coalesced_and_no_more_than_needed(
            units in candidates(), hot in 0u64..30_000, limit in 0u64..30_000,
        ) {
            let plan = plan(hot, limit, &units);
            let of = |id: &UnitId| units.iter().find(|unit| unit.unit == *id).expect("a candidate");
            prop_assert!(plan.split.is_empty() || plan.coalesce.is_empty());
            prop_assert!(plan.split.iter().all(|id| of(id).huge) && plan.coalesce.iter().all(|id| !of(id).huge));
            prop_assert!(plan.split.is_sorted_by_key(|id| of(id).touched));
            prop_assert!(plan.coalesce.is_sorted_by_key(|id| std::cmp::Reverse(of(id).touched)));
            let changed: i64 = plan.coalesce.iter().map(|id| of(id).bloat()).sum::<i64>()
                - plan.split.iter().map(|id| of(id).bloat()).sum::<i64>();
            prop_assert_eq!(plan.after, hot as i64 - limit as i64 + changed);
            if let Some(last) = plan.split.last() {
                prop_assert!(plan.after + of(last).bloat() > 0, "the last split was not needed");
                let spared = units.iter().filter(|unit| unit.huge && !plan.split.contains(&unit.unit));
                prop_assert!(spared.clone().all(|unit| unit.bloat() <= of(last).bloat()));
            }
            if plan.pressure > 0 && plan.after > 0 {
                let stays = |unit: &Candidate| !unit.huge || unit.bloat() == 0;
                prop_assert!(units.iter().all(|unit| stays(unit) || plan.split.contains(&unit.unit)));
            }
            if plan.pressure <= 0 {
                prop_assert!(plan.after <= 0);
            }
        }

        #[test]
        fn a_plan_that_is_carried_out_needs_at_most_two_more(
            mut units in candidates(), hot in 0u64..30_000, limit in 0u64..30_000,
        ) {
            let mut hot = hot as i64;
            for round in 0..4 {
                let plan = plan(hot.max(0) as u64, limit, &units);
                prop_assert!(round < 3 || (plan.split.is_empty() && plan.coalesce.is_empty()), "it never settles");
                hot = hot.max(0) + plan.after - plan.pressure;
                for unit in &mut units {
                    unit.huge = (unit.huge && !plan.split.contains(&unit.unit)) || plan.coalesce.contains(&unit.unit);
                }
            }
        }
    }
}
