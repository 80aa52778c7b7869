//! The figures of an adopted VM that other VMs do not have. It was started without Ballast, and the kernel moves its
//! pages.
//!
//! Before: `daemon` finds a VMM and counts its pages. After: JSON on a socket, and schemas of the OpenAPI document.
//! Units: in the field names. Promise: an adopted VM's `VmStat` has figures from the kernel or from a count of its
//! pages. Figures that only the pager can know (quarantine, latencies, stores) are 0 or null.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The mover of a VM's pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmKind {
    /// Ballast: the VM was started for it.
    #[default]
    Paged,
    /// The kernel, to its swap: the VM ran already.
    Adopted,
}

impl fmt::Display for VmKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// How memory of an adopted VM goes to swap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AdoptedBy {
    /// `process_madvise(MADV_PAGEOUT)`: Ballast names the pages, those that came in first.
    #[default]
    Pageout,
    /// `memory.reclaim` of its cgroup: the kernel picks its coldest pages.
    Reclaim,
}

/// Where the stall of an adopted VM comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum StallSource {
    /// Restores times the time that one took when swap was tried.
    #[default]
    Estimated,
    /// `memory.pressure` of its cgroup.
    Cgroup,
}

/// What only an adopted VM has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AdoptedStat {
    /// How its memory goes.
    pub by: AdoptedBy,
    /// The cgroup that is reclaimed from.
    pub cgroup: Option<String>,
    /// Why its cgroup is not used.
    pub cgroup_reason: Option<String>,
    /// When its pages were counted. Since then the kernel's counters of the process say what changed.
    pub scanned_unix_ms: u64,
    /// Where its stall comes from.
    pub stall_source: StallSource,
    /// Bytes that may still go to swap, by the host's room and by its cgroups.
    pub swap_room_bytes: u64,
}
