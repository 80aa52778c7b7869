//! Tests of late and kept reads.

use std::sync::Arc;

use super::super::faults::{DiskFault, DiskFaults};
use super::*;
use crate::IoContext;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::memfd;
use ballast_sys::ring::{Buffer, Ring};
use ballast_testkit::skip;

fn disk() -> Disk {
    let file = memfd::create("ballast-test", Bytes(64 * PAGE_SIZE as u64)).expect("memfd");
    Disk { file: Arc::new(file.into()), faults: Some(Arc::<DiskFaults>::default()), read_only: false }
}

#[test]
fn kept_bytes_are_dropped_though_nobody_reads_the_store_again() {
    let (reading, disk) = (Reading::default(), disk());
    let keep = |asked: Instant| {
        let state = State::Kept(Buffer::new(PAGE_SIZE).expect("memory"));
        let pieces = vec![Piece { first: 7, blocks: 1, wanted: 1, state }];
        reading.keep(&disk, vec![Batch { ring: None, pieces, begun: asked, asked }]);
    };
    keep(Instant::now());
    reading.drop_forgotten(&disk);
    assert!(reading.has(7), "somebody asked a moment ago");
    if let Some(batches) = reading.lock().as_deref_mut() {
        batches[0].asked = Instant::now().checked_sub(FORGOTTEN * 2).expect("the machine is up for longer");
    }
    reading.drop_forgotten(&disk);
    assert!(!reading.has(7));
}

#[test]
fn late_reads_of_all_stores_are_counted_and_many_leave_some_to_each_store() {
    if let Err(error) = Ring::for_any_thread(1) {
        return skip("io_uring", error);
    }
    let (stores, disk) = ([Reading::default(), Reading::default()], disk());
    let of_all = || LATE_OF_ALL.load(Ordering::Acquire);
    let wait = Wait { timeout: Duration::ZERO, context: IoContext::GUEST };
    let read = |reading: &Reading, block| reading.read(&disk, &[(block, 1)], wait, |_, _| true);
    let before = of_all();
    for (count, block) in (1..).zip(0..8) {
        if let Some(faults) = &disk.faults {
            faults.fail_reads(1, DiskFault::Takes(Duration::MAX));
        }
        assert!(matches!(read(&stores[block as usize % 2], block)[..], [Came::Late]));
        assert_eq!(of_all() - before, count);
    }
    // Unwanted reads are done in reality, or will be soon.
    let falls_to = |count: usize| {
        let until = Instant::now() + Duration::from_mins(1);
        while of_all() - before != count {
            assert!(Instant::now() < until, "{} and not {count}", of_all() - before);
            release_unwanted();
        }
    };
    stores[0].forget(&disk, (0, 1));
    while stores[0].has(0) {
        stores[0].drop_forgotten(&disk);
    }
    drop(stores);
    falls_to(0);
    let readers = [Reader::Guest, Reader::Background];
    assert_eq!(readers.map(|reader| most(reader, MANY - 1)), [MOST, MOST_BACKGROUND]);
    assert!(readers.into_iter().all(|reader| (AT_ONCE..MOST_BACKGROUND).contains(&most(reader, MANY))));
}
