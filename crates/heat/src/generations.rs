//! Four generations, with the meaning they have in the kernel's multi-generational LRU.
//!
//! Before: a cycle said which units were touched. After: reclaim drains the oldest generation.
//! Units: generation 0 is the youngest, 3 the oldest. Promise: pure; a cycle that ages everything costs one addition.
//!
//! A unit has 512 times the chances of a base page to be touched, so a touch must not mean as much. *Fair* promotion
//! (Blowfish §4.3.1): a touched base page becomes youngest at once, a touched unit becomes one generation younger than it
//! was; an untouched one becomes one older. A unit that is touched in most cycles climbs, one that is touched now and
//! then drifts into the oldest generation. *Classic* makes a touched unit youngest as well.
//!
//! A thing's place is the number of the cycle in which it would have been youngest (its *birth*), so that everything ages
//! when the current cycle's number grows.

use crate::Entry;

/// How many generations there are; the oldest is `GENERATIONS - 1`.
pub const GENERATIONS: usize = 4;
const SPAN: u32 = GENERATIONS as u32 - 1;

/// How a touched unit is promoted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promotion {
    /// By one generation.
    #[default]
    Fair,
    /// To the youngest.
    Classic,
}

/// The clock by which generations are told.
#[derive(Clone, Copy, Debug)]
pub struct Generations {
    now: u32,
    promotion: Promotion,
}

impl Generations {
    /// Nothing has aged yet.
    pub fn new(promotion: Promotion) -> Self {
        // So that the oldest generation has a birth that can be written down.
        Self { now: SPAN, promotion }
    }

    /// Birth of something that is youngest.
    pub const fn youngest(&self) -> u32 {
        self.now
    }

    /// Everything grows one generation older; what was oldest stays so.
    pub fn advance(&mut self) {
        self.now += 1;
    }

    /// The generation of something born then.
    pub fn of(&self, birth: u32) -> usize {
        self.now.saturating_sub(birth).min(SPAN) as usize
    }

    /// The new birth of a unit that was touched in the cycle that [`Self::advance`] just ended.
    pub fn touched(&self, birth: u32) -> u32 {
        match self.promotion {
            Promotion::Classic => self.now,
            // Two younger than it has become, which is one younger than it was.
            Promotion::Fair => (birth.max(self.now - 1 - SPAN.min(self.now - 1)) + 2).min(self.now),
        }
    }

    /// The new birth of a unit of which that cycle learned nothing: it neither ages nor climbs.
    pub fn unseen(&self, birth: u32) -> u32 {
        (birth.max(self.now - 1 - SPAN.min(self.now - 1)) + 1).min(self.now)
    }
}

/// The generation of a base page: youngest when the last scan of its unit saw it touched, one older with each that did
/// not, oldest when none did.
pub fn of_page(entry: Entry) -> usize {
    entry.age().min(SPAN) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Touched, untouched, or nothing learned.
    fn step(generations: &mut Generations, birth: &mut u32, seen: Option<bool>) {
        generations.advance();
        match seen {
            Some(true) => *birth = generations.touched(*birth),
            Some(false) => {}
            None => *birth = generations.unseen(*birth),
        }
    }

    proptest! {
        #[test]
        fn a_unit_moves_by_one_generation_and_a_classic_one_jumps(
            promotion in prop_oneof![Just(Promotion::Fair), Just(Promotion::Classic)],
            history in proptest::collection::vec(any::<Option<bool>>(), 0..200),
        ) {
            let mut generations = Generations::new(promotion);
            let (mut birth, mut expected) = (generations.youngest(), 0usize);
            for seen in history {
                step(&mut generations, &mut birth, seen);
                expected = match (seen, promotion) {
                    (Some(true), Promotion::Fair) => expected.saturating_sub(1),
                    (Some(true), Promotion::Classic) => 0,
                    (Some(false), _) => (expected + 1).min(GENERATIONS - 1),
                    (None, _) => expected,
                };
                prop_assert_eq!(generations.of(birth), expected);
                prop_assert!(birth <= generations.youngest());
            }
        }

        #[test]
        fn a_base_page_is_never_older_than_a_fair_unit_with_the_same_history(
            history in proptest::collection::vec(any::<bool>(), 4..200),
        ) {
            let mut generations = Generations::new(Promotion::Fair);
            let (mut birth, mut entry) = (0, Entry::default());
            for touched in history {
                step(&mut generations, &mut birth, Some(touched));
                entry.push(touched, false);
                prop_assert!(of_page(entry) <= generations.of(birth));
            }
        }
    }

    #[test]
    fn a_unit_touched_every_third_cycle_ends_oldest_and_a_hot_one_youngest() {
        let mut generations = Generations::new(Promotion::Fair);
        let (mut warm, mut hot) = (generations.youngest(), 0);
        for cycle in 0..12 {
            generations.advance();
            if cycle % 3 == 0 {
                warm = generations.touched(warm);
            }
            hot = generations.touched(hot);
        }
        assert_eq!((generations.of(warm), generations.of(hot)), (3, 0));
    }
}
