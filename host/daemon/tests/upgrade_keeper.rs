//! The keeper becomes another program in its process: to another build and back, and with programs that refuse, die or
//! go back. Needs root (userfaultfd); `BALLAST_UPGRADES` sets the number of upgrades (default 6), `BALLAST_NEXT` names
//! the `ballastd` of another build (`scripts/next-build.sh`).

mod common;

use std::path::{Path, PathBuf};
use std::process::Command;

use ballast_api::{UpgradeStage, UpgradeStat};
use ballast_testkit::program::{install, install_script};

use common::guest::{Guest, moves};
use common::upgrades::{begin, ended, next_build, request, this_build};
use common::{BUSY, Daemon, QUICK, moment, until, upgrades};

/// A copy of this build's program: always a different file.
fn copied_build(daemon: &Daemon) -> PathBuf {
    let to = daemon.dir().join("ballastd-next");
    install(&next_build(), &to);
    to
}

fn upgrade(daemon: &Daemon, program: &Path) -> UpgradeStat {
    begin(daemon, program);
    let last = ended(daemon);
    assert_eq!(last.stage, UpgradeStage::Done, "{last:?}\n{}", daemon.log());
    last
}

fn keeper_is(daemon: &Daemon) -> PathBuf {
    std::fs::read_link(format!("/proc/{}/exe", daemon.keeper_pid())).expect("it runs")
}

fn script(daemon: &Daemon, name: &str, text: &str) -> PathBuf {
    let path = daemon.dir().join(name);
    let real = this_build();
    install_script(&path, &format!("real={}\n{text}\nexec $real \"$@\"", real.display()));
    path
}

#[test]
fn the_keeper_becomes_another_program_and_back_with_its_vms_its_pid_and_its_lock() {
    let mut daemon = Daemon::start(QUICK);
    let next = copied_build(&daemon);
    let mut guests = vec![Guest::start(&daemon, "first", BUSY)];
    let pid = daemon.keeper_pid();
    for round in 0..upgrades::count() {
        let program = if round % 2 == 0 { next.clone() } else { this_build() };
        std::thread::sleep(moment(round));
        let now = upgrade(&daemon, &program);
        assert_eq!((now.keeper_replaced, now.keeper_message.as_str()), (Some(true), ""), "{}", daemon.log());
        assert_eq!(keeper_is(&daemon), program.canonicalize().expect("a path"));
        let host = daemon.host();
        assert_eq!((host.keeper_pid, host.engine_restarts), (pid, 0), "{}", daemon.log());
        moves(&daemon.api, "first");
        if round == 0 {
            // One keeper attaches it, and the next one notices its end.
            guests.push(Guest::start(&daemon, "second", BUSY));
        }
    }
    let second = Command::new(this_build())
        .arg("--runtime-dir")
        .arg(daemon.dir())
        .output()
        .expect("a second keeper, which ends by itself");
    let said = String::from_utf8_lossy(&second.stderr);
    assert!(!second.status.success() && said.contains("is another ballastd running?"), "{said}");
    assert!(!daemon.events("keeper-upgraded").is_empty());

    // The new keeper notices the end of its engine and of its VMs, and a keeper that is started can follow it.
    daemon.replace_engine();
    moves(&daemon.api, "first");
    drop(guests.pop().map(Guest::finish));
    until("the VM is gone", || daemon.api.vms().is_ok_and(|vms| vms.len() == 1));
    daemon.kill_and_restart_keeper(false);
    until("its VM is back", || daemon.api.vm("first").is_ok());
    moves(&daemon.api, "first");
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn an_engine_that_dies_is_followed_by_one_of_its_own_program() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let installed = daemon.dir().join("ballastd-installed");
    install(&this_build(), &installed);
    upgrade(&daemon, &installed);
    let name = || std::fs::read_to_string(format!("/proc/{}/comm", daemon.engine_pid()?)).ok();
    for installs in ["a program that ends", "none"] {
        std::fs::remove_file(&installed).expect("it was there");
        if installs != "none" {
            script(&daemon, "ballastd-installed", "exit 3");
        }
        daemon.replace_engine();
        moves(&daemon.api, "victim");
        assert_eq!(name().as_deref(), Some("ballastd\n"), "{}", daemon.log());
    }
    guest.finish();
}

#[test]
fn a_program_that_could_not_be_the_keeper_serves_and_the_keeper_stays() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let is = keeper_is(&daemon);
    // Its engine serves, but the program is no longer executable at the exec.
    let text = format!("chmod -x {}", daemon.dir().join("forbidden").display());
    let now = upgrade(&daemon, &script(&daemon, "forbidden", &text));
    assert_eq!(now.keeper_replaced, Some(false));
    assert!(now.keeper_message.contains("Becoming"), "{now:?}");
    assert_eq!(keeper_is(&daemon), is);
    // The keeper continues: descriptors that were kept open for the exec are closed by the next exec as before.
    moves(&daemon.api, "victim");
    assert_eq!(upgrade(&daemon, &this_build()).keeper_replaced, Some(true), "{}", daemon.log());
    moves(&daemon.api, "victim");
    guest.finish();
}

#[test]
fn a_program_installed_over_the_one_that_serves_does_not_become_the_keeper() {
    let daemon = Daemon::start(QUICK);
    let guest = Guest::start(&daemon, "victim", BUSY);
    let (dies, pid) = (script(&daemon, "dies", "exit 3"), daemon.host().keeper_pid);
    let path = daemon.dir().join("installed");
    let text = format!("[ -e {0} ] && mv {0} {1}", dies.display(), path.display());
    let now = upgrade(&daemon, &script(&daemon, "installed", &text));
    assert_eq!(now.keeper_replaced, Some(true), "{now:?}\n{}", daemon.log());
    assert!(!dies.exists() && daemon.host().keeper_pid == pid, "{}", daemon.log());
    // The keeper's engines are of that program, too.
    daemon.replace_engine();
    moves(&daemon.api, "victim");
    guest.finish();
}

#[test]
fn a_program_that_cannot_be_the_keeper_after_all_becomes_the_last_one_again() {
    let daemon = Daemon::start(QUICK);
    let guests = ["one", "two"].map(|name| Guest::start(&daemon, name, BUSY));
    let (is, pid) = (keeper_is(&daemon), daemon.host().keeper_pid);
    // The program gets a descriptor without content. The program that it goes back to gets the right one.
    let back = script(&daemon, "back", "[ $1 = keeper ] && exec $real keeper $KEPT --because \"$4\"");
    let text = format!("[ $1 = keeper ] && KEPT=$2 exec $real keeper 0 --back {}", back.display());
    let fails = script(&daemon, "fails", &text);
    let now = upgrade(&daemon, &fails);
    assert_eq!(now.keeper_replaced, Some(false), "{}", daemon.log());
    assert!(now.keeper_message.contains("Reading what the keeper held"), "{now:?}");
    assert_eq!((keeper_is(&daemon), daemon.host().keeper_pid), (is, pid));
    assert_eq!(daemon.host().engine_restarts, 0);
    assert!(!daemon.events("keeper-stays").is_empty());
    moves(&daemon.api, "one");
    assert_eq!(upgrade(&daemon, &this_build()).keeper_replaced, Some(true), "{}", daemon.log());
    moves(&daemon.api, "two");
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn a_program_that_dies_as_the_keeper_leaves_its_vms_to_the_next_one() {
    let mut daemon = Daemon::start(QUICK);
    let guests = ["one", "two"].map(|name| Guest::start(&daemon, name, BUSY));
    let dies = script(&daemon, "dies", "[ $1 = keeper ] && kill -9 $$");
    for _ in 0..upgrades::count().div_ceil(4) {
        daemon.api.begin_upgrade(&request(&dies)).expect("begun");
        daemon.wait_for_keeper_to_die();
        assert_eq!(daemon.api.vms().expect("the orphan answers").len(), 2, "{}", daemon.log());
        daemon.restart_keeper();
        until("its engine answers", || daemon.api.host().is_ok_and(|host| host.keeper_pid == daemon.keeper_pid()));
        until("all guests are back", || daemon.api.vms().is_ok_and(|vms| vms.len() == 2));
        moves(&daemon.api, "one");
        moves(&daemon.api, "two");
    }
    guests.into_iter().for_each(|guest| drop(guest.finish()));
}
