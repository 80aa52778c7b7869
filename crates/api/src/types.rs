//! What the API says about VMs.
//!
//! Before: `daemon` reads counters and page tables. After: JSON on a socket, and the document in `openapi`.
//! Units: in the field names. Counters only grow while an engine lives and survive its replacement.
//! Promise: for every VM, `size = resident + far + zero + untouched + poisoned`, to the page.

use std::fmt;

use ballast_policy::Settings;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

pub use ballast_policy::Class as VmClass;

use crate::agent::AgentStat;
use crate::problem::Problem;

/// What the VM is doing, as far as Ballast is concerned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum VmStatus {
    /// Faults are served.
    #[default]
    Running,
    /// Reclaim is held, for the reason given; faults are served.
    Blocked,
    /// A new engine is taking over, or the VMM is attaching again.
    Recovering,
    /// Its VMM was told to stop it permanently: its bytes could not be guaranteed.
    Halted,
}

impl fmt::Display for VmStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Running => "running",
            Self::Blocked => "blocked",
            Self::Recovering => "recovering",
            Self::Halted => "halted",
        })
    }
}

/// One VM. `size = resident + far + zero + untouched + poisoned`, to the page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStat {
    /// What operators call it; unique among VMs that are there.
    pub name: String,
    /// 128-bit identity in hexadecimal; never used again.
    pub id: String,
    /// The VMM's process id.
    pub pid: u32,
    /// The VMM program.
    pub vmm: String,
    /// May its memory be taken?
    pub class: VmClass,
    /// What it is doing.
    pub status: VmStatus,
    /// Why the status (or the class) is what it is, in words.
    pub status_reason: Option<String>,
    /// All guest RAM.
    pub size_bytes: u64,
    /// The operator's DRAM cap; null means none.
    pub limit_bytes: Option<u64>,
    /// The cap that the control loop set; null means none. The lower of the two holds.
    pub target_bytes: Option<u64>,
    /// What the operator said of the VM, beside its limit.
    pub settings: Settings,
    /// What is allowed and probably not meant.
    pub warnings: Vec<String>,
    /// In host DRAM, quarantine included.
    pub resident_bytes: u64,
    /// Part of resident: picked for reclaim, zapped, and waiting to prove it is cold.
    pub quarantine_bytes: u64,
    /// Part of resident: pages that should have gone, and that something beside the guest holds (a device, I/O under
    /// way, a registered buffer) and could write to unseen. Seen again each second.
    #[serde(default)]
    pub pinned_pages: u64,
    /// Part of those, held for a minute or longer.
    #[serde(default)]
    pub pinned_long_pages: u64,
    /// Content lives in a store. Uncompressed size; see `store_bytes`.
    pub far_bytes: u64,
    /// Part of far: in the file store, on disk.
    pub far_file_bytes: u64,
    /// Known to be all zero: nothing resident, nothing stored.
    pub zero_bytes: u64,
    /// Never touched, or given back by the guest: nothing resident, nothing stored.
    pub untouched_bytes: u64,
    /// Lost by a store; a touch gives the guest a memory error.
    pub poisoned_bytes: u64,
    /// The part of `size` that is under userfaultfd now; the rest costs nothing.
    pub registered_bytes: u64,
    /// What the far pages in RAM really occupy there.
    pub store_bytes: u64,
    /// Part of far: in the remote store, on other machines.
    #[serde(default)]
    pub far_remote_bytes: u64,
    /// What the far pages in the file store occupy on disk.
    pub file_bytes: u64,
    /// Faults by kind, since attach.
    pub faults: FaultCounts,
    /// Reclaim by outcome, since attach.
    pub reclaim: ReclaimCounts,
    /// Time to bring a far page back: fault read to guest woken.
    pub restore_latency: Latency,
    /// Where that time goes, of the restores that are watched: one in eight of those from RAM, all from disk.
    #[serde(default)]
    pub restore_stages: RestoreStages,
    /// Time to serve any fault: fault read to guest woken.
    pub fault_latency: Latency,
    /// Time guest threads waited for Ballast, in the form of Linux pressure stall information.
    pub stall: Stall,
    /// What the engine's threads spent on this VM.
    #[serde(default)]
    pub engine_time: EngineTime,
    /// The same sums per RAM region.
    pub regions: Vec<RegionStat>,
    /// The agent in its guest; null if the VMM shows no port of one.
    #[serde(default)]
    pub agent: Option<AgentStat>,
}

/// What the engine's threads spent on a VM, since attach. Between VMs whose work waits, they are divided by shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineTime {
    /// Time of fault workers on its faults.
    pub faults_us: u64,
    /// CPU time of its other work: reclaim, prefetch, scans, spill, reads from slow stores, discards.
    pub tasks_us: u64,
}

/// A part of a region, and where the guest sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestRange {
    /// Guest-physical address of its first byte.
    pub guest_address: u64,
    /// Where it begins in the region.
    pub offset_bytes: u64,
    /// Its length.
    pub size_bytes: u64,
}

/// Faults served, by what the page was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FaultCounts {
    /// Was in memory but not mapped: mapped again.
    pub minor: u64,
    /// Was far: read from a store.
    pub restore: u64,
    /// Pages of 4 KiB that those restored: more than faults where 2 MiB is paged as one.
    #[serde(default)]
    pub restored_pages: u64,
    /// Part of restore: read from the file store or the remote store.
    pub file: u64,
    /// Was known to be zero.
    pub zero: u64,
    /// Pages of 4 KiB that those restored.
    #[serde(default)]
    pub zeroed_pages: u64,
    /// Never touched before, or discarded by the guest: zeros.
    pub fresh: u64,
    /// Met a busy page or store and was put back to be served again.
    pub deferred: u64,
    /// Part of all faults: those that waited for credits because the VM was above its limit.
    pub throttled: u64,
    /// How long those waited for it, all together.
    pub throttled_us: u64,
}

impl FaultCounts {
    /// All faults served. A deferred fault is served later under another kind and is not counted twice.
    pub fn total(&self) -> u64 {
        self.minor + self.restore + self.zero + self.fresh
    }
}

/// Pages reclaim has handled, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReclaimCounts {
    /// Put into quarantine.
    pub zapped_pages: u64,
    /// Written to a store and freed.
    pub evicted_pages: u64,
    /// Found all zero: freed, nothing stored.
    pub evicted_zero_pages: u64,
    /// Part of evicted: one repeated word, stored in the page's state word alone.
    pub same_filled_pages: u64,
    /// Touched in quarantine: kept.
    pub quarantine_hit_pages: u64,
    /// Touched while being evicted: kept, the copy dropped.
    pub aborted_pages: u64,
    /// Given back by the guest; far copies dropped.
    pub discarded_pages: u64,
    /// Times reclaim stopped because the store had no room.
    pub store_full_events: u64,
    /// The store would not take the page: kept.
    pub failed_pages: u64,
    /// Restored before they were touched, by clustered prefetch or by sequential readahead.
    pub prefetched_pages: u64,
    /// Moved from RAM to the file store or the remote store.
    pub spilled_pages: u64,
    /// Units of 2 MiB mapped huge again after reclaim had torn them.
    pub coalesced_units: u64,
    /// Times the kernel would not do that.
    pub coalesce_refused: u64,
}

/// A latency distribution, in microseconds, since attach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// How many were measured; the figures are 0 when this is.
    pub count: u64,
    /// Median.
    pub p50_us: f64,
    /// 90th percentile.
    pub p90_us: f64,
    /// 99th percentile.
    pub p99_us: f64,
    /// Longest seen.
    pub max_us: f64,
}

/// The stages of a restore.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RestoreStages {
    /// Fault read until the try that served it, and until what came along was there.
    pub queue: Latency,
    /// From there until the page was found to be far.
    pub lookup: Latency,
    /// Until its bytes had been read from their store.
    pub read: Latency,
    /// Until the guest was woken.
    pub install: Latency,
}

/// Stall in the form of Linux PSI. The host's own PSI does not see waits on userfaultfd.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Stall {
    /// At least one thread of the VM waited.
    pub some: Psi,
    /// All threads of the VM that had been running waited.
    pub full: Psi,
}

/// One line of pressure stall information.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Psi {
    /// Share of the last 10 seconds, in percent.
    pub avg10: f64,
    /// Share of the last 60 seconds, in percent.
    pub avg60: f64,
    /// Share of the last 300 seconds, in percent.
    pub avg300: f64,
    /// Microseconds since attach.
    pub total_us: u64,
}

/// One RAM region. `size = resident + far + zero + untouched + poisoned`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RegionStat {
    /// Position in the attach message, from 0.
    pub index: u32,
    /// Guest RAM in this region.
    pub size_bytes: u64,
    /// In host DRAM.
    pub resident_bytes: u64,
    /// In a store.
    pub far_bytes: u64,
    /// Known to be zero.
    pub zero_bytes: u64,
    /// Never touched or given back.
    pub untouched_bytes: u64,
    /// Lost.
    pub poisoned_bytes: u64,
    /// Where the guest sees it, from the lowest address on; none if that is not known.
    #[serde(default)]
    pub guest_ranges: Vec<GuestRange>,
}

/// A change to a VM. Only the keys that are present change anything; null takes back what was said. Unknown keys are
/// refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmPatch {
    /// The new DRAM cap in bytes, or null to remove it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub limit_bytes: Option<Option<u64>>,
    /// DRAM that is never taken.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub reservation_bytes: Option<Option<u64>>,
    /// DRAM that is taken only when nobody has any beyond theirs.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub protect_bytes: Option<Option<u64>>,
    /// Weight when memory is short; 0 means hands off.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u32>)]
    pub shares: Option<Option<u32>>,
    /// Memory wanted beyond the working set, in percent of it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u32>)]
    pub headroom_percent: Option<Option<u32>>,
    /// What kind of promise the VM has.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<VmClass>)]
    pub class: Option<Option<VmClass>>,
}

impl VmStat {
    /// The reason of a VM that is blocked until somebody has looked who else maps its RAM.
    pub const NOT_LOOKED_AT: &str = "nobody has looked yet who else maps its RAM";

    /// Is it blocked for that?
    pub fn waits_for_look(&self) -> bool {
        self.status_reason.as_deref() == Some(Self::NOT_LOOKED_AT)
    }
}

/// One limit for several VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsPatch {
    /// Their names; absent: every VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms: Option<Vec<String>>,
    /// The new DRAM cap of each in bytes, or null to remove it.
    #[serde(deserialize_with = "required")]
    pub limit_bytes: Option<u64>,
}

/// The result for one of several VMs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmChange {
    /// Its name.
    pub name: String,
    /// Its state after the change; null if it was not changed.
    pub vm: Option<VmStat>,
    /// Why it was not changed.
    pub problem: Option<Problem>,
}

/// A key that must be there, and may be null.
fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Deserialize::deserialize(deserializer)
}

impl VmPatch {
    /// The settings after this change.
    pub fn settings_after(&self, before: Settings) -> Settings {
        Settings {
            class: self.class.map_or(before.class, Option::unwrap_or_default),
            reservation_bytes: self.reservation_bytes.map_or(before.reservation_bytes, Option::unwrap_or_default),
            protect_bytes: self.protect_bytes.map_or(before.protect_bytes, Option::unwrap_or_default),
            shares: self.shares.unwrap_or(before.shares),
            headroom_percent: self.headroom_percent.map_or(before.headroom_percent, Option::unwrap_or_default),
        }
    }
}

/// A key that is present is `Some`, whatever its value; serde alone would read null as absent.
pub(crate) fn present<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Option<T>>, D::Error> {
    Deserialize::deserialize(deserializer).map(Some)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_null_limit_is_not_an_absent_limit() {
        let read = |text| serde_json::from_str::<VmPatch>(text).map(|patch| patch.limit_bytes);
        assert_eq!(read("{}").ok(), Some(None));
        assert_eq!(read(r#"{"limit_bytes":null}"#).ok(), Some(Some(None)));
        assert_eq!(read(r#"{"limit_bytes":4096}"#).ok(), Some(Some(Some(4096))));
        for wrong in [r#"{"limit":1}"#, r#"{"limit_bytes":-1}"#, r#"{"limit_bytes":"1G"}"#, r#"{"limit_bytes":1.5}"#] {
            assert!(read(wrong).is_err(), "{wrong} was accepted");
        }
        for patch in [None, Some(None), Some(Some(7))].map(|limit_bytes| VmPatch { limit_bytes, ..VmPatch::default() })
        {
            let text = serde_json::to_string(&patch).expect("serialise");
            assert_eq!(serde_json::from_str::<VmPatch>(&text).expect("parse"), patch);
        }
    }

    #[test]
    fn a_change_of_settings_changes_what_it_names_and_null_takes_it_back() {
        let before = Settings { reservation_bytes: 7, shares: Some(500), ..Settings::default() };
        let after = |text| serde_json::from_str::<VmPatch>(text).expect("parse").settings_after(before);
        assert_eq!(after("{}"), before);
        assert_eq!(after(r#"{"shares":0}"#), Settings { shares: Some(0), ..before });
        assert_eq!(after(r#"{"shares":null,"reservation_bytes":null}"#), Settings::default());
        assert_eq!(after(r#"{"class":"guaranteed"}"#).class, VmClass::Guaranteed);
        assert!(serde_json::from_str::<VmPatch>(r#"{"class":"platinum"}"#).is_err());
    }
}
