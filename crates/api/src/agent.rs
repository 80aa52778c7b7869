//! The agent in a guest, as the API shows it.
//!
//! Before: the engine has heard something of a guest's agent, or nothing. After: operators see whether it is heeded.
//! Units: bytes, pages of 4 KiB, microseconds, by name. Promise: what a guest says of itself is shown as such, and
//! never decides about another VM.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is heard of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AgentState {
    /// Nobody answers at its port, or not for a while: the host tracks the VM itself.
    #[default]
    Silent,
    /// It answers and reports nothing, for the reason in `note`.
    Idle,
    /// What it calls cold goes first.
    Reporting,
    /// What it called cold was touched at once: its reports are ignored for a while.
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

/// The agent in a guest. Counters begin anew with an engine; what the guest says of itself is the guest's word.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentStat {
    /// Is it heeded?
    pub state: AgentState,
    /// For how much longer it is ignored, in seconds.
    pub ignored_s: Option<u64>,
    /// Times that it was ignored.
    pub times_ignored: u64,
    /// Its version.
    pub version: String,
    /// Release of the guest's kernel.
    pub kernel: String,
    /// What keeps it from reporting, in its words.
    pub note: String,
    /// Whole reports taken.
    pub reports: u64,
    /// Messages of any kind.
    pub messages: u64,
    /// Messages that made no sense or came too often.
    pub rejected_messages: u64,
    /// Bytes that belonged to no message.
    pub garbage_bytes: u64,
    /// Pages of reports that are not the guest's, were named twice, or lie where nothing is proved.
    pub rejected_pages: u64,
    /// What the last report calls cold.
    pub cold_bytes: u64,
    /// Part of it: what the guest's kernel has free.
    pub free_bytes: u64,
    /// Pages told to it that were restored.
    pub restored_pages: u64,
    /// Parts of guest-physical memory, and those of them that the guest has proved.
    pub pieces: u32,
    /// Parts that the guest has proved.
    pub pieces_proved: u32,
    /// The guest's memory, and what of it programs could have without swapping.
    pub guest_total_bytes: u64,
    /// What programs of the guest could have without swapping.
    pub guest_available_bytes: u64,
    /// Time in which some task of the guest waited for memory, since it booted.
    pub guest_stall_us: u64,
    /// CPU time of the agent and of the guest's access monitor.
    pub cpu_us: u64,
    /// Pages that went on its word.
    pub by_agent: PickedStat,
    /// And of pages that the host picked.
    pub by_host: PickedStat,
}

/// A sample of the pages that were picked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PickedStat {
    /// Pages of which it is known.
    pub judged_pages: u64,
    /// Wrong choices: pages that were touched again within 10 s.
    pub wrong_pages: u64,
}
