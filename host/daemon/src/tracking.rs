//! Whether VMs are tracked, and what tracking may cost: the table `[heat]` of the settings.
//!
//! Before: `config` reads it, `settings` passes it on. After: the engine opens each VM with it. An operator may set
//! another `track` for a VM through the API, which holds until the VM's engine is replaced.

use anyhow::ensure;
use ballast_heat::Settings;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tracking {
    pub track: bool,
    /// Most cost, in percent of one CPU; the waits of guest threads may cost as much again.
    pub cost_percent: f64,
}

impl Default for Tracking {
    fn default() -> Self {
        Self { track: false, cost_percent: 3.0 }
    }
}

impl Tracking {
    pub fn validate(&self) -> anyhow::Result<()> {
        let cost = self.cost_percent;
        ensure!((0.01..=100.0).contains(&cost), "heat.cost_percent = {cost} is out of range: 0.01 to 100");
        Ok(())
    }

    /// The settings for the tracker of a VM. `is_placed`: whether its memory is placed by heat. Each of the tracker's
    /// two phases gets half of the cost.
    pub fn settings(&self, is_placed: bool) -> Settings {
        Settings { budget: self.cost_percent / 100.0 / 2.0, is_placed, ..Settings::default() }
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
