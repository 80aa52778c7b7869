//! The access entry: what the last 32 cycles saw of one page or one unit (HugeScope §3.5).
//!
//! Before: a source reported a cycle. After: age, frequency and skew are read from entries.
//! Units: ages are cycles in which the thing was watched; a cycle that did not watch it leaves no bit.
//!
//! ```text
//! bits  0..32  touched, bit 0 in the last cycle, bit 31 in the oldest
//! bits 32..64  written, likewise
//! ```

/// Access history of a page or unit. The default is one that was never seen touched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl Entry {
    /// Cycles an entry remembers.
    pub const CYCLES: u32 = 32;

    /// Add a cycle; the oldest is forgotten. What was written was touched.
    pub fn push(&mut self, touched: bool, written: bool) {
        let touches = self.touches() << 1 | u32::from(touched || written);
        let writes = self.writes() << 1 | u32::from(written);
        self.0 = u64::from(writes) << Self::CYCLES | u64::from(touches);
    }

    /// One bit per cycle, the last one in bit 0.
    pub const fn touches(self) -> u32 {
        self.0 as u32
    }

    /// The same of writes.
    pub const fn writes(self) -> u32 {
        (self.0 >> Self::CYCLES) as u32
    }

    /// Cycles since the last touch: 0 if the last cycle saw one, 32 if none that is remembered did.
    pub const fn age(self) -> u32 {
        self.touches().trailing_zeros()
    }

    /// The same of writes.
    pub const fn write_age(self) -> u32 {
        self.writes().trailing_zeros()
    }

    /// In how many of the remembered cycles it was touched.
    pub const fn frequency(self) -> u32 {
        self.touches().count_ones()
    }

    /// The same of writes.
    pub const fn write_frequency(self) -> u32 {
        self.writes().count_ones()
    }
}

/// Skew of the accesses to a unit (HugeScope §3.4): `1 - touched / of`. 0 when every page was touched, 1 when none was.
pub fn psr(touched: u64, of: u64) -> f64 {
    if of == 0 { 0.0 } else { 1.0 - touched.min(of) as f64 / of as f64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn an_entry_is_the_last_32_cycles_of_its_history(history in proptest::collection::vec(any::<(bool, bool)>(), 0..80)) {
            let mut entry = Entry::default();
            history.iter().for_each(|(touched, written)| entry.push(*touched, *written));
            let last: Vec<_> = history.iter().rev().take(32).collect();
            let age = |seen: &dyn Fn(&(bool, bool)) -> bool| last.iter().position(|cycle| seen(cycle)).unwrap_or(32) as u32;
            let frequency = |seen: &dyn Fn(&(bool, bool)) -> bool| last.iter().filter(|cycle| seen(cycle)).count() as u32;
            let (touched, written) = (|cycle: &(bool, bool)| cycle.0 || cycle.1, |cycle: &(bool, bool)| cycle.1);
            prop_assert_eq!((entry.age(), entry.frequency()), (age(&touched), frequency(&touched)));
            prop_assert_eq!((entry.write_age(), entry.write_frequency()), (age(&written), frequency(&written)));
            prop_assert_eq!(entry.writes() & !entry.touches(), 0, "written but not touched");
        }
    }

    #[test]
    fn skew_is_none_when_all_is_touched_and_whole_when_nothing_is() {
        assert_eq!((psr(512, 512), psr(0, 512), psr(128, 512), psr(0, 0)), (0.0, 1.0, 0.75, 0.0));
    }
}
