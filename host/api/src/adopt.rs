//! Requests to adopt VMs, and their results.
//!
//! Before: an operator names VMs that run already, or all. After: `daemon` has adopted them or says why not.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::types::VmStat;

/// VMs to adopt: one by its process or by its name, or every VMM of this host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AdoptRequest {
    /// The VMM's process id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// The VM's name on its VMM's command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The name that it is to have here; absent: its own, or `vm-PID`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// A VMM that was not adopted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdoptRefusal {
    /// Its process id.
    pub pid: u32,
    /// Why.
    pub reason: String,
}

/// The result of adopting.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct AdoptResult {
    /// The VMs that are adopted now and were not before.
    pub adopted: Vec<VmStat>,
    /// VMMs that could not be adopted.
    pub refused: Vec<AdoptRefusal>,
}
