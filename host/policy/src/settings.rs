//! An operator's settings of a VM, and the settings that contradict each other.
//!
//! Before: API and command line parse them. After: they bound every plan.
//! Promise: a refusal names the settings that contradict each other, with their values.

use std::fmt;
use std::str::FromStr;

use ballast_base::{Bytes, Invalid};
use serde::de::{IntoDeserializer, value};
use serde::{Deserialize, Serialize};

/// Default shares.
pub const NORMAL_SHARES: u32 = 1000;
/// Shares named low.
pub const LOW_SHARES: u32 = 500;
/// Shares named high.
pub const HIGH_SHARES: u32 = 2000;
/// Most shares.
pub const MAX_SHARES: u32 = 100_000;
/// Most headroom.
pub const MAX_HEADROOM_PERCENT: u32 = 400;

/// The class of a VM, which sets defaults for the other settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// All its memory is reserved unless a smaller reservation is given.
    Guaranteed,
    /// Nothing is reserved unless a reservation is given; normal shares.
    #[default]
    Burstable,
    /// Low shares, and no reservation.
    BestEffort,
    /// Never reclaimed, because that would break something. Found by Ballast, not set.
    Pinned,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Class {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found: Result<Self, value::Error> = Self::deserialize(text.into_deserializer());
        found.map_err(|_| format!("{text:?} is no class; there are guaranteed, burstable and besteffort").into())
    }
}

/// An operator's settings of a VM. The default sets nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// The class.
    pub class: Class,
    /// DRAM that no plan takes; 0 means the class's default.
    pub reservation_bytes: u64,
    /// DRAM that is taken only when no VM has more than its own protected memory.
    pub protect_bytes: u64,
    /// Weight when memory is short: 500, 1000, 2000 or any number; 0 means hands off. Null means the class's default.
    pub shares: Option<u32>,
    /// Memory beyond the working set, in percent of it.
    pub headroom_percent: u32,
}

impl Settings {
    /// The weight.
    pub fn effective_shares(&self) -> u32 {
        self.shares.unwrap_or(match self.class {
            Class::BestEffort => LOW_SHARES,
            _ => NORMAL_SHARES,
        })
    }

    /// The reservation of a VM that may have at most `most` bytes.
    pub fn effective_reservation(&self, most: u64) -> u64 {
        match (self.reservation_bytes, self.class) {
            (0, Class::Guaranteed) => most,
            (reservation, _) => reservation.min(most),
        }
    }

    /// The settings that contradict each other, or a VM of this size and limit.
    pub fn contradiction(&self, size: u64, limit: Option<u64>) -> Option<String> {
        let of = |bytes: u64| Bytes(bytes);
        let (reservation, protect) = (self.reservation_bytes, self.protect_bytes);
        let most = limit.map_or(size, |limit| limit.min(size));
        if self.class == Class::Pinned {
            return Some("the class pinned is found by Ballast and cannot be set; guaranteed keeps all memory".into());
        }
        if self.class == Class::BestEffort && reservation > 0 {
            return Some(format!(
                "a VM of class besteffort has no reservation, and one of {} is asked",
                of(reservation)
            ));
        }
        if reservation > size {
            return Some(format!("a reservation of {} is more than the VM's size, {}", of(reservation), of(size)));
        }
        if let Some(limit) = limit.filter(|limit| reservation > *limit) {
            return Some(format!("a reservation of {} is more than the limit, {}", of(reservation), of(limit)));
        }
        if protect > most {
            return Some(format!("protecting {} is more than the VM may have, {}", of(protect), of(most)));
        }
        if protect > 0 && protect < reservation {
            return Some(format!(
                "protecting {} does nothing beside a reservation of {}",
                of(protect),
                of(reservation)
            ));
        }
        if let Some(shares) = self.shares.filter(|shares| *shares > MAX_SHARES) {
            return Some(format!("{shares} shares are out of range: 0 to {MAX_SHARES}"));
        }
        if self.headroom_percent > MAX_HEADROOM_PERCENT {
            return Some(format!(
                "a headroom of {} % is out of range: 0 to {MAX_HEADROOM_PERCENT}",
                self.headroom_percent
            ));
        }
        None
    }

    /// Warnings about settings that are allowed but probably not intended.
    pub fn warnings(&self, size: u64, limit: Option<u64>) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(limit) = limit.filter(|limit| *limit < size) {
            let (limit, size) = (Bytes(limit), Bytes(size));
            warnings.push(format!(
                "the limit of {limit} is below the size of {size}, also when the host has memory to spare"
            ));
        }
        if self.effective_shares() == 0 && (self.reservation_bytes > 0 || self.protect_bytes > 0) {
            warnings.push("shares are 0, so no policy takes anything: reservation and protect do nothing".into());
        }
        warnings
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::{GIB, MIB};

    #[test]
    fn settings_that_contradict_each_other_are_refused_with_their_values() {
        let none = Settings::default();
        let cases = [
            (Settings { reservation_bytes: 3 * GIB, ..none }, None, "size, 2 GiB"),
            (Settings { reservation_bytes: GIB, ..none }, Some(512 * MIB), "limit, 512 MiB"),
            (Settings { protect_bytes: GIB, ..none }, Some(512 * MIB), "may have, 512 MiB"),
            (Settings { protect_bytes: MIB, reservation_bytes: GIB, ..none }, None, "does nothing"),
            (Settings { class: Class::BestEffort, reservation_bytes: MIB, ..none }, None, "besteffort"),
            (Settings { class: Class::Pinned, ..none }, None, "guaranteed keeps"),
            (Settings { shares: Some(MAX_SHARES + 1), ..none }, None, "0 to 100000"),
            (Settings { headroom_percent: 401, ..none }, None, "0 to 400"),
        ];
        for (settings, limit, text) in cases {
            let refused = settings.contradiction(2 * GIB, limit).unwrap_or_else(|| panic!("{settings:?} was accepted"));
            assert!(refused.contains(text), "{settings:?}: {refused}");
        }
        assert_eq!(none.contradiction(2 * GIB, Some(MIB)), None);
    }

    #[test]
    fn a_class_sets_defaults_for_the_other_settings() {
        let guaranteed = Settings { class: Class::Guaranteed, ..Settings::default() };
        assert_eq!(guaranteed.effective_reservation(GIB), GIB);
        assert_eq!(Settings { reservation_bytes: MIB, ..guaranteed }.effective_reservation(GIB), MIB);
        assert_eq!(Settings { class: Class::BestEffort, ..Settings::default() }.effective_shares(), LOW_SHARES);
        assert_eq!(Settings { shares: Some(0), ..guaranteed }.effective_shares(), 0);
    }

    #[test]
    fn a_limit_below_the_size_is_warned_of() {
        assert_eq!(Settings::default().warnings(GIB, Some(GIB)), Vec::<String>::new());
        assert!(Settings::default().warnings(GIB, Some(MIB))[0].contains("below the size"));
    }
}
