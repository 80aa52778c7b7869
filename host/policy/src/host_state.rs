//! The states of the host's free memory, by name.
//!
//! Before: `ladder` computes one. After: snapshots and reasons contain it. Promise: the order is from good to bad.

use std::fmt;

use serde::{Deserialize, Serialize};

/// State of the host's free memory, from good to bad.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum HostState {
    /// Memory is free.
    #[default]
    High,
    /// It becomes less.
    Clear,
    /// It is short.
    Soft,
    /// It is very short: plans divide less than the budget.
    Hard,
    /// It is nearly gone: they divide still less.
    Low,
}

impl HostState {
    /// All, from good to bad.
    pub const ALL: [Self; 5] = [Self::High, Self::Clear, Self::Soft, Self::Hard, Self::Low];
}

impl fmt::Display for HostState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}
