//! Input and output of a policy.
//!
//! Before: the daemon reads counters. After: it sets limits; `explain` shows the rest.
//! Units: in the names; `at_ms` is on any clock that only goes forward, and only differences mean something.
//! Promise: policies do not rely on a consistent snapshot: sums may be off by pages that moved while they were read.

use ballast_base::{Bytes, GIB};
use serde::{Deserialize, Serialize};

use crate::host_state::HostState;
use crate::reason::Reason;
use crate::settings::Settings;

/// Everything a policy may read.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Snapshot {
    /// Time, in milliseconds of a monotonic clock.
    pub at_ms: u64,
    /// The host.
    pub host: HostSample,
    /// Its VMs.
    pub vms: Vec<VmSample>,
}

/// The host's part of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct HostSample {
    /// DRAM that all guests together may use: most that limits may sum up to.
    pub budget_bytes: u64,
    /// DRAM that is available on the host.
    pub free_bytes: u64,
    /// Free memory below which the host is short; host states are fractions of it.
    pub min_free_bytes: u64,
    /// Most guest memory that the stores can hold, by their budgets and compression ratios.
    pub far_capacity_bytes: u64,
    /// No VM is given less than this.
    pub smallest_bytes: u64,
}

/// 1/FREE_PART of a host's memory should stay free, at most MOST_FREE.
const FREE_PART: u64 = 64;
const MOST_FREE: u64 = GIB;

impl HostSample {
    /// Returns `min_free_bytes` of a host with this much memory.
    pub fn min_free(total_bytes: u64) -> u64 {
        (total_bytes / FREE_PART).min(MOST_FREE)
    }
}

/// A VM's part of a snapshot.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct VmSample {
    /// The name that operators use.
    pub name: String,
    /// Unique; never used again.
    pub id: String,
    /// All guest RAM.
    pub size_bytes: u64,
    /// In DRAM.
    pub resident_bytes: u64,
    /// In a store.
    pub far_bytes: u64,
    /// Known to be zero: costs nothing.
    pub zero_bytes: u64,
    /// Never touched, or discarded by the guest: costs nothing.
    pub untouched_bytes: u64,
    /// The operator's limit, which no plan exceeds.
    pub limit_bytes: Option<u64>,
    /// Limit of the last plan.
    pub target_bytes: Option<u64>,
    /// The operator's settings.
    pub settings: Settings,
    /// Why reclaim is held, if so. Plans leave such a VM alone.
    pub held: Option<String>,
    /// Working set, if the VM is tracked.
    pub working_set_bytes: Option<u64>,
    /// Bytes that one restore brings: 4 KiB, or 2 MiB where huge pages are paged as one.
    pub page_bytes: u64,
    /// Restores since the VM attached, by fault or readahead.
    pub restores: u64,
    /// Sum of all refault intervals: pages (of `page_bytes`) times milliseconds.
    pub refault_page_ms: u64,
    /// Sum of one over each refault interval, in 1/1000 Hz.
    pub refault_milli_hz: u64,
    /// Share of the time since the last snapshot in which some thread waited for its memory, 0 to 1.
    pub stall: f64,
    /// The kernel's figure, where the VM has a cgroup of its own.
    pub kernel_stall: Option<f64>,
}

impl VmSample {
    /// Returns the larger of the two stalls; not a number counts as 0.
    pub fn worst_stall(&self) -> f64 {
        let sane = |stall: f64| if stall.is_finite() { stall.clamp(0.0, 1.0) } else { 0.0 };
        sane(self.stall).max(self.kernel_stall.map_or(0.0, sane))
    }

    /// Returns the most memory that the VM may have: its size, or the operator's limit.
    pub fn most_bytes(&self) -> u64 {
        self.limit_bytes.map_or(self.size_bytes, |limit| limit.min(self.size_bytes))
    }

    /// Returns the headroom that belongs to a working set of this size.
    pub fn headroom_of(&self, working_set_bytes: u64) -> u64 {
        (working_set_bytes as f64 * f64::from(self.settings.headroom_percent) / 100.0) as u64
    }

    /// Returns the working set plus headroom, if the working set is measured and headroom is set.
    pub fn with_headroom_bytes(&self) -> Option<u64> {
        let bytes = self.working_set_bytes.filter(|_| self.settings.headroom_percent > 0)?.min(self.size_bytes);
        Some(bytes.saturating_add(self.headroom_of(bytes)))
    }
}

/// The decisions of a policy for all VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Plan {
    /// Time of the snapshot.
    pub at_ms: u64,
    /// The policy or program that decided.
    pub policy: String,
    /// The host, as decided now.
    pub host_state: HostState,
    /// Time until no memory is free at the present rate; null if never.
    pub exhaustion_ms: Option<u64>,
    /// Memory that was divided among the VMs with a limit.
    pub divided_bytes: u64,
    /// One for each VM of the snapshot, in its order.
    pub decisions: Vec<Decision>,
}

/// Action for a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Set this limit.
    Limit,
    /// Remove the limit that a plan set; the operator's limit stays.
    Free,
    /// Change nothing.
    #[default]
    Leave,
}

/// Decision about one VM, and its reasons.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(utoipa::ToSchema))]
pub struct Decision {
    /// The VM.
    pub name: String,
    /// Its id.
    pub id: String,
    /// The action.
    pub action: Action,
    /// The new limit, for [`Action::Limit`].
    pub limit_bytes: Option<u64>,
    /// The one before.
    pub before_bytes: Option<u64>,
    /// Its reasons, most important first.
    pub reasons: Vec<Reason>,
}

impl Decision {
    /// Returns the VM's limit after the decision.
    pub fn after_bytes(&self) -> Option<u64> {
        match self.action {
            Action::Limit => self.limit_bytes,
            Action::Free => None,
            Action::Leave => self.before_bytes,
        }
    }

    /// The decision in words: `may use 2 GiB`.
    pub fn words(&self) -> String {
        match (self.action, self.after_bytes()) {
            (Action::Leave, _) => "is left alone".into(),
            (_, None) => "may use all its memory".into(),
            (_, Some(limit)) => format!("may use {}", Bytes(limit)),
        }
    }

    /// Returns whether the decision changes the limit.
    pub fn changes(&self) -> bool {
        self.after_bytes() != self.before_bytes
    }
}
