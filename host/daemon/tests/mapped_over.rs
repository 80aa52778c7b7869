//! A VMM that maps other memory over parts of its RAM, as QEMU does to replace a page with a memory error: the rest is
//! held to its limit. A real keeper and engine, and the client library. Needs userfaultfd.

mod common;

use std::os::fd::AsFd;

use ballast_api::UpgradeStage;
use ballast_base::{Hva, PAGE_SIZE};
use ballast_client::Client;
use common::raw::Ram;
use common::{Daemon, QUICK, until, upgrades};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous};

const PAGES: u64 = 16 << 10;
const LIMIT: u64 = 16 << 20;
/// Of each `EVERY` pages, `HOLE` are mapped over, so that each batch of a reclaim worker has some.
const EVERY: u64 = 512;
const HOLE: u64 = 4;

#[derive(Clone, Copy)]
enum With {
    Itself,
    Nothing,
    /// A read-only file, which userfaultfd does not register.
    ReadOnly,
}

fn map_over(client: &Client, ram: &Ram, page: u64, pages: u64, with: With) {
    let (at, len) = (ram.map.addr() as u64 + page * PAGE_SIZE as u64, pages * PAGE_SIZE as u64);
    client.unmapping(Hva(at), len).expect("told");
    let (at, len) = (at as *mut _, len as usize);
    let both = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: inside `ram.map`, of which nobody holds references; its own bytes are mapped there again, or its user
    // does not touch the part any more.
    unsafe {
        match with {
            With::Itself => {
                let offset = page * PAGE_SIZE as u64;
                mmap(at, len, both, MapFlags::SHARED | MapFlags::FIXED, ram.fd.as_fd(), offset).expect("map")
            }
            With::Nothing => {
                let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
                mmap_anonymous(at, len, ProtFlags::empty(), flags).expect("map")
            }
            With::ReadOnly => {
                let file = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
                file.as_file().set_len(len as u64).expect("its size");
                let read_only = std::fs::File::open(file.path()).expect("open");
                let flags = MapFlags::SHARED | MapFlags::FIXED;
                mmap(at, len, ProtFlags::READ, flags, read_only.as_fd(), 0).expect("map")
            }
        }
    };
}

fn served(daemon: &Daemon) -> (Ram, Client) {
    let ram = Ram::new(PAGES);
    ram.mark();
    let client = ram.vm(daemon, "web").may_pin(false).attach().expect("attach");
    until("it is served", || daemon.api.vm("web").is_ok());
    (ram, client)
}

fn held(daemon: &Daemon) -> bool {
    daemon.api.vm("web").is_ok_and(|vm| vm.resident_bytes <= LIMIT)
}

#[test]
fn a_vm_whose_ram_is_mapped_over_in_places_is_held_to_its_limit_and_loses_no_byte() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let (ram, client) = served(&daemon);
    (0..PAGES).step_by(EVERY as usize).for_each(|page| map_over(&client, &ram, page, HOLE, With::Itself));
    daemon.api.set_limit("web", Some(LIMIT)).expect("limit");
    until("the limit holds", || held(&daemon));
    assert_eq!(daemon.events("ram-kept").len(), 1);
    // Now pages that may be far, or in quarantine.
    let later = |page: &u64| page % EVERY == EVERY / 2;
    (0..PAGES).filter(later).for_each(|page| map_over(&client, &ram, page, HOLE, With::Itself));
    let wrong = (0..PAGES).filter(|page| !ram.is_marked(*page)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes\n{}", daemon.log());
    until("the limit holds again", || held(&daemon));
    let wrong = (0..PAGES).rev().filter(|page| !ram.is_marked(*page)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes\n{}", daemon.log());
    assert_eq!(daemon.events("ram-kept").len(), 1, "it is said once");
    // The successor finds the pages that are mapped over by itself.
    daemon.replace_engine();
    until("the limit holds after a takeover", || held(&daemon));
    let wrong = (0..PAGES).filter(|page| !ram.is_marked(*page)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes after a takeover\n{}", daemon.log());
}

#[test]
fn a_page_mapped_over_before_registration_costs_only_its_chunk() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    // Two chunks of 32 MiB; one has a page that is no RAM.
    let (ram, client) = served(&daemon);
    map_over(&client, &ram, 100, 1, With::Nothing);
    daemon.api.set_limit("web", Some(40 << 20)).expect("limit");
    until("the limit holds", || daemon.api.vm("web").is_ok_and(|vm| vm.resident_bytes <= 40 << 20));
    assert_eq!(daemon.events("ram-kept").len(), 1);
    let wrong = (0..PAGES).filter(|page| *page != 100 && !ram.is_marked(*page)).count();
    assert_eq!(wrong, 0, "pages with wrong bytes\n{}", daemon.log());
}

#[test]
fn a_vm_with_other_mappings_in_its_ram_is_served_by_the_next_engine() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let (ram, client) = served(&daemon);
    daemon.api.set_limit("web", Some(LIMIT)).expect("limit");
    until("the limit holds", || held(&daemon));
    // All of it is registered by now. No page that is mapped over is used any more.
    let holes = [3, 100, 8191, 8192, PAGES - 1];
    for (page, with) in holes.iter().zip([With::Nothing, With::ReadOnly].into_iter().cycle()) {
        map_over(&client, &ram, *page, 1, with);
    }
    let check = |when: &str| {
        let wrong = (0..PAGES).filter(|page| !holes.contains(page) && !ram.is_marked(*page)).count();
        assert_eq!(wrong, 0, "pages with wrong bytes {when}\n{}", daemon.log());
        until("the limit holds", || held(&daemon));
    };
    daemon.replace_engine();
    check("after a takeover");
    upgrades::begin(&daemon, &upgrades::this_build());
    let now = upgrades::ended(&daemon);
    assert_eq!(now.stage, UpgradeStage::Done, "{now:?}\n{}", daemon.log());
    check("after an upgrade");
    client.bring_back("the test asks").expect("all pages come back");
    assert_eq!(daemon.vm("web").far_bytes, 0);
}
