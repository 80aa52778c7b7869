//! Tests the outcomes of the remote store for one fault of its cluster at a time.
//!
//! Before: `conformance` passed. After: a full cluster is reported, silence is not loss, and a loss is detected.
//! Threads: the test's, and those of an emulated server. Other tests need `valkey`.

use crate::common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_remote::{Access, Cluster, RemoteBudget, RemoteStore, lease, slot_of};
use ballast_store::{Attach, Codec, GetOutcome, Handle, IoContext, PutOutcome, SlowStore, Store};
use ballast_testkit::pages;
use ballast_testvm::valkey::{Layout, read};
use common::{
    LEASE, VM, cluster, end, get_run_at_last, key, key_of, known, nobodys, owner, played, played_to, shards, start,
    store, store_of, tidy_up, until,
};

fn another(cluster: &Arc<Cluster>, kept: &Arc<AtomicU64>) -> RemoteStore {
    store(cluster).kept_in(kept.clone(), None)
}

fn put(store: &RemoteStore, first: u64, count: u64) -> Vec<PutOutcome> {
    let (bytes, mut outcomes): (Vec<_>, _) = ((first..first + count).map(pages::incompressible).collect(), Vec::new());
    store.put_run(key(first), &bytes, &mut outcomes);
    outcomes
}

fn put_at_last(store: &RemoteStore, first: u64, count: u64) -> Vec<PutOutcome> {
    let bytes: Vec<_> = (first..first + count).map(pages::incompressible).collect();
    common::put_at_last(store, key(first), &bytes, &[])
}

fn stored(store: &RemoteStore, first: u64, count: u64) -> Vec<Handle> {
    common::handles(store, put_at_last(store, first, count))
}

fn get(store: &RemoteStore, page: u64, handle: Handle) -> GetOutcome {
    let mut out = [0; PAGE_SIZE];
    let outcome = store.get(key(page), handle, &mut out, IoContext::GUEST);
    assert!(outcome != GetOutcome::Found || out == pages::incompressible(page), "page {page} has other bytes");
    outcome
}

fn get_at_last(store: &RemoteStore, page: u64, handle: Handle) -> GetOutcome {
    known(store, || get(store, page, handle))
}

#[test]
fn a_full_cluster_is_full_keeps_what_it_has_and_takes_pages_again_after_frees() {
    let Some(valkey) = start(Layout::default()) else { return };
    let (ours, mut kept) = (cluster(&valkey, 1), Vec::new());
    let store = store(&ours);
    for node in 0..valkey.len() {
        let info = valkey.text(node, &["INFO", "memory"]).expect("INFO");
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:")?.parse::<u64>().ok());
        let limit = used.expect("used_memory") + (4 << 20);
        valkey.say(node, &["CONFIG", "SET", "maxmemory", &limit.to_string()]).expect("CONFIG");
    }
    for first in (0..20 * 512).step_by(64) {
        let outcomes = put_at_last(&store, first, 64);
        match outcomes[0] {
            PutOutcome::Stored(_) => kept.extend((first..).zip(common::handles(&store, outcomes))),
            PutOutcome::Full => {
                assert!(store.last_refusal().expect("a reason").contains("maxmemory"));
                break;
            }
            PutOutcome::Busy => unreachable!("it was tried again"),
        }
    }
    assert!(kept.len() < 20 * 512, "it was never full");
    kept.iter().for_each(|(page, handle)| assert_eq!(get_at_last(&store, *page, *handle), GetOutcome::Found));
    let half = kept.split_off(kept.len() / 2);
    half.iter().for_each(|(page, handle)| store.free(key(*page), *handle));
    store.tidy();
    // The server frees unlinked memory in the background, so its free memory grows after a delay.
    let begun = Instant::now();
    while !matches!(put(&store, half[0].0, 1)[..], [PutOutcome::Stored(_)]) {
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", store.last_refusal());
    }
    kept.iter().for_each(|(page, handle)| assert_eq!(get_at_last(&store, *page, *handle), GetOutcome::Found));
}

#[test]
fn without_enough_replicas_nothing_is_stored_and_reads_go_on() {
    let Some(mut valkey) = start(Layout { primaries: 1, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    let handles = stored(&store, 0, 3);
    valkey.kill(1);
    until(|| {
        assert_eq!(put(&store, 10, 3), [PutOutcome::Busy; 3]);
        assert_eq!(store.usage().pages, 3);
        let why = store.last_refusal().expect("a reason");
        if why.contains("0 replicas") && why.contains("1 are needed") { Ok(()) } else { Err(why) }
    });
    (0..).zip(&handles).for_each(|(page, handle)| assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found));
    tidy_up(&store);
    assert_eq!(valkey.keys().expect("a size"), 4, "what was not acknowledged is taken away");
}

#[test]
fn a_slot_that_moves_is_read_written_and_freed_on_both_sides() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    let handles = stored(&store, 0, 40);
    let slot = slot_of(format!("b{{{VM}:0:0}}").as_bytes());
    let from = valkey.owner(slot).expect("an owner");
    let to = (0..3).find(|to| *to != from && valkey.is_primary(*to)).expect("another primary");
    valkey.begin_move(slot, from, to).expect("begin");
    assert_eq!(valkey.move_keys(slot, from, to, 15).expect("move"), 15);
    // Both nodes have pages of this run. Get it as a run, and page by page.
    let (outcomes, out) = get_run_at_last(&store, key(0), &handles);
    assert_eq!(outcomes, [GetOutcome::Found; 40], "{:?}", store.last_refusal());
    (0..).zip(&out).for_each(|(page, bytes)| assert!(*bytes == pages::incompressible(page)));
    (0..).zip(&handles).for_each(|(page, handle)| assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found));
    let more = stored(&store, 40, 8);
    (40..).zip(&more).for_each(|(page, handle)| assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found));
    // A page that no node has is not lost while the slot moves.
    assert_eq!(get(&store, 99, handles[0]), GetOutcome::Busy);
    (0..).zip(&handles).take(30).for_each(|(page, handle)| store.free(key(page), *handle));
    tidy_up(&store);
    assert_eq!(valkey.keys().expect("a size"), 10 + 8 + 1);
    while valkey.move_keys(slot, from, to, 100).expect("move") > 0 {}
    valkey.end_move(slot, from, to).expect("end");
    for (page, handle) in (30..).zip(&handles[30..]) {
        assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found);
    }
    assert_eq!(get_at_last(&store, 99, handles[0]), GetOutcome::Absent);
}

#[test]
fn a_page_is_lost_only_when_all_that_may_have_it_say_so() {
    let Some(mut valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    let handles = stored(&store, 0, 1);
    let primary = owner(&valkey, VM);
    // Kill its primary, and the replica of it.
    let replica = primary + 3;
    valkey.kill(replica);
    valkey.kill(primary);
    assert_eq!(get(&store, 0, handles[0]), GetOutcome::Busy, "nobody can be asked");
    // The primary restarts empty, and reports no page, but the replica has not been asked.
    valkey.restart(primary).expect("restart");
    for _ in 0..20 {
        assert_eq!(get(&store, 0, handles[0]), GetOutcome::Busy, "one that may have it cannot be asked");
    }
    valkey.restart(replica).expect("restart");
    assert_eq!(get_at_last(&store, 0, handles[0]), GetOutcome::Absent);
}

#[test]
fn a_page_that_is_damaged_at_its_owner_comes_from_any_replica_and_is_corrupt_if_no_node_has_it_undamaged() {
    let Some(valkey) = start(Layout { replicas: 2, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    let handles = stored(&store, 0, 3);
    let primary = owner(&valkey, VM);
    let tell = |words: &[&str]| drop(valkey.say(primary, words).expect("it does so"));
    // The replicas no longer follow the primary, so they keep their pages.
    tell(&["ACL", "SETUSER", "default", "-psync", "-sync"]);
    tell(&["CLIENT", "KILL", "TYPE", "replica"]);
    let keys = valkey.say(primary, &["KEYS", "b{*"]).and_then(read::<Vec<String>>).expect("keys");
    assert_eq!(keys.len(), 3);
    keys.iter().for_each(|key| tell(&["SET", key, "damaged"]));
    // For each page, another of the two replicas is silent.
    let replicas = [3, 6].map(|first| first + primary % 3);
    for (page, silent) in (0..).zip(replicas) {
        valkey.stop(silent).expect("stop");
        assert_eq!(get_at_last(&store, page, handles[page as usize]), GetOutcome::Found);
        valkey.go_on(silent).expect("go on");
    }
    // From here on the replicas follow the primary again.
    tell(&["ACL", "SETUSER", "default", "allcommands"]);
    let begun = Instant::now();
    while get(&store, 2, handles[2]) != GetOutcome::Corrupt {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", store.last_refusal());
    }
}

#[test]
fn a_request_that_was_begun_is_answered_or_costs_nothing_whatever_became_of_the_page_or_its_node() {
    let Some(mut valkey) = start(Layout::default()) else { return };
    let store = store(&cluster(&valkey, 1));
    let handles = stored(&store, 0, 40);
    let begin = |page, handle| {
        store.begin(key(page), handle, &|_| ());
    };
    // More requests than may be under way at a time, and some pages twice.
    for round in 0..3 {
        (0..).zip(&handles).for_each(|(page, handle)| begin(page % 20, *handle));
        for (page, handle) in (0..).zip(&handles) {
            assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found, "round {round}");
        }
    }
    // The begun page is freed; then a page is begun that never was put.
    begin(0, handles[0]);
    store.free(key(0), handles[0]);
    store.tidy();
    assert_eq!(get_at_last(&store, 1, handles[1]), GetOutcome::Found);
    begin(99, handles[1]);
    assert_eq!(get_at_last(&store, 99, handles[1]), GetOutcome::Absent);
    // The reply is not read for longer than the timeout of its node, and the node dies.
    begin(2, handles[2]);
    let slot = slot_of(format!("b{{{VM}:0:0}}").as_bytes());
    valkey.kill(valkey.owner(slot).expect("an owner"));
    (0..).zip(&handles).skip(1).for_each(|(page, handle)| {
        begin(page, *handle);
        assert_eq!(get_at_last(&store, page, *handle), GetOutcome::Found, "a replica takes over");
    });
}

#[test]
fn a_vm_without_a_lease_is_swept_by_another_host_and_one_with_a_lease_is_not() {
    let Some(valkey) = start(Layout { primaries: 1, ..Layout::default() }) else { return };
    let (ours, theirs) = (cluster(&valkey, 1), cluster(&valkey, 1));
    let living = store(&ours);
    let handles = stored(&living, 0, 2);
    let gone = VmId([9; 16]);
    common::stored(&store_of(gone, &theirs), key_of(gone, 0), &[pages::mixed(1)]);
    let mut leaseless = lease::Leaseless::default();
    let mut sweep = |lasts, here| until(|| leaseless.sweep(&ours, lasts, &|vm| vm == here, &mut || ()));
    assert_eq!(sweep(Duration::ZERO, VM), []);
    valkey.say(0, &["DEL", &format!("bl{{{gone}}}")]).expect("the lease runs out");
    assert_eq!(sweep(LEASE, VM), [], "it was seen without a lease for the first time");
    assert_eq!(sweep(Duration::ZERO, gone), [], "the VM is here");
    assert_eq!(sweep(LEASE, VM), [], "so this is the first time again");
    assert_eq!(sweep(Duration::ZERO, VM), [(gone, 1)]);
    (0..).zip(&handles).for_each(|(page, handle)| assert_eq!(get_at_last(&living, page, *handle), GetOutcome::Found));
    assert_eq!(end(&ours, &[VM]), 2);
    assert_eq!(valkey.keys().expect("a size"), 0);
}

#[test]
fn a_lease_is_renewed_while_its_node_is_full_and_nothing_is_removed_while_a_node_refuses_writes() {
    let Some(valkey) = start(Layout { primaries: 1, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 1);
    let set = |name: &str, value: &str| drop(valkey.say(0, &["CONFIG", "SET", name, value]).expect("CONFIG"));
    // The lease must be renewed each time, and is overdue at once.
    let lasts = Duration::from_millis(1);
    let brief = RemoteStore::new(VM, ours.clone(), RemoteBudget::new(Bytes(1 << 30)), Codec::Lz4, lasts);
    let its_cluster = Arc::new(AtomicU64::new(0));
    let brief = brief.kept_in(its_cluster.clone(), None);
    let handles = stored(&another(&ours, &its_cluster), 0, 2);
    brief.attach_shared(&mut std::iter::empty());
    let lease = format!("bl{{{VM}}}");
    let ttl = || valkey.say(0, &["PTTL", &lease]).and_then(read::<i64>).expect("PTTL");
    let kept = another(&ours, &its_cluster);
    kept.attach_shared(&mut std::iter::empty());
    valkey.say(0, &["DEL", &lease]).expect("DEL");
    set("maxmemory", "1");
    assert_eq!(kept.keep_lease(), None, "it is not overdue");
    assert!(ttl() < 0, "a lease that is not there cannot be made");
    set("maxmemory", "0");
    until(|| {
        assert_eq!(kept.keep_lease(), None);
        if ttl() > 0 { Ok(()) } else { Err("it is not made again") }
    });
    valkey.say(0, &["PEXPIRE", &lease, "60000"]).expect("PEXPIRE");
    set("maxmemory", "1");
    let next = another(&ours, &its_cluster);
    next.attach_shared(&mut std::iter::empty());
    until(|| {
        assert_eq!(next.keep_lease(), None);
        if ttl() > 60_000 { Ok(()) } else { Err("a full node does not renew it") }
    });
    set("maxmemory", "0");
    // The lease runs out while writes are refused.
    valkey.say(0, &["DEL", &lease]).expect("DEL");
    let mut leaseless = lease::Leaseless::default();
    let mut sweep = |lasts| until(|| leaseless.sweep(&ours, lasts, &|_| false, &mut || ()));
    for (name, refuses, accepts) in [("maxmemory", "1", "0"), ("min-replicas-to-write", "3", "0")] {
        assert_eq!(sweep(LEASE), [], "the first look");
        set(name, refuses);
        until(|| {
            let (_, why) = brief.keep_lease().expect("it is overdue");
            if why.contains("its lease: ") && why.contains("says: ") { Ok(()) } else { Err(why) }
        });
        assert_eq!(sweep(Duration::ZERO), [], "the lease may be missing because of {name}");
        set(name, accepts);
        assert_eq!(sweep(LEASE), [], "and that look forgot the one before");
    }
    (0..).zip(&handles).for_each(|(page, handle)| assert_eq!(get_at_last(&brief, page, *handle), GetOutcome::Found));
}

#[test]
fn a_node_that_refuses_keeps_its_own_pages_only_and_they_count_until_they_are_unlinked() {
    let Some(valkey) = start(Layout { replicas: 0, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 0);
    // Twenty pages, none of which is compressed, and their keys.
    let budget = RemoteBudget::new(Bytes(20 * 4300));
    let store = RemoteStore::new(VM, ours, budget, Codec::Lz4, LEASE);
    let owner = |chunk: u64| valkey.owner(slot_of(format!("b{{{VM}:0:{chunk:x}}}").as_bytes())).expect("an owner");
    let firsts: Vec<u64> = (0..12).map(|chunk| chunk * 512).collect();
    let handles: Vec<Handle> = firsts.iter().flat_map(|first| stored(&store, *first, 1)).collect();
    let refusing = owner(0);
    let its = (0..12).filter(|chunk| owner(*chunk) == refusing).count() as u64;
    let other = (0..12).find(|chunk| owner(*chunk) != refusing).expect("a chunk of another node");
    let set = |value| drop(valkey.say(refusing, &["CONFIG", "SET", "min-replicas-to-write", value]).expect("CONFIG"));
    set("1");
    firsts.iter().zip(&handles).for_each(|(first, handle)| store.free(key(*first), *handle));
    let begun = Instant::now();
    while valkey.keys().expect("a size") > its + 1 {
        assert!(begun.elapsed() < Duration::from_secs(60), "the lease, and what that node has");
        store.tidy();
    }
    until(|| {
        store.tidy();
        let why = store.last_refusal().expect("a reason");
        if why.contains("NOREPLICAS") { Ok(()) } else { Err(why) }
    });
    assert_eq!(store.usage().pages, 0);
    let is_stored = |page| matches!(put_at_last(&store, other * 512 + page, 1)[..], [PutOutcome::Stored(_)]);
    let more = (1..).take_while(|page| is_stored(*page));
    assert_eq!(more.count() as u64, 20 - its, "{:?}", store.last_refusal());
    set("0");
    let begun = Instant::now();
    while valkey.keys().expect("a size") > 20 - its + 1 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", store.last_refusal());
        store.tidy();
    }
    tidy_up(&store);
    stored(&store, other * 512, 1);
}

#[test]
fn a_server_that_is_none_or_never_ends_its_reply_costs_time_and_nothing_else() {
    // The server sends a right map. To any other command it sends `junk` repeatedly.
    let server = move |junk: &'static [u8], pause: Duration| {
        played(move |mut stream| {
            let mut asked = [0; 8192];
            while let Ok(len @ 1..) = stream.read(&mut asked) {
                let port = stream.local_addr().expect("an address").port();
                let answer =
                    if asked[..len].ends_with(b"SHARDS\r\n") { shards(port).into_bytes() } else { junk.to_vec() };
                let is_junk = answer == junk;
                while stream.write_all(&answer).is_ok() && is_junk {
                    std::thread::sleep(pause);
                }
            }
        })
    };
    for (junk, pause) in [
        (&b"HTTP/1.1 200 OK\r\n\r\n"[..], Duration::ZERO),
        (b"$4096\r\n", Duration::from_millis(5)),
        (b"*100000\r\n$1\r\n", Duration::ZERO),
        (b"x", Duration::from_millis(5)),
        (b"+", Duration::ZERO),
        (b"$5\r\nhello\r\n", Duration::from_millis(50)),
        (b"-MOVED 1 127.0.0.1:1\r\n", Duration::from_millis(50)),
    ] {
        let ours = server(junk, pause);
        let store = store(&ours);
        assert!(matches!(get(&store, 0, nobodys()), GetOutcome::Busy | GetOutcome::Corrupt));
        assert_eq!(put(&store, 0, 3), [PutOutcome::Busy; 3]);
        store.free(key(0), nobodys());
        store.tidy();
    }
}

#[test]
fn an_engine_that_follows_beside_another_one_counts_what_it_gets_and_unlinks_what_that_one_could_not() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    let first = store(&ours);
    let handles = stored(&first, 0, 8);
    // The engine ends after the free, and before the page was unlinked.
    first.free(key(7), handles[7]);
    let next = store(&ours);
    let pages = |pages: std::ops::Range<u64>| pages.map(|page| (key(page), handles[page as usize])).collect::<Vec<_>>();
    next.attach_shared(&mut pages(0..7).into_iter());
    // Both engines serve, and each frees a page.
    assert!((0..7).all(|page| get_at_last(&next, page, handles[page as usize]) == GetOutcome::Found));
    next.free(key(0), handles[0]);
    first.free(key(1), handles[1]);
    next.attach_exclusive(&mut pages(2..7).into_iter());
    assert_eq!(next.usage().pages, 5);
    drop(first);
    let late = stored(&next, 100, 1);
    // Six pages and the lease remain.
    until(|| {
        next.tidy();
        if valkey.keys().expect("keys") <= 6 + 1 { Ok(()) } else { Err(next.last_refusal()) }
    });
    assert_eq!(next.usage().pages, 6);
    assert!((2..7).all(|page| get_at_last(&next, page, handles[page as usize]) == GetOutcome::Found));
    assert_eq!(get_at_last(&next, 100, late[0]), GetOutcome::Found, "what is put later is nobody's leftover");
    end(&ours, &[VM]);
}

#[test]
fn a_server_that_speaks_no_tls_or_never_ends_its_greeting_costs_time_and_nothing_else() {
    let Some(valkey) = start(Layout { primaries: 1, replicas: 0, tls: true, ..Layout::default() }) else { return };
    let access = Access { tls: Some(common::tls(&valkey)), ..Access::default() };
    for greeting in [&b"+OK\r\n"[..], b"\x16\x03\x03\x40\x00", b"\x15\x03\x03\x00\x02\x02\x28", b""] {
        let ours = played_to(access.clone(), move |mut stream| {
            let mut next = greeting;
            while stream.write_all(if next.is_empty() { b"x" } else { next }).is_ok() {
                next = b"";
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let store = store(&ours);
        assert_eq!(get(&store, 0, nobodys()), GetOutcome::Busy);
        assert_eq!(put(&store, 0, 3), [PutOutcome::Busy; 3]);
    }
}
