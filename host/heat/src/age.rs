//! The age byte of a page's word: recent quarantine hits of the page.
//!
//! Before: a page was touched in quarantine (a *quarantine hit*). After: [`crate::HeatSource`] skips it for some
//! rounds: for 1 round after the first hit, then 3, 7, and 15. So the hot set of a VM under pressure has fewer and
//! fewer minor faults, and a page that cools down is still found.
//!
//! Units: rounds in which the page was a candidate, not seconds. Promise: pure.

/// The age byte of a page: how many more rounds skip it, and how many quarantine hits it had in a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// Rounds that still skip the page.
    pub credit: u8,
    /// Quarantine hits in a row, 0 to [`Age::MAX_LEVEL`].
    pub level: u8,
}

impl Age {
    /// Hits beyond this number earn no more credit: 2^4 - 1 = 15 rounds fill the four bits of the credit.
    pub const MAX_LEVEL: u8 = 4;

    /// Unpacks a byte.
    pub const fn from_byte(byte: u8) -> Self {
        Self { credit: byte & 0xF, level: byte >> 4 }
    }

    /// Packs the byte.
    pub const fn byte(self) -> u8 {
        self.level << 4 | self.credit
    }
}

/// The age of a page that was touched in quarantine.
pub fn touched(age: u8) -> u8 {
    let level = (Age::from_byte(age).level + 1).min(Age::MAX_LEVEL);
    Age { credit: (1 << level) - 1, level }.byte()
}
