//! What the API says about upgrades.
//!
//! Before: the keeper tells the engine how an upgrade goes. After: JSON, and the document in `openapi`. Units: in the
//! field names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An upgrade that is wanted. Unknown keys are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// The absolute path of the `ballastd` that the next engine is started from; null for the one that engines are
    /// started from anyway, which may have been replaced.
    #[serde(default)]
    pub program: Option<String>,
}

/// Where an upgrade is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UpgradeStage {
    /// There was none since the keeper started.
    #[default]
    None,
    /// The successor looks at every VM and changes nothing; the engine serves as before.
    Checking,
    /// VMs go to the successor, a few at a time.
    Switching,
    /// It failed while VMs moved: they go back to the engine that had them.
    Returning,
    /// The successor serves all VMs, and its predecessor is gone.
    Done,
    /// The engine serves on as if nothing had been.
    Failed,
}

/// The last upgrade.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeStat {
    /// Counts the upgrades since the keeper started.
    pub number: u64,
    /// What the successor was started from.
    pub program: String,
    /// Where it is.
    pub stage: UpgradeStage,
    /// VMs that there were when it began.
    pub vms: u32,
    /// VMs that the successor has looked through.
    pub checked: u32,
    /// VMs that the successor serves.
    pub moved: u32,
    /// How long it took, or has taken so far, in microseconds.
    pub took_us: u64,
    /// The longest time for which a VM was served by no engine, in microseconds.
    pub longest_gap_us: u64,
    /// The longest time for which two engines had a VM, so that its faults were served and nothing was reclaimed.
    #[serde(default)]
    pub longest_switch_us: u64,
    /// Why it failed; empty otherwise.
    pub message: String,
    /// Whether the keeper is the new program's, too; null before that is known.
    #[serde(default)]
    pub keeper_replaced: Option<bool>,
    /// Why it is not; empty otherwise.
    #[serde(default)]
    pub keeper_message: String,
}
