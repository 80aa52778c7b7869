//! Moment: a time in four bytes. Units: tenths of a second since tracking began.

use std::time::Duration;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(pub u32);

impl Moment {
    /// Rounded down; at most 13 years.
    pub fn at(since_start: Duration) -> Self {
        Self(u32::try_from(since_start.as_millis() / 100).unwrap_or(u32::MAX))
    }

    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(u64::from(self.0.saturating_sub(earlier.0)) * 100)
    }
}
