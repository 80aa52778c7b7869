//! RAM mapped by a foreign mapper: its reads fill holes of the file with zeros, where pages are far.
//! The real kernel, and a real process that maps the real file. Needs root (userfaultfd).

use crate::common;

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_page::page_state::State;
use ballast_pager::vm::Hold;
use ballast_pager::vm::stats::Counter;
use ballast_sys::Mapping;
use ballast_testvm::Finally;
use common::{
    AMPLE, LIMIT, QUICK, RAM, Rig, churn, faulty_disk, file_of, mapped_by_a_foreign_mapper, restore_for, until,
};

const FILE: &str = "BALLAST_TEST_RAM_FILE";

/// The other process: it maps the file and reads each page once.
#[test]
fn a_foreign_mapper() {
    let Ok(path) = std::env::var(FILE) else { return };
    let file = std::fs::File::options().read(true).write(true).open(path).expect("open");
    let len = file.metadata().expect("stat").len() as usize;
    let map = Mapping::shared(&file, 0, len).expect("map");
    // Huge pages may be short for a moment.
    until("every page was read", || read_each_page(&map));
}

/// Reads each page once, through the mapping, by system calls: if the pool of huge pages is empty, a touch would be a
/// SIGBUS. Returns whether all could be read.
fn read_each_page(map: &Mapping) -> bool {
    let sink = ballast_sys::memfd::create("sink", Bytes(0)).expect("memfd");
    (0..map.len()).step_by(PAGE_SIZE).filter(|at| map.send_to(&sink, *at, 8).is_err()).count() == 0
}

/// Has another process read every page of a squeezed VM's RAM. Returns the number of pages that were far.
fn read_by_a_foreign_mapper(rig: &Rig) -> u64 {
    rig.hold_still();
    let far = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).count() as u64;
    assert!(far > 0);
    let before = rig.resident();
    let status = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "foreign_mappers::a_foreign_mapper"])
        .env(FILE, file_of(rig))
        .status()
        .expect("another process");
    assert!(status.success());
    // Not all: a page that was only read is clean, and the host may drop it once the foreign mapper has ended.
    let filled = Bytes(rig.resident().0 - before.0).pages_floor().0;
    assert!(filled > far / 2, "the foreign mapper has filled {filled} holes of {far}");
    far
}

fn check_every_page(rig: &Rig, far: u64) {
    let wrong = (0..rig.pages).filter(|page| !rig.holds(*page, 1)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes, of {far} that were far and whose copies were in the store");
    rig.wait_until_none_is_far();
    assert!(rig.reported("far-filled"), "nobody was told");
    rig.check_census();
}

#[test]
fn a_foreign_mapper_that_reads_every_far_page_once_costs_no_byte() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let far = read_by_a_foreign_mapper(&rig);
    check_every_page(&rig, far);
    assert_eq!(rig.ram_store().usage().pages, 0, "the copies are not needed any more");
}

#[test]
fn a_foreign_mapper_that_reads_every_far_page_costs_no_byte_in_a_restore_of_all() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    let far = read_by_a_foreign_mapper(&rig);
    restore_for(&rig.vm, Hold::Pinned).expect("pin");
    check_every_page(&rig, far);
}

#[test]
fn a_foreign_mapper_that_reads_huge_pages_costs_no_byte() {
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None) else { return };
    // Nearly all zeros: a zero page within a huge page is no sign of a foreign mapper, a zero huge page is.
    (0..rig.pages).step_by(512).for_each(|page| rig.fill(page + page / 512, 1));
    rig.squeeze(LIMIT);
    let far = read_by_a_foreign_mapper(&rig);
    let wrong = (0..rig.pages).step_by(512).filter(|page| !rig.holds(page + page / 512, 1)).count();
    assert_eq!(wrong, 0, "huge pages with wrong bytes, of {far} pages that were far");
    assert!(rig.reported("far-filled"), "nobody was told");
    rig.check_census();
}

#[test]
fn a_foreign_mapper_that_reads_pages_on_disk_costs_no_byte() {
    let Some((file, _)) = faulty_disk() else { return };
    let rig = Rig::spilling(RAM, AMPLE, QUICK, file, Duration::from_millis(10)).squeezed(LIMIT);
    until("pages were spilled", || rig.vm.stats().get(Counter::Spilled) > 1000);
    let far = read_by_a_foreign_mapper(&rig);
    check_every_page(&rig, far);
}

#[test]
fn memory_allocated_in_the_place_of_far_pages_costs_no_byte() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    let far = (0..rig.pages).filter(|page| rig.state_of(*page) == State::Far).count() as u64;
    let file = std::fs::File::options().read(true).write(true).open(file_of(&rig)).expect("open");
    ballast_sys::memfd::allocate(&file, 0, RAM.0).expect("fallocate");
    assert_eq!(rig.resident(), RAM, "every hole is filled");
    check_every_page(&rig, far);
}

#[test]
fn bytes_that_a_foreign_mapper_writes_to_a_far_page_are_the_page_and_reported() {
    let rig = Rig::new(RAM, AMPLE, QUICK).squeezed(LIMIT);
    rig.hold_still();
    let far = (0..rig.pages).find(|page| rig.state_of(*page) == State::Far).expect("something is far");
    let foreign = mapped_by_a_foreign_mapper(&rig);
    foreign.words(far as usize * PAGE_SIZE, 1)[0].store(77, Ordering::Relaxed);
    // This holds even if the store has lost the copy, which is no longer needed.
    rig.faults.lose(1);
    // The page is read by a system call, which returns EFAULT instead of a SIGBUS.
    let sink = ballast_sys::memfd::create("sink", Bytes(0)).expect("memfd");
    rig.guest.send_to(&sink, far as usize * PAGE_SIZE, 8).expect("a page that is in its file was not served");
    assert_eq!(rig.word(far).load(Ordering::Relaxed), 77);
    until("it is told", || rig.reported("far-filled"));
    assert_eq!(rig.vm.stats().get(Counter::Poisoned), 0);
    rig.faults.lose(0);
    rig.check_census();
}

/// Three threads of the guest write and read pages while a foreign mapper keeps reading all of them.
fn churn_beside_a_foreign_mapper(rig: &Rig, evictions: u64) {
    let foreign = mapped_by_a_foreign_mapper(rig);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                read_each_page(&foreign);
            }
        });
        let _end = Finally(|| over.store(true, Ordering::Relaxed));
        let gone = || rig.vm.stats().get(Counter::Evicted) + rig.vm.stats().get(Counter::Failed);
        let guest = |thread| scope.spawn(move || churn(rig, thread, 3, || gone() >= evictions));
        let guests = [0, 1, 2].map(guest);
        let panicked = guests.into_iter().map(|guest| guest.join().is_err()).filter(|panicked| *panicked).count();
        over.store(true, Ordering::Relaxed);
        reader.join().expect("no panic");
        assert_eq!(panicked, 0, "threads of the guest that read what they had not written");
    });
}

#[test]
fn a_guest_that_writes_while_a_foreign_mapper_reads_gets_its_writes() {
    // With the pin check, a page that a foreign mapper has mapped would stay.
    let rig = Rig::unasked(RAM, AMPLE, Duration::from_millis(1));
    rig.set_limit(Some(LIMIT));
    churn_beside_a_foreign_mapper(&rig, 20_000);
}

#[test]
fn a_guest_on_huge_pages_that_writes_while_a_foreign_mapper_reads_gets_its_writes() {
    let Some(rig) = Rig::huge_unasked(RAM, AMPLE, Duration::from_millis(1)) else { return };
    rig.set_limit(Some(LIMIT));
    churn_beside_a_foreign_mapper(&rig, 20_000);
}
