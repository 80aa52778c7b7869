//! VMs in the API.
//!
//! Before: `daemon` reads counters and page tables. After: JSON on a socket, and schemas of the OpenAPI document.
//! Units: in the field names. Counters only grow while an engine lives, and survive its replacement.
//! Promise: for every VM, `size = resident + far + zero + untouched + poisoned`, to the page.

use std::fmt;

use ballast_policy::Settings;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

pub use ballast_policy::Class as VmClass;

use crate::adopted::{AdoptedStat, VmKind};
use crate::agent::{AgentStat, NodeBalloon};
use crate::problem::Problem;

/// State of a VM, as Ballast sees it.
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
    /// Its VMM was told to stop it permanently, because its bytes could not be guaranteed.
    Halted,
}

impl fmt::Display for VmStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// One VM. `size = resident + far + zero + untouched + poisoned`, to the page.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct VmStat {
    /// Its name; unique among attached VMs.
    pub name: String,
    /// 128-bit identity in hexadecimal; never used again.
    pub id: String,
    /// The UUID that its operator gave it (QEMU's `-uuid`, libvirt's); null: none.
    pub uuid: Option<String>,
    /// The VMM's process id.
    pub pid: u32,
    /// The VMM program.
    pub vmm: String,
    /// The mover of its pages.
    #[serde(default)]
    pub kind: VmKind,
    /// Its class, which says whether memory may be taken from it.
    pub class: VmClass,
    /// Its state.
    pub status: VmStatus,
    /// Why the status (or the class) is what it is, in words.
    pub status_reason: Option<String>,
    /// All guest RAM.
    pub size_bytes: u64,
    /// RAM of the guest that Ballast does not manage, and that is not part of size (event `ram-unmanaged`).
    #[serde(default)]
    pub unmanaged_bytes: u64,
    /// The operator's limit; null: none.
    pub limit_bytes: Option<u64>,
    /// The limit that the governor set; null: none. The lower of the two holds.
    pub target_bytes: Option<u64>,
    /// The operator's settings of the VM, except its limit.
    pub settings: Settings,
    /// Where the limit and each other setting that somebody named come from.
    #[serde(default)]
    pub sources: Vec<SettingSource>,
    /// Settings that are allowed but probably not intended.
    pub warnings: Vec<String>,
    /// Why it waits, or why its memory does not go, in words; null: it runs and does not wait.
    pub why: Option<String>,
    /// Memory in host DRAM, including quarantine.
    pub resident_bytes: u64,
    /// Part of resident: picked for reclaim and zapped; it will be evicted if it is not touched.
    pub quarantine_bytes: u64,
    /// Part of resident: pages that were picked but cannot be evicted, because they are pinned: a device, I/O under way
    /// or a registered buffer could write to them. Checked once a second.
    #[serde(default)]
    pub pinned_pages: u64,
    /// Part of pinned: held for a minute or longer.
    #[serde(default)]
    pub pinned_long_pages: u64,
    /// Memory in a store. Uncompressed size; see `store_bytes`.
    pub far_bytes: u64,
    /// Part of far: memory in the file store, on disk.
    pub far_file_bytes: u64,
    /// Memory known to be all zero: neither resident nor stored.
    pub zero_bytes: u64,
    /// Memory never touched, or discarded by the guest: neither resident nor stored.
    pub untouched_bytes: u64,
    /// Memory that a store lost; a touch gives the guest a memory error.
    pub poisoned_bytes: u64,
    /// The part of `size` that is under userfaultfd now; the rest costs nothing.
    pub registered_bytes: u64,
    /// Bytes that the far pages in RAM occupy there, compressed.
    pub store_bytes: u64,
    /// Part of far: memory in the remote store, on other machines.
    #[serde(default)]
    pub far_remote_bytes: u64,
    /// Bytes that the far pages in the file store occupy on disk.
    pub file_bytes: u64,
    /// Faults by kind, since attach.
    pub faults: FaultCounts,
    /// Reclaim by outcome, since attach.
    pub reclaim: ReclaimCounts,
    /// Time to restore a far page, from reading the fault to waking the guest.
    pub restore_latency: Latency,
    /// Stages of that time, for one in eight restores from RAM and all from disk.
    #[serde(default)]
    pub restore_stages: RestoreStages,
    /// Time to serve any fault, from reading the fault to waking the guest.
    pub fault_latency: Latency,
    /// Time guest threads waited for Ballast, in the form of Linux pressure stall information.
    pub stall: Stall,
    /// Time that the engine's threads spent on this VM.
    #[serde(default)]
    pub engine_time: EngineTime,
    /// The same sums per RAM region.
    pub regions: Vec<RegionStat>,
    /// The agent in its guest; null if the VMM has no port for one.
    pub agent: Option<AgentStat>,
    /// Fast and slow memory of the host; null if memory stays where the kernel puts it.
    pub host_tiers: Option<HostTierStat>,
    /// What only an adopted VM has; null for a paged one.
    pub adopted: Option<AdoptedStat>,
}

/// A VM's memory on the host's nodes of fast and of slow memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostTierStat {
    /// The node of fast memory.
    pub fast_node: u32,
    /// The node of slow memory.
    pub slow_node: u32,
    /// Most memory that it may have on the fast node.
    pub fast_limit_bytes: u64,
    /// Part of resident: on the slow node, when last looked for.
    pub slow_bytes: u64,
    /// Memory moved to the slow node, since attach.
    pub to_slow_bytes: u64,
    /// Memory moved to the fast node.
    pub to_fast_bytes: u64,
    /// Memory that was to be moved and stayed: pinned, or mapped by several processes.
    pub stayed_bytes: u64,
    /// Huge pages split so that a part of them could be moved.
    pub split_units: u64,
    /// Huge pages that the kernel would not split.
    pub split_refused: u64,
    /// Units that became huge pages again.
    pub joined_units: u64,
}

/// Time that the engine's threads spent on a VM, since attach. While VMs compete for it, it is divided by shares.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EngineTime {
    /// Time that fault workers spent on its faults.
    pub faults_us: u64,
    /// CPU time of its other work: reclaim, scans, spill, reads from slow stores, discards.
    pub tasks_us: u64,
}

/// A part of a region, and its guest-physical address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GuestRange {
    /// Guest-physical address of its first byte.
    pub guest_address: u64,
    /// Its offset in the region.
    pub offset_bytes: u64,
    /// Its length.
    pub size_bytes: u64,
}

/// Faults served, by what the page was.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FaultCounts {
    /// The page was in memory but not mapped; it was mapped again.
    pub minor: u64,
    /// The page was far; it was read from a store.
    pub restore: u64,
    /// Pages of 4 KiB that those faults restored: more than faults if 2 MiB are paged as one.
    #[serde(default)]
    pub restored_pages: u64,
    /// Part of restore: read from the file store or the remote store.
    pub file: u64,
    /// The page was known to be zero.
    pub zero: u64,
    /// Pages of 4 KiB that those faults filled with zeros.
    #[serde(default)]
    pub zeroed_pages: u64,
    /// The page was never touched before, or was discarded by the guest; it was filled with zeros.
    pub fresh: u64,
    /// The page or the store was busy; the fault was put back and served later.
    pub deferred: u64,
    /// Part of all faults: they waited for credits because the VM was above its limit.
    pub throttled: u64,
    /// Total time for which those faults waited for credits.
    pub throttled_us: u64,
}

impl FaultCounts {
    /// All faults served. A deferred fault is served later under another kind and is not counted twice.
    pub fn total(&self) -> u64 {
        self.minor + self.restore + self.zero + self.fresh
    }
}

/// Pages that reclaim has handled, by outcome.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ReclaimCounts {
    /// Put into quarantine.
    pub zapped_pages: u64,
    /// Written to a store and freed.
    pub evicted_pages: u64,
    /// Found all zero: freed, nothing stored.
    pub evicted_zero_pages: u64,
    /// Part of evicted: filled with one repeated word, and stored in the page's state word alone.
    pub same_filled_pages: u64,
    /// Touched in quarantine: kept.
    pub quarantine_hit_pages: u64,
    /// Touched while being evicted: kept, the copy dropped.
    pub aborted_pages: u64,
    /// Discarded by the guest; far copies were dropped. Memory that was never watched is not counted.
    pub discarded_pages: u64,
    /// Times reclaim stopped because the store had no room.
    pub store_full_events: u64,
    /// The store refused the page; it was kept.
    pub failed_pages: u64,
    /// Restored before they were touched, by sequential readahead.
    pub prefetched_pages: u64,
    /// Restored within 10 s of their eviction, on touch or before: wrong choices.
    pub restored_soon_pages: u64,
    /// Moved from RAM to the file store or the remote store.
    pub spilled_pages: u64,
    /// Units of 2 MiB that were mapped huge again after reclaim had split them.
    pub coalesced_units: u64,
    /// Times the kernel refused to map a unit huge again.
    pub coalesce_refused: u64,
}

/// A latency distribution, in microseconds, since attach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Number of measurements; if it is 0, so are the other fields.
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
    /// From reading the fault to the try that served it, including pages that are read ahead with it.
    pub queue: Latency,
    /// From there to finding that the page is far.
    pub lookup: Latency,
    /// From there to having read its bytes from their store.
    pub read: Latency,
    /// From there to waking the guest.
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
    /// Index in the attach message, from 0.
    pub index: u32,
    /// Guest RAM in this region.
    pub size_bytes: u64,
    /// In host DRAM.
    pub resident_bytes: u64,
    /// In a store.
    pub far_bytes: u64,
    /// Known to be zero.
    pub zero_bytes: u64,
    /// Never touched, or discarded.
    pub untouched_bytes: u64,
    /// Lost.
    pub poisoned_bytes: u64,
    /// Its parts with guest-physical addresses, ascending; empty if these are not known.
    #[serde(default)]
    pub guest_ranges: Vec<GuestRange>,
}

/// A change to a VM. Only the keys that are present change anything; null removes a setting. Unknown keys are refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VmPatch {
    /// The new limit in bytes, or null to remove it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub limit_bytes: Option<Option<u64>>,
    /// Reservation: DRAM that is never taken.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub reservation_bytes: Option<Option<u64>>,
    /// Protected DRAM: taken only when every VM is down to its own protected DRAM.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u64>)]
    pub protect_bytes: Option<Option<u64>>,
    /// Weight when memory is short; 0: hands off.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u32>)]
    pub shares: Option<Option<u32>>,
    /// Memory wanted beyond the working set, in percent of it.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<u32>)]
    pub headroom_percent: Option<Option<u32>>,
    /// The VM's class.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    #[schema(value_type = Option<VmClass>)]
    pub class: Option<Option<VmClass>>,
    /// Memory of a node of the guest that its agent is to hold for the host, as far as the guest can spare it. Other
    /// nodes stay as they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balloon: Option<NodeBalloon>,
}

/// Where a setting of a VM comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SettingSource {
    /// `limit`, `reservation`, `protect`, `shares`, `headroom` or `class`.
    pub setting: String,
    /// The kind of source.
    pub source: SourceKind,
    /// The pattern of the rule, if it is one that the configuration still has.
    pub rule: Option<String>,
}

/// A kind of source of settings, in the order in which they count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SourceKind {
    /// The VMM's command line: `ballast run --limit`, `BALLAST_LIMIT`.
    CommandLine,
    /// An operator's change, kept for the VM.
    #[default]
    Operator,
    /// A table `[vm.PATTERN]` of the configuration.
    Rule,
}

/// What is kept of a VM for the next time that it attaches.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeptVm {
    /// Its name when it was changed last.
    pub name: String,
    /// Its UUID; null: it is known by its name.
    pub uuid: Option<String>,
    /// When it was changed last.
    pub changed_unix_ms: u64,
    /// What operators changed. An absent setting was never changed; null is the default.
    pub settings: VmPatch,
}

impl VmStat {
    /// The reason of a VM that is blocked until a scan for foreign mappers is over.
    pub const UNCHECKED: &str = "its RAM has not been checked for foreign mappers yet";

    /// The beginning of the warning of a VM whose last change is not kept for its next attach.
    pub const NOT_KEPT: &str = "the change ends with the VM";

    /// The limit that holds, in bytes: the lower one of the operator's and the policy's.
    pub fn lower_limit(&self) -> Option<u64> {
        self.limit_bytes.into_iter().chain(self.target_bytes).min()
    }

    /// Whether the VM is blocked until a scan for foreign mappers is over.
    pub fn waits_for_scan(&self) -> bool {
        self.status_reason.as_deref() == Some(Self::UNCHECKED)
    }
}

/// One limit for several VMs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsPatch {
    /// Names of the VMs; absent: every VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vms: Option<Vec<String>>,
    /// The new limit of each in bytes, or null to remove it.
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

/// Deserializes a key that must be present, and may be null.
fn required<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Deserialize::deserialize(deserializer)
}

impl VmPatch {
    /// Adds a later change to this one, except for the balloon, which is no setting of the VM.
    pub fn merge(&mut self, later: &Self) {
        fn take<T: Clone>(this: &mut Option<T>, later: &Option<T>) {
            if later.is_some() {
                this.clone_from(later);
            }
        }
        take(&mut self.limit_bytes, &later.limit_bytes);
        take(&mut self.reservation_bytes, &later.reservation_bytes);
        take(&mut self.protect_bytes, &later.protect_bytes);
        take(&mut self.shares, &later.shares);
        take(&mut self.headroom_percent, &later.headroom_percent);
        take(&mut self.class, &later.class);
    }

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

/// Deserializes a key that is present as `Some`, whatever its value; serde alone would read null as absent.
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
