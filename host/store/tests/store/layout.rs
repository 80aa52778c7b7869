//! The layout of an arena and an index, byte by byte, for their versions; and the versions that may open them.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ballast_base::format::{Format, Stamp};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, PageIdx};
use ballast_handover::arena;
use ballast_store::{
    Budget, FileOptions, FileStore, GetOutcome, Group, Handle, IoContext, PageKey, RamOptions, RamStore, RegionKey,
    Store,
};
use ballast_sys::memfd;
use ballast_testkit::pages;
use ballast_testkit::skip;

use crate::common::stored;

const STAMP: u64 = 8;

fn key(page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 3 }.page(PageIdx(page))
}

fn dup(fd: &OwnedFd) -> OwnedFd {
    fd.try_clone().expect("dup")
}

fn raw(fd: &OwnedFd) -> std::fs::File {
    dup(fd).into()
}

/// The words of a file that are not zero, as `at=word`, without the counters, which differ by thread.
fn words(fd: &OwnedFd) -> Vec<String> {
    let file = raw(fd);
    let mut bytes = vec![0; file.metadata().expect("stat").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("read");
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).enumerate();
    let counters = |at: usize| (1024 / 8..2048 / 8).contains(&at);
    let set = words.filter(|(at, word)| *word != 0 && !counters(*at));
    set.map(|(at, word)| format!("{:x}={word:x}", at * 8)).collect()
}

fn counters(fd: &OwnedFd) -> [u64; 8] {
    let mut bytes = [0; 1024];
    raw(fd).read_exact_at(&mut bytes, 1024).expect("read");
    let words: Vec<u64> = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
    std::array::from_fn(|counter| words.chunks(8).map(|shard| shard[counter]).sum())
}

fn put(store: &dyn Store, page: u64, bytes: &[u8; 4096]) -> Handle {
    stored(store.put(key(page), bytes))
}

/// Puts one page of each kind. Returns the layout then.
fn layout(store: &dyn Store, fd: &OwnedFd) -> String {
    let mut numbers = [0; 4096];
    numbers.iter_mut().zip(0..).for_each(|(byte, at)| *byte = if at < 64 { at as u8 } else { 7 });
    let kinds = [pages::filled(0x55aa_55aa_55aa_55aa), pages::filled(0x0123_4567_89ab_cdef), numbers];
    let handles: Vec<_> =
        (1..).zip(&kinds).map(|(page, bytes)| format!("{:x}", put(store, page, bytes).bits())).collect();
    format!("{} | {:?} | {}", handles.join(" "), counters(fd), words(fd).join(" "))
}

fn ram_store() -> (RamStore, OwnedFd) {
    RamStore::create(RamOptions { max_slabs: 4, ..RamOptions::new(Budget::new(Bytes(1 << 20))) }).expect("store")
}

fn file_options() -> FileOptions {
    FileOptions::new(Budget::new(Bytes(4 << 20)))
}

/// A file store; `None`, with a message, where no disk has direct I/O.
fn file_store() -> Option<(FileStore, OwnedFd, OwnedFd)> {
    let dir = std::env::var_os("BALLAST_TEST_DIR").map_or_else(std::env::temp_dir, PathBuf::from);
    FileStore::create(&dir, file_options()).inspect_err(|error| skip("disk", error)).ok()
}

#[test]
fn an_arena_is_laid_out_as_its_version_says() {
    let (store, fd) = ram_store();
    let said = (RamStore::FORMAT.version, layout(&store, &fd));
    assert_eq!(said, (1, ARENA.to_owned()), "raise the version of the arena, and put what is there now into ARENA");
}

#[test]
fn an_index_is_laid_out_as_its_version_says() {
    let Some((store, _file, index)) = file_store() else { return };
    let inode = |fd: &OwnedFd, at| {
        let mut word = [0; 8];
        raw(fd).read_exact_at(&mut word, at).expect("read");
        u64::from_le_bytes(word)
    };
    let (device, inode) = (inode(&index, 48), inode(&index, 56));
    let said = layout(&store, &index);
    // The file's identity and the day are not part of the layout.
    let said = said.replace(&format!("30={device:x} 38={inode:x}"), "30=device 38=inode");
    let words: Vec<&str> = said.split(' ').filter(|word| !word.starts_with("40=")).collect();
    let said = (FileStore::FORMAT.version, words.join(" "));
    assert_eq!(said, (1, INDEX.to_owned()), "raise the version of the index, and put what is there now into INDEX");
}

#[test]
fn a_groups_arena_is_laid_out_as_its_version_says() {
    let fd = arena::create().expect("memfd");
    let options = RamOptions { max_slabs: 4, ..RamOptions::new(Budget::new(Bytes(1 << 20))) };
    let group = Group::open(&fd, options).expect("a group");
    let opening = memfd::reopen(fd.as_fd(), true).expect("reopen");
    arena::announce(&opening, key(0).region.vm).expect("announce");
    let member = group.join(key(0).region.vm, opening, true).expect("room for a member");
    let said = layout(&member, &fd);
    // The file's identity seeds the checksums: the first word of a blob's header, and half of the second.
    let masked = said.split(' ').map(|word| match word.split_once('=') {
        Some((at @ ("10000" | "20000"), _)) => format!("{at}=checksum"),
        Some((at @ ("10008" | "20008"), word)) => format!("{at}={}checksum", &word[..word.len() - 8]),
        _ => word.to_owned(),
    });
    let said = (arena::GROUP.format.version, masked.collect::<Vec<_>>().join(" "));
    assert_eq!(
        said,
        (1, GROUP.to_owned()),
        "raise the version of the group's arena, and put what is there now into GROUP"
    );
}

fn set_stamp(fd: &OwnedFd, stamp: Stamp) {
    raw(fd).write_all_at(&stamp.to_word().to_le_bytes(), STAMP).expect("write");
}

fn stamp(fd: &OwnedFd) -> Stamp {
    let mut word = [0; 8];
    raw(fd).read_exact_at(&mut word, STAMP).expect("read");
    Stamp::from_word(u64::from_le_bytes(word))
}

/// Stamps of a later version that this one may read, of one that it may not read, and of one that is too old.
fn others(ours: Format) -> (Stamp, [Stamp; 2]) {
    let next = ours.version + 1;
    let readable = Stamp { version: next, least_reader: ours.version };
    let older = Stamp { version: ours.oldest - 1, least_reader: 0 };
    (readable, [Stamp { version: next, least_reader: next }, older])
}

#[test]
fn an_arena_of_a_newer_version_opens_if_it_may_and_is_refused_unchanged_if_not() {
    let (store, fd) = ram_store();
    let page = pages::half_compressible(5);
    let handle = put(&store, 9, &page);
    drop(store);
    let (readable, refused) = others(RamStore::FORMAT);
    let open = || RamStore::open(dup(&fd), RamOptions::new(Budget::new(Bytes(1 << 20))));
    for stamp in refused {
        set_stamp(&fd, stamp);
        let before = words(&fd);
        let said = open().expect_err("it cannot be read").to_string();
        let Stamp { version, least_reader } = stamp;
        let expected =
            format!("a RAM store arena: it has version {version} and needs a reader of at least {least_reader}");
        assert!(said.contains(&expected), "{said}");
        assert_eq!(words(&fd), before, "who is refused changes nothing");
    }
    set_stamp(&fd, readable);
    // A field that this version does not know.
    raw(&fd).write_all_at(&[1; 8], 1016).expect("write");
    let store = open().expect("it may be read");
    let mut out = [0; 4096];
    assert_eq!((store.get(key(9), handle, &mut out, IoContext::GUEST), out == page), (GetOutcome::Found, true));
    assert_eq!(stamp(&fd), readable, "an older writer lowers nothing");
    assert!(words(&fd).contains(&"3f8=101010101010101".to_owned()), "and leaves what it does not know");
}

const ARENA: &str = "aa55aa55aa 100000000 100000400 | [2, 1, 1, 0, 2, 101, 0, 0] | 0=45524f54534c4142 8=100000001 10=4 \
    18=10000 20=2 28=2 1000=101 1008=1 1080=105 1088=1 10000=b5b5104f33890eeb 10008=104000833446287 \
    10010=123456789abcdef 20000=eed31910fc7bef64 20008=102005db96ee265 20010=5040302010034ff \
    20018=d0c0b0a09080706 20020=1514131211100f0e 20028=1d1c1b1a19181716 20030=2524232221201f1e \
    20038=2d2c2b2a29282726 20040=3534333231302f2e 20048=3d3c3b3a39383736 20050=ff00030707073f3e \
    20058=ffffffffffffffff 20060=50b4ffffffffffff 20068=707070707";

const GROUP: &str = "aa55aa55aa 100000000 100000400 | [2, 0, 0, 0, 2, 101, 0, 0] | 0=50554f52474c4142 8=100000001 10=4 \
    18=10000 \
    20=2 28=2 800=707070707070707 1000=101 1008=1 1080=105 1088=1 10000=checksum 10008=1040008checksum \
    10010=123456789abcdef 20000=checksum 20008=102005dchecksum 20010=5040302010034ff 20018=d0c0b0a09080706 \
    20020=1514131211100f0e 20028=1d1c1b1a19181716 20030=2524232221201f1e 20038=2d2c2b2a29282726 \
    20040=3534333231302f2e 20048=3d3c3b3a39383736 20050=ff00030707073f3e 20058=ffffffffffffffff \
    20060=50b4ffffffffffff 20068=707070707";

const INDEX: &str = "aa55aa55aa 100000000 100000001 | [2, 1, 0, 2, 0, 0, 0, 0] | 0=53454c49464c4142 8=100000001 10=2 \
    18=2000 20=1 28=1 30=device 38=inode 1000=201 1008=3 2000=b5b5104f33890eeb 2008=101100033446287 \
    2010=eed31910fc7bef64 2018=1011000b96ee265";
