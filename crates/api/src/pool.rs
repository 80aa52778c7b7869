//! The pool: what is reserved for VMs, who has it, and changes to that.
//!
//! Before: the daemon's pool. After: the CLI, and anyone's tools, read them. Units: bytes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolStat {
    /// Size of its files, each of which belongs to one VM at a time; 0: nothing was ever reserved.
    pub file_bytes: u64,
    /// Its nodes.
    pub nodes: Vec<PoolNode>,
    /// The VMs that have memory of it.
    pub vms: Vec<PoolVm>,
    /// What the last change did not bring, and why.
    pub notes: Vec<String>,
    /// To be zeroed, but somebody still holds the pages.
    pub waiting_bytes: u64,
    /// Memory of the pool's own state.
    pub metadata_bytes: u64,
    /// `struct page`s that the kernel has freed (HVO).
    pub vmemmap_freed_bytes: u64,
    /// Lent at most while the host is short; 0: by command alone.
    #[serde(default)]
    pub lent_when_short_bytes: u64,
}

/// A node of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolNode {
    /// What the host calls it.
    pub numa: u32,
    /// What the pool has of it.
    pub reserved_bytes: u64,
    /// Zeroed, and for any VM.
    pub ready_bytes: u64,
    /// Part of that, in whole aligned GiB.
    pub ready_gib_bytes: u64,
    /// VMs have it.
    pub used_bytes: u64,
    /// Zeroed, but in a file that a VM has a part of.
    pub fenced_bytes: u64,
    /// To be zeroed, or being zeroed.
    pub dirty_bytes: u64,
    /// Lent to the host.
    pub lent_bytes: u64,
    /// Its memory failed.
    pub failed_bytes: u64,
    /// A letter for each file: `U` a VM has all of it, `u` a part, `-` free, `z` to be zeroed, `l` some of it is lent,
    /// `.` not reserved, `F` memory of it failed.
    pub map: String,
}

/// A VM that has memory of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolVm {
    /// The name under which it asked.
    pub name: String,
    /// How much.
    pub bytes: u64,
    /// In how many pieces.
    pub extents: u32,
}

/// How much the pool is to have. One of the first two is there.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRequest {
    /// The amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// This part of the host's memory, 1 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// For this node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Size of a file: a power of two, 2 MiB to 1 GiB. Once there is a pool it cannot change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
}

/// How much of the pool is to be lent to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LendRequest {
    /// All in all; 0 takes everything back.
    pub bytes: u64,
    /// For this node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Not now, but up to so much while the host is short, and no more when it has memory to spare. A request without
    /// this ends it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub when_short: bool,
}
