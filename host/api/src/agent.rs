//! The agent in a guest, as the API shows it.
//!
//! Before: the engine talks with a guest's agent, or finds none. After: operators see whether its reports are used.
//! Units: bytes, pages of 4 KiB, microseconds, by name. Promise: figures that a guest reports are shown as its own, and
//! never decide about another VM.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// State of the agent in a guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AgentState {
    /// No agent has replied for a while, or ever: the host tracks the VM itself.
    #[default]
    Silent,
    /// It replies but reports nothing, for the reason in `note`.
    Idle,
    /// Pages that it reports as cold are evicted first.
    Reporting,
    /// Pages that it reported as cold were touched at once: its reports are ignored for a while.
    Ignored,
}

impl fmt::Display for AgentState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// The agent in a guest. Counters start at zero with each engine. Values about the guest are the guest's own claims.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentStat {
    /// Whether its reports are used.
    pub state: AgentState,
    /// Seconds until its reports are used again; null if they are used.
    pub ignored_s: Option<u64>,
    /// How often its reports were ignored for a while.
    pub times_ignored: u64,
    /// Its version.
    pub version: String,
    /// Release of the guest's kernel.
    pub kernel: String,
    /// Why it does not report, as the agent says it.
    pub note: String,
    /// Complete reports received.
    pub reports: u64,
    /// Messages received, of any kind.
    pub messages: u64,
    /// Messages that were invalid, or exceeded the rate limit.
    pub rejected_messages: u64,
    /// Received bytes that belonged to no message.
    pub garbage_bytes: u64,
    /// Pages in reports that are not the guest's, were named twice, or lie in a part that is not proved.
    pub rejected_pages: u64,
    /// Memory that the last report calls cold.
    pub cold_bytes: u64,
    /// Part of it: memory that is free in the guest's kernel.
    pub free_bytes: u64,
    /// Restored pages that the agent was told about.
    pub restored_pages: u64,
    /// Part of them, about: restored because khugepaged or compaction of the guest's kernel copied them.
    pub service_restored_pages: u64,
    /// These services are tuned, so that they copy less.
    pub services_tuned: bool,
    /// Huge pages that khugepaged made since the guest booted.
    pub collapsed_huge_pages: u64,
    /// Pages that compaction isolated since then: those to be moved, and the places for them.
    pub compacted_pages: u64,
    /// Parts of guest-physical memory.
    pub pieces: u32,
    /// Parts that the guest has proved.
    pub pieces_proved: u32,
    /// Memory of the guest.
    pub guest_total_bytes: u64,
    /// Memory that programs of the guest could get without swapping.
    pub guest_available_bytes: u64,
    /// Time in which at least one task of the guest waited for memory, since the guest booted.
    pub guest_stall_us: u64,
    /// CPU time of the agent and of the guest's access monitor.
    pub cpu_us: u64,
    /// Nodes of the guest's memory.
    pub nodes: Vec<NodeStat>,
    /// Tiering inside the guest; null if its owner does not want it.
    pub tiering: Option<TieringStat>,
    /// Pages picked because the agent reported them as cold.
    pub by_agent: PickedStat,
    /// Pages that the host picked.
    pub by_host: PickedStat,
}

/// Pages picked for eviction, about: estimated from samples of each pick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PickedStat {
    /// Pages whose outcome is known.
    pub judged_pages: u64,
    /// Part of them that was touched again within 10 s: wrong choices.
    pub wrong_pages: u64,
}

/// Memory of a NUMA node of a guest, as its agent says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NodeStat {
    /// Its number.
    pub node: u32,
    /// Its memory.
    pub size_bytes: u64,
    /// Part of it that is free in the guest's kernel.
    pub free_bytes: u64,
    /// Part of it that the agent holds for the host.
    pub balloon_bytes: u64,
    /// How much it is to hold.
    pub balloon_wanted_bytes: u64,
}

/// How much of a node of the guest the agent is to hold for the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NodeBalloon {
    /// The number of the node.
    pub node: u32,
    /// How much; 0: give all of it back.
    pub bytes: u64,
}

/// What an agent with `--tiering` does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TieringState {
    /// It cannot, for the reason in `note`.
    #[default]
    Unable,
    /// Another program in the guest moves memory by heat: `note` names it.
    Aside,
    /// It moves what is hot to the fast tier.
    Working,
}

impl fmt::Display for TieringState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.serialize(f)
    }
}

/// Tiering inside a guest: all of it is the guest's own claim. Counters start at zero with each start of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TieringStat {
    /// Whether it works.
    pub state: TieringState,
    /// Why it does no more.
    pub note: String,
    /// The tiers, the fastest first.
    pub tiers: Vec<TierStat>,
    /// Programs whose memory is managed.
    pub programs: u64,
    /// Memory of theirs that can be moved.
    pub managed_bytes: u64,
    /// Part of it that is in the fast tier.
    pub managed_fast_bytes: u64,
    /// In the last half second, the share of sampled accesses that the fast tier served, in 1/10,000; null if there
    /// were none.
    pub fast_hits_bp: Option<u32>,
    /// Accesses sampled.
    pub samples: u64,
    /// Ranges of one heat.
    pub ranges: u64,
    /// Memory moved to the fast tier.
    pub promoted_bytes: u64,
    /// Memory moved to a slow tier.
    pub demoted_bytes: u64,
    /// Pages that were to be moved and stayed.
    pub stayed_pages: u64,
    /// CPU time of tiering, with the kernel's monitor for it.
    pub cpu_us: u64,
}

/// A tier of a guest's memory: nodes of one speed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TierStat {
    /// The first of its nodes.
    pub node: u32,
    /// Its memory.
    pub size_bytes: u64,
    /// Part of it that is free in the guest's kernel.
    pub free_bytes: u64,
    /// Read latency by the guest's firmware.
    pub latency_ns: Option<u32>,
}
