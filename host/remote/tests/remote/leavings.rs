//! Tests that the cluster keeps nothing of failed writes, freed pages and ended VMs, whatever fails on the way.
//!
//! Before: `faults` tested pages. After: the keys to be unlinked are bounded, and gone once the cluster takes commands.
//! Threads: the test's, and those of an emulated server. Other tests need `valkey`.

use crate::common;

use std::cell::Cell;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ballast_base::wire::VmId;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_remote::{Cluster, RemoteBudget, RemoteStore, lease};
use ballast_store::{Codec, GetOutcome, Handle, PutOutcome, SlowStore, Store};
use ballast_testkit::pages;
use ballast_testvm::valkey::{Layout, read};
use common::{
    VM, cluster, end, get_at_last, key, key_of, nobodys, owner, played, shards, start, store, store_of, stored,
    tidy_up, until,
};

fn put(store: &RemoteStore, count: u64) -> Vec<PutOutcome> {
    let (bytes, mut outcomes): (Vec<_>, _) = ((0..count).map(pages::incompressible).collect(), Vec::new());
    store.put_run(key_of(store.vm(), 0), &bytes, &mut outcomes);
    outcomes
}

/// Puts pages until a put is refused for this reason; no put may succeed. `between` follows any other refusal.
fn refused(store: &RemoteStore, count: usize, is_why: impl Fn(&str) -> bool, mut between: impl FnMut()) {
    until(|| {
        assert_eq!(put(store, count as u64), vec![PutOutcome::Busy; count]);
        let why = store.last_refusal().expect("a reason");
        if is_why(&why) { Ok(()) } else { Err((why, between())) }
    });
}

/// A server that has all slots. `say` gets the words of each other command, and returns its reply.
fn server(say: impl Fn(&[String]) -> String + Send + Sync + 'static) -> Arc<Cluster> {
    let serve = move |mut stream: TcpStream| {
        let (mut asked, mut text) = ([0; 8192], String::new());
        while let Ok(len @ 1..) = stream.read(&mut asked) {
            text += &String::from_utf8_lossy(&asked[..len]);
            // Commands come one at a time: a command is complete if it has all of its words.
            let words: Vec<String> = text.lines().skip(1).skip(1).step_by(2).map(str::to_owned).collect();
            let count = text.lines().next().and_then(|line| line.strip_prefix('*')?.parse::<usize>().ok());
            if !text.ends_with("\r\n") || count.is_none_or(|count| words.len() < count) {
                continue;
            }
            let port = stream.local_addr().expect("an address").port();
            let reply = if words[0] == "CLUSTER" { shards(port) } else { say(&words) };
            text.clear();
            if stream.write_all(reply.as_bytes()).is_err() {
                return;
            }
        }
    };
    played(serve)
}

#[test]
fn a_write_that_the_server_refused_leaves_nothing_to_be_unlinked() {
    let Some(valkey) = start(Layout { primaries: 1, replicas: 0, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 0);
    let store = store(&ours);
    stored(&store, key(0), &[pages::incompressible(0)]);
    let needs = |replicas| drop(valkey.say(0, &["CONFIG", "SET", "min-replicas-to-write", replicas]).expect("CONFIG"));
    needs("3");
    for _ in 0..3 {
        let is_why = |why: &str| why.contains("NOREPLICAS") && !why.contains("what a failed write left");
        // A write whose reply was late may have left something.
        refused(&store, 300, is_why, || {
            needs("0");
            tidy_up(&store);
            needs("3");
        });
        assert!(store.is_tidy());
    }
}

#[test]
fn a_chunk_has_what_one_failed_write_left_however_often_it_is_tried() {
    let Some(mut valkey) = start(Layout { primaries: 1, ..Layout::default() }) else { return };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    stored(&store, key(0), &[pages::incompressible(0)]);
    let primary = owner(&valkey, VM);
    valkey.kill(1 - primary);
    refused(&store, 3, |why| why.contains("0 replicas"), || ());
    assert!(!store.is_tidy(), "the primary has them");
    valkey.say(primary, &["CONFIG", "SET", "min-replicas-to-write", "1"]).expect("CONFIG");
    let info = || until(|| valkey.text(primary, &["INFO", "commandstats"]));
    let sets = |info: String| info.lines().find(|line| line.starts_with("cmdstat_mset:")).map(str::to_owned);
    let before = sets(info());
    for _ in 0..5 {
        refused(&store, 3, |why| why.contains("what a failed write left"), || ());
    }
    assert_eq!(sets(info()), before, "nothing is sent before that is unlinked");
    valkey.say(primary, &["CONFIG", "SET", "min-replicas-to-write", "0"]).expect("CONFIG");
    tidy_up(&store);
    assert_eq!(valkey.keys().expect("a size"), 1 + 1, "the page and the lease");
}

#[test]
fn pages_on_their_way_are_stored_when_that_is_waited_for() {
    let Some(valkey) = start(Layout::default()) else { return };
    let store = Arc::new(store(&cluster(&valkey, 1)));
    // Two chunks, of which the first is stored before the second is sent.
    let (bytes, mut outcomes): (Vec<_>, _) = ((0..700).map(pages::mixed).collect(), Vec::new());
    until(|| {
        outcomes.clear();
        let ending = store.clone().begin_put(key(0), &bytes, &[]);
        ending(&mut outcomes);
        if !outcomes.contains(&PutOutcome::Busy) {
            return Ok(());
        }
        let why = store.last_refusal();
        for (number, outcome) in (0..).zip(&outcomes) {
            if let PutOutcome::Stored(handle) = outcome {
                store.free(key(number), *handle);
            }
        }
        tidy_up(&store);
        Err(why)
    });
    assert_eq!(outcomes.len(), bytes.len());
    for ((number, outcome), bytes) in (0..).zip(&outcomes).zip(&bytes) {
        let PutOutcome::Stored(handle) = *outcome else { panic!("{outcome:?}: {:?}", store.last_refusal()) };
        let mut out = [0; PAGE_SIZE];
        assert_eq!(get_at_last(&store, key(number), handle, &mut out), GetOutcome::Found);
        assert!(out == *bytes, "page {number} has other bytes");
    }
    tidy_up(&store);
    assert_eq!(valkey.keys().expect("a size"), 700 + 1, "the pages and the lease");
    assert_eq!(store.usage().pages, 700);
}

#[test]
fn a_write_whose_owner_was_stopped_for_longer_than_its_lease_is_not_stored_because_another_host_may_have_removed_it() {
    let Some(valkey) = start(Layout { primaries: 1, ..Layout::default() }) else { return };
    let (ours, theirs) = (cluster(&valkey, 1), cluster(&valkey, 1));
    let (budget, lasts) = (RemoteBudget::new(Bytes(1 << 30)), Duration::from_millis(200));
    let store = Arc::new(RemoteStore::new(VM, ours, budget, Codec::Lz4, lasts));
    let (bytes, mut outcomes): (Vec<_>, _) = ((0..20).map(pages::mixed).collect(), Vec::new());
    let (primary, lease) = (owner(&valkey, VM), format!("bl{{{VM}}}"));
    // Repeats the put until it is refused for this reason: its replies may be late, too.
    until(|| {
        tidy_up(&store);
        let ending = store.clone().begin_put(key(0), &bytes, &[]);
        if valkey.say(primary, &["KEYS", "b{*"]).and_then(read::<Vec<String>>).expect("keys").len() < 20 {
            return Err(store.last_refusal());
        }
        until(|| if valkey.text(primary, &["GET", &lease]).is_ok() { Err("it does not run out") } else { Ok(()) });
        let mut leaseless = lease::Leaseless::default();
        let gone = until(|| {
            let gone =
                leaseless.sweep(&theirs, Duration::ZERO, &|_| false, &mut || ()).map_err(|why| why.to_string())?;
            if gone.is_empty() { Err("nothing is removed".into()) } else { Ok::<_, String>(gone) }
        });
        assert_eq!(gone, [(VM, 20)]);
        outcomes.clear();
        ending(&mut outcomes);
        assert_eq!(outcomes, [PutOutcome::Busy; 20]);
        let why = store.last_refusal();
        if why.as_ref().is_some_and(|why| why.contains("its lease may have run out")) { Ok(()) } else { Err(why) }
    });
    tidy_up(&store);
}

#[test]
fn a_call_unlinks_for_a_short_time_and_the_next_ones_do_the_rest() {
    let unlinked = Arc::new(Mutex::new(Vec::new()));
    let seen = unlinked.clone();
    let ours = server(move |words| {
        std::thread::sleep(Duration::from_millis(20));
        seen.lock().expect("no panic").extend(words[1..].iter().cloned());
        format!(":{}\r\n", words.len() - 1)
    });
    let store = store(&ours);
    (0..100).for_each(|chunk| store.free(key(chunk * 512), nobodys()));
    store.tidy();
    assert!(!store.is_tidy(), "a server that takes 2 s for all of it delays nobody for so long");
    tidy_up(&store);
    let mut unlinked = std::mem::take(&mut *unlinked.lock().expect("no panic"));
    unlinked.sort_unstable();
    let all = unlinked.len();
    unlinked.dedup();
    assert_eq!((all, unlinked.len()), (100, 100), "each page once");
}

#[test]
fn a_sweep_goes_on_after_a_step_that_failed_and_repeats_that_one_only() {
    let asked = Arc::new(Mutex::new(Vec::<u64>::new()));
    let seen = asked.clone();
    let ours = server(move |words| {
        if words[0] != "SCAN" {
            return ":0\r\n".into();
        }
        let cursor: u64 = words[1].parse().expect("a cursor");
        let mut asked = seen.lock().expect("no panic");
        asked.push(cursor);
        // Every second request fails.
        match asked.len() % 2 {
            1 => "-LOADING it is not ready\r\n".into(),
            _ => {
                let next = ((cursor + 1) % 5).to_string();
                format!("*2\r\n${}\r\n{next}\r\n*0\r\n", next.len())
            }
        }
    });
    let mut ended = lease::Ended::default();
    ended.add(VM);
    until(|| {
        let _ = ended.step(&ours);
        if ended.is_empty() { Ok(()) } else { Err("it does not end") }
    });
    assert_eq!(*asked.lock().expect("no panic"), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]);
}

#[test]
fn one_scan_serves_all_vms_that_ended_and_no_other_vm_and_what_ends_meanwhile_is_served_by_the_next() {
    let Some(valkey) = start(Layout::default()) else { return };
    let ours = cluster(&valkey, 1);
    let stores: Vec<RemoteStore> = (1..=4).map(|id| store_of(VmId([id; 16]), &ours)).collect();
    assert!(stores.iter().all(|store| !store.may_be_used()), "a VM that put nothing needs no scan");
    let bytes: Vec<_> = (0..20).map(pages::incompressible).collect();
    let handles: Vec<Vec<Handle>> = stores.iter().map(|store| stored(store, key_of(store.vm(), 0), &bytes)).collect();
    assert!(stores.iter().all(RemoteStore::may_be_used));
    let scans = || {
        let of = |node| valkey.text(node, &["INFO", "commandstats"]).expect("INFO");
        let calls = |info: String| {
            let line = info.lines().find_map(|line| line.strip_prefix("cmdstat_scan:calls=").map(str::to_owned));
            line.map_or(0, |line| line.split(',').next().and_then(|n| n.parse::<u64>().ok()).expect("a number"))
        };
        (0..valkey.len()).filter(|node| valkey.is_primary(*node)).map(|node| calls(of(node))).sum::<u64>()
    };
    let before = scans();
    let mut ended = lease::Ended::default();
    [0, 1].iter().for_each(|at: &usize| ended.add(stores[*at].vm()));
    // A step that failed may have cost a scan.
    let failed = Cell::new(0);
    let step = |ended: &mut lease::Ended| until(|| ended.step(&ours).inspect_err(|_| failed.set(failed.get() + 1)));
    let mut gone = step(&mut ended);
    // This VM is too late for the scan.
    ended.add(stores[2].vm());
    while gone.is_empty() {
        gone = step(&mut ended);
    }
    gone.sort_unstable();
    assert_eq!(gone, [(VmId([1; 16]), 20), (VmId([2; 16]), 20)]);
    let scans = scans() - before;
    assert!((3..=3 + failed.get()).contains(&scans), "{scans}: each primary once, as none has a thousand keys");
    assert_eq!(valkey.keys().expect("a size"), 2 * (20 + 1));
    let mut last = Vec::new();
    while !ended.is_empty() {
        last.extend(step(&mut ended));
    }
    assert_eq!(last, [(VmId([3; 16]), 20)]);
    let mut out = [0; PAGE_SIZE];
    assert_eq!(get_at_last(&stores[3], key_of(stores[3].vm(), 0), handles[3][0], &mut out), GetOutcome::Found);
    assert_eq!(end(&ours, &[stores[3].vm()]), 20);
}
