//! The policies by name.
//!
//! Before: settings, command line and API name a policy. After: [`crate::Setup`] has it.

use std::fmt;
use std::str::FromStr;

use ballast_base::Invalid;
use serde::de::{IntoDeserializer, value};
use serde::{Deserialize, Serialize};

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

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

impl FromStr for Kind {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let found: Result<Self, value::Error> = Self::deserialize(text.into_deserializer());
        found.map_err(|_| format!("{text:?} is no policy; there are none, maestro, pressure and gain").into())
    }
}
