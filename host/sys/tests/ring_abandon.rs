//! Abandoned transfers whose end was seen before.
//!
//! Before: two writes to a file of the kernel are begun. After: both are over. Threads: the test's. Units: bytes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ballast_base::Bytes;
use ballast_sys::memfd;
use ballast_sys::ring::{Buffer, Direction, Ring, Transfer};
use ballast_testkit::skip;

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn a_transfer_that_is_abandoned_when_a_wait_for_another_has_seen_its_end_is_released() {
    let Ok(mut ring) = Ring::new(4).inspect_err(|error| skip("io_uring", error)) else { return };
    let file = Arc::new(memfd::create("ballast-test", Bytes(8192)).expect("memfd").into());
    let tickets = [0, 4096].map(|offset| {
        let (file, buffer) = (Arc::clone(&file), Buffer::new(4096).expect("memory"));
        let write = Transfer { file, direction: Direction::Write, offset, buffer, done: 0, end: 4096 };
        ring.start(write).expect("room")
    });
    tickets.iter().for_each(|ticket| ring.wait_until_over(ticket, MINUTE));
    for ticket in tickets {
        let noticed = Arc::new(AtomicBool::new(false));
        let notice = Arc::clone(&noticed);
        ring.abandon(ticket, move || notice.store(true, Ordering::Release));
        ring.reap();
        assert!(noticed.load(Ordering::Acquire) && !ring.has_late_writes());
    }
}
