//! The settings of the governor.
//!
//! Before: the configuration or an operator names a policy. After: the governor asks it for a plan, once a tick.
//! Units: in the names. Promise: a value out of range is refused with the range.

use ballast_base::Invalid;
use serde::{Deserialize, Serialize};

use crate::kind::Kind;
use crate::memory::State;
use crate::snapshot::{Plan, Snapshot};
use crate::{gain, maestro, pressure};

/// Settings of the governor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The policy.
    pub policy: Kind,
    /// Time between two decisions. The default is Blowfish's interval (section 5.3).
    pub tick_ms: u64,
    /// DRAM for all guests together; `None`: as much as the host can spare.
    pub budget_bytes: Option<u64>,
    /// Share of the time that a VM may stall before the pressure policy returns memory. Blowfish uses 0.04.
    pub threshold: f64,
}

impl Setup {
    /// Checks that each value is in its range.
    ///
    /// # Errors
    /// The value and its range.
    pub fn check(&self) -> Result<(), Invalid> {
        if !(10..=600_000).contains(&self.tick_ms) {
            return Err(format!("a tick of {} ms is out of range: 10 ms to 600 s", self.tick_ms).into());
        }
        if self.budget_bytes.is_some_and(|budget| budget < ballast_base::MIB) {
            return Err("a budget below 1 MiB".into());
        }
        // Also false for NaN.
        if !(self.threshold > 0.0 && self.threshold <= 1.0) {
            return Err(format!("a threshold of {} is out of range: above 0, at most 1", self.threshold).into());
        }
        Ok(())
    }

    /// What the policy decides now; `None` if there is none. `state` is all that it remembers.
    pub fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Option<Plan> {
        match self.policy {
            Kind::None => None,
            Kind::Maestro => Some(maestro::decide(snapshot, state)),
            Kind::Pressure => Some(pressure::decide(self.threshold, snapshot, state)),
            Kind::Gain => Some(gain::decide(snapshot, state)),
        }
    }
}

impl Default for Setup {
    fn default() -> Self {
        Self { policy: Kind::None, tick_ms: 500, budget_bytes: None, threshold: 0.04 }
    }
}
