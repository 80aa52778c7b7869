//! The access entry: what the last 32 cycles saw of one page or one unit (HugeScope, 3.5).
//!
//! Before: a source reported a cycle. After: age, frequency and skew are read from entries.
//! Units: ages are cycles in which the page or unit was watched; a cycle that did not watch it leaves no bit.

/// Number of last cycles and scans that are "recent": they define the working set and the skew of a unit.
pub const RECENT: u32 = 3;
/// Access history of a page or unit: a bit for each cycle that watched it, the last one in bit 0. The default is one
/// that was never seen touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Entry(pub u32);

impl Entry {
    /// Cycles an entry remembers.
    pub const CYCLES: u32 = u32::BITS;

    /// Add a cycle; the oldest is forgotten.
    pub fn push(&mut self, touched: bool) {
        self.0 = self.0 << 1 | u32::from(touched);
    }

    /// One bit per cycle, the last one in bit 0.
    pub const fn touches(self) -> u32 {
        self.0
    }

    /// Cycles since the last touch: 0 if the last cycle saw one, 32 if none that is remembered did.
    pub const fn age(self) -> u32 {
        self.0.trailing_zeros()
    }

    /// In how many of the remembered cycles it was touched.
    pub const fn frequency(self) -> u32 {
        self.0.count_ones()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_entry_is_the_last_32_cycles_of_its_history(history in proptest::collection::vec(any::<bool>(), 0..80)) {
            let mut entry = Entry::default();
            history.iter().for_each(|touched| entry.push(*touched));
            let last: Vec<_> = history.iter().rev().take(32).collect();
            let age = last.iter().position(|touched| **touched).unwrap_or(32) as u32;
            let frequency = last.iter().filter(|touched| ***touched).count() as u32;
            prop_assert_eq!((entry.age(), entry.frequency()), (age, frequency));
        }
    }
}
