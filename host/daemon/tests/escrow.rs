//! A process that hangs up and keeps its escrow: no memory of the VM stays in those files, which no budget counts. Real
//! keeper, engine and guest. Needs userfaultfd.

mod common;

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use common::guest::Guest;
use common::raw::{files, open};
use common::{Daemon, until};

const SQUEEZED: &str = "--workload uniform --ram 48M --limit 8M --threads 2 --zero-fraction 0.1";
const EMPTY_BYTES: u64 = 512 << 10;

/// The files of this name that a process has open, as a recipient of its descriptors would have them.
fn kept(pid: u32, name: &str) -> Vec<File> {
    files(pid, &format!("memfd:{name}")).iter().map(|path| open(path)).collect()
}

fn bytes(file: &File) -> u64 {
    file.metadata().expect("stat").blocks() * 512
}

fn squeezed(daemon: &Daemon) -> (Guest, [File; 2]) {
    let guest = Guest::start(daemon, "web", SQUEEZED);
    until("pages are far, and all are touched", || {
        let vm = daemon.vm("web");
        vm.far_bytes > 16 << 20 && vm.untouched_bytes == 0
    });
    let files = ["ballast-store", "ballast-state"].map(|name| {
        let mut files = kept(guest.pid(), name);
        assert_eq!(files.len(), 1, "{name}");
        files.remove(0)
    });
    assert!(bytes(&files[0]) > 8 << 20, "the copies are in the arena");
    (guest, files)
}

fn are_emptied(daemon: &Daemon, [arena, state]: &[File; 2]) {
    until("the VM is forgotten", || daemon.api.vm("web").is_err());
    until("nothing is left in the arena", || bytes(arena) < EMPTY_BYTES);
    until("nor in the state file", || bytes(state) < EMPTY_BYTES);
}

#[test]
fn a_process_that_keeps_its_escrow_but_not_its_ram_keeps_no_memory() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let (guest, files) = squeezed(&daemon);
    drop(guest);
    are_emptied(&daemon, &files);
}

#[test]
fn a_process_that_keeps_its_escrow_and_its_ram_has_the_pages_only_in_the_ram() {
    let Some(daemon) = Daemon::with_uffd("quarantine_ms = 5\n") else { return };
    let (guest, files) = squeezed(&daemon);
    let ram = kept(guest.pid(), "ballast-testvm-ram");
    assert!(!ram.is_empty());
    drop(guest);
    are_emptied(&daemon, &files);
    assert!(ram.iter().map(bytes).sum::<u64>() > 32 << 20, "what was far is back");
}
