//! The policies by name, and their settings.
//!
//! Before: settings, command line and API name a policy. After: the governor holds one as a [`Policy`].
//! Units: in the names. Promise: a value out of range is refused with the range.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::gain::Gain;
use crate::maestro::Maestro;
use crate::memory::Policy;
use crate::pressure::Pressure;

/// A policy that an operator can choose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// No policy: each VM has its operator's limit.
    #[default]
    None,
    /// Maestro's: by working set and fault counts, least squares.
    Maestro,
    /// Blowfish's: as little memory as the stall of each VM allows.
    Pressure,
    /// Memory goes to where one more byte saves most time of VM and host.
    Gain,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::None, Self::Maestro, Self::Pressure, Self::Gain];

    /// The name that operators type.
    pub const fn word(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Maestro => "maestro",
            Self::Pressure => "pressure",
            Self::Gain => "gain",
        }
    }

    /// The policy of that kind; none for [`Kind::None`].
    pub fn policy(self, params: Params) -> Option<Box<dyn Policy>> {
        Some(match self {
            Self::None => return None,
            Self::Maestro => Box::new(Maestro { window_ms: params.window_ms }),
            Self::Pressure => {
                Box::new(Pressure { threshold: params.threshold, watermark_bytes: params.watermark_bytes })
            }
            Self::Gain => Box::new(Gain),
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.word())
    }
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|kind| kind.word() == text);
        found.ok_or_else(|| format!("{text:?} is no policy; there are none, maestro, pressure and gain"))
    }
}

/// Settings of the policies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Params {
    /// Maestro's window W, over which faults count.
    pub window_ms: u64,
    /// Share of time a VM may stall before the pressure policy gives memory back. Blowfish uses 0.04.
    pub threshold: f64,
    /// Allowance beyond what is resident that the pressure policy leaves a VM before it takes cold memory.
    pub watermark_bytes: u64,
}

impl Params {
    /// Check that every value is in its range.
    ///
    /// # Errors
    /// The value and its range.
    pub fn check(&self) -> Result<(), String> {
        if !(100..=3_600_000).contains(&self.window_ms) {
            return Err(format!("a window of {} ms is out of range: 0.1 s to 3600 s", self.window_ms));
        }
        // Also false for NaN.
        if !(self.threshold > 0.0 && self.threshold <= 1.0) {
            return Err(format!("a threshold of {} is out of range: above 0, at most 1", self.threshold));
        }
        if self.watermark_bytes > 1 << 50 {
            return Err("a watermark of more than 1 PiB".into());
        }
        Ok(())
    }
}

impl Default for Params {
    fn default() -> Self {
        Self { window_ms: 10_000, threshold: 0.04, watermark_bytes: 100 * ballast_base::MIB }
    }
}

/// How the governor runs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Setup {
    /// The policy.
    pub policy: Kind,
    /// Time between two decisions. The default is Blowfish's interval (section 5.3).
    pub tick_ms: u64,
    /// DRAM for all guests together; `None`: as much as the host can spare.
    pub budget_bytes: Option<u64>,
    /// Parameters of the policies.
    pub params: Params,
}

impl Setup {
    /// Check that every value is in its range.
    ///
    /// # Errors
    /// The value and its range.
    pub fn check(&self) -> Result<(), String> {
        if !(10..=600_000).contains(&self.tick_ms) {
            return Err(format!("a tick of {} ms is out of range: 10 ms to 600 s", self.tick_ms));
        }
        if self.budget_bytes.is_some_and(|budget| budget < ballast_base::MIB) {
            return Err("a budget below 1 MiB".into());
        }
        self.params.check()
    }
}

impl Default for Setup {
    fn default() -> Self {
        Self { policy: Kind::None, tick_ms: 500, budget_bytes: None, params: Params::default() }
    }
}
