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

use crate::extent::{Extent, Extents, MAX_EXTENTS};
use crate::format::{Format, Message};
pub use crate::format::{WireError, decode, encode, version_of};
use crate::guest::GuestRange;
use crate::units::{Bytes, Hva, PAGE_SIZE};

/// The client's link. Version 2: file stores in escrow. Version 3: several userfaultfds. Version 4: an attach that must
/// wait. Version 5: a zap answered part by part. Version 6: each message states its least reader. Version 7: regions of
/// extents, guest-physical addresses, counted descriptors; nothing older is read, but a client of version 6 can read
/// why. Version 8: guest-physical ranges, told later.
pub const FORMAT: Format = Format { version: 8, least_reader: 7, oldest: 7 };
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

/// How many files of one store are beside a message: what they are is the store's business.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFiles {
    /// The number of the store (`ballast_base::store`).
    pub store: u8,
    /// How many.
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
    /// What is mapped there, one after the other. Files have their numbers among those of the message.
    pub extents: Vec<Extent>,
    /// Where the guest sees its first byte; `None` if the sender does not know.
    pub guest_address: Option<u64>,
}

impl RegionInfo {
    /// A region that is one piece of the first file.
    pub fn one(hva: Hva, len: Bytes, offset: Bytes) -> Self {
        Self { span: Span { hva, len }, extents: vec![Extent { file: 0, offset, len }], guest_address: None }
    }

    /// What it is made of.
    ///
    /// # Errors
    /// It cannot be; the error names the region.
    pub fn checked(&self) -> Result<Extents, String> {
        let extents = Extents::new(&self.extents);
        extents
            .and_then(|extents| extents.check_len(self.span.len).map(|()| extents))
            .map_err(|error| format!("region at {}: {error}", self.span.hva))
    }
}

/// What a VMM says to be managed.
///
/// Descriptors beside it, in this order: the userfaultfds, whose order is the same each time; the engine's end of the
/// control socket; the RAM files; and when `resume` is set, the escrow of the earlier attachment: the state file, then
/// the files of its stores.
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
    /// How many RAM files there are, no two the same.
    pub files: u8,
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
    /// On resume: the files of stores that were in escrow, in the order in which they came.
    pub stores: Vec<StoreFiles>,
}

/// How many files all these are.
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
        check_stores(&self.stores)?;
        if self.resume.is_none() && !self.stores.is_empty() {
            return Err("files of stores are announced for a VM that is new".into());
        }
        check_regions(&self.regions, self.files)
    }
}

/// Is no store named twice, and are there no more files than may be?
pub fn check_stores(stores: &[StoreFiles]) -> Result<(), String> {
    let files = count_files(stores);
    if files > MAX_STORE_FILES {
        return Err(format!("{files} files of stores announced; at most {MAX_STORE_FILES} are allowed"));
    }
    let mut numbers: Vec<u8> = stores.iter().map(|store| store.store).collect();
    numbers.sort_unstable();
    match numbers.array_windows().find(|[one, next]| one == next) {
        Some([store, _]) => Err(format!("files of store {store} are announced twice")),
        None => Ok(()),
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

/// Are these regions page-aligned, non-empty, within the address space and apart from each other, there and in the
/// files of their message, of which there are `files`?
pub fn check_regions(regions: &[RegionInfo], files: u8) -> Result<(), String> {
    if files == 0 || usize::from(files) > MAX_FILES {
        return Err(format!("{files} RAM files announced; 1 to {MAX_FILES} are allowed"));
    }
    check_spans(&regions.iter().map(|region| region.span).collect::<Vec<_>>())?;
    let count: usize = regions.iter().map(|region| region.extents.len()).sum();
    if count > MAX_EXTENTS {
        return Err(format!("the regions have {count} extents; at most {MAX_EXTENTS} are allowed"));
    }
    let mut all = Vec::with_capacity(count);
    for region in regions {
        let extents = region.checked()?;
        if extents.files() > usize::from(files) {
            let (at, file) = (region.span.hva, extents.files() - 1);
            return Err(format!("region at {at}: it has an extent of file {file}, and there are {files} files"));
        }
        all.extend(extents.list().iter().map(|extent| (extent.file, extent.offset.0, extent.end(), region.span.hva)));
    }
    all.sort_unstable_by_key(|(file, start, ..)| (*file, *start));
    match all.array_windows().find(|[one, next]| one.0 == next.0 && next.1 < one.2) {
        Some([one, next]) => {
            let (at, file) = (next.1, next.0);
            Err(format!("the regions at {} and {} overlap at offset {at:#x} of file {file}", one.3, next.3))
        }
        None => Ok(()),
    }
}

/// Are these page-aligned, non-empty, within the address space, and apart from each other?
pub fn check_spans(spans: &[Span]) -> Result<(), String> {
    /// The user half of the x86-64 address space (5-level paging included).
    const ADDRESS_END: u64 = 1 << 56;
    let mut ends = Vec::with_capacity(spans.len());
    for Span { hva, len } in spans {
        let aligned = [hva.0, len.0].iter().all(|n| n.is_multiple_of(PAGE_SIZE as u64));
        if !aligned || len.0 == 0 {
            return Err(format!("region at {hva} of {} bytes: addresses and lengths must be whole pages", len.0));
        }
        let Some(end) = hva.0.checked_add(len.0).filter(|end| *end <= ADDRESS_END) else {
            return Err(format!("region at {hva} of {} bytes does not fit the address space", len.0));
        };
        ends.push((hva.0, end));
    }
    ends.sort_unstable();
    match ends.array_windows().find(|[one, next]| one.1 > next.0) {
        Some([_, next]) => Err(format!("regions overlap at {:#x}", next.0)),
        None => Ok(()),
    }
}

/// Client to keeper, on the attach socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientToKeeper {
    /// Manage this VM.
    Attach(Attach),
    /// RAM was hot-plugged. Descriptors: its files.
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
    /// Where the guest sees the region at this address: the VMM knows only now. It replaces what was said before.
    GuestRanges {
        /// Where it is mapped.
        hva: Hva,
        /// At most [`crate::guest::MAX_GUEST_RANGES`].
        ranges: Vec<GuestRange>,
    },
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
    },
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

    fn least_reader(&self) -> u16 {
        match self {
            Self::GuestRanges { .. } => 8,
            _ => FORMAT.least_reader,
        }
    }
}
impl Message for KeeperToClient {
    const FORMAT: Format = FORMAT;

    fn least_reader(&self) -> u16 {
        match self {
            // A client that is too old reads why it is refused.
            Self::Refused(_) | Self::Later(_) => 6,
            Self::Attached { .. } | Self::Ok => FORMAT.least_reader,
        }
    }
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

    fn region() -> RegionInfo {
        RegionInfo::one(Hva(0x7f00_0000_0000), Bytes(GIB), Bytes(0))
    }

    fn extent(file: u16, first: u64, pages: u64) -> Extent {
        Extent { file, offset: Bytes(first * PAGE_SIZE as u64), len: Bytes(pages * PAGE_SIZE as u64) }
    }

    fn attach() -> Attach {
        Attach {
            name: "web-1".into(),
            limit: Some(Bytes(512 * MIB)),
            vmm: "qemu-system-x86_64".into(),
            uffd_features: 0x520,
            shards: 1,
            files: 1,
            pinned: None,
            may_pin: false,
            regions: vec![region()],
            resume: None,
            stores: Vec::new(),
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
        let region = RegionInfo {
            span: Span { hva: Hva(0x1000), len: Bytes(0x3000) },
            extents: vec![extent(1, 7, 2), extent(0, 5, 1)],
            guest_address: Some(0x2000),
        };
        let stores = || vec![StoreFiles { store: 1, count: 1 }, StoreFiles { store: 2, count: 2 }];
        let attach = Attach {
            pinned: Some("p".into()),
            may_pin: true,
            resume: Some(VmId([7; 16])),
            stores: stores(),
            ..attach()
        };
        let text = || "t".to_owned();
        let range = (Hva(0x1000), 0x2000);
        let seen = GuestRange { address: 0x3000, offset: Bytes(0x1000), len: Bytes(0x2000) };
        let client = [
            ClientToKeeper::Attach(attach),
            ClientToKeeper::AddRegion { region, files: 2 },
            ClientToKeeper::RemoveRegion(Hva(0x1000)),
            ClientToKeeper::Pin(text()),
            ClientToKeeper::MayPin,
            ClientToKeeper::GuestRanges { hva: Hva(0x1000), ranges: vec![seen] },
        ];
        let keeper = [
            KeeperToClient::Attached { vm: VmId([7; 16]), stores: stores() },
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
        assert_eq!((FORMAT.version, said.as_str()), (8, SAID), "raise FORMAT, and put what is said now into SAID");
    }

    const SAID: &str = "00057765622d310180808080021271656d752d73797374656d2d7838365f3634a00a010101017001018080\
        808080e01f808080800401000080808080040001070707070707070707070707070707070201010202 0180208060020180e001804\
        00080a001802001804002 028020 030174 04 05802001806080208040 00070707070707070707070707070707070201010202 01\
        \x20020174 030174 00010180208040 0102010174 0203 030174 0001012c0180208040 01020180208040 0203";

    /// What a client of version 6 knows of its keeper's answers.
    #[derive(Debug, Serialize, Deserialize)]
    enum Answer6 {
        Attached(VmId),
        Ok,
        Refused(String),
        Later(String),
    }

    impl Message for Answer6 {
        const FORMAT: Format = Format { version: 6, least_reader: 6, oldest: 6 };
    }

    #[test]
    fn an_older_client_is_refused_with_both_versions_and_can_read_why() {
        let mut bytes = encode(&ClientToKeeper::MayPin);
        bytes[4..8].copy_from_slice(&[6, 0, 6, 0]);
        let why = decode::<ClientToKeeper>(&bytes).expect_err("it is too old").to_string();
        assert!(why.contains("has version 6") && why.contains("version 8 and reads from 7 on"), "{why}");
        let read = decode::<Answer6>(&encode(&KeeperToClient::Refused(why.clone()))).expect("it reads that");
        assert!(matches!(read, Answer6::Refused(read) if read == why));
        decode::<Answer6>(&encode(&KeeperToClient::Ok)).expect_err("nothing else");
    }

    #[test]
    fn trailing_bytes_are_refused() {
        let mut bytes = encode(&KeeperToClient::Ok);
        bytes.push(0);
        assert_eq!(decode::<KeeperToClient>(&bytes), Err(WireError::Body { len: 2 }));
    }

    #[test]
    fn wrong_regions_names_and_numbers_of_userfaultfds_are_refused() {
        assert_eq!(attach().validate(), Ok(()));
        let span = |hva, len| RegionInfo { span: Span { hva: Hva(hva), len: Bytes(len) }, ..region() };
        let one = |file, first, pages: u64| RegionInfo {
            span: Span { hva: Hva(1 << 30), len: Bytes(pages << 12) },
            extents: vec![extent(file, first, pages)],
            guest_address: None,
        };
        let with = |second| Attach { regions: vec![region(), second], files: 2, ..attach() };
        assert_eq!(with(one(1, 0, 5)).validate(), Ok(()));
        assert_eq!(with(one(0, GIB >> 12, 5)).validate(), Ok(()));
        let many = RegionInfo { extents: vec![extent(1, 0, 1); MAX_EXTENTS], ..one(1, 0, 1) };
        let wrong = [
            (RegionInfo::one(Hva(0x7f00_0000_1000), Bytes(4096), Bytes(GIB)), "regions overlap at 0x7f0000001000"),
            (span(0x1001, 4096), "addresses and lengths must be whole pages"),
            (span(0x1000, 0), "addresses and lengths must be whole pages"),
            (span(0x1000, u64::MAX - 4095), "does not fit the address space"),
            (one(1, u64::MAX >> 12, 1), "is too long"),
            (one(1, 0, 0), "addresses and lengths must be whole pages"),
            (RegionInfo { extents: vec![extent(1, 0, 1), extent(1, 3, 0)], ..one(1, 0, 1) }, "extent 1, 0 bytes"),
            (
                RegionInfo { extents: vec![extent(1, 0, 1)], ..one(1, 0, 2) },
                "its extents have 4096 bytes, and it has 8192",
            ),
            (
                RegionInfo { extents: vec![extent(1, 0, 2), extent(1, 1, 1)], ..one(1, 0, 3) },
                "overlap at offset 0x1000",
            ),
            (RegionInfo { extents: Vec::new(), ..one(1, 0, 1) }, "it has no extents"),
            (one(0, 7, 1), "the regions at 0x7f0000000000 and 0x40000000 overlap at offset 0x7000 of file 0"),
            (one(2, 0, 1), "an extent of file 2, and there are 2 files"),
            (many, "1025 extents; at most 1024"),
        ];
        for (second, why) in wrong {
            let said = with(second.clone()).validate().expect_err("wrong");
            assert!(said.contains(why), "{second:?}: {said}");
        }
        for files in [0, MAX_FILES as u8 + 1, u8::MAX] {
            assert!(Attach { files, ..attach() }.validate().is_err(), "{files} RAM files were accepted");
        }
        let stores = |stores: &[(u8, u8)]| {
            let stores = stores.iter().map(|(store, count)| StoreFiles { store: *store, count: *count }).collect();
            Attach { resume: Some(VmId([7; 16])), stores, ..attach() }
        };
        assert_eq!(
            (stores(&[(1, 1), (2, 2)]).validate(), stores(&[(1, 1), (2, 2)]).fd_count()),
            (Ok(()), 1 + 1 + 1 + 4)
        );
        for wrong in [&[(1, 9)][..], &[(1, 255), (2, 255)], &[(1, 1), (1, 1)]] {
            assert!(stores(wrong).validate().is_err(), "{wrong:?} was accepted");
        }
        assert!(Attach { resume: None, ..stores(&[(1, 1)]) }.validate().is_err(), "a new VM has no stores");
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
