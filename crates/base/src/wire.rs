//! The messages that cross a process border between a VMM (client) and Ballast (keeper, engine).
//!
//! Two `SOCK_SEQPACKET` sockets per VMM process, one message per datagram:
//! * *attach socket*, client to keeper: who I am, my userfaultfds, my RAM. Its end-of-file tells each side that the
//!   other process died, because neither end is ever handed on.
//! * *control socket*, client to engine: zaps one way, discards the other. The client makes the pair and sends one end
//!   with [`Attach`]; the keeper gives a duplicate to each engine it starts, so it outlives engines.
//!
//! Units: addresses are host virtual addresses in the sending VMM; lengths are bytes.
//! Promise: [`decode`] accepts any bytes and returns a message or an error, and [`Attach::validate`] is all a receiver
//! needs to trust the numbers of an attach message.

use serde::{Deserialize, Serialize};

use crate::format::{Format, Message};
pub use crate::format::{WireError, decode, encode};
use crate::units::{Bytes, Hva, PAGE_SIZE};

/// The client's link. Version 2: file stores in escrow. Version 3: several userfaultfds. Version 4: an attach that must
/// wait. Version 5: a zap answered part by part. Version 6: each message states its least reader; nothing older is
/// read.
pub const FORMAT: Format = Format { version: 6, least_reader: 6, oldest: 6 };
/// Most RAM regions one VM may have.
pub const MAX_REGIONS: usize = 32;
/// Most userfaultfds of one process; each has a fault worker of the engine. (Most descriptors of an attach message:
/// 45.)
pub const MAX_SHARDS: usize = 8;
/// Most ranges in one [`EngineToClient::Zap`] or [`ClientToEngine::Discard`].
pub const MAX_RANGES: usize = 1024;
/// Fewest and most files in escrow: state and arena, and with a file store its file and index.
pub const MIN_ESCROW: usize = 2;
/// See [`MIN_ESCROW`].
pub const MAX_ESCROW: usize = 4;
/// Longest VM name, in bytes.
pub const MAX_NAME: usize = 64;

/// Identity of a VM: 128 random bits given by the keeper at first attach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct VmId(pub [u8; 16]);

impl std::fmt::Display for VmId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One contiguous piece of guest RAM as the sender maps it. Its file descriptor travels beside the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RegionInfo {
    /// Where the sender has it mapped.
    pub hva: Hva,
    /// Length of the mapping.
    pub len: Bytes,
    /// Where the mapping begins in the file.
    pub file_offset: Bytes,
}

/// What a VMM says to be managed.
///
/// Descriptors beside it, in this order: the userfaultfds, whose order is the same each time; the engine's end of the
/// control socket; one RAM file per region; and when `resume` is set, the escrow of the earlier attachment: state file,
/// arena file, and if `has_file` is set, the file of the file store and its index.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attach {
    /// What operators call the VM: letters, digits, `.`, `_`, `-`.
    pub name: String,
    /// DRAM cap at attach; `None` means none.
    pub limit: Option<Bytes>,
    /// The VMM program, for display.
    pub vmm: String,
    /// userfaultfd features the descriptors were enabled with.
    pub uffd_features: u64,
    /// How many userfaultfds there are. It never changes, because it decides which page belongs to which.
    pub shards: u8,
    /// Why this memory must never be reclaimed (VFIO, locked memory); `None` if it may be.
    pub pinned: Option<String>,
    /// May the kernel or a device write to guest RAM for a while without touching it through the page table (O_DIRECT,
    /// vhost, a read from FUSE past the page cache)? False is a promise. Else, where it cannot be seen who holds a
    /// page, none is ever evicted before the full quarantine time; see ARCHITECTURE.md.
    pub may_pin: bool,
    /// The RAM.
    pub regions: Vec<RegionInfo>,
    /// Set when this process was attached before and the keeper died: the VM it was.
    pub resume: Option<VmId>,
    /// On resume: four files were in escrow, not two.
    pub has_file: bool,
}

impl Attach {
    /// How many files the earlier attachment had in escrow.
    pub fn escrow_count(&self) -> usize {
        if self.has_file { MAX_ESCROW } else { MIN_ESCROW }
    }

    /// How many descriptors must travel beside this message.
    pub fn fd_count(&self) -> usize {
        usize::from(self.shards) + 1 + self.regions.len() + if self.resume.is_some() { self.escrow_count() } else { 0 }
    }

    /// Check everything that can be checked without looking at the descriptors. The error says what is wrong.
    pub fn validate(&self) -> Result<(), String> {
        check_name(&self.name)?;
        if self.vmm.len() > 256 || self.pinned.as_ref().is_some_and(|reason| reason.len() > 256) {
            return Err("the VMM name or the pinned reason is longer than 256 bytes".into());
        }
        if self.shards == 0 || usize::from(self.shards) > MAX_SHARDS {
            return Err(format!("{} userfaultfds announced; 1 to {MAX_SHARDS} are allowed", self.shards));
        }
        if self.regions.is_empty() || self.regions.len() > MAX_REGIONS {
            return Err(format!("{} RAM regions given; 1 to {MAX_REGIONS} are allowed", self.regions.len()));
        }
        check_regions(&self.regions)
    }
}

/// Is this a name a VM may have?
pub fn check_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if name.is_empty() || name.len() > MAX_NAME || !name.chars().all(allowed) || name.starts_with(['.', '-']) {
        return Err(format!(
            "VM name {name:?}: use 1 to {MAX_NAME} letters, digits, '.', '_' or '-', not beginning with '.' or '-'"
        ));
    }
    Ok(())
}

/// Are these regions page-aligned, non-empty, within the address space, and apart from each other?
pub fn check_regions(regions: &[RegionInfo]) -> Result<(), String> {
    /// The user half of the x86-64 address space (5-level paging included).
    const ADDRESS_END: u64 = 1 << 56;
    let mut spans = Vec::with_capacity(regions.len());
    for region in regions {
        let RegionInfo { hva, len, file_offset } = *region;
        let aligned = [hva.0, len.0, file_offset.0].iter().all(|n| n.is_multiple_of(PAGE_SIZE as u64));
        if !aligned || len.0 == 0 {
            return Err(format!("region at {hva} of {} bytes: addresses and lengths must be whole pages", len.0));
        }
        let end = hva.0.checked_add(len.0).filter(|end| *end <= ADDRESS_END);
        let file_end = file_offset.0.checked_add(len.0).filter(|end| *end <= i64::MAX as u64);
        let (Some(end), Some(_)) = (end, file_end) else {
            return Err(format!("region at {hva} of {} bytes does not fit the address space", len.0));
        };
        spans.push((hva.0, end));
    }
    spans.sort_unstable();
    match spans.windows(2).find(|pair| pair[0].1 > pair[1].0) {
        Some(pair) => Err(format!("regions overlap at {:#x}", pair[1].0)),
        None => Ok(()),
    }
}

/// Client to keeper, on the attach socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientToKeeper {
    /// Manage this VM.
    Attach(Attach),
    /// RAM was hot-plugged. One descriptor: the RAM file.
    AddRegion(RegionInfo),
    /// RAM was unplugged: the mapping at this address is about to go away. Wait for the answer before unmapping.
    RemoveRegion(Hva),
    /// From now on this memory must not be reclaimed, for this reason.
    Pin(String),
    /// From now on [`Attach::may_pin`] is true. Wait for the answer before the first such access.
    MayPin,
}

/// Keeper to client, on the attach socket. Every request is answered once, in order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum KeeperToClient {
    /// Managed. Descriptors, all read-only, to be given back on resume: the state file, the arena file, and if the VM
    /// has a file store, its file and its index.
    Attached(VmId),
    /// Done.
    Ok,
    /// Not done, for this reason.
    Refused(String),
    /// Not attached yet, for this reason: attach again in a moment.
    Later(String),
}

/// A range of guest RAM as the client maps it: start and length in bytes.
pub type Range = (Hva, u64);

/// Engine to client, on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum EngineToClient {
    /// Drop the page-table entries of these ranges, then answer [`ClientToEngine::Zapped`].
    Zap {
        /// The answer repeats it. The upper half is the engine's epoch, so an answer meant for a dead engine is
        /// recognised.
        seq: u64,
        /// At most [`MAX_RANGES`].
        ranges: Vec<Range>,
    },
    /// The discard with this number has been taken note of; free the memory now. With an `error` it was not, or only in
    /// part.
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
    /// The guest's memory cannot be kept right: stop the VM now and print why.
    FailStop {
        /// For the log.
        reason: String,
    },
}

/// Client to engine, on the control socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientToEngine {
    /// The zap with this number is done.
    Zapped {
        /// From [`EngineToClient::Zap`].
        seq: u64,
        /// The request makes no sense, and nothing was done.
        error: Option<i32>,
        /// Which parts of the ranges were not zapped, at most [`MAX_RANGES`]: they are announced RAM no more (the VMM
        /// has mapped something over them), or the kernel would not.
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
mod tests {
    use super::*;
    use crate::format::HEADER;
    use crate::units::{GIB, MIB};
    use proptest::prelude::*;

    fn attach() -> Attach {
        Attach {
            name: "web-1".into(),
            limit: Some(Bytes(512 * MIB)),
            vmm: "qemu-system-x86_64".into(),
            uffd_features: 0x520,
            shards: 1,
            pinned: None,
            may_pin: false,
            regions: vec![RegionInfo { hva: Hva(0x7f00_0000_0000), len: Bytes(GIB), file_offset: Bytes(0) }],
            resume: None,
            has_file: false,
        }
    }

    #[test]
    fn a_message_comes_back_as_it_went() {
        let message = ClientToKeeper::Attach(attach());
        assert_eq!(decode::<ClientToKeeper>(&encode(&message)), Ok(message));
    }

    #[test]
    fn another_version_is_named_in_the_error() {
        let mut bytes = encode(&KeeperToClient::Ok);
        bytes[4] = 9;
        bytes[6] = 9;
        let said = decode::<KeeperToClient>(&bytes).expect_err("too new").to_string();
        assert!(said.contains("has version 9"), "{said}");
    }

    #[test]
    fn what_is_said_is_what_this_version_says() {
        let attach =
            Attach { pinned: Some("p".into()), may_pin: true, resume: Some(VmId([7; 16])), has_file: true, ..attach() };
        let region = attach.regions[0];
        let text = || "t".to_owned();
        let range = (Hva(0x1000), 0x2000);
        let client = [
            ClientToKeeper::Attach(attach),
            ClientToKeeper::AddRegion(region),
            ClientToKeeper::RemoveRegion(Hva(0x1000)),
            ClientToKeeper::Pin(text()),
            ClientToKeeper::MayPin,
        ];
        let keeper = [
            KeeperToClient::Attached(VmId([7; 16])),
            KeeperToClient::Ok,
            KeeperToClient::Refused(text()),
            KeeperToClient::Later(text()),
        ];
        let engine = [
            EngineToClient::Zap { seq: 1, ranges: vec![range] },
            EngineToClient::DiscardDone { seq: 2, error: Some(text()) },
            EngineToClient::Ping { seq: 3 },
            EngineToClient::FailStop { reason: text() },
        ];
        let back = [
            ClientToEngine::Zapped { seq: 1, error: Some(22), kept: vec![range] },
            ClientToEngine::Discard { seq: 2, ranges: vec![range] },
            ClientToEngine::Pong { seq: 3 },
        ];
        fn hex<T: Message>(messages: &[T]) -> Vec<String> {
            let body = |message| encode(message)[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
            messages.iter().map(body).collect()
        }
        let said = [hex(&client), hex(&keeper), hex(&engine), hex(&back)].concat().join(" ");
        assert_eq!((FORMAT.version, said.as_str()), (6, SAID), "raise FORMAT, and put what is said now into SAID");
    }

    const SAID: &str = "00057765622d310180808080021271656d752d73797374656d2d7838365f3634a00a0101017001018080808080e01f\
        808080800400010707070707070707070707070707070701 018080808080e01f808080800400 028020 030174 04 \
        0007070707070707070707070707070707 01 020174 030174 00010180208040 0102010174 0203 030174 0001012c0180208040 \
        01020180208040 0203";

    #[test]
    fn trailing_bytes_are_refused() {
        let mut bytes = encode(&KeeperToClient::Ok);
        bytes.push(0);
        assert_eq!(decode::<KeeperToClient>(&bytes), Err(WireError::Body { len: 2 }));
    }

    #[test]
    fn wrong_regions_names_and_numbers_of_userfaultfds_are_refused() {
        assert_eq!(attach().validate(), Ok(()));
        let region = attach().regions[0];
        let wrong = [
            RegionInfo { hva: region.hva + 4096, ..region },
            RegionInfo { hva: Hva(0x1001), len: Bytes(4096), file_offset: Bytes(0) },
            RegionInfo { hva: Hva(0x1000), len: Bytes(0), file_offset: Bytes(0) },
            RegionInfo { hva: Hva(0x1000), len: Bytes(u64::MAX - 4095), file_offset: Bytes(0) },
            RegionInfo { hva: Hva(0x1000), len: Bytes(4096), file_offset: Bytes(u64::MAX - 4095) },
        ];
        for second in wrong {
            let attach = Attach { regions: vec![region, second], ..attach() };
            assert!(attach.validate().is_err(), "{second:?} was accepted");
        }
        for shards in [0, MAX_SHARDS as u8 + 1, u8::MAX] {
            assert!(Attach { shards, ..attach() }.validate().is_err(), "{shards} userfaultfds were accepted");
        }
        for name in ["", "a/b", "..", "-x", "é", &"x".repeat(65)] {
            assert!(Attach { name: name.into(), ..attach() }.validate().is_err(), "{name:?} was accepted");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_decode_to_a_message_or_an_error(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = encode(&KeeperToClient::Ok);
            bytes.truncate(HEADER);
            bytes.extend_from_slice(&body);
            let _ = decode::<ClientToKeeper>(&body);
            if let Ok(ClientToKeeper::Attach(attach)) = decode::<ClientToKeeper>(&bytes) {
                let _ = attach.validate();
            }
            let _ = decode::<ClientToEngine>(&bytes);
        }
    }
}
