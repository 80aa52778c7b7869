//! A VM on huge pages of hugetlbfs, which move as one, against the real kernel. Needs root (userfaultfd) and free
//! memory for up to 48 huge pages; the pool's size is raised for the test and put back.

use crate::common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::store::RAM_STORE;
use ballast_base::units::MIB;
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT, PageIdx};
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::recover::recover;
use ballast_pager::vm::stats::Counter;
use common::{QUICK, Rig, churn_by, disk, hammer, restore_for, until};

const RAM: Bytes = Bytes(48 * MIB);
const LIMIT: Bytes = Bytes(16 * MIB);
const AMPLE: Bytes = Bytes(96 * MIB);

fn squeezed() -> Option<Rig> {
    Rig::huge(RAM, AMPLE, QUICK, None).map(|rig| rig.squeezed(LIMIT))
}

#[test]
fn a_huge_page_moves_as_one_and_one_touch_restores_all_of_it() {
    let Some(rig) = squeezed() else { return };
    rig.count_exactly();
    let region = rig.vm.region(0).expect("region");
    let far =
        region.granules(region.range()).find(|page| region.word(*page).state() == State::Far).expect("some is far");
    let before = (rig.resident(), rig.vm.stats().get(Counter::FaultRestore));
    assert!(rig.holds(far.0 + 300, 1), "the page that was touched");
    // The worker counts the restore after the wake.
    until("the restore is counted", || rig.vm.stats().get(Counter::FaultRestore) == before.1 + 1);
    assert_eq!(rig.resident().0 - before.0.0, HUGE_SIZE as u64);
    assert!((far.0..far.0 + PAGES_PER_UNIT).all(|page| rig.holds(page, 1)));
    assert_eq!(rig.vm.stats().get(Counter::FaultRestore), before.1 + 1, "the others came with it");
    let pages = rig.vm.stats().get(Counter::RestoredPages);
    assert_eq!(pages, rig.vm.stats().get(Counter::FaultRestore) * PAGES_PER_UNIT, "and are counted");
    rig.check_census();
}

#[test]
fn a_huge_page_of_zeros_needs_no_copy_and_untouched_ones_stay_untouched() {
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None) else { return };
    let third = rig.pages / 3;
    (0..third).for_each(|page| rig.fill(page, 1));
    (third..2 * third).for_each(|page| rig.word(page).store(0, Ordering::Relaxed));
    rig.check_census();
    rig.squeeze(Bytes(4 * MIB));
    rig.count_exactly();
    let census = rig.census();
    assert!(census.zero.0 > 0 && census.far.0 > 0, "{census:?}");
    assert_eq!(census.untouched.0, rig.pages - 2 * third);
    assert_eq!(rig.ram_store().usage().pages, census.far.0);
    assert!((0..third).all(|page| rig.holds(page, 1)));
    assert!((third..rig.pages).all(|page| rig.word(page).load(Ordering::Relaxed) == 0));
}

/// Threads that read and write their own huge pages until `done`; every access is checked.
fn churn(rig: &Rig, discards: Option<u64>, done: impl Fn() -> bool + Copy + Send) {
    std::thread::scope(|scope| {
        (0..3).for_each(|thread| drop(scope.spawn(move || churn_by(PAGES_PER_UNIT, discards, rig, thread, 3, done))));
    });
}

#[test]
fn a_guest_that_keeps_writing_and_discarding_huge_pages_reads_its_writes() {
    let Some(rig) = Rig::huge(RAM, AMPLE, Duration::from_millis(1), None) else { return };
    rig.set_limit(Some(LIMIT));
    let gone = || rig.vm.stats().get(Counter::Evicted) + rig.vm.stats().get(Counter::EvictedZero);
    churn(&rig, Some(64), || gone() > 200 * PAGES_PER_UNIT);
    rig.count_exactly();
}

#[test]
fn a_vm_that_uses_all_its_huge_pages_is_held_to_its_limit() {
    let Some(rig) = Rig::huge(RAM, AMPLE, Duration::from_secs(1), None) else { return };
    (0..rig.pages).for_each(|page| rig.word(page).store(page, Ordering::Relaxed));
    rig.set_limit(Some(LIMIT));
    hammer(&rig, || rig.resident() <= LIMIT);
    assert!((0..rig.pages).all(|page| rig.word(page).load(Ordering::Relaxed) & 0xFFFF_FFFF == page));
    rig.count_exactly();
}

#[test]
fn huge_pages_move_to_a_file_and_are_restored_whole_while_the_guest_writes() {
    let soon = Duration::from_millis(5);
    let Some(rig) = Rig::huge(RAM, AMPLE, Duration::from_millis(1), Some((disk(), soon))) else { return };
    rig.set_limit(Some(LIMIT));
    churn(&rig, None, || rig.vm.stats().get(Counter::FaultFile) > 20);
    rig.fill_all();
    rig.squeeze(LIMIT);
    let region = rig.vm.region(0).expect("region");
    let in_file = |page: &PageIdx| region.is_slow(*page);
    until("a huge page is in the file", || region.granules(region.range()).any(|page| in_file(&page)));
    rig.check_bytes();
    rig.count_exactly();
}

#[test]
fn a_discard_frees_whole_huge_pages_and_leaves_parts_alone() {
    let Some(rig) = squeezed() else { return };
    // The first huge page and half of the second.
    let len = (HUGE_SIZE + HUGE_SIZE / 2) as u64;
    rig.vm.discard(&rig.view, &[(rig.addr(0), len), (rig.addr(PAGES_PER_UNIT + 1), len)]).expect("discard");
    assert!((0..PAGES_PER_UNIT).all(|page| rig.word(page).load(Ordering::Relaxed) == 0));
    assert!((PAGES_PER_UNIT..2 * PAGES_PER_UNIT).all(|page| rig.holds(page, 1)), "a part was discarded");
    assert!((3 * PAGES_PER_UNIT..rig.pages).all(|page| rig.holds(page, 1)));
    rig.count_exactly();
}

#[test]
fn one_lost_page_makes_its_huge_page_a_memory_error_until_it_is_discarded() {
    let Some(rig) = squeezed() else { return };
    rig.count_exactly();
    let region = rig.vm.region(0).expect("region");
    let far =
        region.granules(region.range()).find(|page| region.word(*page).state() == State::Far).expect("some is far");
    rig.faults.lose(1);
    let sink = ballast_sys::memfd::create("sink", Bytes(0)).expect("memfd");
    let error = rig.guest.send_to(&sink, (far.0 as usize + 9) * PAGE_SIZE, 8).expect_err("a lost page was read");
    assert_eq!(error.raw_os_error(), Some(14), "{error}");
    until("the loss is counted", || rig.vm.stats().get(Counter::Poisoned) == PAGES_PER_UNIT);
    until("it is told", || rig.reported("page-lost"));
    rig.check_census();
    rig.discard(far.0..far.0 + PAGES_PER_UNIT);
    assert_eq!(rig.word(far.0 + 9).load(Ordering::Relaxed), 0, "a discarded page reads zeros");
    rig.check_census();
}

#[test]
fn a_full_store_keeps_no_part_of_a_half_copied_huge_page() {
    let Some(rig) = Rig::huge(RAM, Bytes(5 * MIB), QUICK, None) else { return };
    rig.fill_all();
    rig.set_limit(Some(LIMIT));
    until("the store is full", || rig.reported("store-full"));
    rig.count_exactly();
    assert_eq!(rig.ram_store().usage().pages, rig.vm.stats().get(Counter::Far));
    rig.check_bytes();
}

#[test]
fn a_successor_finds_every_huge_page_and_each_copy_once() {
    let Some(rig) = squeezed() else { return };
    rig.vm.stop();
    let region = rig.vm.region(0).expect("region");
    let recovered = recover(&rig.vm.state, [&*region]).expect("recover");
    assert_eq!(recovered.live_in(RAM_STORE).count(), rig.ram_store().usage().pages);
    rig.check_census();
}

#[test]
fn pinning_restores_every_huge_page() {
    let Some(rig) = squeezed() else { return };
    restore_for(&rig.vm, Hold::Pinned).expect("pin");
    assert_eq!((rig.resident(), rig.vm.stats().get(Counter::Far)), (RAM, 0));
    rig.check_bytes();
}
