//! The pages of these tests, in every store.

use ballast_base::wire::VmId;
use ballast_base::{PAGE_SIZE, PageIdx};
use ballast_store::{GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, RegionKey, Store};

pub const MIB: u64 = 1 << 20;
pub const EIO: i32 = 5;
/// Tries of a get; the last ones wait for seconds each.
pub const TRIES: usize = 20;

pub fn key(page: u64) -> PageKey {
    RegionKey { vm: VmId([7; 16]), number: 1 }.page(PageIdx(page))
}

pub fn stored(outcome: PutOutcome) -> Handle {
    match outcome {
        PutOutcome::Stored(handle) => handle,
        other => panic!("a put came to {other:?}"),
    }
}

pub fn put(store: &dyn Store, page: u64, bytes: &PageBytes) -> Handle {
    stored(store.put(key(page), bytes))
}

pub fn put_run(store: &dyn Store, first: u64, pages: &[PageBytes]) -> Vec<Handle> {
    let mut outcomes = Vec::new();
    store.put_run(key(first), pages, &mut outcomes);
    outcomes.into_iter().map(stored).collect()
}

pub fn get(store: &dyn Store, page: u64, handle: Handle) -> (GetOutcome, PageBytes) {
    let mut out = [0x77; PAGE_SIZE];
    (store.get(key(page), handle, &mut out, IoContext::GUEST), out)
}

/// Repeats the get while the store is busy: the disk under these tests may have other work.
pub fn must_hold(store: &dyn Store, page: u64, handle: Handle, bytes: &PageBytes) {
    let mut tries = (0..TRIES).map(|_| get(store, page, handle));
    let (outcome, out) = tries.find(|(outcome, _)| *outcome != GetOutcome::Busy).expect("the disk answers");
    assert!(outcome == GetOutcome::Found && out == *bytes, "page {page}: {outcome:?}");
}

pub fn block_of(handle: Handle) -> u64 {
    handle.bits() & 0x3ff | (handle.bits() >> 10 & 0x3f_ffff) << 9
}
