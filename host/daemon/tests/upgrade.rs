//! Another engine follows the serving one, under a guest that writes and verifies all the time: to another build and
//! back, and with programs that are no engines. No wrong byte, and no operation fails. Needs root (userfaultfd);
//! `BALLAST_UPGRADES` sets the number of upgrades (default 6), `BALLAST_NEXT` names the `ballastd` of another build
//! (`scripts/next-build.sh`), with another layout; without it this build is its own successor.

mod common;

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ballast_api::UpgradeStage;
use ballast_testkit::program::install_script;
use rustix::process::Signal;

use common::guest::{Guest, moves};
use common::raw::{files, open};
use common::upgrades::{begin, ended, next_build, request, this_build};
use common::{BUSY, Daemon, QUICK, moment, until, upgrades};

const DECIDING: &str = "quarantine_ms = 5\n[policy]\nname = \"gain\"\ntick_ms = 100\n";

#[test]
fn engines_that_follow_each_other_lose_no_byte_and_answer_every_request() {
    let daemon = Daemon::start(DECIDING);
    let guests = ["one", "two", "three"].map(|name| Guest::start(&daemon, name, BUSY));
    let other = daemon.dir().join("ballastd-other");
    std::os::unix::fs::symlink(next_build(), &other).expect("a link");
    let mut last = daemon.host();
    for round in 0..upgrades::count() {
        moves(&daemon.api, "two");
        std::thread::sleep(moment(round));
        let program = if round % 2 == 0 { other.clone() } else { this_build() };
        begin(&daemon, &program);
        // A client that reads the VMs while they move never misses one.
        loop {
            assert_eq!(daemon.api.vms().expect("answered").len(), 3, "{}", daemon.log());
            if matches!(daemon.api.upgrade().expect("answered").stage, UpgradeStage::Done | UpgradeStage::Failed) {
                break;
            }
        }
        let now = ended(&daemon);
        let (vms, expected) = ((now.vms, now.checked, now.moved), (3, 3, 3));
        assert_eq!((now.stage, vms), (UpgradeStage::Done, expected), "{now:?}\n{}", daemon.log());
        assert_eq!(now.longest_gap_us, 0, "a VM was without an engine\n{}", daemon.log());
        let host = daemon.host();
        assert_ne!(host.engine_pid, last.engine_pid);
        assert_eq!(host.engine_restarts, 0, "an engine died\n{}", daemon.log());
        last = host;
    }
    moves(&daemon.api, "two");
    let events = daemon.api.events().expect("events");
    let upgraded = events.iter().filter(|event| event.kind == "upgraded").count();
    // The event list holds a thousand.
    if upgrades::count() < 900 {
        assert_eq!(upgraded, upgrades::count() as usize, "events of earlier engines are kept: {events:?}");
        assert!(events.iter().any(|event| event.kind == "attached"), "{events:?}");
    }
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn a_client_of_either_build_is_served_by_engine_and_keeper_of_the_other() {
    let next = std::env::var_os("BALLAST_NEXT").map(PathBuf::from);
    if common::missing("next-build", next.is_none().then_some("BALLAST_NEXT names no ballastd of another build")) {
        return;
    }
    let next = next.expect("seen above");
    let mut daemon = Daemon::start(QUICK);
    let builds = [this_build(), next];
    let mut guests = Vec::new();
    for round in 0..upgrades::count().min(8) {
        // Engine and keeper are of one build; a client of each build attaches, beside those that are there.
        for (build, name) in builds.iter().zip(["old", "new"]).filter(|_| round < 2) {
            let name = format!("{name}-{round}");
            guests.push(Guest::start_beside(build, &daemon, &name, BUSY, &[]));
        }
        for name in ["old-0", "new-0"] {
            moves(&daemon.api, name);
        }
        begin(&daemon, &builds[(round as usize + 1) % 2]);
        let now = ended(&daemon);
        assert_eq!((now.stage, now.keeper_replaced), (UpgradeStage::Done, Some(true)), "{now:?}\n{}", daemon.log());
        assert_eq!(now.longest_gap_us, 0, "a VM was without an engine\n{}", daemon.log());
        for name in ["old-0", "new-0"] {
            moves(&daemon.api, name);
        }
        if round % 4 == 2 {
            // The guests return to a keeper of this build, with the escrow that the other build's keeper gave them.
            daemon.kill_and_restart_keeper(round % 8 == 2);
            until("all guests are back", || daemon.api.vms().is_ok_and(|vms| vms.len() == guests.len()));
        }
    }
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn a_program_that_is_no_engine_or_refuses_or_is_silent_changes_nothing() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let before = daemon.host().engine_pid;
    let script = |name: &str, text: &str| {
        let path = daemon.dir().join(name);
        install_script(&path, text);
        path
    };
    let ends = script("ends", "exit 3");
    let hangs = script("hangs", "exec sleep 1000");
    for (program, why) in [(&ends, "it ended"), (&hangs, "did not answer")] {
        begin(&daemon, program);
        let now = ended(&daemon);
        assert!(now.stage == UpgradeStage::Failed && now.message.contains(why), "{now:?}\n{}", daemon.log());
        moves(&daemon.api, "victim");
    }
    for nothing in [daemon.dir().join("nowhere"), daemon.dir().to_owned(), PathBuf::from("relative")] {
        daemon.api.begin_upgrade(&request(&nothing)).expect_err("there is no such program");
    }
    assert_eq!(daemon.host().engine_pid, before);
    assert_eq!(daemon.host().engine_restarts, 0);
    guest.finish();
}

#[test]
fn if_the_successor_cannot_read_a_vm_it_is_named_and_all_stay_with_their_engine() {
    let daemon = Daemon::start(QUICK);
    let guests = ["one", "two", "three"].map(|name| Guest::start(&daemon, name, BUSY));
    let before = daemon.host().engine_pid;
    // The least reader of a layout: bytes 12 and 13 of the file.
    let (file, mut least) = (open(&files(guests[1].pid(), "ballast-state")[0]), [0; 2]);
    file.read_exact_at(&mut least, 12).expect("read");
    file.write_all_at(&999_u16.to_le_bytes(), 12).expect("written");
    for _ in 0..2 {
        begin(&daemon, &next_build());
        let now = ended(&daemon);
        let is_named = now.message.contains("it cannot serve VM two") && now.message.contains("999");
        assert!(now.stage == UpgradeStage::Failed && is_named, "{now:?}\n{}", daemon.log());
        assert_eq!((now.moved, daemon.host().engine_pid), (0, before), "{}", daemon.log());
        for name in ["one", "two", "three"] {
            moves(&daemon.api, name);
        }
    }
    file.write_all_at(&least, 12).expect("written");
    begin(&daemon, &next_build());
    let now = ended(&daemon);
    assert_eq!((now.stage, now.moved), (UpgradeStage::Done, 3), "{now:?}\n{}", daemon.log());
    moves(&daemon.api, "two");
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn a_successor_that_stops_in_the_middle_is_ended_and_its_vms_go_back() {
    let daemon = Daemon::start(QUICK);
    let guests = ["one", "two", "three", "four", "five", "six"].map(|name| Guest::start(&daemon, name, BUSY));
    let old = daemon.host().engine_pid;
    begin(&daemon, &next_build());
    until("the successor has a VM, or all", || daemon.engines().iter().any(|pid| *pid != old));
    let next = daemon.engines().into_iter().find(|pid| *pid != old).expect("a successor");
    std::thread::sleep(moment(5));
    common::signal_process(next, Signal::STOP);
    // The upgrade may be complete: then the stopped engine serves, hangs, and is replaced.
    until("it is ended", || !daemon.engines().contains(&next));
    until("the guests are served", || daemon.api.vms().is_ok_and(|vms| vms.len() == guests.len()));
    assert_ne!(daemon.host().engine_pid, next);
    moves(&daemon.api, "one");
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}
