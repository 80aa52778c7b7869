//! The age byte of a page's word: what quarantine taught about it.
//!
//! Before: a fault lane rescued a page that was picked wrongly. After: [`crate::HeatSource`] passes it over for a while.
//! A page that fails the test of quarantine (it was touched) is passed over for 1, 3, 7, then 15 rounds, so that the hot
//! set of a VM under pressure pays for a minor fault ever more seldom, and one that cools down is found again.
//!
//! Units: rounds in which the page was looked at, not seconds. Promise: pure.

/// The age byte of a page: rounds to be passed over yet, and how often in a row it was rescued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Age {
    /// Rounds that still pass the page over.
    pub credit: u8,
    /// Rescues in a row, 0 to [`Age::MAX_LEVEL`].
    pub level: u8,
}

impl Age {
    /// Rescues beyond this many earn no more credit: 2^4 - 1 = 15 rounds fill the four bits of the credit.
    pub const MAX_LEVEL: u8 = 4;

    /// Unpack.
    pub const fn from_byte(byte: u8) -> Self {
        Self { credit: byte & 0xF, level: byte >> 4 }
    }

    /// Pack.
    pub const fn byte(self) -> u8 {
        self.level << 4 | self.credit
    }
}

/// The age of a page that was touched in quarantine.
pub fn touched(age: u8) -> u8 {
    let level = (Age::from_byte(age).level + 1).min(Age::MAX_LEVEL);
    Age { credit: (1 << level) - 1, level }.byte()
}
