//! A hung disk under the file stores: only pages on it wait, whichever VM comes or dies. When the disk responds again,
//! each byte is right. Real processes; the disk is a real FUSE server. Needs root.

mod common;

use ballast_api::{UpgradeStage, VmStatus};
use ballast_base::Bytes;
use ballast_testvm::fuse::Fuse;

use common::guest::Guest;
use common::raw::{Ram, files};
use common::upgrades::{begin, ended, request, this_build};
use common::{BUSY, Daemon, QUICK, missing, spilling, until};

/// A disk that can hang; `None` if this kernel does not let FUSE make files without a name (before Linux 6.2).
fn disk() -> Option<Fuse> {
    let made = |fuse: &Fuse| ballast_sys::direct::create_unnamed(&fuse.dir(), ballast_base::Bytes(1 << 20));
    let served = Fuse::serve().and_then(|fuse| made(&fuse).map(|_| fuse));
    let refused = served.as_ref().err().map(|error| format!("no disk by FUSE: {error}"));
    if missing("fuse", refused) { None } else { served.ok() }
}

fn is_served(daemon: &Daemon, name: &str) -> bool {
    daemon.api.vm(name).is_ok_and(|vm| vm.status != VmStatus::Recovering)
}

#[test]
fn an_engine_dies_while_the_disk_hangs_and_its_successor_serves_pages_in_ram() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    let hangs = fuse.hold_on();
    for _ in 0..3 {
        daemon.replace_engine();
        until("it is served", || is_served(&daemon, "victim"));
        until("it is said that its disk does not answer", || daemon.has_event_of("victim", "spill-unavailable"));
        assert!(daemon.api.metrics().expect("metrics").contains("victim"));
    }
    drop(hangs);
    until("it is said that its disk answers", || daemon.has_event_of("victim", "spill-back"));
    daemon.goes_to_file_and_back("victim");
    guest.finish();
}

#[test]
fn keeper_and_engine_die_while_the_disk_hangs() {
    let Some(fuse) = disk() else { return };
    let mut daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    let hangs = fuse.hold_on();
    for both in [true, false] {
        daemon.kill_and_restart_keeper(both);
        until("it is served", || is_served(&daemon, "victim"));
    }
    drop(hangs);
    daemon.goes_to_file_and_back("victim");
    guest.finish();
}

#[test]
fn an_upgrade_to_a_file_on_a_hung_disk_stops_nobody() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let program = fuse.dir().join("ballastd");
    std::fs::write(&program, b"#!/bin/sh\n").expect("a file");
    let hangs = fuse.hold_on();
    let refused = daemon.api.begin_upgrade(&request(&program)).expect_err("it does not come");
    assert!(refused.to_string().contains("no answer within"), "{refused}");
    // The keeper continues: it takes another VM, and another engine follows.
    let other = Guest::start(&daemon, "other", BUSY);
    begin(&daemon, &this_build());
    assert_eq!(ended(&daemon).stage, UpgradeStage::Done, "{}", daemon.log());
    drop(hangs);
    [guest, other].into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn vms_that_come_while_the_disk_hangs_have_no_file_store_and_wait_for_nobody() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let hangs = fuse.hold_on();
    let guests = ["one", "two", "three"].map(|name| {
        let guest = Guest::start(&daemon, name, "--workload uniform --ram 16M --limit 8M");
        until("it is said that it has no file store", || daemon.has_event_of(name, "spill-unavailable"));
        guest
    });
    guests.into_iter().for_each(|guest| drop(guest.finish()));
    drop(hangs);
    until("the disk is used again", || {
        Guest::start(&daemon, "late", "--workload uniform --ram 8M").finish();
        until("it is forgotten", || daemon.api.vm("late").is_err());
        let of_late = |kind| daemon.events(kind).iter().filter(|event| event.vm.as_deref() == Some("late")).count();
        of_late("gone") > of_late("spill-unavailable")
    });
}

#[test]
fn vms_that_die_with_reads_in_flight_leave_nothing_behind() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let engine = daemon.engine_pid().expect("an engine");
    for _ in 0..4 {
        let dies = Guest::start(&daemon, "dies", BUSY);
        daemon.goes_to_file_and_back("dies");
        let hangs = fuse.hold_on();
        // One read is enough: a late page is not read again, and the other thread may wait for this one.
        fuse.wait_for_held(1);
        drop(dies);
        drop(hangs);
        until("it is forgotten", || daemon.api.vm("dies").is_err());
        until("the disk space is given back", || daemon.host().file_bytes == 0);
    }
    let rings = files(engine, "io_uring").len();
    assert!(rings < 64, "{rings} rings are left");
    let guest = Guest::start(&daemon, "late", BUSY);
    daemon.goes_to_file_and_back("late");
    guest.finish();
    assert_eq!(daemon.engine_pid(), Some(engine), "{}", daemon.log());
}

#[test]
fn a_vm_is_restored_while_the_disk_hangs_and_its_memory_is_plugged_and_freed() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let ram = Ram::new(4096);
    ram.mark();
    let client = ram.vm(&daemon, "mine").limit(2 << 20).attach().expect("attach");
    until("pages are on the disk", || daemon.api.vm("mine").is_ok_and(|vm| vm.far_file_bytes > 4 << 20));
    let hangs = fuse.hold_on();
    daemon.api.restore("mine").expect("asked for");
    until("it waits for the disk", || daemon.vm("mine").status == VmStatus::Blocked);
    // The wait for its page grows each time, and none of the requests below may wait for that.
    for _ in 0..3 {
        let more = Ram::new(256);
        let span = more.info().span;
        client.add_region(more.fd.try_clone().expect("dup"), span.hva, span.len, Bytes(0)).expect("plugged");
        // The keeper replies before the engine has the region.
        until("the engine has it", || daemon.vm("mine").size_bytes == (4096 + 256) * 4096);
        more.mark();
        // An engine ignores addresses whose mapping it does not know yet.
        until("half of it is freed", || {
            client.discard(&[(span.hva, span.len.0 / 2)]).expect("freed");
            !more.is_marked(0)
        });
        assert!((0..256).all(|page| more.is_marked(page) == (page >= 128)));
        client.remove_region(span.hva).expect("unplugged");
    }
    Guest::start(&daemon, "other", "--workload uniform --ram 16M --limit 8M").finish();
    assert!(daemon.vm("mine").far_file_bytes > 0, "the disk hangs");
    drop(hangs);
    until("all is back", || daemon.vm("mine").far_bytes == 0);
    assert!((0..4096).all(|page| ram.is_marked(page)), "{}", daemon.log());
}

#[test]
fn an_engine_killed_or_replaced_while_reads_are_late_leaves_each_page_to_the_next() {
    let Some(fuse) = disk() else { return };
    let daemon = Daemon::start(&spilling("8M", &fuse.dir()));
    let ram = Ram::new(4096);
    ram.mark();
    let _client = ram.vm(&daemon, "mine").limit(2 << 20).attach().expect("attach");
    for is_killed in [true, false, true, false] {
        until("pages are on the disk", || daemon.api.vm("mine").is_ok_and(|vm| vm.far_file_bytes > 4 << 20));
        std::thread::scope(|scope| {
            let hangs = fuse.hold_on();
            for first in 0..8 {
                let ram = &ram;
                scope.spawn(move || assert!((first..4096).step_by(8).all(|page| ram.is_marked(page))));
            }
            fuse.wait_for_held(1);
            // After this, the reads are late.
            Guest::start(&daemon, "other", "--workload uniform --ram 16M --limit 8M").finish();
            if is_killed {
                daemon.replace_engine();
                until("it is served", || is_served(&daemon, "mine"));
            } else {
                let moving = || daemon.log().matches("the upgrade goes on stage=Moving").count();
                let before = moving();
                begin(&daemon, &this_build());
                until("the VM is to go to another engine", || moving() > before);
            }
            drop(hangs);
        });
        if !is_killed {
            assert_eq!(ended(&daemon).stage, UpgradeStage::Done, "{}", daemon.log());
        }
    }
    assert!(!daemon.has_event_of("mine", "page-lost"), "{}", daemon.log());
    assert!((0..4096).all(|page| ram.is_marked(page)), "{}", daemon.log());
}
