//! The state of the policies between decisions.
//!
//! Before: nothing. After: each policy keeps its part of [`State`].
//! Threads: none.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::ladder::Ladder;
use crate::snapshot::Snapshot;
use crate::sums::Sums;

/// State of the policies between decisions. Each policy uses its own part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The host's state, with its history.
    pub ladder: Ladder,
    /// By VM id.
    pub vms: BTreeMap<String, VmState>,
}

/// State of the policies for one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmState {
    /// Time and restore count of past samples, oldest first, at most one window.
    pub restores: Vec<(u64, u64)>,
    /// The target at the last decision.
    pub target_bytes: Option<u64>,
    /// Estimated need of a VM that is not tracked.
    pub need: Option<Need>,
    /// State of the gain policy.
    pub gain: Sums,
    /// The pressure policy takes nothing before this time.
    pub pause_until_ms: u64,
    /// Length of the last pause.
    pub pause_ms: u64,
    /// Time at which the pressure policy last raised the limit.
    pub raised_at_ms: u64,
}

/// Estimated need of a VM that is not tracked, for Maestro.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// Time of the estimate.
    pub at_ms: u64,
    /// The estimate.
    pub bytes: u64,
    /// Restores until then.
    pub restores: u64,
}

impl State {
    /// The state of a VM, inserted if it is new.
    pub(crate) fn vm(&mut self, id: &str) -> &mut VmState {
        if !self.vms.contains_key(id) {
            self.vms.insert(id.to_owned(), VmState::default());
        }
        self.vms.get_mut(id).expect("inserted above")
    }

    pub(crate) fn keep_only(&mut self, snapshot: &Snapshot) {
        self.vms.retain(|id, _| snapshot.vms.iter().any(|vm| vm.id == *id));
    }
}
