//! When VMs are tracked, and the cost of that: the table `[heat]` of the settings.
//!
//! Before: `config` reads it, `settings` passes it on. After: the engine opens each VM with it; an operator
//! may set another `track` for a VM through the API, which holds until the VM's engine is replaced.

use anyhow::ensure;
use ballast_api::Track;
use ballast_heat::Settings;
use ballast_heat::pace::Budget;
use serde::{Deserialize, Serialize};

/// The settings of tracking.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracking {
    /// When to track which memory is hot.
    pub track: Track,
    /// Most cost, in percent of one CPU, and as much again of the time that guest threads wait.
    pub cost_percent: f64,
}

impl Default for Tracking {
    fn default() -> Self {
        Self { track: Track::Off, cost_percent: 3.0 }
    }
}

impl Tracking {
    /// Is every value in its range?
    pub fn validate(&self) -> anyhow::Result<()> {
        let cost = self.cost_percent;
        ensure!((0.01..=100.0).contains(&cost), "heat.cost_percent = {cost} is out of range: 0.01 to 100");
        Ok(())
    }

    /// The same for the tracker of a VM, whose memory is placed by heat or not. Each of its two phases gets half.
    pub fn settings(&self, is_placed: bool) -> Settings {
        let each = self.cost_percent / 100.0 / 2.0;
        Settings { budget: Budget { cpu: each, guest: each }, is_placed, ..Settings::default() }
    }
}

/// When to track a VM at first. Its memory is placed by heat (`[tier]`), so it is tracked then.
pub fn at_first(track: Track, is_placed: bool) -> ballast_pager::vm::tuning::Track {
    to_pager(if is_placed { Track::On } else { track })
}

/// The API's word as the pager's.
pub fn to_pager(track: Track) -> ballast_pager::vm::tuning::Track {
    use ballast_pager::vm::tuning::Track as Pager;
    match track {
        Track::Auto => Pager::Auto,
        Track::On => Pager::On,
        Track::Off => Pager::Off,
    }
}

/// And back.
pub fn from_pager(track: ballast_pager::vm::tuning::Track) -> Track {
    use ballast_pager::vm::tuning::Track as Pager;
    match track {
        Pager::Auto => Track::Auto,
        Pager::On => Track::On,
        Pager::Off => Track::Off,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_of_the_settings_file_is_that_of_the_tracker() {
        assert_eq!(Tracking::default().settings(false), Settings::default());
    }
}
