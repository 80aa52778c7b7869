//! What a receiver accepts, and the bytes of each message.

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
        uuid: None,
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
    bytes[4] = 10;
    bytes[6] = 10;
    let said = decode::<KeeperToClient>(&bytes).expect_err("too new").to_string();
    assert!(said.contains("has version 10"), "{said}");
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
        uuid: Some(Uuid([9; 16])),
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
        ClientToKeeper::Unmanaged { name: "w".into(), len: Bytes(0x1000), why: "t".into() },
        ClientToKeeper::Device,
    ];
    let keeper = [
        KeeperToClient::Attached { vm: VmId([7; 16]), stores: stores(), is_first: true },
        KeeperToClient::Ok,
        KeeperToClient::Refused(text()),
        KeeperToClient::Later(text()),
        KeeperToClient::Device,
    ];
    let engine = [
        EngineToClient::Zap { seq: 1, ranges: vec![range] },
        EngineToClient::DiscardDone { seq: 2, error: Some(text()) },
        EngineToClient::Ping { seq: 3 },
        EngineToClient::FailStop { reason: text() },
        EngineToClient::AgentPort,
        EngineToClient::Settled { range: (Hva(0), 2 << 20) },
    ];
    let back = [
        ClientToEngine::Zapped { seq: 1, error: Some(22), kept: vec![range] },
        ClientToEngine::Discard { seq: 2, ranges: vec![range] },
        ClientToEngine::Pong { seq: 3 },
        ClientToEngine::AgentPort(AgentPort::Here),
        ClientToEngine::AgentPort(AgentPort::None),
        ClientToEngine::AgentPort(AgentPort::Unreachable(text())),
    ];
    fn hex<T: Message>(messages: &[T]) -> Vec<String> {
        let body = |message| encode(message)[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect();
        messages.iter().map(body).collect()
    }
    let said = [hex(&client), hex(&keeper), hex(&engine), hex(&back)].concat().join(" ");
    assert_eq!((FORMAT.version, said.as_str()), (1, SAID), "raise FORMAT, and put what is said now into SAID");
}

const SAID: &str = "00057765622d3101090909090909090909090909090909090180808080021271656d752d73797374656d2d7838365f3634a\
    00a010101017001018080808080e01f808080800401000080808080040001070707070707070707070707070707070201010202 01802080600\
    20180e00180400080a001802001804002 028020 030174 04 05802001806080208040 06017780200174 07 0007070707070707070707070\
    707070707020101020201 01 020174 030174 04 00010180208040 0102010174 0203 030174 04 050080808001 0001012c0180208040 \
    01020180208040 0203 0300 0301 03020174";

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
        (RegionInfo { extents: vec![extent(1, 0, 1)], ..one(1, 0, 2) }, "its extents have 4096 bytes, and it has 8192"),
        (RegionInfo { extents: vec![extent(1, 0, 2), extent(1, 1, 1)], ..one(1, 0, 3) }, "overlap at offset 0x1000"),
        (RegionInfo { extents: Vec::new(), ..one(1, 0, 1) }, "it has no extents"),
        (one(0, 7, 1), "the regions at 0x7f0000000000 and 0x40000000 overlap at offset 0x7000 of file 0"),
        (one(2, 0, 1), "an extent of file 2, and there are 2 files"),
        (many, "1025 extents; at most 1024"),
    ];
    for (second, why) in wrong {
        let said = with(second.clone()).validate().expect_err("wrong").to_string();
        assert!(said.contains(why), "{second:?}: {said}");
    }
    for files in [0, MAX_FILES as u8 + 1, u8::MAX] {
        assert!(Attach { files, ..attach() }.validate().is_err(), "{files} RAM files were accepted");
    }
    let stores = |stores: &[(u8, u8)]| {
        let stores = stores.iter().map(|(store, count)| StoreFiles { store: *store, count: *count }).collect();
        Attach { resume: Some(VmId([7; 16])), stores, ..attach() }
    };
    assert_eq!((stores(&[(1, 1), (2, 2)]).validate(), stores(&[(1, 1), (2, 2)]).fd_count()), (Ok(()), 1 + 1 + 1 + 4));
    for wrong in [&[(1, 9)][..], &[(1, 255), (2, 255)], &[(1, 1), (1, 1)]] {
        assert!(stores(wrong).validate().is_err(), "{wrong:?} was accepted");
    }
    assert!(Attach { resume: None, ..stores(&[(1, 1)]) }.validate().is_err(), "a new VM has no stores");
    for shards in [0, MAX_SHARDS as u8 + 1, u8::MAX] {
        assert!(Attach { shards, ..attach() }.validate().is_err(), "{shards} userfaultfds were accepted");
    }
    for name in ["", "a\0b", "a\nb", "\u{202e}x", &"x".repeat(MAX_NAME + 1)] {
        assert!(Attach { name: name.into(), ..attach() }.validate().is_err(), "{name:?} was accepted");
    }
    for name in ["a/b", "web:1", "..", "-x", "東京", &"x".repeat(255)] {
        assert_eq!(Attach { name: name.into(), ..attach() }.validate(), Ok(()), "{name:?}");
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

#[test]
fn a_name_is_its_own_whatever_its_letters_and_what_cannot_be_shown_is_escaped() {
    let names = [
        "web-1",
        "web:1",
        "web/1",
        "веб-1",
        "база-1",
        "..",
        "-x",
        "a b",
        "it's \"x\"",
        "हिन्दी",
        "a\nb",
        "a\\nb",
        "a\u{1b}[2J",
        "a\u{202e}b",
        "\u{301}x",
        "a\u{a0}b",
        "a\u{7f}",
    ];
    let shown: std::collections::BTreeSet<String> = names.iter().map(|name| shown_name(name)).collect();
    assert_eq!(shown.len(), names.len(), "two names became one: {shown:?}");
    for name in &shown {
        assert_eq!(check_name(name), Ok(()), "{name}");
        assert!(!name.chars().any(char::is_control), "{name:?}");
    }
    assert_eq!(shown_name("हिन्दी, web's"), "हिन्दी, web's");
    assert_eq!(shown_name("a\u{1b}b\\"), "a\\u{1b}b\\\\");
    assert_eq!(check_name(&shown_name(&"é".repeat(127))), Ok(()), "254 bytes");
    assert_eq!(check_name(&shown_name(&"n".repeat(255))), Ok(()));
}
