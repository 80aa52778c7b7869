//! The HTTP/JSON API of Ballast, version 1: its types and their schemas, and a small blocking client.
//!
//! Before: `daemon` fills these types from the pager. After: the CLI and other programs read them.
//! Units: sizes are bytes and end in `_bytes`, durations name their unit, page counts end in `_pages`.
//! Promise: fields may be added in version 1, never renamed, removed or given another unit.
#![forbid(unsafe_code)]

mod adopt;
mod adopted;
mod agent;
mod client;
mod governor;
mod heat;
mod history;
mod host;
mod pool;
mod problem;
mod types;
mod upgrade;

pub use adopt::{AdoptRefusal, AdoptRequest, AdoptResult};
pub use adopted::{AdoptedBy, AdoptedStat, StallSource, VmKind};
pub use agent::{AgentStat, AgentState, NodeBalloon, NodeStat, PickedStat, TierStat, TieringStat, TieringState};
pub use ballast_policy as policy;
pub use client::{Client, ClientError};
pub use governor::{DecisionRecord, LeaseStat, PlanLimit, PlanRequest, PolicyPatch, PolicyStat};
pub use heat::{AgeBucket, DEFAULT_CELLS, HeatCell, HeatPatch, MAX_CELLS, VmHeat};
pub use history::{History, VmHistory};
pub use host::{Event, HostStat, RemoteFinding, RemoteNode, RemoteStat};
pub use pool::{LendRequest, PoolNode, PoolPages, PoolRequest, PoolStat, PoolVm};
pub use problem::Problem;
pub use types::{
    EngineTime, FaultCounts, GuestRange, HostTierStat, KeptVm, Latency, LimitsPatch, Psi, ReclaimCounts, RegionStat,
    RestoreStages, SettingSource, SourceKind, Stall, VmChange, VmClass, VmPatch, VmStat, VmStatus,
};
pub use upgrade::{UpgradeRequest, UpgradeStage, UpgradeStat};

/// Socket on which the daemon listens by default.
pub const DEFAULT_SOCKET: &str = "/run/ballast/api.sock";
/// Most bytes a request body may have.
pub const MAX_BODY_BYTES: usize = 64 * 1024;
