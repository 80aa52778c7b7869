//! Tests the remote store while nodes are killed and stopped, replicas take over, slots move, and connections close.
//!
//! Before: `conformance` passed. After: every page that was stored was read back right.
//! Threads: three put, get and free. The test's own damages the cluster. Units: pages.
//! Promise: the events are a function of the seed, but their time is not. `BALLAST_REMOTE_EVENTS` (default 8) sets
//! their number, `BALLAST_SEED` the seed.

#[path = "remote/common/mod.rs"]
mod common;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE, PageIdx};
use ballast_remote::{RemoteBudget, RemoteStore, slot_of};
use ballast_store::{
    Codec, DurableStore, GetOutcome, Handle, IoContext, PageKey, PutOutcome, RegionKey, SlowStore, Store,
};
use ballast_testkit::pages;
use ballast_testkit::random::Random;
use ballast_testvm::Finally;
use ballast_testvm::valkey::{Layout, Valkey};
use common::{LEASE, cluster, env, start};

const VM: VmId = VmId([7; 16]);
const PAGES: u64 = 2048;
/// Limit for every wait, longer than any failover here. A page that is missing then is lost.
const HANG: Duration = Duration::from_secs(60);

/// Pages that a thread put and has not freed, each with its handle and its content.
type Kept = HashMap<u64, (Handle, u64)>;

#[derive(Default)]
struct Counts {
    gets: AtomicU64,
    puts: AtomicU64,
    refused: AtomicU64,
    longest_ms: AtomicU64,
}

fn page(thread: u32, page: u64) -> PageKey {
    RegionKey { vm: VM, number: thread }.page(PageIdx(page))
}

/// Get a page. Retries until `HANG`.
fn must_get(store: &RemoteStore, key: PageKey, (handle, content): (Handle, u64), counts: &Counts) {
    let (begun, mut out) = (Instant::now(), [0; PAGE_SIZE]);
    loop {
        match store.get(key, handle, &mut out, IoContext::GUEST) {
            GetOutcome::Found => break,
            GetOutcome::Busy if begun.elapsed() < HANG => std::thread::sleep(Duration::from_millis(1)),
            outcome => panic!("{key:?} after {:?}: {outcome:?}, {:?}", begun.elapsed(), store.last_refusal()),
        }
    }
    assert!(out == pages::mixed(content), "{key:?} came with other bytes");
    counts.gets.fetch_add(1, Relaxed);
    counts.longest_ms.fetch_max(begun.elapsed().as_millis() as u64, Relaxed);
}

fn churn(store: &RemoteStore, thread: u32, seed: u64, stop: &AtomicBool, counts: &Counts) -> Kept {
    let (mut random, mut kept) = (Random(seed), Kept::new());
    let free = |kept: &mut Kept, at: u64| {
        if let Some((handle, _)) = kept.remove(&at) {
            store.free(page(thread, at), handle);
        }
    };
    while !stop.load(Relaxed) {
        let (first, run) = (random.below(PAGES), 1 + random.below(64));
        let run = first..(first + run).min(PAGES);
        match random.below(4) {
            0 => {
                let contents: Vec<u64> = run.clone().map(|_| random.word()).collect();
                let bytes: Vec<_> = contents.iter().map(|content| pages::mixed(*content)).collect();
                let mut outcomes = Vec::new();
                store.put_run(page(thread, first), &bytes, &mut outcomes);
                for ((at, content), outcome) in run.zip(contents).zip(outcomes) {
                    if let PutOutcome::Stored(handle) = outcome {
                        free(&mut kept, at);
                        kept.insert(at, (handle, content));
                        counts.puts.fetch_add(1, Relaxed);
                    } else {
                        counts.refused.fetch_add(1, Relaxed);
                    }
                }
                store.tidy();
            }
            1 => run.step_by(3).for_each(|at| free(&mut kept, at)),
            2 => get_run(store, thread, run.filter(|at| kept.contains_key(at)).collect(), &kept, counts),
            _ => run.step_by(7).filter_map(|at| Some((at, *kept.get(&at)?))).for_each(|(at, what)| {
                must_get(store, page(thread, at), what, counts);
            }),
        }
    }
    kept
}

/// Get the adjacent pages at the start of `all` as one run, and then the late ones singly.
fn get_run(store: &RemoteStore, thread: u32, all: Vec<u64>, kept: &Kept, counts: &Counts) {
    let Some(first) = all.first() else { return };
    let run: Vec<u64> = all.iter().zip(*first..).take_while(|(at, next)| *at == next).map(|(at, _)| *at).collect();
    let handles: Vec<Handle> = run.iter().map(|at| kept[at].0).collect();
    let mut out = vec![[0; PAGE_SIZE]; run.len()];
    let outcomes = store.get_run(&page(thread, *first).run(handles), &mut out, IoContext::GUEST);
    for ((at, outcome), bytes) in run.iter().zip(outcomes).zip(&out) {
        match outcome {
            GetOutcome::Found => assert!(*bytes == pages::mixed(kept[at].1), "page {at} of a run has other bytes"),
            GetOutcome::Busy => must_get(store, page(thread, *at), kept[at], counts),
            outcome => panic!("page {at} of a run: {outcome:?}"),
        }
    }
}

/// Damage the cluster once, and wait until it is whole again. Returns a text about the event.
fn damage(valkey: &mut Valkey, random: &mut Random) -> String {
    let node = random.index(valkey.len());
    let pause = Duration::from_millis(random.below(2500));
    let said = match random.below(6) {
        4 => take_over(valkey),
        0 | 1 => {
            let (primary, slot) = (valkey.is_primary(node), slot_of_node(valkey, node));
            std::thread::sleep(pause / 10);
            valkey.kill(node);
            // Without persistence, a primary must not restart before another node has its slots.
            while primary && slot.is_some_and(|slot| valkey.owner(slot).is_none_or(|owner| owner == node)) {
                std::thread::sleep(Duration::from_millis(50));
            }
            valkey.restart(node).expect("restart");
            format!("node {node} killed, a {}", if primary { "primary" } else { "replica" })
        }
        2 => {
            valkey.stop(node).expect("stop");
            std::thread::sleep(pause);
            valkey.go_on(node).expect("go on");
            format!("node {node} stopped for {pause:?}")
        }
        3 => {
            (0..valkey.len()).for_each(|node| drop(valkey.say(node, &["CLIENT", "KILL", "TYPE", "normal"])));
            "all connections cut".into()
        }
        _ => {
            let key = format!("b{{{VM}:{:x}:{:x}}}", random.below(3), random.below(PAGES / 512));
            let slot = slot_of(key.as_bytes());
            let from = valkey.owner(slot).expect("an owner");
            let to = (0..valkey.len()).find(|to| *to != from && valkey.is_primary(*to)).expect("another primary");
            valkey.begin_move(slot, from, to).expect("begin to move");
            let mut moved = 0;
            loop {
                let some = valkey.move_keys(slot, from, to, 20).expect("move keys");
                moved += some;
                if some == 0 {
                    break;
                }
            }
            valkey.end_move(slot, from, to).expect("end the move");
            format!("slot {slot} moved from {from} to {to} with {moved} keys")
        }
    };
    valkey.wait_whole().expect("whole again");
    said
}

/// A replica takes the slots of its primary, which is there and does not agree. Returns a text about the event.
fn take_over(valkey: &Valkey) -> String {
    let begun = Instant::now();
    // A node that does not say in time that it is a primary is not taken for a replica.
    let replica = loop {
        let replica = (0..valkey.len()).find(|node| !valkey.is_primary(*node)).expect("a replica");
        match valkey.say(replica, &["CLUSTER", "FAILOVER", "TAKEOVER"]) {
            Ok(_) => break replica,
            Err(error) => assert!(begun.elapsed() < HANG, "node {replica}: {error}"),
        }
    };
    // Before the former primary follows it, its pages have one copy.
    while !valkey.text(replica, &["INFO", "replication"]).is_ok_and(|text| text.contains("state=online")) {
        assert!(begun.elapsed() < HANG, "nobody follows node {replica}");
        std::thread::sleep(Duration::from_millis(50));
    }
    format!("node {replica} took over")
}

fn slot_of_node(valkey: &Valkey, node: usize) -> Option<u16> {
    (0..16_384).step_by(512).find(|slot| valkey.owner(*slot) == Some(node))
}

#[test]
fn nothing_that_was_stored_is_lost_or_wrong_whatever_happens_to_the_cluster() {
    let Some(mut valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    let budget = RemoteBudget::new(Bytes(1 << 30));
    let store = RemoteStore::new(VM, ours.clone(), budget.clone(), Codec::Lz4, LEASE);
    let (seed, events) = (env("BALLAST_SEED", 1), env("BALLAST_REMOTE_EVENTS", 8));
    let (stop, counts) = (AtomicBool::new(false), Counts::default());
    let kept: Vec<Kept> = std::thread::scope(|scope| {
        let (store, stop, counts) = (&store, &stop, &counts);
        let churn = |thread| scope.spawn(move || churn(store, thread, seed << 8 | u64::from(thread), stop, counts));
        let threads: Vec<_> = (0..3).map(churn).collect();
        let end = Finally(|| stop.store(true, Relaxed));
        let mut random = Random(seed);
        for event in 0..events {
            let begun = Instant::now();
            println!("event {event}: {}, whole again after {:?}", damage(&mut valkey, &mut random), begun.elapsed());
        }
        drop(end);
        threads.into_iter().map(|thread| thread.join().expect("no thread failed")).collect()
    });
    // The next engine finds all pages.
    let next = RemoteStore::new(VM, ours.clone(), budget, Codec::Lz4, LEASE);
    let all =
        || (0..).zip(&kept).flat_map(|(thread, kept)| kept.iter().map(move |(at, what)| (page(thread, *at), *what)));
    next.recover(&mut all().map(|(key, (handle, _))| (key, handle))).expect("recover");
    all().for_each(|(key, what)| must_get(&next, key, what, &counts));
    let [gets, puts, refused, longest] =
        [&counts.gets, &counts.puts, &counts.refused, &counts.longest_ms].map(|count| count.load(Relaxed));
    println!("{gets} pages got, {puts} put, {refused} refused; the longest wait took {longest} ms");
    assert!(puts > 0 && gets > 0, "nothing was tried");
    // Pages that no word names are removed, also those that a stopped server wrote after the timeout.
    let live = all().count() as u64;
    assert_eq!(next.usage().pages, live);
    let begun = Instant::now();
    while valkey.keys().expect("a size") != live + 1 {
        next.tidy();
        assert!(begun.elapsed() < HANG, "{} keys are left, {live} pages live", valkey.keys().expect("a size"));
    }
    all().for_each(|(key, what)| must_get(&next, key, what, &counts));
    for (addr, figures) in ours.figures() {
        println!("{addr}: {figures:?}");
    }
}
