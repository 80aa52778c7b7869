//! The promises of the pin check, against the real kernel.

use super::check::SLOTS;
use super::found::{self, Found};
use super::own::{Held, own_large_folio, own_memory};
use super::*;
use crate::Mapping;
use crate::memfd;
use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE};
use ballast_testkit::PoolLoan;
use ballast_testkit::skip;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;

fn check() -> Option<PinCheck> {
    PinCheck::new().inspect_err(|why| skip("pin-check", why)).ok()
}

fn expect(
    check: &PinCheck,
    what: &str,
    file: impl AsFd + Copy,
    pages: &[u64],
    expected: impl Fn(&[Pin]) -> bool,
) -> Result<(), String> {
    super::own::expect((&check.check, &check.drain, check.knows_large), what, file, pages, expected)
}

/// Run `around` repeatedly on a thread of its own, while this thread checks these pages many times. Returns the
/// findings. The first check comes after the first run of `around`.
fn check_while(check: &PinCheck, file: impl AsFd, pages: &[u64], around: impl Fn(u64) + Sync) -> Vec<Pin> {
    const CHECKS: u64 = 20_000;
    let (over, around) = (&AtomicBool::new(false), &around);
    std::thread::scope(|scope| {
        let (began, first) = mpsc::channel();
        scope.spawn(move || {
            for round in (0..).take_while(|_| !over.load(Ordering::Relaxed)) {
                around(round);
                if round == 0 {
                    began.send(()).expect("the checks wait for it");
                }
            }
        });
        first.recv().expect("the first round");
        let checks = (0..CHECKS).map(|_| check.pins(&file, pages).expect("checked"));
        let found = checks.flatten().collect();
        over.store(true, Ordering::Relaxed);
        found
    })
}

#[test]
fn counts_are_judged_as_free_mapped_held_failed_or_unknown() {
    const NR: i32 = 512;
    let page = |refs, mapcount| {
        let found = Found {
            what: found::PAGE,
            order: 0,
            index: 9,
            mapcount,
            refs: [refs, 0, 0],
            mappings: [0, 0, 0],
            failed: false,
        };
        found.judge(9, false)
    };
    assert_eq!([page(1, -1), page(2, -1), page(1025, -1)], [Pin::Free, Pin::Held(1), Pin::Held(1024)]);
    assert_eq!([page(2, 0), page(3, 0), page(3, 1)], [Pin::Mapped, Pin::Held(1), Pin::Mapped]);
    assert_eq!([page(0, -1), page(1, 0), page(1, -9)], [Pin::Unknown; 3]);
    let large = |refs: [i32; 3], mappings: [i32; 3]| Found {
        what: found::LARGE,
        order: 9,
        index: 512,
        mapcount: 7,
        refs,
        mappings,
        failed: false,
    };
    let judge = |refs, mappings| large(refs, mappings).judge(1023, true);
    assert_eq!(judge([NR; 3], [-1; 3]), Pin::Free);
    assert_eq!(judge([NR, 0, 0], [5, 0, 0]), Pin::Free, "as many as it has pages: there is no other holder");
    assert_eq!(judge([NR + 1; 3], [0; 3]), Pin::Free, "one mapping");
    assert_eq!([judge([NR + 1; 3], [-1; 3]), judge([NR + 3; 3], [0; 3])], [Pin::Held(1), Pin::Held(2)]);
    for changed in 0..3 {
        let mut refs = [NR + 1; 3];
        refs[changed] += 1;
        let mut mappings = [0; 3];
        mappings[changed] += 1;
        assert_eq!([judge(refs, [0; 3]), judge([NR + 1; 3], mappings)], [Pin::Unknown; 2]);
    }
    let good = large([NR; 3], [-1; 3]);
    assert_eq!([good.judge(511, true), good.judge(1024, true), good.judge(512, false)], [Pin::Unknown; 3]);
    assert_eq!(Found { order: 0, ..good }.judge(512, true), Pin::Unknown);
    assert_eq!(Found { failed: true, ..good }.judge(512, true), Pin::Failed);
    let held = Found { failed: true, ..large([NR + 1; 3], [-1; 3]) };
    assert_eq!(held.judge(513, true), Pin::Held(1), "the memory of another page failed; this one can still be read");
    assert_eq!(Found { what: found::NOTHING, ..good }.judge(512, true), Pin::Unknown);
    assert_eq!(Found { what: found::ABSENT, ..good }.judge(0, false), Pin::Absent);
}

#[test]
fn a_held_page_is_never_called_free_while_its_neighbours_and_the_files_tree_come_and_go() {
    let Some(check) = check() else { return };
    const PAGES: u64 = 1 << 20;
    let (file, map) = own_memory(Bytes(PAGES * PAGE_SIZE as u64)).expect("memory");
    let at = |page: u64| page as usize * PAGE_SIZE;
    map.words(0, 1)[0].store(1, Ordering::Relaxed);
    let _held = Held::new(&map, 0).expect("vmsplice");
    // The only page in its node. At times it is the only one in the tree, which then has one or two levels less.
    let found = check_while(&check, &file, &[0], |round| {
        let far = 1 << (round % 20);
        map.words(at(far), 1)[0].store(1, Ordering::Relaxed);
        map.zap(0, map.len()).expect("zap");
        memfd::punch(&file, at(far) as u64, PAGE_SIZE as u64).expect("punch");
    });
    assert!(found.iter().all(|pin| !pin.may_go()), "{:?}", found.iter().find(|pin| pin.may_go()));
    // One reference of the holder, and perhaps one of the batch of the CPU that filled the page.
    assert!(found.iter().any(|pin| matches!(pin, Pin::Held(_))), "{:?}", found.first());
}

#[test]
fn a_held_page_of_a_large_folio_is_never_called_free_while_others_are_mapped_and_unmapped() {
    let Some(check) = check().filter(PinCheck::knows_large) else { return };
    let Some((file, map)) = own_large_folio().expect("memory") else { return };
    let held = Held::new(&map, 9 * PAGE_SIZE).expect("vmsplice");
    let storm = |round: u64| {
        let page = round as usize % 512 * PAGE_SIZE;
        map.words(page, 1)[0].fetch_add(1, Ordering::Relaxed);
        map.zap(page, PAGE_SIZE).expect("zap");
    };
    let found = check_while(&check, &file, &[9, 10], storm);
    assert!(found.iter().all(|pin| !pin.may_go()), "{:?}", found.iter().find(|pin| pin.may_go()));
    assert!(found.iter().any(|pin| matches!(pin, Pin::Held(_))));
    drop(held);
    let found = check_while(&check, &file, &[9, 10], storm);
    assert!(found.contains(&Pin::Free), "never free, though nobody holds it");
}

#[test]
fn pages_of_registered_buffers_are_held() {
    let Some(check) = check() else { return };
    let (file, map) = own_memory(Bytes(4 * PAGE_SIZE as u64)).expect("memory");
    map.populate(0, map.len()).expect("populate");
    let ring = io_uring::IoUring::new(1);
    let Ok(ring) = ring.inspect_err(|error| skip("io_uring", error)) else { return };
    let buffer = libc::iovec { iov_base: map.ptr(PAGE_SIZE, 2 * PAGE_SIZE).cast(), iov_len: 2 * PAGE_SIZE };
    // SAFETY: the buffer lies in a mapping that outlives the ring, and nothing is ever read into it.
    unsafe { ring.submitter().register_buffers(&[buffer]) }.expect("register");
    map.zap(0, map.len()).expect("zap");
    let held = |pins: &[Pin]| matches!(pins, [Pin::Free, Pin::Held(_), Pin::Held(_), Pin::Free]);
    expect(&check, "registered", &file, &[0, 1, 2, 3], held).expect("as it is");
    ring.submitter().unregister_buffers().expect("unregister");
    expect(&check, "given back", &file, &[0, 1, 2, 3], |pins| pins == [Pin::Free; 4]).expect("as it is");
}

#[test]
fn held_and_free_huge_pages_of_the_pool_are_told_apart() {
    let Some(check) = check().filter(PinCheck::knows_large) else { return };
    let ready = PoolLoan::new(2).and_then(|loan| {
        let file = memfd::create_huge("ballast-test", Bytes(2 * HUGE_SIZE as u64))?;
        let map = Mapping::shared(&file, 0, 2 * HUGE_SIZE)?;
        map.populate(0, 2 * HUGE_SIZE)?;
        Ok((loan, file, map))
    });
    let Ok((_loan, file, map)) = ready.inspect_err(|why| skip("hugetlb", why)) else { return };
    let held = Held::new(&map, HUGE_SIZE + 5 * PAGE_SIZE).expect("vmsplice");
    map.zap(0, map.len()).expect("zap");
    let pages = [0, 511, 512, 517, 1023];
    let second = [Pin::Free, Pin::Free, Pin::Held(1), Pin::Held(1), Pin::Held(1)];
    expect(&check, "one of two is held", &file, &pages, |pins| pins == second).expect("as it is");
    drop(held);
    expect(&check, "none is", &file, &pages, |pins| pins == [Pin::Free; 5]).expect("as it is");
    memfd::punch(&file, 0, HUGE_SIZE as u64).expect("punch");
    expect(&check, "one is gone", &file, &[3, 600], |pins| pins == [Pin::Absent, Pin::Free]).expect("as it is");
}

#[test]
fn many_threads_check_at_once() {
    let Some(check) = check() else { return };
    std::thread::scope(|scope| {
        for thread in 0..2 * SLOTS as u64 {
            let check = &check;
            scope.spawn(move || {
                let (file, map) = own_memory(Bytes(256 * PAGE_SIZE as u64)).expect("memory");
                map.words(thread as usize * PAGE_SIZE, 1)[0].store(1, Ordering::Relaxed);
                for _ in 0..100 {
                    let found = check.pins(&file, &(0..256).collect::<Vec<_>>()).expect("checked");
                    let present: Vec<_> = (0..256).filter(|page| found[*page as usize] != Pin::Absent).collect();
                    assert_eq!(present, [thread]);
                }
            });
        }
    });
}

#[test]
fn the_kernel_checks_the_program_in_one_turn_or_two_of_its_loop_not_in_one_for_each_page() {
    let Some(check) = check() else { return };
    let (verified, length) = check.check.verified().expect("ask the kernel");
    // Each turn has several ways through it. With 32 turns that were all gone through it was 59 times the length.
    assert!(verified < 8 * length, "{verified} instructions were checked of a program of {length}");
}
