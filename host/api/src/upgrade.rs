//! Upgrades in the API.
//!
//! Before: the keeper tells the engine the state of an upgrade. After: JSON, and schemas of the OpenAPI document.
//! Units: in the field names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A request to upgrade. Unknown keys are refused.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Absolute path of the `ballastd` from which the next engine is started; null: the file from which engines are
    /// started now, which may have been replaced.
    #[serde(default)]
    pub program: Option<String>,
}

/// Stage of an upgrade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum UpgradeStage {
    /// There was none since the keeper started.
    #[default]
    None,
    /// The new engine checks every VM and changes nothing; the old engine serves.
    Checking,
    /// VMs move to the new engine, a few at a time.
    Switching,
    /// It failed while VMs moved: they go back to the old engine.
    Returning,
    /// The new engine serves all VMs, and the old one is gone.
    Done,
    /// It failed; the old engine serves all VMs.
    Failed,
}

/// The last upgrade.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UpgradeStat {
    /// Number of the upgrade, counted since the keeper started.
    pub number: u64,
    /// Path of the new engine's program.
    pub program: String,
    /// Its stage.
    pub stage: UpgradeStage,
    /// Number of VMs when it began.
    pub vms: u32,
    /// Number of VMs that the new engine has checked.
    pub checked: u32,
    /// Number of VMs that the new engine serves.
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
    /// Whether the keeper became the new program as well; null until that is known.
    #[serde(default)]
    pub keeper_replaced: Option<bool>,
    /// Why it did not; empty otherwise.
    #[serde(default)]
    pub keeper_message: String,
}
