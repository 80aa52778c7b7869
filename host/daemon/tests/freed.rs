//! A VMM frees memory page by page, as a balloon would, in a VM that was reclaimed.

mod common;

use ballast_base::{PAGE_SIZE, PAGES_PER_UNIT};
use ballast_client::Client;
use common::raw::Ram;
use common::{Daemon, until};

const UNITS: u64 = 4;

#[test]
fn a_unit_freed_page_by_page_needs_few_messages_and_all_of_it_reads_zeros() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 20\n") else { return };
    let ram = Ram::new(UNITS * PAGES_PER_UNIT);
    ram.mark();
    let client = ram.vm(&daemon, "freed").attach().expect("attach");
    let vm = || daemon.vm("freed");
    daemon.api.set_limit("freed", Some(PAGES_PER_UNIT * PAGE_SIZE as u64)).expect("limit");
    until("most of it is far", || vm().far_bytes >= (UNITS - 1) * PAGES_PER_UNIT * PAGE_SIZE as u64);
    daemon.api.set_limit("freed", None).expect("limit");
    until("nothing moves", || vm().quarantine_bytes == 0);

    let base = ram.info().span.hva;
    let asked = || vm().reclaim.discarded_pages;
    // Like a hook of a VMM: the memory is freed while the client knows it.
    let free = |client: &Client, page: u64| {
        let freeing = client.freeing(&[(base + page * PAGE_SIZE as u64, PAGE_SIZE as u64)]).expect("it may be freed");
        let flags = rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&ram.fd, flags, page * PAGE_SIZE as u64, PAGE_SIZE as u64).expect("punch");
        drop(freeing);
    };
    let unit = |unit: u64| unit * PAGES_PER_UNIT..(unit + 1) * PAGES_PER_UNIT;
    unit(1).take(100).for_each(|page| free(&client, page));
    until("a page of the unit is freed unasked", || {
        let before = asked();
        free(&client, PAGES_PER_UNIT);
        asked() == before
    });
    let before = asked();
    unit(1).for_each(|page| free(&client, page));
    assert_eq!(asked(), before, "nobody was asked for the rest");
    assert!(unit(1).all(|page| ram.get(page) == 0));
    free(&client, 2 * PAGES_PER_UNIT);
    assert_eq!(asked(), before + 1, "the next unit is another matter");
    assert!(unit(0).chain(unit(2).skip(1)).chain(unit(3)).all(|page| ram.is_marked(page)));
    assert_eq!(ram.get(2 * PAGES_PER_UNIT), 0);

    unit(1).for_each(|page| ram.set(page, page));
    daemon.api.set_limit("freed", Some(PAGES_PER_UNIT * PAGE_SIZE as u64)).expect("limit");
    until("it is within its limit", || vm().resident_bytes <= PAGES_PER_UNIT * PAGE_SIZE as u64);
    assert!(unit(1).all(|page| ram.get(page) == page));
}
