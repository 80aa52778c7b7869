//! RAM in pages of 1 GiB, of which the kernel can neither map nor fill a part: its VM is pinned. Needs root
//! (userfaultfd). No such page is ever touched, so the host need not have any.

mod common;

use std::os::fd::OwnedFd;

use ballast_api::VmClass;
use ballast_base::{Bytes, GIB, Hva};
use ballast_client::{Client, Ram as Described};
use ballast_sys::Mapping;
use ballast_testkit::skip;
use common::raw::Ram;
use common::{Daemon, until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// A file for one page of 1 GiB, without the page, and its mapping; `None`, with a message, if there are no such pages.
fn gib() -> Option<(OwnedFd, Mapping)> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_1GB;
    let made = memfd_create("ballast-test", flags).map_err(std::io::Error::from).and_then(|fd| {
        ftruncate(&fd, GIB)?;
        let map = Mapping::shared(&fd, 0, GIB as usize)?;
        Ok((fd, map))
    });
    made.inspect_err(|why| skip("hugetlb", why)).ok()
}

#[test]
fn ram_in_1_gib_pages_pins_its_vm_even_if_plugged_into_a_paged_one() {
    const LIMIT: u64 = 1 << 20;
    let (Some((fd, map)), Some((dimm, dimm_map))) = (gib(), gib()) else { return };
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let class = |name: &str| daemon.api.vm(name).ok().map(|vm| vm.class);
    let builder = Client::builder().name("large").socket(daemon.attach_socket()).may_pin(false);
    let ram = Described::one(fd, Hva(map.addr() as u64), Bytes(GIB), Bytes(0));
    let large = builder.ram(ram).attach().expect("attach");
    until("it is pinned", || class("large") == Some(VmClass::Pinned));
    let vm = daemon.vm("large");
    let why = vm.status_reason.unwrap_or_default();
    assert!(why.contains("pages of 1 GiB"), "{why}");
    assert_eq!((vm.size_bytes, vm.resident_bytes, vm.registered_bytes), (GIB, 0, 0));
    let said = daemon.api.set_limit("large", Some(LIMIT)).expect_err("a limit").to_string();
    assert!(said.contains("the VM is pinned"), "{said}");

    let ram = Ram::new(1024);
    ram.mark();
    let grows = ram.vm(&daemon, "grows").limit(LIMIT).may_pin(false).attach().expect("attach");
    until("it is held to its limit", || daemon.vm("grows").resident_bytes <= LIMIT);
    assert_eq!(class("grows"), Some(VmClass::Burstable));
    let at = Hva(dimm_map.addr() as u64);
    grows.add_region(dimm, at, Bytes(GIB), Bytes(0)).expect("plugged");
    until("all of it is pinned", || class("grows") == Some(VmClass::Pinned));
    assert!((0..1024).all(|page| ram.is_marked(page)), "a byte was lost");
    // A touch continues before its page counts as resident.
    let all = (GIB + 1024 * 4096, 1024 * 4096);
    until("nothing goes any more", || {
        let vm = daemon.vm("grows");
        (vm.size_bytes, vm.resident_bytes) == all
    });
    grows.remove_region(at).expect("unplugged");
    daemon.replace_engine();
    until("the next engine pages it, and not the other one", || {
        class("grows") == Some(VmClass::Burstable) && class("large") == Some(VmClass::Pinned)
    });
    until("it is held to its limit", || daemon.vm("grows").resident_bytes <= LIMIT);
    assert!((0..1024).all(|page| ram.is_marked(page)), "a byte was lost");
    drop((large, grows));
}
