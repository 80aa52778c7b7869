//! The past of the host or of a VM in the API: samples of some figures, as columns.
//!
//! Before: the engine took a sample every 10 s. After: JSON for charts. Units: in the field names.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Samples, oldest first. All columns have one entry for each sample: one for each 10 s of the last hour, or one for
/// each minute of the last day. A time without an engine has none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct History {
    /// The time between two samples in seconds: 10 or 60.
    pub step_s: u32,
    /// Seconds since 1970-01-01 00:00 UTC.
    pub at_unix_s: Vec<u32>,
    /// Guest RAM.
    pub size_bytes: Vec<u64>,
    /// Guest RAM in host DRAM.
    pub resident_bytes: Vec<u64>,
    /// Guest RAM in a store, or in the kernel's swap.
    pub far_bytes: Vec<u64>,
    /// Guest RAM that is known to be zero.
    pub zero_bytes: Vec<u64>,
    /// Of a VM: the limit that holds, the lower one of limit and target; null without one. Of the host: null.
    pub limit_bytes: Vec<Option<u64>>,
    /// Of a VM: its working set; null while nobody tracks it. Of the host: DRAM that is available.
    pub other_bytes: Vec<Option<u64>>,
    /// Of a VM: bytes that its far pages occupy. Of the host: bytes that those of all VMs occupy.
    pub store_bytes: Vec<u64>,
    /// Time for which the VM waited for far pages, in thousandths of the time since the sample before; of the host,
    /// the VM that waited longest. A sample of a minute has the highest of the minute.
    pub stall_permille: Vec<u16>,
    /// Pages that came back, a second.
    pub restores_per_s: Vec<u32>,
}

/// The last minutes of each VM, for a list of VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmHistory {
    /// The VM's name.
    pub name: String,
    /// Its samples.
    pub history: History,
}
