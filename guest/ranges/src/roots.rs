//! Roots: the parts of a program's address space that are classified, and their units as small numbers.
//!
//! Before: the caller knows where heap and mappings lie (`/proc/PID/maps`). After: classifiers count by unit and never
//! see an address. Units: addresses in bytes; a *unit* is 2 MiB, the least that a range can be. Promise: an address
//! outside of all roots has no unit; no root is empty, and none overlaps another.

use ballast_base::{HUGE_SIZE, Invalid};

/// Bytes of a unit.
pub const UNIT: u64 = HUGE_SIZE as u64;
/// Most units of all roots: 8 PiB. A unit's number fits 32 bits.
const MOST_UNITS: u64 = 1 << 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Root {
    start: u64,
    end: u64,
    /// Number of its first unit.
    first: u64,
}

/// The parts of an address space that are classified: by the paper the heap and the mappings, without code, data and
/// stacks, which are hot and small.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Roots {
    list: Vec<Root>,
}

impl Roots {
    /// Makes roots from first addresses and the addresses after the last, ascending, and widens each to whole units.
    pub fn new(ranges: &[(u64, u64)]) -> Result<Self, Invalid> {
        if ranges.is_empty() {
            return Err("there are no roots".into());
        }
        let mut list: Vec<Root> = Vec::with_capacity(ranges.len());
        let mut units = 0;
        for &(start, end) in ranges {
            let widened = end.checked_next_multiple_of(UNIT).filter(|_| start < end);
            let last = widened.ok_or_else(|| format!("{start:#x} to {end:#x} is not a range that has an end"))?;
            let first = start / UNIT * UNIT;
            if list.last().is_some_and(|root| first < root.end) {
                return Err(
                    format!("the root at {start:#x} begins in a unit of 2 MiB that belongs to the one before").into()
                );
            }
            list.push(Root { start: first, end: last, first: units });
            units += (last - first) / UNIT;
        }
        if units > MOST_UNITS {
            return Err(format!("{units} units of 2 MiB; at most {MOST_UNITS} are possible").into());
        }
        Ok(Self { list })
    }

    /// Returns first addresses and the addresses after the last, of whole units.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.list.iter().map(|root| (root.start, root.end))
    }

    /// Returns the unit of this address.
    pub fn unit_of(&self, address: u64) -> Option<u32> {
        let after = self.list.partition_point(|root| root.start <= address);
        let root = self.list[..after].last().filter(|root| address < root.end)?;
        u32::try_from(root.first + (address - root.start) / UNIT).ok()
    }

    /// Returns the first unit of each root, and its number of units.
    pub fn spans(&self) -> impl ExactSizeIterator<Item = (u64, u64)> {
        self.list.iter().map(|root| (root.first, (root.end - root.start) / UNIT))
    }

    /// Returns the addresses of these units, which are in one root.
    pub fn addresses(&self, first: u64, units: u64) -> (u64, u64) {
        let after = self.list.partition_point(|root| root.first <= first);
        let root = self.list[..after].last().expect("the first root has unit 0");
        let start = root.start + (first - root.first) * UNIT;
        (start, start + units * UNIT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_numbered_through_all_roots_and_lead_back_to_their_addresses() {
        let roots = Roots::new(&[(UNIT + 5, 3 * UNIT), (8 * UNIT, 9 * UNIT + 1)]).expect("two roots");
        assert_eq!(roots.ranges().collect::<Vec<_>>(), [(UNIT, 3 * UNIT), (8 * UNIT, 10 * UNIT)]);
        let unit = |address| roots.unit_of(address);
        assert_eq!([0, UNIT - 1, UNIT, 3 * UNIT - 1, 3 * UNIT].map(unit), [None, None, Some(0), Some(1), None]);
        assert_eq!(
            [8 * UNIT - 1, 8 * UNIT, 9 * UNIT, 10 * UNIT, u64::MAX].map(unit),
            [None, Some(2), Some(3), None, None]
        );
        assert_eq!(roots.addresses(1, 1), (2 * UNIT, 3 * UNIT));
        assert_eq!(roots.addresses(2, 2), (8 * UNIT, 10 * UNIT));
    }

    #[test]
    fn what_is_no_root_is_refused_by_name() {
        let error = |ranges: &[(u64, u64)]| Roots::new(ranges).expect_err("refused").to_string();
        assert!(error(&[]).contains("no roots"));
        assert!([(5, 5), (0, u64::MAX)].into_iter().all(|range| error(&[range]).contains("not a range")));
        assert!(error(&[(0, UNIT + 1), (2 * UNIT - 1, 3 * UNIT)]).contains("0x3fffff begins in a unit"));
        assert!(error(&[(0, 1 << 60)]).contains("549755813888 units"));
    }
}
