//! Attacks of a hostile agent while its guest's threads write and check each byte: false reports of all RAM, and
//! impossible numbers.
//!
//! The tests check that no byte is lost, that faults are served, that no worker panics, and that the figures in the API
//! stay bounded.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_api::{NodeBalloon, VmPatch};
use ballast_base::{MIB, PAGE_SIZE};
use ballast_messages::message::{NODES_END, Node, Tick, TierUse, Tiering, TieringState, Tracking};
use ballast_messages::run::COLD;
use ballast_messages::{Kind, Run, ToGuest, ToHost};
use ballast_testkit::random::Random;
use ballast_testvm::Finally;
use common::agent::{
    Fake, HIGH, NONCES, PAGES, Port, agent_of, all_is_there, attach, no_worker_panicked, one_at_a_time, proved,
};
use common::raw::Ram;
use common::{Daemon, QUICK, until};

const WORDS: usize = PAGE_SIZE / 8;

/// A thread of the guest: checks and then writes all words of its pages, page by page in random order.
fn write_and_check(ram: &Ram, thread: u64, threads: u64, (ends, checked): (&AtomicBool, &AtomicU64)) {
    let pages: Vec<u64> = (0..PAGES).filter(|page| page % threads == thread && !NONCES.contains(page)).collect();
    let mut rounds = vec![0; pages.len()];
    let words = |page: u64| ram.map.words(page as usize * PAGE_SIZE, WORDS);
    let content = |page: u64, round: u64, at: usize| (page << 40 | round << 16 | at as u64).wrapping_mul(0x9e37_79b9);
    let fill = |page: u64, round: u64| {
        let words = words(page).iter().enumerate();
        words.for_each(|(at, word)| word.store(content(page, round, at), Ordering::Relaxed));
    };
    let check = |page: u64, round: u64| {
        let mut words = words(page).iter().enumerate();
        let wrong = words.find(|(at, word)| word.load(Ordering::Relaxed) != content(page, round, *at));
        assert!(wrong.is_none(), "page {page} in round {round}: word {:?}", wrong.map(|(at, _)| at));
    };
    pages.iter().for_each(|page| fill(*page, 0));
    let mut random = Random(thread);
    while !ends.load(Ordering::Relaxed) {
        let at = random.index(pages.len());
        check(pages[at], rounds[at]);
        rounds[at] += 1;
        fill(pages[at], rounds[at]);
        checked.fetch_add(1, Ordering::Relaxed);
    }
    pages.iter().zip(&rounds).for_each(|(page, round)| check(*page, *round));
}

/// Calls `run` while two threads of the guest write and check; it gets the number of checked pages.
fn while_written(ram: &Ram, run: impl FnOnce(&AtomicU64)) {
    let (ends, checked) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let seen = (&ends, &checked);
            scope.spawn(move || write_and_check(ram, thread, 2, seen));
        }
        let _end = Finally(|| ends.store(true, Ordering::Relaxed));
        run(&checked);
    });
}

fn all_cold(kind: Kind) -> Vec<Run> {
    [0, HIGH].map(|page| Run { page, count: PAGES as u32 / 2, kind, level: COLD }).to_vec()
}

#[test]
fn a_guest_that_reports_all_of_its_memory_as_free_while_it_writes_loses_no_byte() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "all-free");
    while_written(&ram, |checked| {
        daemon.api.set_limit("all-free", Some(48 * MIB)).expect("limit");
        // The bytes that the agent reports as held count up to the number that it should hold.
        let balloon = Some(NodeBalloon { node: 0, bytes: PAGES * PAGE_SIZE as u64 });
        daemon.api.patch_vm("all-free", &VmPatch { balloon, ..VmPatch::default() }).expect("it has a port");
        while !matches!(fake.hear(), Some(ToGuest::Balloon { node: 0, pages: PAGES })) {}
        let nodes = vec![Node { node: 0, pages: PAGES, free: PAGES, ballooned: PAGES }];
        until("its pages were evicted and restored, many times", || {
            if fake.stay_alive() {
                fake.say(&ToHost::Taken { node: 0, runs: all_cold(Kind::Free) });
                fake.say(&ToHost::Tick(Tick {
                    total: PAGES,
                    free: PAGES,
                    tracking: Tracking::Damon,
                    nodes: nodes.clone(),
                    ..Tick::default()
                }));
                fake.report(all_cold(Kind::Free));
            }
            let vm = daemon.vm("all-free");
            let shown = vm.agent.unwrap_or_default();
            let is_used = shown.reports >= 2 && shown.free_bytes == 64 * MIB;
            is_used && vm.faults.restored_pages > 2000 && checked.load(Ordering::Relaxed) > PAGES
        });
    });
    assert_eq!(daemon.vm("all-free").poisoned_bytes, 0);
    no_worker_panicked(&daemon);
}

#[test]
fn a_guest_that_reports_all_of_its_memory_as_its_kernels_is_held_to_its_limit() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "all-kernel");
    while_written(&ram, |checked| {
        until("a thread has written all of its pages", || checked.load(Ordering::Relaxed) > 0);
        daemon.api.set_limit("all-kernel", Some(48 * MIB)).expect("limit");
        until("it is within its limit, and pays for it", || {
            if fake.stay_alive() {
                fake.report(all_cold(Kind::Other));
            }
            let vm = daemon.vm("all-kernel");
            vm.resident_bytes <= 48 * MIB && vm.faults.restored_pages > 2000
        });
    });
    assert_eq!(daemon.vm("all-kernel").poisoned_bytes, 0);
    no_worker_panicked(&daemon);
}

#[test]
fn a_guest_with_a_new_node_in_each_message_and_impossible_numbers_fills_no_table() {
    let _one = one_at_a_time();
    // A policy requests a balloon in each node that it knows.
    let Some(daemon) = Daemon::with_uffd(&format!("{QUICK}[policy]\nname = \"gain\"\n")) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let _client = attach(&daemon, &port, &ram, "nodes");
    let mut fake = Fake::accept(&port);
    fake.begin(&ram);
    let all = |numbers: std::ops::Range<u32>, pages: u64| {
        let node = |node| Node { node, pages, free: pages, ballooned: pages };
        let tiers = vec![TierUse { node: u32::MAX, pages, free: pages, latency_ns: u32::MAX }];
        let tiering = Tiering { state: TieringState::Working, tiers, hits: Some(u32::MAX - 1), ..Tiering::default() };
        let (nodes, tracking) = (numbers.map(node).collect(), Tracking::Damon);
        ToHost::Tick(Tick {
            total: pages,
            available: pages,
            cpu_us: pages,
            tracking,
            nodes,
            tiering,
            ..Tick::default()
        })
    };
    fake.say(&all(0..3, u64::MAX));
    until("its nodes are shown", || agent_of(&daemon, "nodes").nodes.len() == 3);
    assert_eq!(agent_of(&daemon, "nodes").guest_total_bytes, u64::MAX);
    let before = agent_of(&daemon, "nodes").rejected_messages;
    for first in 0..60 {
        fake.say(&all(NODES_END + first * 16 - 1..NODES_END + first * 16 + 15, u64::MAX));
    }
    until("they were refused", || agent_of(&daemon, "nodes").rejected_messages >= before + 60);
    let shown = agent_of(&daemon, "nodes");
    assert_eq!(shown.nodes.iter().map(|node| node.node).collect::<Vec<_>>(), [0, 1, 2]);
    assert!(daemon.api.metrics().expect("metrics").contains("ballast_vm_node_bytes"));
    no_worker_panicked(&daemon);
    all_is_there(&ram);
}
