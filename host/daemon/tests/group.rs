//! VMs of a group: real keeper, engines and clients with equal content, killed in every order. Each byte of living VMs
//! is verified, and no page of dead ones is left. Needs root (userfaultfd).

mod common;

use ballast_api::UpgradeStage;

use common::guest::{Guest, moves};
use common::upgrades::{begin, ended, this_build};
use common::{BUSY, Daemon, kill, moment, until};

/// Pages move all the time. The guests' data is equal at first, and differs more and more.
const SETTINGS: &str = "quarantine_ms = 5\n[dedup]\ntwins = [\"twin-*\"]\n";

fn is_empty(daemon: &Daemon) {
    until("nothing of them is left", || daemon.api.host().is_ok_and(|host| host.vms == 0 && host.store_bytes == 0));
}

#[test]
fn engine_keeper_and_members_die_in_every_order_and_no_other_member_loses_a_byte() {
    let mut daemon = Daemon::start(SETTINGS);
    let [one, two] = ["twin-1", "twin-2"].map(|name| Guest::start(&daemon, name, BUSY));
    for round in 0..12 {
        let name = format!("twin-victim-{round}");
        let victim = Guest::start(&daemon, &name, BUSY);
        ["twin-1", "twin-2", &name].iter().for_each(|name| moves(&daemon.api, name));
        std::thread::sleep(moment(round));
        let engine = daemon.engine_pid().expect("an engine");
        // The engine dies before the member, or after it; with the keeper, or without.
        match round % 4 {
            0 => kill(engine),
            1 => {
                kill(victim.pid());
                kill(engine);
            }
            2 => {
                daemon.kill_keeper();
                kill(engine);
                kill(victim.pid());
            }
            _ => {
                daemon.kill_keeper();
                std::thread::sleep(moment(round + 1));
            }
        }
        if round % 4 >= 2 {
            daemon.restart_keeper();
        }
        daemon.wait_for_engine_after(engine);
        if round % 4 != 1 && round % 4 != 2 {
            until("it is attached", || daemon.api.vm(&name).is_ok());
            moves(&daemon.api, &name);
        }
        drop(victim);
        until("the others are attached", || ["twin-1", "twin-2"].iter().all(|name| daemon.api.vm(name).is_ok()));
    }
    ["twin-1", "twin-2"].iter().for_each(|name| assert_eq!(daemon.vm(name).poisoned_bytes, 0));
    one.finish();
    two.finish();
    is_empty(&daemon);
}

#[test]
fn an_upgrade_moves_members_one_after_the_other_and_loses_none() {
    let daemon = Daemon::start(SETTINGS);
    let guests = ["twin-1", "twin-2", "twin-3"].map(|name| Guest::start(&daemon, name, BUSY));
    for _ in 0..3 {
        ["twin-1", "twin-2", "twin-3"].iter().for_each(|name| moves(&daemon.api, name));
        let old = daemon.host().engine_pid;
        begin(&daemon, &this_build());
        let now = ended(&daemon);
        assert_eq!((now.stage, now.longest_gap_us), (UpgradeStage::Done, 0), "{}", daemon.log());
        assert_ne!(daemon.host().engine_pid, old);
    }
    ["twin-1", "twin-2", "twin-3"].iter().for_each(|name| moves(&daemon.api, name));
    guests.into_iter().for_each(|guest| drop(guest.finish()));
    is_empty(&daemon);
}
