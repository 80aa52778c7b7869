//! Far pages in a real cluster: a real guest, keeper and engine, six real servers. The engine, the keeper, and one node
//! after the other are killed; each byte is verified. Needs root (userfaultfd) and `valkey`.

mod common;

use std::os::unix::fs::FileExt;

use ballast_api::UpgradeStage;
use ballast_handover::secret::Secret;
use ballast_handover::state_file::StateFile;
use ballast_testvm::valkey::{self, Layout, Valkey, valkey_missing};

use common::guest::Guest;
use common::raw::{Ram, files, open};
use common::upgrades::{begin, ended, this_build};
use common::vmm::Program;
use common::{Daemon, missing, until};

const BUSY: &str = "--workload uniform --ram 48M --limit 16M --threads 2 --zero-fraction 0.1";

const PAGES: u64 = 4096;
const LIMIT: u64 = 2 << 20;
const NAME_AT: u64 = 512;
const KEY_AT: u64 = 384;

fn remote(valkey: &Valkey) -> String {
    let (first, last) = (valkey.addr(0), valkey.addr(valkey.len() - 1));
    format!(
        "quarantine_ms = 5\nstore_budget = \"8M\"\n[remote]\nnodes = [\"{first}\", \"{last}\"]\nbudget = \"256M\"\n\
         after_s = 1\n"
    )
}

fn start(layout: Layout) -> Option<Valkey> {
    if missing("valkey", valkey_missing()) {
        return None;
    }
    Some(Valkey::start(layout).expect("a cluster"))
}

fn engine_dies(daemon: &Daemon) {
    daemon.replace_engine();
    daemon.goes_to_file_and_back("victim");
}

fn keeper_dies(daemon: &mut Daemon) {
    daemon.kill_and_restart_keeper(true);
    until("the guest is attached again", || daemon.api.vm("victim").is_ok());
    daemon.goes_to_file_and_back("victim");
}

#[test]
fn an_engine_and_a_keeper_die_and_no_byte_in_the_cluster_is_lost() {
    let Some(valkey) = start(Layout::default()) else { return };
    let mut daemon = Daemon::start(&remote(&valkey));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    for _ in 0..4 {
        engine_dies(&daemon);
    }
    keeper_dies(&mut daemon);
    assert!(daemon.vm("victim").far_remote_bytes > 0);
    let remote = daemon.host().remote.expect("a remote store");
    assert!(remote.far_bytes > 0 && remote.used_bytes > 0 && remote.nodes.len() >= 3, "{remote:?}");
    guest.finish();
    until("nothing of it is left in the cluster", || valkey.keys().is_ok_and(|keys| keys == 0));
}

fn private(valkey: &Valkey) -> String {
    let (dir, settings) = (valkey.dir().display(), remote(valkey).replace(&valkey.addr(0), &valkey.tls_addr(0)));
    let settings = settings.replace(&valkey.addr(valkey.len() - 1), &valkey.tls_addr(valkey.len() - 1));
    format!(
        "{settings}encrypt = true\n[remote.tls]\nca_file = \"{dir}/ca.pem\"\ncert_file = \"{dir}/client.pem\"\n\
         key_file = \"{dir}/client.key\"\n"
    )
}

/// The number of values that look like unsealed blobs. A sealed page looks random.
fn plain_values(valkey: &Valkey) -> usize {
    let mut plain = 0;
    for node in (0..valkey.len()).filter(|node| valkey.is_primary(*node)) {
        let keys: Vec<String> = valkey::read(valkey.say(node, &["KEYS", "b{*"]).expect("KEYS")).expect("keys");
        for key in keys {
            let value: Vec<u8> = valkey::read(valkey.say(node, &["GET", &key]).expect("GET")).unwrap_or_default();
            // A blob has its own length at byte 12.
            plain += usize::from(
                value.len() >= 16 && value.len() == 16 + usize::from(value[12]) + (usize::from(value[13]) << 8),
            );
        }
    }
    plain
}

#[test]
fn sealed_pages_survive_engine_keeper_and_an_upgrade_and_none_is_plain_in_a_server() {
    let Some(valkey) = start(Layout { tls: true, ..Layout::default() }) else { return };
    let mut daemon = Daemon::start(&private(&valkey));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    engine_dies(&daemon);
    keeper_dies(&mut daemon);
    begin(&daemon, &this_build());
    assert_eq!(ended(&daemon).stage, UpgradeStage::Done);
    daemon.goes_to_file_and_back("victim");
    assert!(daemon.vm("victim").far_remote_bytes > 0);
    assert!(valkey.keys().expect("keys") > 1);
    // By chance one of 65,536 sealed pages looks like a blob.
    assert!(plain_values(&valkey) <= 2);
    assert_eq!(daemon.vm("victim").poisoned_bytes, 0);
    guest.finish();
    until("nothing of it is left in the cluster", || valkey.keys().is_ok_and(|keys| keys == 0));
}

#[test]
fn a_damaged_or_wrong_key_costs_the_pages_that_it_sealed_and_no_other_vm_a_page() {
    let Some(valkey) = start(Layout::default()) else { return };
    let Some(daemon) = Daemon::with_uffd(&format!("{}encrypt = true\n", remote(&valkey))) else { return };
    let names = ["damaged", "another", "calm"];
    let rams = names.map(|_| Ram::new(PAGES));
    let attach = |(ram, name): (&Ram, &str)| {
        ram.mark();
        ram.vm(&daemon, name).limit(LIMIT).attach().expect("attach")
    };
    let _clients: Vec<_> = rams.iter().zip(names).map(attach).collect();
    for name in names {
        until("its pages are in the cluster", || daemon.vm(name).far_remote_bytes > PAGES * 4096 / 2);
    }
    let engine = daemon.engine_pid().expect("an engine");
    for path in files(engine, "ballast-state") {
        let (file, mut name) = (open(&path), [0; 7]);
        file.read_exact_at(&mut name, NAME_AT).expect("read its name");
        let state = StateFile::open(open(&path).into()).expect("a state file");
        let Secret::Kept { since, .. } = state.secret() else { panic!("{path} has no key") };
        match &name {
            b"damaged" => file.write_all_at(b"damage", KEY_AT + 8).expect("damage it"),
            b"another" => {
                file.write_all_at(&[0; 48], KEY_AT).expect("forget it");
                state.keep_secret(since, &[9; 32]);
            }
            _ => {}
        }
    }
    daemon.replace_engine();
    until("the lost key is an event of its VM", || daemon.has_event_of("damaged", "remote-key-lost"));
    let lost = [0, 1, 2].map(|at| rams[at].lost(0..PAGES));
    assert!(lost[0] > PAGES / 2 && lost[1] > PAGES / 2 && lost[2] == 0, "{lost:?}");
    for (name, lost) in names.iter().zip(lost) {
        assert_eq!(daemon.vm(name).poisoned_bytes, lost * 4096, "{name}");
    }
    let log = daemon.log();
    assert!(!log.contains("panicked"), "{log}");
    assert_eq!(daemon.engine_pid(), Some(daemon.host().engine_pid), "{}", daemon.log());
}

#[test]
fn a_ram_file_that_outlives_its_vm_has_its_pages_and_the_cluster_has_none() {
    let Some(program) = Program::compile() else { return };
    let Some(valkey) = start(Layout::default()) else { return };
    let made = tempfile::Builder::new().prefix("ballast-test-").tempfile_in("/dev/shm");
    if missing("tmpfs", made.as_ref().err().map(|error| format!("no file in /dev/shm: {error}"))) {
        return;
    }
    let file = made.expect("made above").into_temp_path();
    let daemon = Daemon::start(&remote(&valkey));
    let vmm = program.start(&daemon, "victim", file.to_str().expect("text"), PAGES);
    daemon.api.set_limit("victim", Some(LIMIT)).expect("set a limit");
    until("its pages are in the cluster", || daemon.vm("victim").far_remote_bytes > PAGES * 4096 / 2);
    vmm.kill();
    until("its pages are back", || !daemon.events("written-back").is_empty());
    until("the cluster has its lease and nothing else", || valkey.keys().is_ok_and(|keys| keys == 1));
}

#[test]
fn nodes_die_and_stop_and_the_guest_waits_and_sees_no_wrong_byte() {
    let Some(mut valkey) = start(Layout::default()) else { return };
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
    // No node responds for a while: pages there wait, and the engine may die.
    (0..valkey.len()).for_each(|node| valkey.stop(node).expect("stop"));
    daemon.replace_engine();
    until("the guest is served", || daemon.api.vm("victim").is_ok());
    (0..valkey.len()).for_each(|node| valkey.go_on(node).expect("go on"));
    daemon.goes_to_file_and_back("victim");
    let poisoned = daemon.vm("victim").poisoned_bytes;
    assert_eq!(poisoned, 0);
    guest.finish();
}

#[test]
fn settings_with_another_cluster_or_none_are_reported_and_cost_no_page() {
    let one = Layout { primaries: 1, ..Layout::default() };
    let (Some(right), Some(wrong)) = (start(one), start(one)) else { return };
    let mut daemon = Daemon::start(&remote(&right));
    let guest = Guest::start(&daemon, "victim", BUSY);
    daemon.goes_to_file_and_back("victim");
    let none = remote(&right).split("[remote]").next().expect("text").to_owned();
    for (settings, event) in [(remote(&wrong), "remote-other"), (none, "remote-missing")] {
        daemon.restart_with(&settings);
        until("it is an event of the VM", || daemon.has_event_of("victim", event));
        if event == "remote-other" {
            until("the guest waits", || !daemon.events("store-late").is_empty());
        } else {
            begin(&daemon, &this_build());
            assert_eq!(ended(&daemon).stage, UpgradeStage::Done);
        }
        let vm = daemon.vm("victim");
        assert!(vm.far_remote_bytes > 0 && vm.poisoned_bytes == 0, "{vm:?}");
    }
    assert_eq!(wrong.keys().expect("keys"), 0);
    daemon.restart_with(&remote(&right));
    daemon.goes_to_file_and_back("victim");
    assert_eq!(daemon.vm("victim").poisoned_bytes, 0);
    guest.finish();
}

#[test]
fn settings_that_would_lose_pages_are_reported() {
    let Some(valkey) = start(Layout::default()) else { return };
    valkey.say(0, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]).expect("CONFIG");
    let daemon = Daemon::start(&remote(&valkey));
    until("it is said", || !daemon.events("remote-unsafe").is_empty());
    let remote = daemon.host().remote.expect("a remote store");
    let serious: Vec<_> = remote.findings.iter().filter(|finding| finding.serious).collect();
    assert!(matches!(serious[..], [only] if only.text.contains("allkeys-lru")), "{serious:?}");
}
