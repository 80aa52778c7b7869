//! Messages between keeper and engine, on the socket that is the engine's standard input.
//!
//! Same framing as `base::wire` (magic, version, one datagram each), but both ends are always of one release: the engine
//! is started from the same file as the keeper, or from the one that replaced it, which must then speak this version.

use ballast_base::wire::{RegionInfo, VmId};
use ballast_base::{Bytes, Hva};
use ballast_policy::Setup;
use serde::{Deserialize, Serialize};

use crate::config::Compression;
use crate::tracking::Tracking;

/// What an engine must know to begin. Descriptor: the listening API socket.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    /// The keeper.
    pub keeper_pid: u32,
    /// Engines that died before this one.
    pub restarts: u64,
    /// When the keeper started, seconds since 1970.
    pub since_unix_s: u64,
    /// Most memory the store may use.
    pub store_budget: Bytes,
    /// How far pages are compressed.
    pub compression: Compression,
    /// Quarantine time.
    pub quarantine_ms: u64,
    /// Group that may read the API.
    pub reader_gid: Option<u32>,
    /// File stores.
    pub spill: Option<Spilling>,
    /// When VMs are tracked.
    pub heat: Tracking,
    /// The control loop.
    pub policy: Setup,
}

/// How pages go to file stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spilling {
    /// Most disk space.
    pub budget: Bytes,
    /// How long a page is far before it goes, at least.
    pub after_s: u64,
    /// Bytes that may be written for each VM in a day; 0 is no limit.
    pub writes_per_day: Bytes,
}

/// Keeper to engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Order {
    /// The first order. One descriptor: the API listener.
    Begin(Begin),
    /// Serve this VM. Descriptors: state file, arena file, with a file store its file and index, then one RAM file per
    /// region of the state file (a removed region is represented by the state file).
    OpenVm {
        /// The VM.
        vm: VmId,
        /// The VMM program.
        vmm: String,
        /// Why nothing may be reclaimed.
        pinned: Option<String>,
        /// See [`ballast_base::wire::Attach::may_pin`].
        may_pin: bool,
        /// It has a file store.
        has_file: bool,
    },
    /// Serve the faults of this process. Descriptors: its userfaultfds in its order, then the control socket.
    AddView {
        /// The VM.
        vm: VmId,
        /// The process.
        pid: u32,
        /// userfaultfd features.
        uffd_features: u64,
        /// Where it maps which region.
        spans: Vec<(RegionInfo, u32)>,
        /// Since when nobody serves it, on the monotonic clock.
        unserved_since_ns: Option<u64>,
    },
    /// RAM was hot-plugged. Descriptor: the RAM file.
    AddRegion {
        /// The VM.
        vm: VmId,
        /// The process that told us.
        pid: u32,
        /// Where it maps it.
        info: RegionInfo,
        /// Its number.
        number: u32,
    },
    /// RAM is about to be unplugged. Answered by [`Report::Done`].
    RemoveRegion {
        /// Comes back in the answer.
        seq: u64,
        /// The VM.
        vm: VmId,
        /// The process that told us.
        pid: u32,
        /// Where it is mapped.
        hva: Hva,
    },
    /// Keep all pages resident from now on. Answered by [`Report::Done`] when they are: a VMM that is about to pin its
    /// memory must not find pages that are far, or on their way.
    Pin {
        /// Comes back in the answer.
        seq: u64,
        /// The VM.
        vm: VmId,
        /// Why.
        reason: String,
    },
    /// From now on memory of the VM may be pinned for a while. Answered by [`Report::Done`].
    MayPin {
        /// Comes back in the answer.
        seq: u64,
        /// The VM.
        vm: VmId,
    },
    /// Answered by [`Report::Done`] when this process can touch these regions: its faults there are served, or if they
    /// cannot be, every page of the VM is back and stays.
    Reach {
        /// Comes back in the answer.
        seq: u64,
        /// The VM.
        vm: VmId,
        /// The process.
        pid: u32,
        /// Numbers of the regions.
        regions: Vec<u32>,
    },
    /// A process of the VM is gone.
    RemoveView {
        /// The VM.
        vm: VmId,
        /// The process.
        pid: u32,
    },
    /// The VM is gone.
    CloseVm {
        /// The VM.
        vm: VmId,
    },
    /// All VMs there are have been handed over: answer the API from now on. Answered by [`Report::Serving`].
    Serve,
    /// Are you there? Answered by [`Report::Pong`].
    Ping,
    /// Something for the event list.
    Note {
        /// The VM's name.
        vm: Option<String>,
        /// A short stable word.
        kind: String,
        /// One sentence.
        message: String,
    },
}

impl Order {
    /// The VM it is about, if it is about one that the engine may have open.
    pub fn vm(&self) -> Option<VmId> {
        match self {
            Self::OpenVm { vm, .. }
            | Self::AddView { vm, .. }
            | Self::AddRegion { vm, .. }
            | Self::RemoveRegion { vm, .. }
            | Self::Pin { vm, .. }
            | Self::MayPin { vm, .. }
            | Self::Reach { vm, .. }
            | Self::RemoveView { vm, .. }
            | Self::CloseVm { vm } => Some(*vm),
            Self::Begin(_) | Self::Serve | Self::Ping | Self::Note { .. } => None,
        }
    }
}

/// Engine to keeper.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Report {
    /// The order with this number is carried out, or why it could not be.
    Done {
        /// From the order.
        seq: u64,
        /// What went wrong.
        result: Result<(), String>,
    },
    /// The engine has opened what it was given: it is no longer starting.
    Serving,
    /// Here.
    Pong,
    /// An operator changed the control loop: the next engine is to begin with this.
    Policy(Setup),
}
