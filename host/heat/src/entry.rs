//! The access entry: the last 32 cycles of one page or one unit (HugeScope, 3.5).
//!
//! Before: a source reported a cycle. After: age, frequency and skew are read from entries. Units: ages are cycles that
//! watched the page or unit; other cycles leave no bit.

/// Number of last cycles and scans that are "recent": they define the working set and the skew of a unit.
pub const RECENT: u32 = 3;
/// Access history of a page or unit: a bit for each cycle that watched it, the last one in bit 0. By default, no touch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Entry(pub u32);

impl Entry {
    /// Adds a cycle; the oldest is forgotten.
    pub fn push(&mut self, touched: bool) {
        self.0 = self.0 << 1 | u32::from(touched);
    }

    /// One bit per cycle, the last one in bit 0.
    pub const fn touches(self) -> u32 {
        self.0
    }

    /// Cycles since the last touch: 0 if the last cycle saw one, 32 if no remembered cycle did.
    pub const fn age(self) -> u32 {
        self.0.trailing_zeros()
    }

    /// Number of remembered cycles that saw a touch.
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
