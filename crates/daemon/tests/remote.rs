//! Far pages in a real cluster: a real guest, keeper and engine, six real servers. The engine is killed, the keeper is,
//! and a node after the other; every byte is verified. Needs root (userfaultfd) and `valkey`.

mod common;

use ballast_api::{UpgradeRequest, UpgradeStage};
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

use common::guest::Guest;
use common::{Daemon, missing, until};

/// More is far than the store in RAM holds.
const BUSY: &str = "--workload uniform --ram 48M --limit 16M --threads 2 --zero-fraction 0.1";

fn remote(valkey: &Valkey) -> String {
    let (first, last) = (valkey.addr(0), valkey.addr(valkey.len() - 1));
    format!(
        "quarantine_ms = 5\nstore_budget = \"8M\"\n[remote]\nnodes = [\"{first}\", \"{last}\"]\nbudget = \"256M\"\n\
         after_s = 1\n"
    )
}

fn start() -> Option<Valkey> {
    if missing("valkey", valkey_missing()) {
        return None;
    }
    Some(Valkey::start(Layout::default()).expect("a cluster"))
}

#[test]
fn an_engine_and_a_keeper_die_and_no_byte_in_the_cluster_is_lost() {
    let Some(valkey) = start() else { return };
    let mut daemon = Daemon::start(&remote(&valkey));
    let guest = Guest::start(&daemon, "victim", BUSY);
    for _ in 0..4 {
        daemon.goes_to_file_and_back("victim");
        let old = daemon.kill_engine();
        daemon.wait_for_engine_after(old);
    }
    daemon.goes_to_file_and_back("victim");
    daemon.kill_and_restart_keeper(true);
    until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    daemon.goes_to_file_and_back("victim");
    assert!(daemon.vm("victim").far_remote_bytes > 0);
    let remote = daemon.host().remote.expect("a remote store");
    assert!(remote.far_bytes > 0 && remote.used_bytes > 0 && remote.nodes.len() >= 3, "{remote:?}");
    guest.finish();
    until("nothing of it is left in the cluster", || valkey.keys().is_ok_and(|keys| keys == 0));
}

#[test]
fn an_upgrade_moves_a_vm_with_pages_in_the_cluster_and_somebody_serves_it_at_every_moment() {
    let Some(valkey) = start() else { return };
    let daemon = Daemon::start(&remote(&valkey));
    let guest = Guest::start(&daemon, "victim", BUSY);
    for _ in 0..4 {
        daemon.goes_to_file_and_back("victim");
        let program = Some(env!("CARGO_BIN_EXE_ballastd").to_owned());
        daemon.api.begin_upgrade(&UpgradeRequest { program }).expect("it begins");
        until("it is over", || daemon.api.upgrade().is_ok_and(|now| now.stage == UpgradeStage::Done));
        assert_eq!(daemon.api.upgrade().expect("answered").longest_gap_us, 0, "{}", daemon.log());
    }
    daemon.goes_to_file_and_back("victim");
    let remote = daemon.host().remote.expect("a remote store");
    assert!(remote.used_bytes > 0, "what the engines before have put counts: {remote:?}");
    guest.finish();
    until("nothing of it is left in the cluster", || valkey.keys().is_ok_and(|keys| keys == 0));
}

#[test]
fn nodes_die_and_stop_and_the_guest_waits_and_sees_no_wrong_byte() {
    let Some(mut valkey) = start() else { return };
    let daemon = Daemon::start(&remote(&valkey));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    for primary in 0..2 {
        valkey.kill(primary);
        until("another node has its slots", || {
            valkey.owner(primary as u16 * 6000).is_some_and(|owner| owner != primary)
        });
        daemon.goes_to_file_and_back("victim");
        valkey.restart(primary).expect("restart");
        valkey.wait_whole().expect("whole again");
    }
    valkey.stop(2).expect("stop");
    until("another node has its slots", || valkey.owner(16_000).is_some_and(|owner| owner != 2));
    daemon.goes_to_file_and_back("victim");
    valkey.go_on(2).expect("go on");
    valkey.wait_whole().expect("whole again");
    // Nothing answers at all for a while: what is there waits, and the engine may die meanwhile.
    (0..valkey.len()).for_each(|node| valkey.stop(node).expect("stop"));
    let old = daemon.kill_engine();
    daemon.wait_for_engine_after(old);
    until("the guest is served", || daemon.api.vm("victim").is_ok());
    (0..valkey.len()).for_each(|node| valkey.go_on(node).expect("go on"));
    daemon.goes_to_file_and_back("victim");
    let poisoned = daemon.vm("victim").poisoned_bytes;
    assert_eq!(poisoned, 0);
    guest.finish();
}

#[test]
fn settings_that_would_lose_pages_are_said() {
    let Some(valkey) = start() else { return };
    valkey.say(0, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).expect("CONFIG");
    let daemon = Daemon::start(&remote(&valkey));
    until("it is said", || daemon.api.events().is_ok_and(|events| events.iter().any(|e| e.kind == "remote-unsafe")));
    let remote = daemon.host().remote.expect("a remote store");
    let serious: Vec<_> = remote.findings.iter().filter(|finding| finding.serious).collect();
    assert!(matches!(serious[..], [only] if only.text.contains("allkeys-lru")), "{serious:?}");
}
