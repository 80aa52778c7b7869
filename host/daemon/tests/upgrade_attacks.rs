//! Upgrades under attack: to files that are no program of this machine, with an engine or a keeper stopped at any
//! stage, and several at once while limits and VMs change. Whatever the result, no guest reads a wrong byte, and one
//! engine serves all VMs in the end. Needs root (userfaultfd).

mod common;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ballast_api::UpgradeStage;
use ballast_base::wire::KeeperToClient;
use ballast_testkit::program::install;
use rustix::process::Signal;

use common::guest::{Guest, moves};
use common::raw::{Ram, RawClient};
use common::upgrades::{begin, ended, request, this_build};
use common::{BUSY, Daemon, QUICK, signal_process, until};

const THREE: [&str; 3] = ["one", "two", "three"];

fn upgrades(daemon: &Daemon) {
    begin(daemon, &this_build());
    let now = ended(daemon);
    assert_eq!((now.stage, now.keeper_replaced), (UpgradeStage::Done, Some(true)), "{now:?}\n{}", daemon.log());
}

fn all_are_served(daemon: &Daemon, names: &[&str]) {
    until("one engine is left", || daemon.engines().len() == 1);
    until("all guests are served", || daemon.api.vms().is_ok_and(|vms| vms.len() == names.len()));
    names.iter().for_each(|name| moves(&daemon.api, name));
}

#[test]
fn a_file_that_is_no_program_of_this_machine_changes_nothing() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let engine = daemon.host().engine_pid;
    let dir = daemon.dir().to_owned();
    let made = |name: &str, mode: u32, bytes: &[u8]| {
        let path = dir.join(name);
        std::fs::write(&path, bytes).expect("written");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).expect("a mode");
        path
    };
    let real = std::fs::read(this_build()).expect("this build");
    let mut other = real[..1 << 20].to_vec();
    // The machine in an ELF header: one on which Linux does not run.
    other[18..20].copy_from_slice(&0x7FFF_u16.to_le_bytes());
    let huge = made("huge", 0o755, b"\x7fELF");
    std::fs::File::options().write(true).open(&huge).expect("open").set_len(1 << 40).expect("sparse");
    let fifo = dir.join("fifo");
    assert!(Command::new("mkfifo").args(["-m", "755"]).arg(&fifo).status().expect("mkfifo").success());
    let circle = dir.join("circle");
    std::os::unix::fs::symlink(&circle, &circle).expect("a link");
    let programs = [
        made("empty", 0o755, b""),
        made("truncated", 0o755, &real[..4096]),
        made("of-another-machine", 0o755, &other),
        made("not-executable", 0o644, &real),
        made("no-interpreter", 0o755, b"#!/nowhere/sh\n"),
        huge,
        fifo,
        circle,
        PathBuf::from("/dev/null"),
        PathBuf::from("/proc/self/mem"),
    ];
    for program in programs {
        // Refused at once, or when the program ended.
        if daemon.api.begin_upgrade(&request(&program)).is_ok() {
            let now = ended(&daemon);
            assert_eq!((now.stage, now.moved), (UpgradeStage::Failed, 0), "{now:?}\n{}", daemon.log());
        }
        let host = daemon.host();
        assert_eq!((host.engine_pid, host.engine_restarts), (engine, 0), "{}\n{}", program.display(), daemon.log());
    }
    moves(&daemon.api, "victim");
    upgrades(&daemon);
    moves(&daemon.api, "victim");
    guest.finish();
}

const STAGES: [&str; 6] = [
    "an engine that is to follow is started",
    "the upgrade goes on stage=Resting",
    "the upgrade goes on stage=Moving",
    "two engines serve it",
    "the one that left has closed it",
    "the upgrade goes on stage=Serving",
];

#[test]
fn an_engine_stopped_at_any_stage_is_replaced_and_later_changes_nothing() {
    let daemon = Daemon::start(QUICK);
    let guests = THREE.map(|name| Guest::start(&daemon, name, BUSY));
    for stage in STAGES {
        let (old, said) = (daemon.host().engine_pid, daemon.log().len());
        begin(&daemon, &this_build());
        // A stopped engine does not answer, so the log is read.
        until("it comes so far", || daemon.log()[said..].contains(stage));
        signal_process(old, Signal::STOP);
        until("another engine serves", || {
            daemon.engines().iter().any(|pid| *pid != old) && daemon.api.host().is_ok_and(|host| host.engine_pid != old)
        });
        // The old engine was ended, or is fenced.
        signal_process(old, Signal::CONT);
        all_are_served(&daemon, &THREE);
    }
    upgrades(&daemon);
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn while_a_keeper_is_stopped_at_any_stage_each_touch_is_served() {
    const PAGES: u64 = 4096;
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let guests = THREE.map(|name| Guest::start(&daemon, name, BUSY));
    let ram = Arc::new(Ram::new(PAGES));
    let _client = ram.vm(&daemon, "touched").limit(PAGES * 4096 / 4).attach().expect("attached");
    ram.mark();
    for stage in STAGES {
        until("half of its pages are far", || daemon.vm("touched").far_bytes > PAGES * 4096 / 2);
        let said = daemon.log().len();
        begin(&daemon, &this_build());
        until("it comes so far", || daemon.log()[said..].contains(stage));
        daemon.signal_keeper(Signal::STOP);
        let touches = ram.clone();
        // Not scoped: a touch that no engine serves waits forever.
        let touched = std::thread::spawn(move || (0..PAGES).all(|page| touches.is_marked(page)));
        until("all of it is touched", || touched.is_finished());
        daemon.signal_keeper(Signal::CONT);
        assert!(touched.join().expect("no panic"), "wrong bytes");
        ended(&daemon);
    }
    upgrades(&daemon);
    THREE.iter().for_each(|name| moves(&daemon.api, name));
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn several_clients_request_upgrades_while_limits_change_and_vms_come_and_go() {
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let guests = ["one", "two"].map(|name| Guest::start(&daemon, name, BUSY));
    let other = daemon.dir().join("ballastd-other");
    install(&this_build(), &other);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (daemon, stop) = (&daemon, &stop);
        scope.spawn(move || {
            for round in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let limit = Some((8 + round % 16) << 20);
                daemon.api.set_limit("one", limit).unwrap_or_else(|error| panic!("limit: {error}\n{}", daemon.log()));
            }
        });
        scope.spawn(move || {
            for came in 0_u64.. {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let ram = Ram::new(64);
                let answer = RawClient::new(&daemon.attach_socket(), &format!("comes-{came}")).attach(&[&ram]);
                assert!(matches!(answer, Some(KeeperToClient::Attached { .. })), "{answer:?}\n{}", daemon.log());
            }
        });
        let asks = [this_build(), other].map(|program| {
            scope.spawn(move || {
                let mut begun = 0;
                while begun < 4 {
                    // Refused while the other client's upgrade is in progress.
                    if daemon.api.begin_upgrade(&request(&program)).is_ok() {
                        let now = ended(daemon);
                        let expected = (UpgradeStage::Done, Some(true));
                        assert_eq!((now.stage, now.keeper_replaced), expected, "{now:?}\n{}", daemon.log());
                        begun += 1;
                    }
                }
            })
        });
        let results = asks.map(|asking| asking.join());
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.expect("every upgrade that began ended well"));
    });
    assert_eq!(daemon.host().engine_restarts, 0, "{}", daemon.log());
    moves(&daemon.api, "one");
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}
