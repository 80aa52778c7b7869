//! The messages that cross a process border between a VMM (client) and Ballast (keeper, engine).
//!
//! Two `SOCK_SEQPACKET` sockets per VMM process, one message per datagram:
//! * *attach socket*, client to keeper: who I am, my userfaultfds, my RAM. Its end-of-file tells each side that the
//!   other process died, because neither end is ever passed to a third one.
//! * *control socket*, client to engine: zaps one way, discards the other. The client makes the pair and sends one end
//!   with [`Attach`]; the keeper gives a duplicate to each engine it starts, so it outlives engines.
//!
//! Units: addresses are host virtual addresses in the sending VMM; lengths are bytes.
//! Promise: [`decode`] accepts any bytes and returns a message or an error, and [`Attach::validate`] is all a receiver
//! needs to trust the numbers of an attach message.

use serde::{Deserialize, Serialize};

use crate::extent::{Extent, MAX_EXTENTS};
use crate::extents::Extents;
use crate::format::{Format, Message};
pub use crate::format::{WireError, decode, encode};
use crate::guest::GuestRange;
use crate::invalid::Invalid;
use crate::units::{Bytes, Hva, PAGE_SIZE};
use crate::uuid::Uuid;

/// The versions of the client's link.
pub const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
/// Most RAM regions one VM may have.
pub const MAX_REGIONS: usize = 32;
/// Most userfaultfds of one process; each has a fault worker of the engine.
pub const MAX_SHARDS: usize = 8;
/// Most RAM files of one VM. (Most descriptors of a message: 50, with userfaultfds, escrow and control socket.)
pub const MAX_FILES: usize = 32;
/// Most ranges in one [`EngineToClient::Zap`] or [`ClientToEngine::Discard`].
pub const MAX_RANGES: usize = 1024;
/// Most files that all stores of a VM have.
pub const MAX_STORE_FILES: usize = 8;
/// Longest VM name, in bytes, as [`shown_name`] writes it. Any name of 255 bytes that can be shown is one.
pub const MAX_NAME: usize = 512;

/// Identity of a VM: 128 random bits given by the keeper at first attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub [u8; 16]);

impl std::fmt::Display for VmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Number of the files of one store beside a message. Their meaning is known to the store alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFiles {
    /// The number of the store (`ballast_base::store`).
    pub store: u8,
    /// Number of its files.
    pub count: u8,
}

/// Where a process maps a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Span {
    /// Its first byte.
    pub hva: Hva,
    /// Its length.
    pub len: Bytes,
}

/// One contiguous range of guest RAM as the sender maps it. Its files are beside the message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Where the sender has it mapped.
    pub span: Span,
    /// The extents mapped there, in order. Files are numbered as in the message.
    pub extents: Vec<Extent>,
    /// Its guest-physical addresses; `None` if the sender does not know.
    pub guest_address: Option<u64>,
}

impl RegionInfo {
    /// A region that is one piece of the first file.
    pub fn one(hva: Hva, len: Bytes, offset: Bytes) -> Self {
        Self { span: Span { hva, len }, extents: vec![Extent { file: 0, offset, len }], guest_address: None }
    }

    /// The extents of the region, checked.
    ///
    /// # Errors
    /// They are invalid; the error names the region.
    pub fn checked(&self) -> Result<Extents, Invalid> {
        let extents = Extents::new(&self.extents);
        extents
            .and_then(|extents| extents.check_len(self.span.len).map(|()| extents))
            .map_err(|error| format!("region at {}: {error}", self.span.hva).into())
    }
}

/// A VMM's request to be managed.
///
/// Descriptors beside it, in this order: the userfaultfds, whose order is the same each time; the engine's end of the
/// control socket; the RAM files; and when `resume` is set, the escrow of the earlier attachment: the state file, then
/// the files of its stores.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// Name of the VM, as [`shown_name`] writes it.
    pub name: String,
    /// Its UUID, if its operator gave it one.
    pub uuid: Option<Uuid>,
    /// Limit at attach; `None`: no limit.
    pub limit: Option<Bytes>,
    /// The VMM program, for display.
    pub vmm: String,
    /// userfaultfd features the descriptors were enabled with.
    pub uffd_features: u64,
    /// How many userfaultfds there are. It never changes, because it decides which page belongs to which.
    pub shards: u8,
    /// How many RAM files there are, no two the same.
    pub files: u8,
    /// Why this memory must never be reclaimed (VFIO, locked memory); `None` if it may be.
    pub pinned: Option<String>,
    /// May the kernel or a device write to guest RAM for a while without touching it through the page table (O_DIRECT,
    /// vhost, a read from FUSE past the page cache)? False is a promise. If it is true and there is no pin check, no
    /// page is evicted before the full quarantine time; see ARCHITECTURE.md.
    pub may_pin: bool,
    /// The RAM.
    pub regions: Vec<RegionInfo>,
    /// Set when this process was attached before and the keeper died: the VM of that attachment.
    pub resume: Option<VmId>,
    /// On resume: the files of stores that were in escrow, in the order in which they came.
    pub stores: Vec<StoreFiles>,
}

/// Number of the files of all these stores.
pub fn count_files(stores: &[StoreFiles]) -> usize {
    stores.iter().map(|store| usize::from(store.count)).sum()
}

impl Attach {
    /// How many descriptors must travel beside this message.
    pub fn fd_count(&self) -> usize {
        let escrow = if self.resume.is_some() { 1 + count_files(&self.stores) } else { 0 };
        usize::from(self.shards) + 1 + usize::from(self.files) + escrow
    }

    /// Check everything that can be checked without looking at the descriptors. The error says what is wrong.
    pub fn validate(&self) -> Result<(), Invalid> {
        check_name(&self.name)?;
        if self.vmm.len() > 256 || self.pinned.as_ref().is_some_and(|reason| reason.len() > 256) {
            return Err("the VMM name or the pinned reason is longer than 256 bytes".into());
        }
        if self.shards == 0 || usize::from(self.shards) > MAX_SHARDS {
            return Err(format!("{} userfaultfds announced; 1 to {MAX_SHARDS} are allowed", self.shards).into());
        }
        if self.regions.is_empty() || self.regions.len() > MAX_REGIONS {
            return Err(format!("{} RAM regions given; 1 to {MAX_REGIONS} are allowed", self.regions.len()).into());
        }
        check_stores(&self.stores)?;
        if self.resume.is_none() && !self.stores.is_empty() {
            return Err("files of stores are announced for a VM that is new".into());
        }
        check_regions(&self.regions, self.files)
    }
}

/// Check that no store is named twice, and that there are at most [`MAX_STORE_FILES`] files.
pub fn check_stores(stores: &[StoreFiles]) -> Result<(), Invalid> {
    let files = count_files(stores);
    if files > MAX_STORE_FILES {
        return Err(format!("{files} files of stores announced; at most {MAX_STORE_FILES} are allowed").into());
    }
    let mut numbers: Vec<u8> = stores.iter().map(|store| store.store).collect();
    numbers.sort_unstable();
    match numbers.array_windows().find(|[one, next]| one == next) {
        Some([store, _]) => Err(format!("files of store {store} are announced twice").into()),
        None => Ok(()),
    }
}

/// The name of a VM as it travels, is stored and is shown: characters that cannot be shown, and the backslash, are
/// escaped as in Rust. Different names stay different.
pub fn shown_name(name: &str) -> String {
    let mut shown = String::with_capacity(name.len());
    let mut buffer = String::new();
    for c in name.chars() {
        buffer.clear();
        // Alone, or at the beginning, a combining character would be escaped.
        buffer.extend(['a', c]);
        match c {
            '\'' | '"' => shown.push(c),
            _ => shown.extend(buffer.escape_debug().skip(1)),
        }
    }
    shown
}

/// Check that a VM may have this name, as [`shown_name`] writes it.
pub fn check_name(name: &str) -> Result<(), Invalid> {
    if name.is_empty() || name.len() > MAX_NAME {
        return Err(format!(
            "VM name {:?} has {} bytes; a name has 1 to {MAX_NAME}, and each character that cannot be shown counts as \
             its escape",
            name.chars().take(32).collect::<String>(),
            name.len()
        )
        .into());
    }
    let plain: String = name.split('\\').collect();
    if shown_name(&plain) != plain {
        return Err(format!("VM name {name:?}: characters that cannot be shown must be escaped").into());
    }
    Ok(())
}

/// Check that these regions are page-aligned, non-empty, within the address space and apart from each other, in
/// addresses and in the files of their message, of which there are `files`.
pub fn check_regions(regions: &[RegionInfo], files: u8) -> Result<(), Invalid> {
    if files == 0 || usize::from(files) > MAX_FILES {
        return Err(format!("{files} RAM files announced; 1 to {MAX_FILES} are allowed").into());
    }
    check_spans(&regions.iter().map(|region| region.span).collect::<Vec<_>>())?;
    let count: usize = regions.iter().map(|region| region.extents.len()).sum();
    if count > MAX_EXTENTS {
        return Err(format!("the regions have {count} extents; at most {MAX_EXTENTS} are allowed").into());
    }
    let mut all = Vec::with_capacity(count);
    for region in regions {
        let extents = region.checked()?;
        if extents.files() > usize::from(files) {
            let (at, file) = (region.span.hva, extents.files() - 1);
            return Err(format!("region at {at}: it has an extent of file {file}, and there are {files} files").into());
        }
        all.extend(extents.list().iter().map(|extent| (extent.file, extent.offset.0, extent.end(), region.span.hva)));
    }
    all.sort_unstable_by_key(|(file, start, ..)| (*file, *start));
    match all.array_windows().find(|[one, next]| one.0 == next.0 && next.1 < one.2) {
        Some([one, next]) => {
            let (at, file) = (next.1, next.0);
            Err(format!("the regions at {} and {} overlap at offset {at:#x} of file {file}", one.3, next.3).into())
        }
        None => Ok(()),
    }
}

/// Check that these are page-aligned, non-empty, within the address space, and apart from each other.
pub fn check_spans(spans: &[Span]) -> Result<(), Invalid> {
    /// The user half of the x86-64 address space (5-level paging included).
    const ADDRESS_END: u64 = 1 << 56;
    let mut ends = Vec::with_capacity(spans.len());
    for Span { hva, len } in spans {
        let aligned = [hva.0, len.0].iter().all(|n| n.is_multiple_of(PAGE_SIZE as u64));
        if !aligned || len.0 == 0 {
            return Err(format!("region at {hva} of {} bytes: addresses and lengths must be whole pages", len.0).into());
        }
        let Some(end) = hva.0.checked_add(len.0).filter(|end| *end <= ADDRESS_END) else {
            return Err(format!("region at {hva} of {} bytes does not fit the address space", len.0).into());
        };
        ends.push((hva.0, end));
    }
    ends.sort_unstable();
    match ends.array_windows().find(|[one, next]| one.1 > next.0) {
        Some([_, next]) => Err(format!("regions overlap at {:#x}", next.0).into()),
        None => Ok(()),
    }
}

/// Client to keeper, on the attach socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientToKeeper {
    /// Manage this VM.
    Attach(Attach),
    /// RAM was plugged. Descriptors: its files.
    AddRegion {
        /// Where, and what.
        region: RegionInfo,
        /// How many files there are, no two the same.
        files: u8,
    },
    /// RAM was unplugged: the mapping at this address is about to go away. Wait for the answer before unmapping.
    RemoveRegion(Hva),
    /// From now on this memory must not be reclaimed, for this reason.
    Pin(String),
    /// From now on [`Attach::may_pin`] is true. Wait for the answer before the first such access.
    MayPin,
    /// Guest-physical addresses of the region that is mapped here, if the VMM learns them later. Replaces earlier ones.
    GuestRanges {
        /// Where it is mapped.
        hva: Hva,
        /// At most [`crate::guest::MAX_GUEST_RANGES`].
        ranges: Vec<GuestRange>,
    },
    /// This part of the guest's RAM is not managed. Before an attach: the whole VM of this name, and there is no reply.
    Unmanaged {
        /// The VM, as [`shown_name`] writes it.
        name: String,
        /// Bytes that are not managed; 0 if unknown.
        len: Bytes,
        /// For the operator.
        why: String,
    },
    /// Give me `/dev/userfaultfd`, open. Sent before an attach. Answered by [`KeeperToClient::Device`].
    Device,
}

/// Keeper to client, on the attach socket. Every request is answered once, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeeperToClient {
    /// Managed. Descriptors, all read-only, to be given back on resume: the state file, then the files of its stores.
    Attached {
        /// Which VM it is.
        vm: VmId,
        /// How many files of which store there are.
        stores: Vec<StoreFiles>,
        /// No other process of the VM was attached. Without `resume` before it: the VM is new.
        is_first: bool,
    },
    /// Done.
    Ok,
    /// Not done, for this reason.
    Refused(String),
    /// Not attached yet, for this reason: attach again in a moment.
    Later(String),
    /// Descriptor: `/dev/userfaultfd`, open.
    Device,
}

/// A range of guest RAM as the client maps it: start and length in bytes.
pub type Range = (Hva, u64);

/// Engine to client, on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineToClient {
    /// Drop the page-table entries of these ranges, then answer [`ClientToEngine::Zapped`].
    Zap {
        /// The answer repeats it. The upper half is the engine's epoch, which shows answers meant for a dead engine.
        seq: u64,
        /// At most [`MAX_RANGES`].
        ranges: Vec<Range>,
    },
    /// The discard with this number was recorded; free the memory now. With an `error` it was not, or only in part.
    DiscardDone {
        /// From [`ClientToEngine::Discard`].
        seq: u64,
        /// Why not, for the VMM's log.
        error: Option<String>,
    },
    /// Are you there? Answer [`ClientToEngine::Pong`].
    Ping {
        /// The answer repeats it.
        seq: u64,
    },
    /// The guest's memory cannot be kept intact: stop the VM now and print why.
    FailStop {
        /// For the log.
        reason: String,
    },
    /// Give me the host's end of the port of the guest's agent. Answered by [`ClientToEngine::AgentPort`].
    AgentPort,
    /// All of this range, whole units of a region, is in memory and has no copy, until its next [`Self::Zap`].
    Settled {
        /// The range in the receiving process.
        range: Range,
    },
}

/// Client to engine, on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientToEngine {
    /// The zap with this number is done.
    Zapped {
        /// From [`EngineToClient::Zap`].
        seq: u64,
        /// The request is invalid, and nothing was done.
        error: Option<i32>,
        /// Parts of the ranges that were not zapped, at most [`MAX_RANGES`]: they are no longer announced RAM (the VMM
        /// has mapped something over them), or the kernel refused.
        kept: Vec<Range>,
    },
    /// The VMM is about to free these ranges (balloon, free page reporting, virtio-mem). Sent before it does, and it
    /// waits for [`EngineToClient::DiscardDone`].
    Discard {
        /// The answer repeats it.
        seq: u64,
        /// At most [`MAX_RANGES`].
        ranges: Vec<Range>,
    },
    /// Answer to [`EngineToClient::Ping`].
    Pong {
        /// From the ping.
        seq: u64,
    },
    /// Answer to [`EngineToClient::AgentPort`].
    AgentPort(AgentPort),
}

/// The host's end of the port of the guest's agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgentPort {
    /// It is the one descriptor beside this message: a connected Unix stream socket.
    Here,
    /// The VMM has none.
    None,
    /// It cannot be reached, for this reason.
    Unreachable(String),
}

impl Message for ClientToKeeper {
    const FORMAT: Format = FORMAT;
}
impl Message for KeeperToClient {
    const FORMAT: Format = FORMAT;
}
impl Message for EngineToClient {
    const FORMAT: Format = FORMAT;
}
impl Message for ClientToEngine {
    const FORMAT: Format = FORMAT;
}

#[cfg(test)]
mod tests;
