//! The governor in the API: its settings, its decisions, and plans of another program.
//!
//! Before: `daemon` runs the loop; snapshots and plans are those of `ballast-policy`. After: JSON, and the OpenAPI
//! document. Units: in the field names.

use ballast_policy::{Decision, HostState, Kind, VmSample};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::types::present;

/// State of the governor.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PolicyStat {
    /// The policy.
    pub policy: Kind,
    /// How often.
    pub tick_ms: u64,
    /// DRAM for all guests together, as set; null: as much as the host can spare.
    pub budget_bytes: Option<u64>,
    /// The value in effect.
    pub effective_budget_bytes: u64,
    /// Pressure: the share of time a VM may stall.
    pub threshold: f64,
    /// Pressure on the host's memory; null while no policy decides.
    pub state: Option<HostState>,
    /// Time until no memory is free at the present rate; null if never.
    pub exhaustion_ms: Option<u64>,
    /// The lease of a program that decides instead of the policy; null if there is none.
    pub lease: Option<LeaseStat>,
    /// Ticks since this engine started.
    pub ticks: u64,
    /// Limits changed in these ticks.
    pub changed_limits: u64,
}

/// Another program's right to decide.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LeaseStat {
    /// Name of the program.
    pub holder: String,
    /// Time in which it must put another plan.
    pub left_ms: u64,
}

/// A change to the governor. Only the keys that are present change anything; unknown keys are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub struct PolicyPatch {
    /// The policy to use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub policy: Option<Kind>,
    /// How often.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tick_ms: Option<u64>,
    /// DRAM for all guests together; null: as much as the host can spare.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub budget_bytes: Option<Option<u64>>,
    /// Pressure: the share of time a VM may stall.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub threshold: Option<f64>,
}

/// A plan of another program. The program decides until the lease ends; to go on, it puts another plan before that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanRequest {
    /// Name of the program: up to 64 letters, digits, `.`, `_` and `-`.
    pub policy: String,
    /// Length of the lease: 100 ms to 10 minutes.
    pub lease_ms: u64,
    /// Limits by VM. VMs that are not named keep theirs.
    pub limits: Vec<PlanLimit>,
}

/// The limit of one VM in a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PlanLimit {
    /// The VM.
    pub name: String,
    /// The limit; rounded down to whole pages.
    pub limit_bytes: u64,
}

/// A decision about one VM, or several in a row with the same outcome for the same reasons.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct DecisionRecord {
    /// When it was first made, milliseconds since 1970-01-01 00:00 UTC.
    pub first_unix_ms: u64,
    /// When it was last made.
    pub last_unix_ms: u64,
    /// How often it was made in a row.
    pub times: u64,
    /// The policy or program that decided.
    pub policy: String,
    /// Pressure on the host's memory, the last time.
    pub host_state: HostState,
    /// The sample of the VM, the last time.
    pub vm: VmSample,
    /// The decision, the last time.
    pub decision: Decision,
    /// Its reasons in words, in the same order.
    pub sentences: Vec<String>,
}
