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
/// Fewer entries tell nothing about the cost of one.
const FEW: u64 = 1 << 12;

/// The pace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    entry_ns: f64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { entry_ns: GUESS_NS }
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
        if entries >= FEW {
            let entry = time.as_nanos() as f64 / entries as f64;
            self.entry_ns = ((self.entry_ns + entry) / 2.0).clamp(1.0, 1e6);
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
                pace.took(entries.max(FEW), Duration::from_nanos(entries.max(FEW) * cost));
                assert!(known == PAGES_PER_UNIT || known == entries / KNOWN_PART, "{known} of {entries}");
            }
            let (entries, _) = pace.entries(1);
            let part = entries as f64 * cost as f64 / EPOCH.as_nanos() as f64;
            assert!((0.018..0.021).contains(&part), "{part} of a CPU at {cost} ns");
        }
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
