//! What the API says about the control loop: who decides, what was decided, what another program wants.
//!
//! Before: `daemon` runs the loop; snapshots and plans are those of `ballast-policy`. After: JSON, and the OpenAPI
//! document. Units: in the field names.

use ballast_policy::{Decision, HostState, Kind, VmSample};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::types::present;

/// The control loop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PolicyStat {
    /// The policy.
    pub policy: Kind,
    /// How often.
    pub tick_ms: u64,
    /// DRAM for all guests together, as set; null is what the host can spare.
    pub budget_bytes: Option<u64>,
    /// The same, as it is now.
    pub effective_budget_bytes: u64,
    /// Maestro: over how long faults count.
    pub window_ms: u64,
    /// Pressure: the share of time a VM may stall.
    pub threshold: f64,
    /// Pressure: unused allowance a VM keeps.
    pub watermark_bytes: u64,
    /// How hard-pressed the host is; null while nobody decides.
    pub state: Option<HostState>,
    /// At the present rate, when no memory is free any more; null if never.
    pub exhaustion_ms: Option<u64>,
    /// Another program decides, for as long as this.
    pub lease: Option<LeaseStat>,
    /// Decisions since this engine started.
    pub ticks: u64,
    /// Limits they changed.
    pub changed_limits: u64,
}

/// Another program's right to decide.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseStat {
    /// What it calls itself.
    pub holder: String,
    /// It must put another plan before this is over.
    pub left_ms: u64,
}

/// A change to the control loop. Only the keys that are present change anything; unknown keys are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyPatch {
    /// The policy to use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Kind>,
    /// How often.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_ms: Option<u64>,
    /// DRAM for all guests together, or null for what the host can spare.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub budget_bytes: Option<Option<u64>>,
    /// Maestro: over how long faults count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_ms: Option<u64>,
    /// Pressure: the share of time a VM may stall.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
    /// Pressure: unused allowance a VM keeps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watermark_bytes: Option<u64>,
}

/// What another program wants. It decides until the lease is over; to go on, it puts another plan before that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// What the program calls itself: up to 64 letters, digits, `.`, `_` and `-`.
    pub policy: String,
    /// For how long it decides: 100 ms to 10 minutes.
    pub lease_ms: u64,
    /// VMs that are not named stay as they are.
    pub limits: Vec<PlanLimit>,
}

/// One VM in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanLimit {
    /// The VM.
    pub name: String,
    /// What it may have; rounded down to whole pages.
    pub limit_bytes: u64,
}

/// A decision about one VM, or several in a row with the same outcome for the same reasons.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DecisionRecord {
    /// When it was first made, milliseconds since 1970-01-01 00:00 UTC.
    pub first_unix_ms: u64,
    /// When it was last made.
    pub last_unix_ms: u64,
    /// How often in a row.
    pub times: u64,
    /// The policy or program that decided.
    pub policy: String,
    /// How hard-pressed the host was, the last time.
    pub host_state: HostState,
    /// What was known of the VM, the last time.
    pub vm: VmSample,
    /// What was decided, the last time.
    pub decision: Decision,
    /// Its reasons in words, in the same order.
    pub sentences: Vec<String>,
}
