//! Whatever dies, and whenever: a guest that writes and verifies all the time must not see one wrong byte.
//! Real processes, real SIGKILLs. Needs root (userfaultfd); `BALLAST_KILLS` sets how many kills (default 200).

mod common;

use std::time::Duration;

use common::guest::Guest;
use common::{Daemon, until};

/// A short quarantine, so that pages move all the time and kills meet every state.
const QUICK: &str = "quarantine_ms = 5\n";
/// Half-compressible data, both halves of the life busy: hot pages stay, the others go and come back.
const BUSY: &str = "--workload uniform --ram 48M --limit 16M --threads 2 --zero-fraction 0.1";

fn kills() -> u32 {
    std::env::var("BALLAST_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(200)
}

/// Varies the moment of a kill without depending on a clock's phase: 0 to 40 ms in odd steps.
fn moment(round: u32) -> Duration {
    Duration::from_micros(u64::from(round).wrapping_mul(7919) % 40_000)
}

fn evicting(daemon: &Daemon, name: &str) {
    until("pages go out and come back", || {
        let vm = daemon.vm(name);
        vm.reclaim.evicted_pages > 0 && vm.faults.restore > 0
    });
}

#[test]
fn an_engine_killed_hundreds_of_times_loses_no_byte() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    evicting(&daemon, "victim");
    let before = daemon.vm("victim");
    for round in 0..kills() {
        std::thread::sleep(moment(round));
        let old = daemon.kill_engine();
        daemon.wait_for_engine_after(old);
    }
    let after = daemon.vm("victim");
    assert!(after.faults.restore > before.faults.restore, "nothing moved between the kills");
    assert_eq!(daemon.host().engine_restarts, u64::from(kills()));
    guest.finish();
}

#[test]
fn a_keeper_killed_and_started_again_loses_no_byte_and_its_engine_serves_meanwhile() {
    let mut daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    for round in 0..kills() / 10 {
        evicting(&daemon, "victim");
        std::thread::sleep(moment(round));
        let orphan = daemon.engine_pid().expect("an engine");
        daemon.kill_keeper();
        std::thread::sleep(moment(round + 1));
        assert!(std::path::Path::new(&format!("/proc/{orphan}")).exists(), "the engine must serve on");
        daemon.restart_keeper();
        daemon.wait_for_engine_after(orphan);
        until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    }
    guest.finish();
}

#[test]
fn keeper_and_engine_killed_together_lose_no_byte() {
    let mut daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    for round in 0..kills() / 10 {
        evicting(&daemon, "victim");
        std::thread::sleep(moment(round));
        let engine = daemon.engine_pid().expect("an engine");
        daemon.kill_keeper();
        common::kill(engine);
        std::thread::sleep(moment(round + 1));
        daemon.restart_keeper();
        until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    }
    guest.finish();
}

#[test]
fn a_vm_that_dies_leaves_nothing_behind() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    evicting(&daemon, "victim");
    assert!(daemon.host().store_bytes > 0);
    drop(guest);
    until("the VM is forgotten", || daemon.api.vms().is_ok_and(|vms| vms.is_empty()));
    until("its store is empty", || daemon.host().store_bytes == 0);
    // Another one may have the name now.
    let guest = Guest::start(&daemon, "victim", BUSY);
    guest.finish();
}

#[test]
fn ten_vms_at_once_keep_their_bytes_through_kills() {
    let daemon = Daemon::start(QUICK);
    let args = "--workload hotset --ram 12M --limit 4M --threads 1";
    let guests: Vec<Guest> = (0..10).map(|n| Guest::start(&daemon, &format!("vm-{n}"), args)).collect();
    until("all are attached", || daemon.api.vms().is_ok_and(|vms| vms.len() == 10));
    for round in 0..kills() / 20 {
        evicting(&daemon, "vm-7");
        std::thread::sleep(moment(round));
        let old = daemon.kill_engine();
        daemon.wait_for_engine_after(old);
    }
    for guest in guests {
        guest.finish();
    }
}

#[test]
fn size_is_the_sum_of_its_parts_to_the_page_at_any_moment() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    for _ in 0..200 {
        let vm = daemon.vm("victim");
        let parts = vm.resident_bytes + vm.far_bytes + vm.zero_bytes + vm.untouched_bytes + vm.poisoned_bytes;
        assert_eq!(vm.size_bytes, parts, "{vm:?}");
        assert!(vm.quarantine_bytes <= vm.resident_bytes);
    }
    guest.finish();
}

#[test]
fn a_limit_raised_or_removed_gives_the_vm_its_memory_back_when_it_touches_it() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    evicting(&daemon, "victim");
    daemon.api.set_limit("victim", None).expect("remove the limit");
    until("everything is resident", || {
        let vm = daemon.vm("victim");
        vm.resident_bytes + vm.zero_bytes + vm.untouched_bytes == vm.size_bytes
    });
    until("nothing is registered any more", || daemon.vm("victim").registered_bytes == 0);
    daemon.api.set_limit("victim", Some(20 << 20)).expect("set a limit");
    until("resident is at the limit", || daemon.vm("victim").resident_bytes <= 20 << 20);
    guest.finish();
}
