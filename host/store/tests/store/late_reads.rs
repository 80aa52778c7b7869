//! Late reads of a file store, and its verdicts on unreadable blocks: through its interface, with injected faults.
//!
//! Before: a store in a file without a name in the directory for temporary files. After: each page was read, or is lost
//! for a reason, and each of its reads was begun once.
//! Threads: as each test says. Units: bytes, pages, areas of 2 MiB.
//! Promise: no sleeps, no dependence on time. Where the directory has no direct I/O, or io_uring is off, tests are
//! skipped.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_store::{
    Budget, DiskFault, DiskFaults, FileOptions, FileStore, GetOutcome, Handle, IoContext, PageBytes, SlowStore, Store,
};
use ballast_testkit::pages;
use ballast_testkit::skip;
use ballast_testvm::fuse::Fuse;

use crate::common::{self, EIO, MIB, block_of, key};

/// Longer than the first wait of any reader.
const LONG: Duration = Duration::from_millis(150);
const NEVER: DiskFault = DiskFault::Takes(Duration::MAX);

struct Made {
    store: FileStore,
    faults: Arc<DiskFaults>,
}

fn made_to_last(unreadable_for: Duration) -> Option<Made> {
    made_in(&std::env::temp_dir(), unreadable_for)
}

fn made_in(dir: &Path, unreadable_for: Duration) -> Option<Made> {
    let (budget, faults) = (Budget::new(Bytes(64 * MIB)), Arc::<DiskFaults>::default());
    let options = FileOptions { unreadable_for, faults: Some(faults.clone()), ..FileOptions::new(budget) };
    let created = FileStore::create(dir, options);
    let (store, _, _) = created.inspect_err(|error| skip("disk", error)).ok()?;
    Some(Made { store, faults })
}

fn made() -> Option<Made> {
    made_to_last(Duration::from_secs(10))
}

fn put_run(store: &FileStore, range: std::ops::Range<u64>) -> Vec<Handle> {
    common::put_run(store, range.start, &range.map(pages::incompressible).collect::<Vec<_>>())
}

fn get_in(context: IoContext<'_>, store: &FileStore, page: u64, handle: Handle) -> GetOutcome {
    let mut out = [0x77; PAGE_SIZE];
    let outcome = store.get(key(page), handle, &mut out, context);
    assert!(outcome != GetOutcome::Found || out == pages::incompressible(page), "page {page} has wrong bytes");
    outcome
}

fn get(store: &FileStore, page: u64, handle: Handle) -> GetOutcome {
    get_in(IoContext::GUEST, store, page, handle)
}

fn get_at_last_in(context: IoContext<'_>, store: &FileStore, page: u64, handle: Handle) -> GetOutcome {
    let until = Instant::now() + Duration::from_mins(1);
    let asks = std::iter::repeat_with(|| get_in(context, store, page, handle));
    let mut tries = asks.take_while(|_| Instant::now() < until);
    tries.find(|outcome| *outcome != GetOutcome::Busy).expect("an answer")
}

fn get_at_last(store: &FileStore, page: u64, handle: Handle) -> GetOutcome {
    get_at_last_in(IoContext::GUEST, store, page, handle)
}

fn get_run(store: &FileStore, range: std::ops::Range<u64>, handles: &[Handle]) -> Vec<GetOutcome> {
    let mut out = vec![[0; PAGE_SIZE]; handles.len()];
    let outcomes = store.get_run(&key(range.start).run(handles.iter().copied()), &mut out, IoContext::GUEST);
    let right = |(page, (outcome, bytes)): (u64, (&GetOutcome, &PageBytes))| {
        *outcome != GetOutcome::Found || *bytes == pages::incompressible(page)
    };
    assert!(range.zip(outcomes.iter().zip(&out)).all(right), "wrong bytes");
    outcomes
}

fn get_run_at_last(store: &FileStore, range: std::ops::Range<u64>, handles: &[Handle]) {
    let until = Instant::now() + Duration::from_mins(1);
    while get_run(store, range.clone(), handles).iter().any(|outcome| *outcome != GetOutcome::Found) {
        assert!(Instant::now() < until, "it is not all there");
    }
}

fn count(made: &Made, handles: &[Handle]) {
    handles.iter().for_each(|handle| made.faults.fail_reads_of(block_of(*handle), None));
}

fn reads(made: &Made, handles: &[Handle]) -> Vec<u64> {
    handles.iter().map(|handle| made.faults.reads_of(block_of(*handle))).collect()
}

#[test]
fn a_late_read_is_used_by_the_next_call_though_the_thread_that_began_it_has_ended() {
    let Some(made) = made() else { return };
    let handles = put_run(&made.store, 0..8);
    count(&made, &handles);
    made.faults.fail_reads(8, DiskFault::Takes(LONG));
    std::thread::scope(|scope| {
        for (page, handle) in (0..).zip(&handles) {
            let store = &made.store;
            let ended = scope.spawn(move || get(store, page, *handle)).join();
            assert_eq!(ended.expect("no panic"), GetOutcome::Busy);
        }
    });
    for (page, handle) in (0..).zip(&handles) {
        assert_eq!(get_at_last(&made.store, page, *handle), GetOutcome::Found);
    }
    assert_eq!(reads(&made, &handles), [1; 8]);
    assert_eq!(get_at_last(&made.store, 0, handles[0]), GetOutcome::Found, "it was taken, so this is another read");
    assert_eq!(reads(&made, &handles[..1]), [2]);
}

#[test]
fn reads_that_never_end_leave_room_for_other_reads_and_more_for_guests() {
    let Some(made) = made() else { return };
    let handles = put_run(&made.store, 0..120);
    let never = |range: std::ops::Range<usize>| {
        for page in range {
            made.faults.fail_reads_of(block_of(handles[page]), Some(NEVER));
            assert_eq!(get(&made.store, page as u64, handles[page]), GetOutcome::Busy);
        }
    };
    never(0..40);
    assert_eq!(get_at_last(&made.store, 119, handles[119]), GetOutcome::Found);
    never(40..64);
    count(&made, &handles[110..]);
    assert_eq!(get_in(IoContext::BACKGROUND, &made.store, 110, handles[110]), GetOutcome::Busy);
    assert_eq!(reads(&made, &handles[110..111]), [0], "it was not begun");
    assert_eq!(get_at_last(&made.store, 110, handles[110]), GetOutcome::Found);
    never(64..96);
    assert_eq!(get(&made.store, 111, handles[111]), GetOutcome::Busy);
    assert_eq!(reads(&made, &handles[111..112]), [0], "it was not begun");
    // The read of the freed page is done in reality, and makes room for another one.
    made.store.free(key(0), handles[0]);
    assert_eq!(get_at_last(&made.store, 111, handles[111]), GetOutcome::Found);
}

#[test]
fn the_pieces_of_a_huge_page_are_kept_until_the_last_one_is_there() {
    let Some(made) = made() else { return };
    let handles = put_run(&made.store, 0..512);
    count(&made, &handles);
    made.faults.fail_reads(5, DiskFault::Takes(Duration::ZERO));
    made.faults.fail_reads(3, DiskFault::Takes(Duration::from_secs(1)));
    let tries = (0..20).take_while(|_| get_run(&made.store, 0..512, &handles).contains(&GetOutcome::Busy)).count();
    assert!((3..20).contains(&tries), "0.1, 0.2 and 0.4 s are too short: {tries}");
    assert_eq!(reads(&made, &handles), [1; 512]);
    // A part of the huge page is restored alone, as base pages.
    made.faults.fail_reads(8, DiskFault::Takes(LONG));
    assert!(get_run(&made.store, 0..512, &handles).contains(&GetOutcome::Busy));
    for (page, handle) in (100..).zip(&handles[100..300]) {
        assert_eq!(get_at_last(&made.store, page, *handle), GetOutcome::Found);
        made.store.free(key(page), *handle);
    }
    get_run_at_last(&made.store, 300..512, &handles[300..]);
    get_run_at_last(&made.store, 0..100, &handles[..100]);
    assert_eq!(reads(&made, &handles), [2; 512]);
}

#[test]
fn a_call_does_not_drop_buffers_that_it_needs_to_make_room() {
    let Some(made) = made() else { return };
    // More pages than are kept.
    let handles = put_run(&made.store, 0..11 * 512);
    let run = |at: usize| (at as u64 * 512..at as u64 * 512 + 448, &handles[at * 512..][..448]);
    for at in 0..11 {
        let (pages, handles) = run(at);
        made.faults.fail_reads(6, DiskFault::Takes(Duration::ZERO));
        made.faults.fail_reads(1, DiskFault::Takes(Duration::from_secs(1)));
        assert!(get_run(&made.store, pages, handles).contains(&GetOutcome::Busy));
    }
    count(&made, &handles[..512]);
    // The first pieces are the oldest. Now the call needs one piece more.
    get_run(&made.store, 0..512, &handles[..512]);
    get_run_at_last(&made.store, 0..512, &handles[..512]);
    assert_eq!(reads(&made, &handles[..448]), [0; 448], "they had been read");
    assert_eq!(reads(&made, &handles[448..512]), [1; 64]);
}

#[test]
fn a_page_whose_read_is_late_is_not_begun_beside_it() {
    let Some(made) = made() else { return };
    let handle = put_run(&made.store, 0..1)[0];
    count(&made, &[handle]);
    made.faults.fail_reads(1, DiskFault::Takes(LONG));
    assert_eq!(get(&made.store, 0, handle), GetOutcome::Busy);
    assert!(!made.store.begin(key(0), handle, &|_| ()));
    assert_eq!(get_at_last(&made.store, 0, handle), GetOutcome::Found);
    assert_eq!(reads(&made, &[handle]), [1]);
}

#[test]
fn a_page_freed_while_its_read_is_late_is_not_found_in_place_of_the_next_one() {
    let Some(made) = made() else { return };
    for turn in 0..20 {
        let handle = put_run(&made.store, turn..turn + 1)[0];
        made.faults.fail_reads(1, if turn % 2 == 0 { DiskFault::Late } else { NEVER });
        assert_eq!(get(&made.store, turn, handle), GetOutcome::Busy);
        made.store.free(key(turn), handle);
        let again = put_run(&made.store, turn + 1..turn + 2)[0];
        assert_eq!(block_of(again), block_of(handle));
        assert_eq!(get_at_last(&made.store, turn + 1, again), GetOutcome::Found);
        made.store.free(key(turn + 1), again);
    }
}

#[test]
fn a_page_whose_error_takes_longer_than_any_wait_is_given_up() {
    for context in [IoContext::GUEST, IoContext::BACKGROUND] {
        let Some(made) = made_to_last(Duration::ZERO) else { return };
        let get_at_last = |page, handle| get_at_last_in(context, &made.store, page, handle);
        let handles = put_run(&made.store, 0..3);
        let slowly = DiskFault::FailsAfter(Duration::from_secs(60), EIO);
        made.faults.fail_reads_of(block_of(handles[1]), Some(slowly));
        assert_eq!(get_at_last(1, handles[1]), GetOutcome::Corrupt);
        assert!(made.faults.reads_of(block_of(handles[1])) <= 12, "each is waited for");
        made.store.free(key(1), handles[1]);
        assert_eq!(made.store.usage_detail().bad_blocks, 1);
        assert_eq!(get_at_last(0, handles[0]), GetOutcome::Found);
    }
}

#[test]
fn on_a_real_disk_with_only_late_reads_and_errors_each_block_is_read_once() {
    let Ok(fuse) = Fuse::serve().inspect_err(|error| skip("fuse", error)) else { return };
    let Some(made) = made_in(&fuse.dir(), Duration::ZERO) else { return };
    let handles = put_run(&made.store, 0..512);
    let bad = block_of(handles[511]) * PAGE_SIZE as u64;
    fuse.set_delay(LONG);
    let before = fuse.reads();
    get_run_at_last(&made.store, 0..448, &handles[..448]);
    assert_eq!(fuse.reads() - before, 7, "of 64 blocks each");
    std::thread::scope(|scope| {
        for (page, handle) in (448..456).zip(&handles[448..]) {
            let store = &made.store;
            scope.spawn(move || assert_eq!(get_at_last(store, page, *handle), GetOutcome::Found));
        }
    });
    assert_eq!(fuse.reads() - before, 15, "and a block each");
    fuse.fail_reads(move |at| at == bad);
    assert_eq!(get_at_last(&made.store, 511, handles[511]), GetOutcome::Corrupt);
    assert_eq!(fuse.reads() - before, 21, "six errors are enough");
    // One bad block costs no other page of its piece.
    let outcomes = get_run(&made.store, 456..512, &handles[456..]);
    assert!(!outcomes.contains(&GetOutcome::Corrupt));
    fuse.set_delay(Duration::ZERO);
    (456..511).for_each(|page| {
        assert_eq!(get_at_last(&made.store, page as u64, handles[page]), GetOutcome::Found);
    });
}

#[test]
fn a_store_closed_with_late_reads_leaves_its_bytes_to_the_next() {
    let (budget, faults) = (Budget::new(Bytes(64 * MIB)), Arc::<DiskFaults>::default());
    let options = || FileOptions { faults: Some(faults.clone()), ..FileOptions::new(budget.clone()) };
    let created = FileStore::create(&std::env::temp_dir(), options());
    let Ok((store, file, index)) = created.inspect_err(|error| skip("disk", error)) else { return };
    let handles = put_run(&store, 0..32);
    faults.fail_reads(32, NEVER);
    assert!((0..32).all(|page| get(&store, page as u64, handles[page]) == GetOutcome::Busy));
    drop(store);
    let store = FileStore::open(file, index, options()).expect("open");
    for (page, handle) in (0..).zip(handles) {
        assert_eq!(get_at_last(&store, page, handle), GetOutcome::Found);
    }
}
