//! The host in the API: its memory, its stores, its events.
//!
//! Before: the engine reads counters. After: JSON, and schemas of the OpenAPI document. Units: in the field names.

use ballast_policy::{HostState, Kind};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The remote store: a cluster that far pages may go to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteStat {
    /// Bytes that far pages of this host's VMs occupy there, estimated from the sizes of stored pages.
    pub used_bytes: u64,
    /// Most they may occupy.
    pub budget_bytes: u64,
    /// Guest memory that is far there. Sum over VMs.
    pub far_bytes: u64,
    /// Its nodes, as far as this engine has asked them.
    pub nodes: Vec<RemoteNode>,
    /// Problems of its settings, the serious ones first.
    pub findings: Vec<RemoteFinding>,
}

/// A node of the remote store, since the engine began.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteNode {
    /// Host and port.
    pub addr: String,
    /// Requests that it answered.
    pub requests: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Median of the time of a request in microseconds, rounded up to a power of two.
    pub p50_us: u64,
    /// 99th percentile of the same.
    pub p99_us: u64,
}

/// A wrong setting of the remote store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemoteFinding {
    /// True if pages may be lost or cannot be stored because of it.
    pub serious: bool,
    /// The setting, the node, and the right value.
    pub text: String,
}

/// The host and Ballast itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HostStat {
    /// Version of the engine that answered.
    pub version: String,
    /// Process id of the engine.
    pub engine_pid: u32,
    /// Process id of the keeper.
    pub keeper_pid: u32,
    /// Number of the engine, counted by the keeper. A change means that another engine answers.
    pub engine_epoch: u64,
    /// Engines that were replaced because they died.
    pub engine_restarts: u64,
    /// Time since the keeper started.
    pub uptime_s: u64,
    /// Host DRAM.
    pub mem_total_bytes: u64,
    /// The kernel's `MemAvailable`.
    pub mem_available_bytes: u64,
    /// Bytes that far pages of all VMs occupy in RAM.
    pub store_bytes: u64,
    /// Most they may occupy there.
    pub store_budget_bytes: u64,
    /// Bytes that far pages of all VMs occupy on disk.
    pub file_bytes: u64,
    /// Most they may occupy there; 0 if no page goes to disk.
    pub file_budget_bytes: u64,
    /// VMs attached.
    pub vms: u32,
    /// Sum over VMs.
    pub size_bytes: u64,
    /// Sum over VMs.
    pub resident_bytes: u64,
    /// Sum over VMs.
    pub far_bytes: u64,
    /// Part of far: on disk. Sum over VMs.
    pub far_file_bytes: u64,
    /// The remote store; null if none is set.
    pub remote: Option<RemoteStat>,
    /// Sum over VMs.
    pub zero_bytes: u64,
    /// Host memory that reclaim has freed: far + zero - store in RAM, or 0 if that is negative.
    pub saved_bytes: u64,
    /// The policy that decides how much each VM may have.
    pub policy: Kind,
    /// Pressure on the host's memory; null while no policy decides.
    pub state: Option<HostState>,
    /// Time until no memory is free at the present rate; null if never.
    pub exhaustion_ms: Option<u64>,
    /// DRAM that all guests together may use.
    pub guest_budget_bytes: u64,
    /// The part of it that may still be reserved.
    pub schedulable_bytes: u64,
    /// Why there is no pin check, so that VMs whose memory may be pinned are held to their limits more slowly; null if
    /// there is one.
    pub pin_check_missing: Option<String>,
    /// What the host lacks, in words, the worst first; empty: nothing.
    #[serde(default)]
    pub warnings: Vec<String>,
}

/// An event: a report to operators.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number: microseconds since 1970-01-01 00:00 UTC, made to rise from each event to the next, also from one
    /// engine to the next.
    #[serde(default)]
    pub id: u64,
    /// Milliseconds since 1970-01-01 00:00 UTC.
    pub at_unix_ms: u64,
    /// The VM it is about; null for the host.
    pub vm: Option<String>,
    /// A short stable word such as `attached`, `engine-replaced`, `store-full`, `page-lost`.
    pub kind: String,
    /// What happened, in one sentence.
    pub message: String,
}
