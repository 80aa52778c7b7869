//! Attacks of a hostile agent while its guest's threads write and check each byte: false reports of all RAM, random
//! messages, repeated and reordered messages, and impossible numbers.
//!
//! The tests check that no byte is lost, that faults are served, that no worker panics, and that the figures in the API
//! stay bounded.

mod common;

use std::io::Write;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ballast_api::{AgentState, NodeBalloon, VmPatch};
use ballast_base::{MIB, PAGE_SIZE};
use ballast_messages::message::{MAX_RUNS, NODES_END, Node, Tick, TierUse, Tiering, TieringState, Tracking};
use ballast_messages::run::COLD;
use ballast_messages::{Kind, Run, ToGuest, ToHost, frame};
use ballast_testkit::random::Random;
use ballast_testvm::Finally;
use common::agent::{
    Fake, HIGH, NONCES, PAGES, Port, agent_of, all_is_there, attach, no_worker_panicked, one_at_a_time, proved, run,
};
use common::raw::Ram;
use common::{Daemon, QUICK, until};

const WORDS: usize = PAGE_SIZE / 8;
/// Messages that need no new tokens, and some more.
const MESSAGES: u64 = 200;

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

/// Runs this while two threads of the guest write and check; it gets the number of checked pages.
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

/// A report that all of the guest's memory is cold and of this kind.
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
        // What it reports as held counts up to what it should hold.
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

/// A message with a valid checksum and session, and a random body, or a valid body with some changed bytes.
fn random_message(random: &mut Random, session: u64) -> Vec<u8> {
    let tick = Tick { nodes: vec![Node::default(); 3], note: "a note".into(), ..Tick::default() };
    let whole = match random.index(5) {
        0 => ToHost::Tick(tick),
        1 => ToHost::Report {
            number: random.index(3) as u32,
            last: random.index(2) == 0,
            runs: vec![run(0, 9, COLD); 9],
        },
        2 => ToHost::Proof(vec![Run::of(random.index(PAGES as usize) as u64, 1)]),
        3 => ToHost::Taken { node: u32::MAX, runs: vec![run(HIGH, u32::MAX, COLD)] },
        _ => ToHost::Hello { agent: "x".into(), kernel: "y".into() },
    };
    let (whole, kind) = (whole.frame(session), random.index(8) as u16);
    let mut body = whole[ballast_messages::frame::HEADER..].to_vec();
    if random.index(2) == 0 {
        body = (0..random.index(300)).map(|_| random.index(256) as u8).collect();
    }
    for _ in 0..random.index(4).min(body.len()) {
        let at = random.index(body.len());
        body[at] = random.of(&[0, 1, 0x7f, 0x80, 0xff]);
    }
    frame(session, kind, &body)
}

#[test]
fn random_and_repeated_messages_are_counted_and_lose_no_byte() {
    let _one = one_at_a_time();
    let Some(daemon) = Daemon::with_uffd(QUICK) else { return };
    let port = Port::new();
    let ram = Ram::new(PAGES);
    let (_client, mut fake) = proved(&daemon, &port, &ram, "random");
    daemon.api.set_limit("random", Some(32 * MIB)).expect("limit");
    let (mut random, mut said) = (Random::seeded("BALLAST_AGENT_SEED"), Vec::new());
    for _ in 0..MESSAGES {
        said.extend(random_message(&mut random, fake.session));
        // Half a message, and bytes that belong to none.
        if random.index(8) == 0 {
            let torn = random_message(&mut random, fake.session);
            said.extend(&torn[..random.index(torn.len())]);
        }
    }
    let before = agent_of(&daemon, "random").messages;
    fake.stream.write_all(&said).expect("the engine listens");
    // A torn message swallows up to 64 KiB.
    fake.stream.write_all(&[0; 70 << 10]).expect("the engine listens");
    until("all of it was read", || {
        fake.stay_alive();
        let shown = agent_of(&daemon, "random");
        shown.garbage_bytes > 64 << 10 && shown.messages > before + 2
    });
    assert!(agent_of(&daemon, "random").rejected_messages > 0);
    until("its memory is paged", || daemon.vm("random").resident_bytes <= 32 * MIB);

    // Each page of RAM in a part, the last part first, and parts of two reports in turn: the last report counts.
    fake.say(&ToHost::Report { number: 70, last: true, runs: vec![run(0, 1, COLD)] });
    for number in [71, 72, 71, 72] {
        fake.say(&ToHost::Report { number, last: false, runs: vec![run(0, 1, COLD); 10] });
    }
    let (old, whole) = (fake.session, ToHost::Report { number: 73, last: true, runs: vec![run(5, 1, COLD); MAX_RUNS] });
    drop(fake);
    // Everything of an old session again.
    let mut fake = Fake::accept(&port);
    let before = agent_of(&daemon, "random");
    for _ in 0..20 {
        fake.stream.write_all(&whole.frame(old)).expect("the engine listens");
    }
    until("it was heard", || agent_of(&daemon, "random").messages >= before.messages + 20);
    let after = agent_of(&daemon, "random");
    assert_eq!((after.reports, after.state), (before.reports, AgentState::Silent));
    no_worker_panicked(&daemon);
    all_is_there(&ram);
}

#[test]
fn a_guest_with_a_new_node_in_each_message_and_impossible_numbers_fills_no_table() {
    let _one = one_at_a_time();
    // A policy asks for a balloon in each node that it knows.
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
