//! A state file that several engines use in turn, and damaged ones.

use super::*;
use crate::table::flags_len;
use ballast_base::PageCount;
use ballast_base::{Extents, PageIdx};
use ballast_sys::memfd::FileId;
use proptest::prelude::*;
use std::os::unix::fs::FileExt;

const LOST: Lost = Lost { flags: 0x0101, word: 0xff };

fn word<'a>(table: &'a Surviving, record: &RegionRecord, page: u64) -> &'a AtomicU64 {
    &table.words(flags_len(record.pages()) as usize + page as usize * 8, 1)[0]
}

fn add(file: &StateFile, offset: u64, pages: u64) -> u32 {
    let extents = Extents::one(Bytes(offset), PageCount(pages).bytes()).expect("good");
    file.add_region(&[FileId { dev: 1, ino: 2 }], &extents, None).expect("add")
}

#[test]
fn a_successor_finds_what_its_predecessor_wrote() {
    let file = StateFile::create(VmId([7; 16]), "web-1").expect("create");
    file.set_limit(Some(Bytes(1 << 30)));
    assert_eq!((file.target(), file.settings()), (None, [0; SETTINGS]), "new words say nothing");
    file.set_target(Some(Bytes(1 << 29)));
    file.set_settings([1, 2, 3, 4, u64::MAX]);
    assert!(!file.kept());
    file.set_kept(true);
    assert_eq!(file.cluster(), 0, "a new word says nothing");
    file.keep_cluster(77);
    file.keep_cluster(78);
    let first = add(&file, 0, 20_000);
    let second = add(&file, 1 << 30, 1);
    assert_eq!((first, second, file.take_over(10, 99, LOST).expect("no journal")), (0, 1, 1));
    let record = file.regions().remove(0);
    let table = file.map_table(&record, LOST).expect("map");
    word(&table, &record, 19_999).store(5, Ordering::Release);
    table.bytes(0, 3)[2].store(1, Ordering::Release);

    let again = StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open");
    assert_eq!((again.id(), again.name().as_str()), (VmId([7; 16]), "web-1"));
    assert_eq!((again.limit(), again.engine()), (Some(Bytes(1 << 30)), Some((10, 99))));
    assert_eq!((again.target(), again.settings()), (Some(Bytes(1 << 29)), [1, 2, 3, 4, u64::MAX]));
    assert!(again.kept());
    assert_eq!(again.cluster(), 77, "the first engine that keeps one is right");
    again.forget_cluster();
    assert_eq!(file.cluster(), 0);
    again.set_target(None);
    assert_eq!((file.target(), file.limit()), (None, Some(Bytes(1 << 30))));
    assert_eq!(again.take_over(11, 100, LOST).expect("no journal"), 2);
    again.name_engine(12, 101);
    again.rename("w");
    again.set_unmanaged(Bytes(4096));
    assert_eq!(file.unmanaged(), Bytes(4096));
    again.remove_region(0);
    again.give_up_region(1);
    let ends = file.regions().iter().map(|record| (record.removed, record.given_up)).collect::<Vec<_>>();
    assert_eq!(ends, [(true, false), (true, true)]);
    assert_eq!((file.engine(), file.epoch(), file.name().as_str()), (Some((12, 101)), 2, "w"));
    let records = again.regions();
    assert_eq!(
        (records.len(), records[0].pages(), records[1].extents.place(PageIdx(0))),
        (2, PageCount(20_000), (0, 1 << 30))
    );
    let table = again.map_table(&records[0], LOST).expect("map");
    assert_eq!(word(&table, &records[0], 19_999).load(Ordering::Acquire), 5);
    assert_eq!(table.bytes(0, 3).iter().map(|flag| flag.load(Ordering::Acquire)).collect::<Vec<_>>(), [0, 0, 1]);
    let written = again.written_words(&records[0]).expect("seek");
    assert_eq!(written.len(), 1, "one page of words was written");
    assert!(written[0].contains(PageIdx(19_999)) && written[0].count() <= 512);
}

#[test]
fn words_of_a_region_that_was_not_added_completely_are_not_words_of_the_next() {
    let file = StateFile::create(VmId([7; 16]), "test").expect("create");
    let state = std::fs::File::from(file.fd().try_clone_to_owned().expect("dup"));
    let end = state.metadata().expect("stat").len();
    state.write_all_at(&[0xff; 8192], end).expect("write");
    add(&file, 0, 20_000);
    let record = file.regions().remove(0);
    let table = file.map_table(&record, LOST).expect("map");
    assert!((0..20_000).all(|page| word(&table, &record, page).load(Ordering::Relaxed) == 0));
}

#[test]
fn words_that_an_engine_was_replacing_when_it_died_are_lost_and_no_others() {
    let file = StateFile::create(VmId([7; 16]), "web-1").expect("create");
    add(&file, 0, 2000);
    let record = file.regions().remove(0);
    let table = file.map_table(&record, LOST).expect("map");
    let pages = [0, 511, 512, 1023, 1024];
    pages.iter().for_each(|page| word(&table, &record, *page).store(77, Ordering::Release));
    let second = record.words_at() + PAGE_SIZE as u64;
    file.set(Field::Journal, second | 1);
    memfd::punch(&*file.fd, second, PAGE_SIZE as u64).expect("it came so far");

    let again = StateFile::open(file.fd().try_clone_to_owned().expect("dup")).expect("open");
    again.take_over(11, 100, LOST).expect("finished");
    let table = again.map_table(&record, LOST).expect("map");
    let words = pages.map(|page| word(&table, &record, page).load(Ordering::Acquire));
    assert_eq!(words, [77, 77, LOST.word, LOST.word, 77]);
    assert_eq!(again.get(Field::Journal), 0);
}

proptest! {
    #[test]
    fn a_damaged_header_is_refused_or_stays_within_the_file(
        damage in proptest::collection::vec((0u64..3072, any::<u8>()), 1..40),
    ) {
        let file = StateFile::create(VmId([1; 16]), "x").expect("create");
        add(&file, 0, 5000);
        let raw = std::fs::File::from(file.fd().try_clone_to_owned().expect("dup"));
        for (offset, byte) in damage {
            raw.write_all_at(&[byte], offset).expect("write");
        }
        if let Ok(file) = StateFile::open(raw.into()) {
            for record in file.regions() {
                let table = file.map_table(&record, LOST).expect("map");
                word(&table, &record, record.pages().0 - 1).load(Ordering::Acquire);
            }
        }
    }
}

#[test]
fn a_file_is_opened_while_regions_are_added_to_it() {
    for _ in 0..50 {
        let state = StateFile::create(VmId([3; 16]), "test").expect("made");
        let file = memfd::create("ballast-test-ram", Bytes(0)).expect("memfd");
        let id = memfd::file_id(&file).expect("stat");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for number in 0..MAX_REGIONS as u64 {
                    let extents = Extents::one(Bytes(number << 20), Bytes(1 << 20)).expect("good");
                    state.add_region(&[id], &extents, None).expect("a region");
                }
            });
            let regions = || {
                let fd = state.fd().try_clone_to_owned().expect("dup");
                StateFile::open(fd).expect("a region that is about to be added is in nobody's way").regions().len()
            };
            while regions() < MAX_REGIONS {}
        });
    }
}
