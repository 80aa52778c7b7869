//! What a VMM may do to itself while its memory is away: a child in its own memory, an `exec`, an end that its RAM file
//! outlives. A real keeper and engine, the preload library, and a real VMM of few lines (`vmm.c`).

mod common;

use ballast_api::VmStatus;
use common::vmm::{Program, Vmm};
use common::{Daemon, missing, until};

/// Pages go soon.
const QUICK: &str = "quarantine_ms = 20\n";
const PAGES: u64 = 8192;
const LIMIT: u64 = 4 << 20;

/// Have most pages of a VM far.
fn squeeze(daemon: &Daemon, name: &str) {
    daemon.api.set_limit(name, Some(LIMIT)).expect("set a limit");
    until("most pages are far", || daemon.vm(name).far_bytes > PAGES * 4096 * 3 / 4);
}

#[test]
fn a_child_in_the_vmms_own_memory_is_no_stranger() {
    let Some(program) = Program::compile() else { return };
    let none = (!ballast_sys::kcmp::is_available()).then_some("the kernel has no kcmp");
    if missing("kcmp", none) {
        return;
    }
    let daemon = Daemon::start(QUICK);
    let mut vmm: Vmm = program.start(&daemon, "teardown", "memfd", PAGES);
    assert_eq!(vmm.ask("clone"), "ok");
    squeeze(&daemon, "teardown");
    // The engine looks every few seconds, and when the limit is set.
    for _ in 0..3 {
        daemon.api.set_limit("teardown", Some(LIMIT)).expect("nobody else maps it");
    }
    let vm = daemon.vm("teardown");
    assert_eq!((vm.status, vm.status_reason), (VmStatus::Running, None));
    assert_eq!(vmm.ask("verify"), "wrong 0");
    assert_eq!(vmm.ask("unclone"), "ok");
}
