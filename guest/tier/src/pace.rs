//! How many page-table entries may be read in an epoch, by what reading one costs on this machine.
//!
//! An entry takes some 10 ns on a CPU, and 80 ns where the CPU is emulated; so the cost is measured.
//! Before: entries were read, and the CPU time for it is known. After: the next epoch's reads stay within their part
//! of a CPU. Threads: none. Units: entries, nanoseconds. Promise: pure; never less than a unit of 2 MiB.

use std::time::Duration;

use ballast_base::PAGES_PER_UNIT;

use crate::settings::EPOCH;

/// Reading takes at most 1/N of a CPU: memory that was never read, and programs that grow.
const PART: u32 = 50;
/// What is known is read again at 1/N of that.
const KNOWN_PART: u64 = 4;
/// The cost of an entry that nothing was measured of yet.
const GUESS_NS: f64 = 20.0;
/// Fewer entries tell nothing about the cost of one; those of several epochs are added up until they do.
const FEW: u64 = 1 << 12;

/// The pace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    entry_ns: f64,
    /// Entries that were read since the cost was last measured, and the time for them.
    read: u64,
    time: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { entry_ns: GUESS_NS, read: 0, time: Duration::ZERO }
    }
}

impl Pace {
    /// Returns how many entries one of `programs` may read in an epoch, and how many of those that are known.
    pub fn entries(&self, programs: usize) -> (u64, u64) {
        let all = (EPOCH / PART).as_nanos() as f64 / self.entry_ns;
        let each = |entries: u64| (entries / (programs as u64).max(1)).max(PAGES_PER_UNIT);
        (each(all as u64), each(all as u64 / KNOWN_PART))
    }

    /// This many entries took this long.
    pub fn took(&mut self, entries: u64, time: Duration) {
        // Epochs in which nothing was read would add time that no entry cost.
        if entries == 0 {
            return;
        }
        (self.read, self.time) = (self.read + entries, self.time + time);
        if self.read >= FEW {
            let entry = self.time.as_nanos() as f64 / self.read as f64;
            self.entry_ns = ((self.entry_ns + entry) / 2.0).clamp(1.0, 1e6);
            (self.read, self.time) = (0, Duration::ZERO);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_takes_its_part_of_a_cpu_whatever_an_entry_costs_and_a_quarter_of_that_for_what_is_known() {
        for cost in [2, 10, 80, 5000] {
            let mut pace = Pace::default();
            for _ in 0..40 {
                let (entries, known) = pace.entries(1);
                pace.took(entries, Duration::from_nanos(entries * cost));
                assert!(known == PAGES_PER_UNIT || known == entries / KNOWN_PART, "{known} of {entries}");
            }
            let (entries, _) = pace.entries(1);
            let part = entries as f64 * cost as f64 / EPOCH.as_nanos() as f64;
            assert!((0.018..0.021).contains(&part), "{part} of a CPU at {cost} ns");
        }
    }

    #[test]
    fn a_pace_that_was_slow_for_a_while_recovers_though_an_epoch_reads_few_entries() {
        let mut pace = Pace::default();
        (0..40).for_each(|_| pace.took(FEW, Duration::from_millis(100)));
        assert!(pace.entries(1).0 < FEW, "the machine was busy");
        for _ in 0..200 {
            let (entries, _) = pace.entries(1);
            pace.took(entries, Duration::from_nanos(entries * 10));
            pace.took(0, Duration::from_secs(1));
        }
        assert!((980_000..=1_000_000).contains(&pace.entries(1).0), "{pace:?}");
    }

    #[test]
    fn programs_share_the_pace_and_each_reads_a_unit_at_least() {
        let pace = Pace::default();
        assert_eq!(pace.entries(4), (pace.entries(1).0 / 4, pace.entries(1).1 / 4));
        assert_eq!(pace.entries(1 << 20), (PAGES_PER_UNIT, PAGES_PER_UNIT));
        let mut slow = pace;
        (0..60).for_each(|_| slow.took(FEW, Duration::from_secs(1)));
        assert_eq!(slow.entries(1), (PAGES_PER_UNIT, PAGES_PER_UNIT));
    }
}
