//! The pool: memory reserved for VMs, its owners, and changes of it.
//!
//! Before: the daemon's pool. After: the CLI and other programs read it. Units: bytes.

use std::str::FromStr;

use ballast_base::Invalid;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The pages of a part of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub enum PoolPages {
    /// Pages of 2 MiB.
    #[default]
    #[serde(rename = "2M")]
    Huge,
    /// Pages of 1 GiB.
    #[serde(rename = "1G")]
    Gib,
}

impl PoolPages {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl FromStr for PoolPages {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "2M" => Ok(Self::Huge),
            "1G" => Ok(Self::Gib),
            _ => Err(format!("{text:?} is neither 2M nor 1G").into()),
        }
    }
}

/// The pool, by its pages of 2 MiB.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolStat {
    /// Size of its files, each of which belongs to one VM at a time; 0: nothing was ever reserved.
    pub file_bytes: u64,
    /// Its nodes.
    pub nodes: Vec<PoolNode>,
    /// The VMs that have memory of it.
    pub vms: Vec<PoolVm>,
    /// Where the last change differs from the request, and why.
    pub notes: Vec<String>,
    /// Memory to be zeroed whose pages another process still holds.
    pub waiting_bytes: u64,
    /// Memory of the pool's own state.
    pub metadata_bytes: u64,
    /// `struct page`s that the kernel has freed (HVO).
    pub vmemmap_freed_bytes: u64,
    /// Most memory that is lent while the host is short; 0: memory is lent by command only.
    #[serde(default)]
    pub lent_when_short_bytes: u64,
    /// Memory that VMs on demand may touch.
    #[serde(default)]
    pub promised_bytes: u64,
    /// Part of that which they have.
    #[serde(default)]
    pub touched_bytes: u64,
    /// Memory of the pool that is set aside for it, touched or not; part of what is used.
    #[serde(default)]
    pub aside_bytes: u64,
    /// What the pool has for memory on demand: set aside for it, or promised to nobody else.
    #[serde(default)]
    pub for_demand_bytes: u64,
    /// How much of that it may promise, in percent, as far as these VMs can have the rest far.
    #[serde(default)]
    pub overcommit_percent: u32,
    /// The same of its pages of 1 GiB, if any were ever reserved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(no_recursion)]
    pub gib: Option<Box<PoolStat>>,
}

/// A node of the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolNode {
    /// Number of the node on the host.
    pub numa: u32,
    /// Memory of the node that the pool has.
    pub reserved_bytes: u64,
    /// Zeroed memory that any VM may get.
    pub ready_bytes: u64,
    /// Part of that, in whole aligned GiB.
    pub ready_gib_bytes: u64,
    /// Memory that VMs have, or that is set aside for those on demand.
    pub used_bytes: u64,
    /// Zeroed memory in a file of which a VM has a part.
    pub fenced_bytes: u64,
    /// Memory to be zeroed, or being zeroed.
    pub dirty_bytes: u64,
    /// Memory lent to the host.
    pub lent_bytes: u64,
    /// Memory that failed.
    pub failed_bytes: u64,
    /// A letter for each file: `U` a VM has all of it, `u` a part, `-` free, `z` to be zeroed, `l` some of it is lent,
    /// `.` not reserved, `F` memory of it failed.
    pub map: String,
}

/// A VM that has memory of the pool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolVm {
    /// Its name.
    pub name: String,
    /// Amount of memory.
    pub bytes: u64,
    /// Number of extents.
    pub extents: u32,
    /// What it has touched of its memory, if that comes on demand.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub touched_bytes: Option<u64>,
}

/// A new size of the pool. One of the first two fields is required.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PoolRequest {
    /// The amount.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Percentage of the host's memory, 1 to 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub percent: Option<u8>,
    /// For this node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// Size of a file: 1 to 512 pages, a power of two. Once there is a pool it cannot change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file_bytes: Option<u64>,
    /// From now on up to this many percent of what the pool has for memory on demand are promised, 100 to 1000, as far
    /// as these VMs can have the rest far. Without it, nothing changes; at first it is 100.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub overcommit_percent: Option<u32>,
    /// The pages to reserve.
    #[serde(default, skip_serializing_if = "PoolPages::is_default")]
    pub pages: PoolPages,
}

/// How much of the pool is to be lent to the host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LendRequest {
    /// Total; 0 takes everything back.
    pub bytes: u64,
    /// For this node alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<u32>,
    /// If true, nothing is lent now: up to this amount is lent while the host is short, and taken back when it has
    /// memory to spare. A request without this ends it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub when_short: bool,
    /// The pages to lend.
    #[serde(default, skip_serializing_if = "PoolPages::is_default")]
    pub pages: PoolPages,
}
