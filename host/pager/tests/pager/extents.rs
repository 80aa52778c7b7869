//! A VM whose RAM is made of extents, out of order and in two files, against the real kernel: real userfaultfd, real
//! memfds; the guest is threads of this test. The files have other bytes around the extents, which must not change.
//! Needs root (userfaultfd).

use crate::common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::store::RAM_STORE;
use ballast_base::units::MIB;
use ballast_base::{Bytes, Extent, Extents, HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx, PageRange};
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::ram::RamFile;
use ballast_sys::memfd;
use common::{AMPLE, LIMIT, QUICK, Rig, churn, restore_for, until};

fn extent(file: u16, first: u64, pages: u64) -> Extent {
    Extent { file, offset: PageCount(first).bytes(), len: PageCount(pages).bytes() }
}

/// 32 MiB: three extents of one file, out of order, one of them a single page; and one of another file.
fn four() -> Extents {
    let list = [extent(0, 5000, 3000), extent(0, 4000, 1), extent(1, 7, 2191), extent(0, 100, 3000)];
    Extents::new(&list).expect("good")
}

/// A page on each side of each border, and the first and the last one.
fn borders(extents: &Extents) -> Vec<u64> {
    let all = PageRange::of(PageIdx(0), extents.pages().0);
    extents.pieces(all).flat_map(|piece| [piece.pages.start().0, piece.pages.end().0 - 1]).collect()
}

#[test]
fn pages_of_extents_are_evicted_and_restored_and_no_other_byte_changes() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK).filled();
    let ram = PageCount(rig.pages).bytes();
    assert_eq!(rig.resident(), ram, "the rest of the files does not count");
    rig.squeeze(LIMIT);
    rig.check_not_ram();
    rig.check_bytes();
    until("resident is at the limit again", || rig.resident() <= LIMIT);
    assert!((0..rig.pages).rev().all(|page| rig.holds(page, 1)), "a byte was lost on the second way");
    rig.squeeze(Bytes(2 * MIB));
    rig.count_exactly();
    rig.check_not_ram();
    for page in borders(&four()) {
        assert!(rig.holds(page, 1), "page {page}");
    }
}

#[test]
fn pages_of_others_in_the_file_do_not_count_as_the_vms() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK);
    let region = rig.vm.region(0).expect("region");
    assert_eq!((rig.resident(), region.resident().expect("count")), (Bytes(0), PageCount(0)));
    for (count, page) in (1..).zip(borders(&four()).into_iter().step_by(2)) {
        rig.fill(page, 1);
        assert_eq!(region.resident().expect("count"), PageCount(count));
    }
    until("it is counted again", || rig.resident() == PageCount(4).bytes());
}

#[test]
fn discarded_parts_of_extents_read_zeros_and_their_neighbours_keep_their_bytes() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK).squeezed(LIMIT);
    // Across two borders, with a whole extent between them.
    let gone = PageRange::new(PageIdx(2990), PageIdx(3010));
    rig.discard(gone.start().0..gone.end().0);
    for page in 0..rig.pages {
        match gone.contains(PageIdx(page)) {
            true => assert_eq!(rig.word(page).load(Ordering::Relaxed), 0, "page {page}"),
            false => assert!(rig.holds(page, 1), "page {page} was touched"),
        }
    }
    rig.check_not_ram();
    rig.count_exactly();
}

#[test]
fn a_successor_finds_every_byte_of_every_extent() {
    let mut rig = Rig::of_extents(four(), AMPLE, QUICK).squeezed(LIMIT);
    for _ in 0..2 {
        let stores = rig.vm.stores.clone();
        // The successor must evict no page while copies are counted.
        rig.set_limit(None);
        let recovered = rig.succeed(stores);
        assert_eq!(recovered.live_in(RAM_STORE).count(), rig.ram_store().usage().pages);
        rig.set_limit(Some(LIMIT));
        rig.check_bytes();
        rig.squeeze(LIMIT);
    }
    rig.check_not_ram();
}

#[test]
fn threads_that_write_at_random_while_engines_take_over_lose_nothing() {
    let mut rig = Rig::of_extents(four(), AMPLE, Duration::from_millis(2));
    rig.set_limit(Some(LIMIT));
    for _ in 0..3 {
        churn_for_a_while(&rig);
        let stores = rig.vm.stores.clone();
        rig.succeed(stores);
        // Each turn of the guest begins without knowledge of earlier writes.
        (0..rig.pages).for_each(|page| rig.word(page).store(0, Ordering::Relaxed));
    }
    rig.check_not_ram();
}

fn churn_for_a_while(rig: &Rig) {
    let steps = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let steps = &steps;
            scope.spawn(move || churn(rig, thread, 2, || steps.fetch_add(1, Ordering::Relaxed) > 40_000));
        }
    });
}

#[test]
fn pages_far_when_the_last_process_ends_are_written_back_to_their_file() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK).squeezed(LIMIT);
    rig.vm.remove_view(std::process::id());
    rig.vm.stop();
    let regions = rig.vm.regions();
    let done = rig.vm.write_back(&regions, &mut || true).expect("write back");
    assert!(!done.stopped && done.pages.bytes().0 > 16 * MIB, "{done:?}");
    for page in (0..rig.pages).map(PageIdx) {
        assert_eq!(regions[0].word(page).state(), State::Resident, "{page}");
        let (file, offset) = regions[0].extents().place(page);
        let mut bytes = [0; PAGE_SIZE];
        rustix::io::pread(&regions[0].files()[usize::from(file)], &mut bytes, offset).expect("read");
        assert!(bytes == ballast_testkit::pages::half_compressible(1 << 32 | page.0), "{page}");
    }
    rig.check_not_ram();
}

#[test]
fn huge_pages_in_extents_are_evicted_and_restored_as_one() {
    let unit = |file, first, units| extent(file, first * PAGES_PER_UNIT, units * PAGES_PER_UNIT);
    let extents = Extents::new(&[unit(0, 5, 3), unit(1, 1, 2), unit(0, 1, 3)]).expect("good");
    let Some(rig) = Rig::huge_of_extents(extents, AMPLE, QUICK) else { return };
    rig.fill_all();
    assert_eq!(rig.resident(), PageCount(rig.pages).bytes());
    rig.squeeze(Bytes(3 * HUGE_SIZE as u64));
    rig.check_bytes();
    let region = rig.vm.region(0).expect("region");
    assert!(region.resident().expect("count").bytes().0 <= 8 * HUGE_SIZE as u64);
}

#[test]
fn extents_that_cannot_be_ram_are_refused_with_the_reason() {
    use ballast_base::wire::VmId;
    use ballast_handover::state_file::StateFile;
    use ballast_pager::vm::region_table::LOST;
    let rig = Rig::without_view(Bytes(MIB), AMPLE, QUICK);
    let stores = rig.vm.stores.clone();
    let refused = |extents: &[Extent], files: &[RamFile]| {
        let state = StateFile::create(VmId([4; 16]), "test").expect("state");
        let ids: Vec<_> = files.iter().map(|file| file.id).collect();
        state.add_region(&ids, &Extents::new(extents).expect("apart"), None).expect("region");
        let epoch = state.take_over(std::process::id(), 1, LOST).expect("no journal");
        let vm = ballast_pager::vm::Vm::new(state, epoch, stores.clone(), rig.vm.tuning, rig.vm.reporter());
        let error = vm.open_region(files).expect_err("it cannot be RAM");
        std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string)
    };
    let small = || RamFile::new(memfd::create("ballast-test", PageCount(10).bytes()).expect("memfd")).expect("stat");
    let said = refused(&[extent(0, 0, 5), extent(1, 6, 5)], &[small(), small()]);
    assert!(said.contains("extent 1 ends at offset 0xb000 of file 1"), "{said}");
    let size = Bytes(4 * HUGE_SIZE as u64);
    let Ok(huge) = memfd::create_huge("ballast-test", size) else { return ballast_testkit::skip("hugetlb", "no file") };
    let huge = RamFile::new(huge).expect("stat");
    let said = refused(&[extent(0, 0, 512), extent(0, 600, 512)], std::slice::from_ref(&huge));
    assert!(said.contains("must be whole pages of 2097152 bytes"), "{said}");
    let base = RamFile::new(memfd::create("ballast-test", size).expect("memfd")).expect("stat");
    let said = refused(&[extent(0, 0, 512), extent(1, 0, 512)], &[huge, base]);
    assert!(said.contains("pages of different sizes"), "{said}");
}

/// Makes the second file of a VM shorter. Returns the number of far pages beyond and before its new end. The file has
/// the pages from 3001 on; its first 7 pages are no RAM.
fn far_around_a_new_end(rig: &Rig) -> (usize, usize) {
    let region = rig.vm.region(0).expect("region");
    rustix::fs::ftruncate(&region.files()[1], PageCount(7 + 1000).bytes().0).expect("truncate");
    let is_far = |from: u64, pages: u64| (from..from + pages).filter(|page| region.is_far(PageIdx(*page))).count();
    (is_far(4001, 1191), is_far(0, 4001) + is_far(5192, 3000))
}

#[test]
fn write_back_into_a_truncated_file_ends_and_restores_the_rest() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK).squeezed(Bytes(2 * MIB));
    rig.vm.remove_view(std::process::id());
    rig.vm.stop();
    let (beyond, others) = far_around_a_new_end(&rig);
    assert!(beyond > 0 && others > 0);
    let error = rig.vm.write_back(&rig.vm.regions(), &mut || true).expect_err("some pages have no place");
    assert!(error.to_string().contains("shorter"), "{error}");
    assert_eq!(far_around_a_new_end(&rig), (beyond, 0), "all others are back");
}

#[test]
fn restoring_a_vm_with_a_truncated_file_ends_and_restores_the_rest() {
    let rig = Rig::of_extents(four(), AMPLE, QUICK).squeezed(Bytes(2 * MIB));
    let (beyond, others) = far_around_a_new_end(&rig);
    assert!(beyond > 0 && others > 0);
    for _ in 0..2 {
        let error = restore_for(&rig.vm, Hold::Shared).expect_err("some pages have no place");
        assert!(error.to_string().contains("shorter"), "{error}");
        let (still, others) = far_around_a_new_end(&rig);
        assert!(still >= beyond && others == 0, "all others are back: {still} of {beyond}, {others}");
    }
}
