//! Engine and keeper are replaced during all kinds of work: first touches, evictions, restores, spills, decisions of a
//! policy, discards, plugs, attaches and ends of VMs; with pages in RAM, on a disk and in a cluster. In every other
//! round a process is killed, at a stage in the log: each pair of stage and victim occurs once in 64 upgrades. No
//! operation fails, and no byte is wrong. Needs root (userfaultfd); `BALLAST_UPGRADES` sets the number of upgrades
//! (default 6), `BALLAST_SEED` repeats a run, `BALLAST_NEXT` names the `ballastd` of another build
//! (`scripts/next-build.sh`).

mod common;

use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ballast_api::UpgradeStage;
use ballast_base::wire::{KeeperToClient, MAX_REGIONS};
use ballast_base::{Bytes, Hva};
use ballast_client::Client;
use ballast_testkit::random::Random;
use ballast_testvm::Finally;
use ballast_testvm::valkey::{Layout, Valkey, valkey_missing};

use common::guest::Guest;
use common::raw::{Ram, RawClient, no_uffd};
use common::upgrades::{next_build, request, this_build};
use common::{Daemon, joined, kill, missing, no_disk, until, upgrades};

const POLICY: &str = "quarantine_ms = 5\n[policy]\nname = \"gain\"\ntick_ms = 100\n";
const PAGES: u64 = 2048;
const PLUGGED: u64 = 256;

/// Lines of the log at the stages of an upgrade. Not each upgrade has all of them.
const STAGES: [&str; 8] = [
    "an engine that is to follow is started",
    "the upgrade goes on stage=Resting",
    "the upgrade goes on stage=Moving",
    "two engines are to serve it",
    "two engines serve it",
    "the one that left has closed it",
    "the upgrade goes on stage=Serving",
    "the keeper becomes another program",
];

fn all_deaths() -> Vec<(&'static str, Victim)> {
    let victims = [Victim::Old, Victim::Next, Victim::Both, Victim::Keeper];
    STAGES.into_iter().flat_map(|stage| victims.map(|victim| (stage, victim))).collect()
}

#[derive(Clone, Copy, Debug)]
enum Victim {
    Old,
    Next,
    Both,
    Keeper,
}

/// The end of the log, from where it was when this was made.
struct Tail(std::fs::File, String);

impl Tail {
    fn of(daemon: &Daemon) -> Self {
        let mut file = std::fs::File::open(daemon.dir().join("log")).expect("the log");
        file.seek(SeekFrom::End(0)).expect("its end");
        Self(file, String::new())
    }

    fn says(&mut self, what: &str) -> bool {
        self.0.read_to_string(&mut self.1).expect("read the log");
        self.1.contains(what)
    }

    /// The pid of the engine that was started to follow.
    fn next_engine(&self) -> Option<u32> {
        let (_, rest) = self.1.split_once(&format!("{} pid=", STAGES[0]))?;
        rest.split(' ').next()?.parse().ok()
    }
}

/// Pages that a discarding thread has in a row; the next ones belong to the other thread.
const RUN: u64 = 64;

/// One of two threads, each with its own runs, that write and discard in turn, with reclaim in between. Written data is
/// there until it is discarded, and then zeros are.
fn write_and_discard(ram: &Ram, client: &Client, who: u64, stop: &AtomicBool) -> u64 {
    let start = ram.info().span.hva;
    let mut random = Random::seeded("BALLAST_SEED");
    let own: Vec<u64> = (0..PAGES).filter(|page| page / RUN % 2 == who).collect();
    let mut rounds = 0;
    while !stop.load(Ordering::Relaxed) {
        rounds += 1;
        let written = |page: u64| rounds << 32 | page << 1 | 1;
        own.iter().for_each(|page| ram.set(*page, written(*page)));
        let mut ranges = Vec::new();
        for run in own.chunks(RUN as usize) {
            let from = random.index(run.len());
            let len = random.index(run.len() - from + 1);
            if len > 0 {
                ranges.push((run[from], len as u64));
            }
        }
        let spans: Vec<_> = ranges.iter().map(|(page, len)| (Hva(start.0 + page * 4096), len * 4096)).collect();
        client.discard(&spans).unwrap_or_else(|error| panic!("round {rounds}: {error}"));
        for page in &own {
            let is_gone = ranges.iter().any(|(from, len)| (*from..from + len).contains(page));
            let expected = if is_gone { 0 } else { written(*page) };
            assert_eq!(ram.get(*page), expected, "page {page} of thread {who} in round {rounds}: {ranges:?}");
        }
    }
    rounds
}

/// Number of times that a keeper ended or began: odd while there is none. So a thread that was delayed while there was
/// none still sees the change.
#[derive(Default)]
struct Changes(AtomicU64);

impl Changes {
    fn now(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }

    fn add(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    fn was_away_since(&self, before: u64) -> bool {
        !before.is_multiple_of(2) || self.now() > before
    }
}

/// A VM plugs memory and unplugs it again, only twice per upgrade because it has few regions in its life, with a third
/// of it as the limit: written data is there. A request may fail only while there is no keeper.
fn plug_and_unplug(client: &Client, ram: &Ram, rounds: &AtomicU64, changes: &Changes, stop: &AtomicBool) -> u64 {
    ram.mark();
    let mut plugged = 0;
    while !stop.load(Ordering::Relaxed) {
        if plugged >= (2 * rounds.load(Ordering::Relaxed)).min(MAX_REGIONS as u64 - 1) {
            assert!((0..PLUGGED).all(|page| ram.is_marked(page)), "wrong pages after {plugged} plugs");
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let before = changes.now();
        let more = Ram::new(PLUGGED);
        let (fd, span) = (more.fd.try_clone().expect("dup"), more.info().span);
        let added = client.add_region(fd, span.hva, span.len, Bytes(0));
        more.mark();
        for ram in [ram, &more, ram, &more] {
            let wrong = (0..PLUGGED).filter(|page| !ram.is_marked(*page)).count();
            assert_eq!(wrong, 0, "wrong pages after {plugged} plugs; the last: {added:?}");
        }
        let removed = client.remove_region(span.hva);
        let may_fail = changes.was_away_since(before);
        assert!(added.is_ok() && removed.is_ok() || may_fail, "after {plugged} plugs: {added:?}, {removed:?}");
        plugged += 1;
    }
    plugged
}

/// VMs that come and go. An attach may fail only while there is no keeper.
fn come_and_go(socket: &Path, changes: &Changes, stop: &AtomicBool) -> u64 {
    let mut came = 0;
    while !stop.load(Ordering::Relaxed) {
        let ram = Ram::new(64);
        let mut client = RawClient::new(socket, &format!("guest-{came}"));
        let before = changes.now();
        let answer = client.attach(&[&ram]);
        let is_attached = matches!(answer, Some(KeeperToClient::Attached { .. }));
        let may_fail = answer.is_none() && changes.was_away_since(before);
        assert!(is_attached || may_fail, "VM {came}: {answer:?}");
        came += 1;
        // Leaves the engines time for other work.
        std::thread::sleep(Duration::from_millis(3));
    }
    came
}

fn run(daemon: &mut Daemon, guests: &[&str], upgrades: u32, kills: bool) {
    let mut random = Random::seeded("BALLAST_SEED");
    let running: Vec<_> = guests
        .iter()
        .map(|name| {
            let args = "--workload uniform --ram 32M --limit 12M --threads 2 --zero-fraction 0.1";
            Guest::start(daemon, name, args)
        })
        .collect();
    let (stop, changes) = (Arc::new(AtomicBool::new(false)), Arc::new(Changes::default()));
    let ram = Ram::new(PAGES);
    let client = ram.vm(daemon, "discards").limit(PAGES * 4096 / 4).attach().expect("attached");
    let vm = Arc::new((client, ram));
    // Not scoped: a discard without a reply waits forever, and so would a scope.
    let discards = [0, 1].map(|who| {
        let (vm, ends) = (vm.clone(), stop.clone());
        std::thread::spawn(move || write_and_discard(&vm.1, &vm.0, who, &ends))
    });
    let (socket, ends, away) = (daemon.attach_socket(), stop.clone(), changes.clone());
    let comes = std::thread::spawn(move || come_and_go(&socket, &away, &ends));
    let ram = Ram::new(PLUGGED);
    let client = ram.vm(daemon, "plugs").limit(PLUGGED * 4096 * 2 / 3).attach().expect("attached");
    let rounds = Arc::new(AtomicU64::new(0));
    let (ends, away, begun) = (stop.clone(), changes.clone(), rounds.clone());
    let plugs = std::thread::spawn(move || plug_and_unplug(&client, &ram, &begun, &away, &ends));
    // Even if an assertion fails here.
    let end = Finally(|| stop.store(true, Ordering::Relaxed));
    let (mut gap_us, mut deaths) = (0, Vec::new());
    for round in 0..upgrades {
        rounds.fetch_add(1, Ordering::Relaxed);
        let program = if round % 2 == 0 { next_build() } else { this_build() };
        let mut tail = Tail::of(daemon);
        let old = daemon.host().engine_pid;
        let number = daemon.api.upgrade().expect("answered").number;
        // After a death the keeper may still wait for a VM.
        until("it begins", || daemon.api.begin_upgrade(&request(&program)).is_ok());
        if deaths.is_empty() {
            deaths = all_deaths();
        }
        let planned = (kills && random.index(2) == 0).then(|| deaths.swap_remove(random.index(deaths.len())));
        if let Some((stage, victim)) = planned {
            let begun = Instant::now();
            // If the stage does not come, the upgrade has ended by then.
            while !tail.says(stage) && begun.elapsed() < Duration::from_secs(5) {
                std::thread::yield_now();
            }
            if matches!(victim, Victim::Old | Victim::Both) {
                kill(old);
            }
            if matches!(victim, Victim::Next | Victim::Both) {
                tail.next_engine().into_iter().for_each(kill);
            }
            if matches!(victim, Victim::Keeper) {
                changes.add();
                daemon.kill_keeper();
                daemon.restart_keeper();
                until("its engine answers", || {
                    daemon.api.host().is_ok_and(|host| host.keeper_pid == daemon.keeper_pid())
                });
                changes.add();
            }
        }
        let is_over = |stage| matches!(stage, UpgradeStage::Done | UpgradeStage::Failed | UpgradeStage::None);
        until("the upgrade is over", || daemon.api.upgrade().is_ok_and(|now| is_over(now.stage)));
        let now = daemon.api.upgrade().expect("answered");
        if planned.is_none() {
            let expected = (number + 1, UpgradeStage::Done, Some(true));
            assert_eq!((now.number, now.stage, now.keeper_replaced), expected, "{now:?}\n{}", daemon.log());
            gap_us = gap_us.max(now.longest_gap_us);
        }
        for name in guests {
            until("the guest is served", || daemon.api.vm(name).is_ok());
            let before = daemon.vm(name);
            until("its pages go out and come back", || {
                daemon.api.vm(name).is_ok_and(|vm| {
                    vm.reclaim.evicted_pages > before.reclaim.evicted_pages
                        && vm.faults.restore + vm.faults.file > before.faults.restore + before.faults.file
                })
            });
        }
        println!("round {round}: {planned:?}: {:?}", now.stage);
    }
    println!("the longest time for which a VM moved and nobody served it: {gap_us} us");
    drop(end);
    discards.into_iter().for_each(|thread| assert!(joined("the last discard is carried out", thread) > 0));
    assert!(joined("the last VM is attached", comes) > 0);
    assert!(joined("the last plug is over", plugs) > 0);
    running.into_iter().for_each(|guest| drop(guest.finish()));
}

#[test]
fn engine_and_keeper_are_replaced_during_all_kinds_of_work() {
    let Some(mut daemon) = Daemon::with_uffd(POLICY) else { return };
    run(&mut daemon, &["one", "two", "three"], upgrades::count(), false);
}

#[test]
fn any_process_may_be_killed_at_any_stage_during_all_kinds_of_work() {
    let Some(mut daemon) = Daemon::with_uffd(POLICY) else { return };
    run(&mut daemon, &["one", "two", "three"], upgrades::count(), true);
}

/// The file takes a part of the far pages, and the cluster the rest, if there can be one: each guest has pages in three
/// stores.
#[test]
fn with_pages_in_flight_to_a_disk_and_to_a_cluster() {
    if no_uffd() || no_disk() {
        return;
    }
    let valkey = (!missing("valkey", valkey_missing())).then(|| Valkey::start(Layout::default()).expect("a cluster"));
    let dir = std::env::temp_dir();
    let slow = |budget| format!("dir = \"{}\"\nbudget = \"{budget}\"\nafter_s = 1\n", dir.display());
    let slow = match &valkey {
        None => format!("[spill]\n{}", slow("256M")),
        Some(valkey) => {
            let addr = valkey.addr(0);
            format!("[spill]\n{}[remote]\nnodes = [\"{addr}\"]\nbudget = \"256M\"\nafter_s = 1\n", slow("8M"))
        }
    };
    let config = format!("store_budget = \"8M\"\n{POLICY}{slow}");
    run(&mut Daemon::start(&config), &["one", "two"], upgrades::count(), true);
}
