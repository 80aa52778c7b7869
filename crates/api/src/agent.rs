//! The agent in a guest, as the API shows it.
//!
//! Before: the engine talks with a guest's agent, or finds none. After: operators see whether its reports are used.
//! Units: bytes, pages of 4 KiB, microseconds, by name. Promise: what a guest says of itself is shown as such, and
//! never decides about another VM.

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
        f.pad(match self {
            Self::Silent => "silent",
            Self::Idle => "idle",
            Self::Reporting => "reporting",
            Self::Ignored => "ignored",
        })
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
    /// Evicted pages that the agent reported as cold.
    pub by_agent: PickedStat,
    /// Evicted pages that the host picked.
    pub by_host: PickedStat,
}

/// A sample of evicted pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PickedStat {
    /// Pages in the sample whose outcome is known.
    pub judged_pages: u64,
    /// Pages in the sample that were touched again within 10 s: wrong choices.
    pub wrong_pages: u64,
}
