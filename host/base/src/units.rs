//! Units as types: bytes, pages, page indexes and host virtual addresses.
//!
//! Every shift between bytes and pages in Ballast is written here and nowhere else.
//! Promise: a conversion that loses something says in its name which way it rounds.

use std::fmt;
use std::ops::{Add, AddAssign, Sub};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// 1024 bytes.
pub const KIB: u64 = 1024;
/// 1024 KiB.
pub const MIB: u64 = 1024 * KIB;
/// 1024 MiB.
pub const GIB: u64 = 1024 * MIB;
/// Bytes in a base page.
pub const PAGE_SIZE: usize = 4096;
/// Bytes in a huge page (a *unit* of tracking and registration).
pub const HUGE_SIZE: usize = 2 * MIB as usize;
/// Base pages in a unit.
pub const PAGES_PER_UNIT: u64 = (HUGE_SIZE / PAGE_SIZE) as u64;

const PAGE_SHIFT: u32 = PAGE_SIZE.trailing_zeros();
const UNIT_SHIFT: u32 = PAGES_PER_UNIT.trailing_zeros();
const _: () = assert!(1 << PAGE_SHIFT == PAGE_SIZE && 1 << UNIT_SHIFT == PAGES_PER_UNIT);

/// A number of bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Bytes(pub u64);

impl Bytes {
    /// Whole pages in this many bytes; a partial page at the end is not counted.
    pub const fn pages_floor(self) -> PageCount {
        PageCount(self.0 >> PAGE_SHIFT)
    }
}

/// `512 MiB`-style display: the largest binary unit that leaves at least one, with at most one decimal.
impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (unit, name) in [(1024 * GIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
            if self.0 >= unit {
                let value = self.0 as f64 / unit as f64;
                return if self.0.is_multiple_of(unit) {
                    f.pad(&format!("{value:.0} {name}"))
                } else {
                    f.pad(&format!("{value:.1} {name}"))
                };
            }
        }
        f.pad(&format!("{} B", self.0))
    }
}

/// A size that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Reading the size {0:?}: write a number with a unit, such as 512M, 1.5G or 4096B (powers of 1024)")]
pub struct ParseBytesError(pub String);

/// Accepts `512M`, `512MiB`, `1.5g`, `4096B` (powers of 1024; parts of a byte are cut off), and no bare number.
impl FromStr for Bytes {
    type Err = ParseBytesError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseBytesError(text.to_owned());
        let trimmed = text.trim();
        let digits_end = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (digits, unit) = trimmed.split_at(digits_end);
        let (whole, part) = digits.split_once('.').unwrap_or((digits, "0"));
        let whole: u64 = whole.parse().map_err(|_| wrong())?;
        let tens = 10u128.checked_pow(part.len() as u32).ok_or_else(wrong)?;
        let part: u64 = part.parse().map_err(|_| wrong())?;
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "b" => 1,
            "k" | "kib" => KIB,
            "m" | "mib" => MIB,
            "g" | "gib" => GIB,
            "t" | "tib" => 1024 * GIB,
            _ => return Err(wrong()),
        };
        let part = (u128::from(part) * u128::from(factor) / tens) as u64;
        whole.checked_mul(factor).and_then(|bytes| bytes.checked_add(part)).map(Bytes).ok_or_else(wrong)
    }
}

/// A number of base pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageCount(pub u64);

impl PageCount {
    /// The bytes these pages hold.
    pub const fn bytes(self) -> Bytes {
        Bytes(self.0 << PAGE_SHIFT)
    }

    /// Units needed to cover this many pages from an aligned start, rounded up.
    pub const fn units_ceil(self) -> u64 {
        self.0.div_ceil(PAGES_PER_UNIT)
    }
}

impl Add for PageCount {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for PageCount {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for PageCount {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

/// The index of a base page inside one region: 0 is the region's first page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PageIdx(pub u64);

impl PageIdx {
    /// The page that holds the byte at `offset` from the start of the region.
    pub const fn containing(offset: u64) -> Self {
        Self(offset >> PAGE_SHIFT)
    }

    /// Byte offset of the page from the start of the region.
    pub const fn offset(self) -> u64 {
        self.0 << PAGE_SHIFT
    }

    /// The unit this page is in.
    pub const fn unit(self) -> u64 {
        self.0 >> UNIT_SHIFT
    }

    /// First page of unit `unit`.
    pub const fn first_of_unit(unit: u64) -> Self {
        Self(unit << UNIT_SHIFT)
    }
}

impl fmt::Display for PageIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p{:#x}", self.0)
    }
}

/// A host virtual address in the address space of one VMM process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Hva(pub u64);

impl Hva {
    /// The address of the start of the page this address is in.
    pub const fn page_start(self) -> Self {
        Self(self.0 & !(PAGE_SIZE as u64 - 1))
    }
}

impl Add<u64> for Hva {
    type Output = Self;
    fn add(self, offset: u64) -> Self {
        Self(self.0 + offset)
    }
}

impl fmt::Display for Hva {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_size_needs_a_unit_and_units_are_powers_of_1024() {
        assert_eq!("512M".parse(), Ok(Bytes(512 * MIB)));
        assert_eq!("2GiB".parse(), Ok(Bytes(2 * GIB)));
        assert_eq!(" 7 kib ".parse(), Ok(Bytes(7 * KIB)));
        assert_eq!("4096B".parse(), Ok(Bytes(4096)));
        assert_eq!("1.5G".parse(), Ok(Bytes(1536 * MIB)));
        assert_eq!("0.0001k".parse(), Ok(Bytes(0)));
        assert_eq!(format!("1.{}B", "9".repeat(19)).parse(), Ok(Bytes(1)));
        for wrong in ["", "512", "M", "1.5", ".5G", "1.G", "1.5.2G", "-1M", "5 parsecs", "99999999999T"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong:?} was accepted");
        }
    }

    #[test]
    fn a_size_prints_in_the_largest_unit_that_fits() {
        assert_eq!(Bytes(512 * MIB).to_string(), "512 MiB");
        assert_eq!(Bytes(3 * GIB / 2).to_string(), "1.5 GiB");
        assert_eq!(Bytes(100).to_string(), "100 B");
    }

    proptest! {
        #[test]
        fn page_and_offset_are_inverse(page in 0u64..1 << 40, within in 0u64..PAGE_SIZE as u64) {
            let page = PageIdx(page);
            prop_assert_eq!(PageIdx::containing(page.offset() + within), page);
            prop_assert!(PageIdx::first_of_unit(page.unit()) <= page);
            prop_assert!(page.0 - PageIdx::first_of_unit(page.unit()).0 < PAGES_PER_UNIT);
        }
    }
}
