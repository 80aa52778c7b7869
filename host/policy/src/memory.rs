//! The trait of a policy, and the state that it keeps from one decision to the next.
//!
//! Before: nothing. After: each policy implements [`Policy`] and keeps its part of [`State`].
//! Threads: none. Promise: the state serialises, so that a recording can be replayed.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ladder::Ladder;
use crate::snapshot::{Plan, Snapshot};
use crate::sums::Sums;

/// One way to divide memory. In-tree policies implement this; other programs use the API.
pub trait Policy: fmt::Debug + Send + Sync {
    /// The name that operators type.
    fn name(&self) -> &'static str;

    /// Decide what each VM may have now. `state` is all that the policy remembers between decisions.
    fn decide(&self, snapshot: &Snapshot, state: &mut State) -> Plan;
}

/// State of the policies between decisions. Each policy uses its own part.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct State {
    /// The host's state, and the time since which it holds.
    pub ladder: Ladder,
    /// By VM id.
    pub vms: BTreeMap<String, VmState>,
}

/// State of the policies for one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct VmState {
    /// Time and restore count of past samples, oldest first, one window at most.
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
    /// When the pressure policy last raised the limit.
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
    /// Return the state of a VM; insert it if it is new.
    pub(crate) fn vm(&mut self, id: &str) -> &mut VmState {
        if !self.vms.contains_key(id) {
            self.vms.insert(id.to_owned(), VmState::default());
        }
        self.vms.get_mut(id).expect("inserted above")
    }

    /// Forget VMs that the snapshot does not have.
    pub(crate) fn keep_only(&mut self, snapshot: &Snapshot) {
        self.vms.retain(|id, _| snapshot.vms.iter().any(|vm| vm.id == *id));
    }
}
