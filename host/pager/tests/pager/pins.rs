//! Pages of guest RAM that are pinned during their eviction: by devices, direct I/O, system calls that have not
//! returned. A FUSE server of the test's own is the slow file system.
use crate::common;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use ballast_base::units::{GIB, MIB};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_page::page_state::State;
use ballast_pager::vm::stats::Counter;
use ballast_testkit::skip;
use ballast_testvm::Finally;
use ballast_testvm::fuse::Fuse;

use common::{Pipe, Rig, hammer, mapped_by_a_foreign_mapper, until};

const AMPLE: Bytes = Bytes(GIB);

/// A file without page cache, of this many pages of [`of_file`], whose reads are slow.
fn slow_file(pages: u64, delay: Duration) -> Option<(Fuse, File)> {
    let fuse = Fuse::serve().inspect_err(|why| skip("fuse", why)).ok()?;
    let path = fuse.dir().join("file");
    let bytes: Vec<u8> = (0..pages).flat_map(|page| [of_file(page); PAGE_SIZE]).collect();
    std::fs::write(&path, bytes).expect("write");
    fuse.set_direct(true);
    fuse.set_delay(delay);
    let file = File::open(&path).expect("open");
    Some((fuse, file))
}

fn of_file(page: u64) -> u8 {
    0x80 | (page % 0x7F) as u8
}

/// `read()` this many pages of the file into guest RAM; returns how many do not hold what was read.
fn read_into(rig: &Rig, page: u64, file: &File, from: u64, pages: u64) -> u64 {
    let (at, len) = (page as usize * PAGE_SIZE, pages as usize * PAGE_SIZE);
    let target = rig.guest.ptr(at, len).cast();
    // SAFETY: the range lies inside the guest's RAM, which is mapped as long as the rig lives.
    let read = unsafe { libc::pread(file.as_raw_fd(), target, len, (from as usize * PAGE_SIZE) as i64) };
    assert_eq!(read, len as isize, "{}", std::io::Error::last_os_error());
    let mut bytes = [0; PAGE_SIZE];
    let wrong = (0..pages).filter(|index| {
        rig.guest.copy_out(at + *index as usize * PAGE_SIZE, &mut bytes);
        bytes.iter().any(|byte| *byte != of_file(from + index))
    });
    wrong.count() as u64
}

#[test]
fn a_plain_read_past_the_page_cache_loses_nothing_in_a_squeezed_vm() {
    const READERS: u64 = 8;
    const ROUNDS: u64 = 40;
    const AT_ONCE: u64 = 32;
    let Some((_fuse, file)) = slow_file(READERS * AT_ONCE, Duration::from_millis(60)) else { return };
    let rig = Rig::new(Bytes(128 * MIB), AMPLE, Duration::from_secs(1)).filled();
    rig.set_limit(Some(Bytes(32 * MIB)));
    // One thread keeps touching the lower half; each reader has a part of the upper half.
    let half = rig.pages / 2;
    let (over, wrong) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let _end = Finally(|| over.store(true, Ordering::Relaxed));
        for thread in 0..2 {
            let (rig, over) = (&rig, &over);
            scope.spawn(move || {
                for page in (thread..half).step_by(2).cycle().take_while(|_| !over.load(Ordering::Relaxed)) {
                    rig.word(page).fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (rig, file, wrong) = (&rig, &file, &wrong);
                scope.spawn(move || {
                    let own = half / READERS;
                    for round in 0..ROUNDS {
                        let page = half + reader * own + round * AT_ONCE % own;
                        (page..page + AT_ONCE).for_each(|page| rig.fill(page, 2));
                        wrong.fetch_add(read_into(rig, page, file, reader * AT_ONCE, AT_ONCE), Ordering::Relaxed);
                    }
                })
            })
            .collect();
        readers.into_iter().for_each(|reader| reader.join().expect("a reader"));
    });
    let (wrong, all) = (wrong.load(Ordering::Relaxed), READERS * ROUNDS * AT_ONCE);
    assert_eq!(wrong, 0, "{wrong} of {all} pages do not hold what read() said it had put there");
}

const RAM: Bytes = Bytes(16 * MIB);
const QUICK: Duration = Duration::from_millis(2);
/// A limit so low that every page may be evicted.
const LEAST: Bytes = Bytes(MIB);

/// Waits until exactly these pages are left, and counted as pinned. Their bytes are unchanged.
fn only_these_stay(rig: &Rig, pages: &[u64]) {
    rig.set_limit(Some(LEAST));
    let stays = |page: u64| pages.contains(&page);
    until("all others have gone", || (0..rig.pages).all(|page| (rig.state_of(page) == State::Far) != stays(page)));
    until("they are counted", || rig.vm.pinned.pages().0 == pages.len() as u64);
    until("the last hole is punched", || rig.resident().pages_floor().0 == pages.len() as u64);
}

/// Waits until no page is left; then each page holds the bytes of [`Rig::fill_all`].
fn all_go_and_come_back(rig: &Rig) {
    until("all have gone", || rig.resident().0 == 0 && rig.vm.pinned.pages().0 == 0);
    rig.check_bytes();
    rig.hold_still();
    let far = || rig.census().far.0;
    until("the last are counted", || rig.vm.stats().get(Counter::Far) == far());
    rig.check_census();
}

fn small_rig() -> Option<Rig> {
    let rig = Rig::new(RAM, AMPLE, QUICK).filled();
    rig.is_asked().then_some(rig)
}

#[test]
fn pages_in_a_pipe_stay_until_it_is_closed_and_all_others_go() {
    let Some(rig) = small_rig() else { return };
    let pipe = Pipe::with(&rig, 700..706);
    only_these_stay(&rig, &[700, 701, 702, 703, 704, 705]);
    drop(pipe);
    all_go_and_come_back(&rig);
}

#[test]
fn buffers_registered_with_io_uring_stay_until_unregistered_and_all_others_go() {
    let Some(rig) = small_rig() else { return };
    let ring = io_uring::IoUring::new(1);
    let Ok(ring) = ring.inspect_err(|error| skip("io_uring", error)) else { return };
    let pages = [5, 6, 7, 8, 9, 600];
    let buffer = |page: u64, count: usize| {
        let iov_base = rig.guest.ptr(page as usize * PAGE_SIZE, count * PAGE_SIZE).cast();
        libc::iovec { iov_base, iov_len: count * PAGE_SIZE }
    };
    // SAFETY: the buffers lie in the guest's RAM, which outlives the ring, and nothing is read into them.
    unsafe { ring.submitter().register_buffers(&[buffer(5, 5), buffer(600, 1)]) }.expect("register");
    only_these_stay(&rig, &pages);
    // The guest's own accesses do not change that.
    pages.iter().for_each(|page| assert!(rig.holds(*page, 1)));
    only_these_stay(&rig, &pages);
    ring.submitter().unregister_buffers().expect("unregister");
    all_go_and_come_back(&rig);
}

#[test]
fn the_target_page_of_a_read_stays_until_the_read_returns() {
    let Some((fuse, file)) = slow_file(8, Duration::ZERO) else { return };
    let Some(rig) = small_rig() else { return };
    fuse.hold();
    std::thread::scope(|scope| {
        let (rig, file) = (&rig, &file);
        let _end = Finally(|| fuse.release());
        let reader = scope.spawn(move || read_into(rig, 100, file, 0, 8));
        fuse.wait_for_held(1);
        only_these_stay(rig, &(100..108).collect::<Vec<_>>());
        fuse.release();
        assert_eq!(reader.join().expect("read"), 0, "pages do not hold what was read");
    });
    until("all have gone", || rig.resident().0 == 0);
    let mut bytes = [0; PAGE_SIZE];
    for page in 0..8 {
        rig.guest.copy_out((100 + page as usize) * PAGE_SIZE, &mut bytes);
        assert!(bytes.iter().all(|byte| *byte == of_file(page)), "what was read did not come back");
    }
}

#[test]
fn a_page_that_a_foreign_mapper_has_mapped_stays() {
    let Some(rig) = small_rig() else { return };
    let foreign = mapped_by_a_foreign_mapper(&rig);
    // A read would map its neighbours, too.
    foreign.words(9 * PAGE_SIZE, 1)[0].store(rig.word(9).load(Ordering::Relaxed), Ordering::Relaxed);
    only_these_stay(&rig, &[9]);
    drop(foreign);
    all_go_and_come_back(&rig);
}

#[test]
fn a_huge_page_stays_as_a_whole_if_one_page_of_it_is_held() {
    let Some(rig) = Rig::coalesced(RAM, AMPLE, QUICK).filter(Rig::is_asked) else { return };
    let pipe = Pipe::with(&rig, 1030..1031);
    only_these_stay(&rig, &(1024..1536).collect::<Vec<_>>());
    drop(pipe);
    all_go_and_come_back(&rig);
}

#[test]
fn a_huge_page_of_hugetlbfs_stays_if_one_page_of_it_is_held() {
    let Some(rig) = Rig::huge(RAM, AMPLE, QUICK, None).filter(Rig::is_asked) else { return };
    rig.fill_all();
    let pipe = Pipe::with(&rig, 1030..1031);
    rig.set_limit(Some(LEAST));
    until("all others have gone", || rig.resident() == Bytes(2 * MIB));
    until("they are counted", || rig.vm.pinned.pages().0 == 512);
    drop(pipe);
    all_go_and_come_back(&rig);
}

/// Waits until the worker has found all pages held, and checks that it then rests.
fn is_left_in_peace(rig: &Rig) {
    rig.set_limit(Some(LEAST));
    until("all are found pinned", || rig.vm.pinned.pages().0 == rig.pages);
    rig.wait_for_quarantine();
    let zapped = rig.vm.stats().get(Counter::Zapped);
    let rounds = AtomicU64::new(0);
    until("the worker had time for many rounds, and to look again at what is held", || {
        rig.vm.notify_reclaim();
        rounds.fetch_add(1, Ordering::Relaxed) > 700
    });
    // A page that was touched since it was found pinned looks free once; without the rest, each round tries them all.
    let again = rig.vm.stats().get(Counter::Zapped) - zapped;
    assert!(again <= rig.pages, "pages that cannot go are tried again and again: {again}");
    rig.check_bytes();
}

#[test]
fn reclaim_rests_if_all_pages_are_pinned() {
    let Some(rig) = small_rig() else { return };
    let ring = io_uring::IoUring::new(1);
    let Ok(ring) = ring.inspect_err(|error| skip("io_uring", error)) else { return };
    let all = libc::iovec { iov_base: rig.guest.ptr(0, rig.guest.len()).cast(), iov_len: rig.guest.len() };
    // SAFETY: as above.
    unsafe { ring.submitter().register_buffers(&[all]) }.expect("register");
    is_left_in_peace(&rig);
    ring.submitter().unregister_buffers().expect("unregister");
    all_go_and_come_back(&rig);
}

/// A vhost-user backend has all pages mapped, too.
#[test]
fn reclaim_rests_if_a_foreign_mapper_has_all_pages_mapped() {
    let Some(rig) = small_rig() else { return };
    let foreign = mapped_by_a_foreign_mapper(&rig);
    let mut bytes = [0; PAGE_SIZE];
    (0..rig.guest.len()).step_by(PAGE_SIZE).for_each(|at| foreign.copy_out(at, &mut bytes));
    is_left_in_peace(&rig);
    // The first check has touched all pages; such touches do not end the rest either.
    is_left_in_peace(&rig);
    drop(foreign);
    // Pages that the guest maps, too, are retried once a minute; this asks at once.
    rig.set_limit(None);
    until("all is forgotten", || rig.vm.pinned.pages().0 == 0);
    rig.set_limit(Some(LEAST));
    all_go_and_come_back(&rig);
}

#[test]
fn with_the_pin_check_a_vm_that_may_pin_is_held_to_its_limit_at_once() {
    let rig = Rig::new(RAM, AMPLE, Duration::from_secs(3600));
    if !rig.is_asked() {
        return;
    }
    rig.vm.set_may_pin();
    (0..rig.pages).for_each(|page| rig.word(page).store(page, Ordering::Relaxed));
    rig.set_limit(Some(Bytes(4 * MIB)));
    hammer(&rig, || rig.resident() <= Bytes(4 * MIB));
    assert!((0..rig.pages).all(|page| rig.word(page).load(Ordering::Relaxed) & 0xFFFF_FFFF == page));
}
