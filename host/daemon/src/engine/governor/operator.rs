//! The operator's settings of a VM, as words of its state file.
//!
//! Promise: a zero word has no meaning, so a state file without these words has the defaults. A value out of range,
//! which only damage can leave, becomes the nearest one in range.

use ballast_handover::state_file::SETTINGS;
use ballast_policy::settings::{MAX_HEADROOM_PERCENT, MAX_SHARES};
use ballast_policy::{Class, Settings};

const GUARANTEED: u64 = 1;
const BEST_EFFORT: u64 = 2;

/// The words of the state file: class, reservation, protect, shares plus one, headroom.
pub fn write(settings: &Settings) -> [u64; SETTINGS] {
    let class = match settings.class {
        // Each engine finds out itself whether a VM is pinned.
        Class::Burstable | Class::Pinned => 0,
        Class::Guaranteed => GUARANTEED,
        Class::BestEffort => BEST_EFFORT,
    };
    let shares = settings.shares.map_or(0, |shares| u64::from(shares) + 1);
    [class, settings.reservation_bytes, settings.protect_bytes, shares, settings.headroom_percent.into()]
}

pub fn read([class, reservation_bytes, protect_bytes, shares, headroom]: [u64; SETTINGS]) -> Settings {
    Settings {
        class: match class {
            GUARANTEED => Class::Guaranteed,
            BEST_EFFORT => Class::BestEffort,
            _ => Class::Burstable,
        },
        reservation_bytes,
        protect_bytes,
        shares: shares.checked_sub(1).map(|shares| shares.min(MAX_SHARES.into()) as u32),
        headroom_percent: headroom.min(MAX_HEADROOM_PERCENT.into()) as u32,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_read_as_written_and_zeros_are_the_defaults() {
        assert_eq!(read([0; SETTINGS]), Settings::default());
        assert_eq!(write(&Settings::default()), [0; SETTINGS]);
        for (class, shares) in [(Class::Guaranteed, Some(0)), (Class::BestEffort, Some(2000)), (Class::Burstable, None)]
        {
            let settings =
                Settings { class, reservation_bytes: 1 << 40, protect_bytes: 7, shares, headroom_percent: 20 };
            assert_eq!(read(write(&settings)), settings);
        }
        let damaged = read([u64::MAX; SETTINGS]);
        assert_eq!(
            (damaged.class, damaged.shares, damaged.headroom_percent),
            (Class::Burstable, Some(MAX_SHARES), 400)
        );
    }
}
