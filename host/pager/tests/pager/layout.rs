//! The layout of a state file of this version, byte by byte, and which programs may open it.

use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::Ordering;

use ballast_base::format::Stamp;
use ballast_base::guest::GuestRange;
use ballast_base::wire::VmId;
use ballast_base::{Bytes, Extent, Extents, PageCount, PageIdx};
use ballast_handover::state_file::{COUNTERS, FORMAT, HISTOGRAM_WORDS, SETTINGS, StateFile};
use ballast_page::page_state::{State, Ticket, Word};
use ballast_pager::vm::region_table::{LOST, RegionTable};
use ballast_pager::vm::stats::Counter;
use ballast_store::Handle;
use ballast_sys::memfd::FileId;

const STAMP: u64 = 8;

fn dup(file: &StateFile) -> OwnedFd {
    file.fd().try_clone_to_owned().expect("dup")
}

fn raw(file: &StateFile) -> std::fs::File {
    dup(file).into()
}

/// The words of a file that are not zero: `at=word`.
fn words(file: &StateFile) -> String {
    let file = raw(file);
    let mut bytes = vec![0; file.metadata().expect("stat").len() as usize];
    file.read_exact_at(&mut bytes, 0).expect("read");
    let words = bytes.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word)).enumerate();
    let set: Vec<_> = words.filter(|(_, word)| *word != 0).map(|(at, word)| format!("{:x}={word:x}", at * 8)).collect();
    set.join(" ")
}

/// Three regions, one of them of three extents, with a different value in each field.
fn file() -> StateFile {
    let file = StateFile::create(VmId(std::array::from_fn(|at| at as u8 + 1)), "web-1").expect("create");
    file.set_limit(Some(Bytes(0x11)));
    file.set_target(Some(Bytes(0x12)));
    file.set_settings(std::array::from_fn(|at| 0x20 + at as u64));
    file.set_kept(true);
    file.keep_cluster(0x13);
    let id = |at| FileId { dev: at, ino: at + 1 };
    let one = |offset, pages| Extents::one(Bytes(offset), PageCount(pages).bytes()).expect("good");
    file.add_region(&[id(0x31)], &one(0x4000, 8193), None).expect("region");
    file.add_region(&[id(0x33)], &one(0x5000, 1), Some(0)).expect("region");
    let extent = |file, offset, len| Extent { file, offset: Bytes(offset), len: Bytes(len) };
    let three = Extents::new(&[extent(1, 0x8000, 0x1000), extent(0, 0, 0x2000), extent(1, 0x1000, 0x3000)]);
    file.add_region(&[id(0x35), id(0x37)], &three.expect("good"), Some(0x9000)).expect("region");
    let seen = |offset, address, pages| GuestRange { address, offset: Bytes(offset), len: PageCount(pages).bytes() };
    file.set_guest_ranges(2, &[seen(0x1000, 0x7000, 2), seen(0x3000, 0xa000, 3)]).expect("set");
    file.remove_region(0);
    file.give_up_region(1);
    file.take_over(0x41, 0x42, LOST).expect("no journal");
    for (words, last) in [(file.counters(), COUNTERS - 1), (file.histograms(), HISTOGRAM_WORDS - 1)] {
        words[0].store(0x51, Ordering::Release);
        words[last].store(0x52, Ordering::Release);
    }
    let table = RegionTable::map(&file, &file.regions()[0]).expect("map");
    table.chunk_flags()[1].store(2, Ordering::Release);
    let far = Word::far(0x61, Handle::new(Handle::MAX - 1).expect("in range"), 0x62);
    let quarantine = Word::quarantine(Ticket::new(0x63, 0x64), 0x65);
    let states = [
        Word::new(State::Resident, 0x66),
        quarantine,
        quarantine.in_state(State::Evicting),
        far,
        far.marked(),
        far.in_state(State::Restoring).locked(),
        Word::new(State::Zero, 0),
        Word::new(State::Poisoned, 0),
        Word::LOST,
    ];
    for (page, word) in (8193 - states.len() as u64..).zip(states) {
        table.words(PageIdx(page), 1)[0].store(word.bits(), Ordering::Release);
    }
    file
}

#[test]
fn a_state_file_is_laid_out_as_its_version_says() {
    let (file, listed) = (file(), 0x71);
    let _listed = file.list(listed).expect("nobody has fenced it");
    let counters = (Counter::Quarantined as usize, Counter::FaultFile as usize, Counter::ZeroedPages as usize);
    let said = (FORMAT.version, SETTINGS, counters, words(&file));
    let expected = (1, 5, (0, 24, 32), STATE.to_owned());
    assert_eq!(said, expected, "raise the version of the state file, and put what is there now into STATE");
    file.name_beside(0x43, 0x44);
    let with_a_key = |file: &StateFile| {
        file.keep_secret(0x81, &std::array::from_fn(|at| 0x82 + at as u8 / 8));
        words(file)
    };
    let beside = words(&file);
    for at in ["180=81", "188=8282828282828282", "1a0=8585858585858585", "8=100000001"] {
        let words = with_a_key(&file);
        assert!(words.split(' ').any(|word| word == at), "{at}: {words}");
    }
    for at in ["30=43", "38=44", "90=41", "98=42"] {
        assert!(beside.split(' ').any(|word| word == at), "{at}: {beside}");
    }
}

fn set_stamp(file: &StateFile, stamp: Stamp) {
    raw(file).write_all_at(&stamp.to_word().to_le_bytes(), STAMP).expect("write");
}

fn stamp(file: &StateFile) -> Stamp {
    let mut word = [0; 8];
    raw(file).read_exact_at(&mut word, STAMP).expect("read");
    Stamp::from_word(u64::from_le_bytes(word))
}

#[test]
fn a_newer_state_file_opens_if_it_permits_that_and_unknown_fields_stay() {
    let file = file();
    let newer = Stamp { version: FORMAT.version + 3, least_reader: FORMAT.version };
    set_stamp(&file, newer);
    // Unknown fields, in the header and after the region table.
    for at in [504, 4088] {
        raw(&file).write_all_at(&[1; 8], at).expect("write");
    }
    let again = StateFile::open(dup(&file)).expect("it may be read");
    assert_eq!((again.limit(), again.regions().len()), (Some(Bytes(0x11)), 3));
    again.take_over(0x43, 0x44, LOST).expect("no journal");
    again.remove_region(0);
    assert_eq!(stamp(&file), newer, "an older writer lowers nothing");
    let words = words(&file);
    for at in ["1f8=101010101010101", "ff8=101010101010101"] {
        assert!(words.contains(at), "{words}");
    }
}

#[test]
fn a_state_file_too_new_is_refused_with_both_versions_and_not_changed() {
    let file = file();
    let next = FORMAT.version + 1;
    let older = Stamp { version: FORMAT.oldest - 1, least_reader: 0 };
    for stamp in [Stamp { version: next, least_reader: next }, Stamp { version: 900, least_reader: next }, older] {
        set_stamp(&file, stamp);
        let before = words(&file);
        let said = StateFile::open(dup(&file)).expect_err("it cannot be read").to_string();
        let Stamp { version, least_reader } = stamp;
        let expected =
            format!("VM's state file: it has version {version} and needs a reader of at least {least_reader}");
        assert!(said.contains(&expected), "{said}");
        assert_eq!(words(&file), before);
    }
    set_stamp(&file, FORMAT.stamp());
    assert_eq!(StateFile::open(dup(&file)).expect("its own reader").name(), "web-1");
}

const STATE: &str = "0=535453414c4c4142 8=100000001 10=807060504030201 18=100f0e0d0c0b0a09 20=1 28=11 30=41 38=42 40=3 \
    48=20000 50=12 58=20 60=21 68=22 70=23 78=24 80=1 a0=13 200=312d626577 400=31 408=32 410=4000 418=2001 \
    420=8000 428=1 440=33 448=34 450=5000 458=1 460=1a000 468=2 478=1 480=37 488=38 490=8000 498=6 \
    4a0=1c000 4b0=1e003 4b8=9001 \
    c00=103 c08=7 c10=2 c18=303 c20=a c28=3 1000=51 11f8=52 1200=410000000042 1218=71 2000=51 7ff8=52 8000=200 \
    18fc0=6600 18fc8=63000064006501 18fd0=63000064006502 18fd8=fffffffffe616203 18fe0=fffffffffe616223 \
    18fe8=fffffffffe616214 18ff0=5 18ff8=6 19000=1f 1e000=37 1e008=38 1e010=8000 1e018=1 1e020=35 \
    1e028=36 1e038=2 1e040=37 1e048=38 1e050=1000 1e058=3 1f000=37 1f008=38 1f010=8000 1f018=1 1f020=35 \
    1f028=36 1f038=2 1f040=37 1f048=38 1f050=1000 1f058=3";
