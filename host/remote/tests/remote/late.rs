//! Tests of servers that are slow, or silent while others wait for a lock of the thread that waits.
//!
//! Before: `conformance` passed. After: the bytes of a slow server arrive, and a thread gives up a lock that others
//! want.
//! Threads: the test's, those that read beside it, and those of an emulated server. Units: pages.

use crate::common;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_remote::Cluster;
use ballast_store::{Codec, DurableStore, Ends, GetOutcome, IoContext, PutOutcome, SlowStore, Store, blob};
use ballast_testkit::pages;
use ballast_testvm::Finally;
use common::{DEADLINE, key, nobodys, played, serve, store, until};

const RUN: u64 = 512;

/// Waits until the store's client has a map of the slots.
fn has_map(cluster: &Cluster) {
    until(|| cluster.owner(0, IoContext::BACKGROUND).map_err(|_| cluster.silence()));
}

fn value(page: u64) -> Vec<u8> {
    let mut value = Vec::new();
    blob::seal(key(page), nobodys(), &pages::incompressible(page), Codec::Lz4, &mut value);
    [format!("${}\r\n", value.len()).as_bytes(), &value, b"\r\n"].concat()
}

#[test]
fn a_replica_that_needs_longer_than_a_wait_gets_longer_ones_and_no_quick_removal_shortens_them() {
    let ours = played(|stream| {
        serve(&stream, &|words| {
            let ms = |word: &[u8]| String::from_utf8_lossy(word).parse::<u64>().expect("a number");
            let reply = match &words[0][..] {
                b"MSET" => "+OK\r\n",
                b"WAIT" if ms(&words[2]) > 1500 => ":1\r\n",
                b"WAIT" => ":0\r\n",
                b"UNLINK" => ":3\r\n",
                other => panic!("{}", String::from_utf8_lossy(other)),
            };
            Some((vec![reply.into()], Duration::ZERO))
        });
    });
    let (store, content) = (store(&ours), [1, 2, 3].map(pages::mixed));
    let (begun, mut refused) = (Instant::now(), 0);
    loop {
        let mut outcomes = Vec::new();
        store.put_run(key(0), &content, &mut outcomes);
        if outcomes.iter().all(|outcome| matches!(outcome, PutOutcome::Stored(_))) {
            break;
        }
        assert_eq!(outcomes, [PutOutcome::Busy; 3]);
        let why = store.last_refusal().expect("a reason");
        assert!(begun.elapsed() < DEADLINE, "{why}");
        // On a busy machine an earlier reply may be late: then the reason is another one.
        refused += u32::from(why.contains("0 replicas of"));
        store.tidy();
    }
    assert!(refused > 0, "the first one is shorter");
}

#[test]
fn a_run_that_takes_long_comes_while_others_read_pages_of_its_node_that_come_quickly() {
    let ours = played(|stream| {
        serve(&stream, &|words| match &words[0][..] {
            b"GET" => Some((vec![value(0)], Duration::ZERO)),
            b"MGET" => {
                let all = (0..RUN).flat_map(value);
                let reply: Vec<u8> = format!("*{RUN}\r\n").into_bytes().into_iter().chain(all).collect();
                // The reply takes longer than a page may take at first, or twice or four times as long.
                Some((reply.chunks(100 << 10).map(<[u8]>::to_vec).collect(), Duration::from_millis(30)))
            }
            other => panic!("{}", String::from_utf8_lossy(other)),
        });
    });
    let (store, over) = (store(&ours), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let _ends = Finally(|| over.store(true, Ordering::Release));
        scope.spawn(|| {
            let mut out = [0; PAGE_SIZE];
            while !over.load(Ordering::Acquire) {
                // A busy machine may let a request take longer than its timeout.
                let outcome = store.get(key(0), nobodys(), &mut out, IoContext::GUEST);
                assert!(matches!(outcome, GetOutcome::Found | GetOutcome::Busy), "{outcome:?}");
            }
        });
        let (begun, mut out) = (Instant::now(), vec![[0; PAGE_SIZE]; RUN as usize]);
        loop {
            let outcomes = store.get_run(&key(0).run([nobodys(); RUN as usize]), &mut out, IoContext::GUEST);
            if outcomes == [GetOutcome::Found; RUN as usize] {
                break;
            }
            assert!(begun.elapsed() < DEADLINE, "{:?}", store.last_refusal());
        }
        (0..).zip(&out).for_each(|(page, bytes)| assert!(*bytes == pages::incompressible(page), "page {page}"));
    });
}

#[test]
fn a_read_whose_caller_has_a_lock_that_others_want_ends_before_its_node_is_late() {
    // The server does not answer a `GET`, and sends a run much too slowly.
    let ours = played(|stream| {
        serve(&stream, &|words| {
            let reply = [format!("*{RUN}\r\n").as_bytes(), &value(0)].concat();
            let pieces = reply.chunks(16).map(<[u8]>::to_vec).collect();
            (words[0] == b"MGET").then_some((pieces, Duration::from_millis(20)))
        });
    });
    let (store, wanted) = (store(&ours), AtomicU32::new(0));
    has_map(&ours);
    // Reads until a read fails for this reason.
    let fails = |pages: usize, wanted: &str, context: IoContext<'_>| {
        let begun = Instant::now();
        loop {
            let mut out = vec![[0; PAGE_SIZE]; pages];
            let outcomes = store.get_run(&key(0).run(vec![nobodys(); pages]), &mut out, context);
            assert_eq!(outcomes, vec![GetOutcome::Busy; pages]);
            let why = store.last_refusal().expect("a reason");
            if why.contains(wanted) {
                return;
            }
            assert!(begun.elapsed() < DEADLINE, "{why}");
        }
    };
    for pages in [1, RUN as usize] {
        // The node may take much longer after these reads.
        for _ in 0..4 {
            fails(pages, "does not answer in time", IoContext::GUEST);
        }
        let context = IoContext::GUEST.ended_by(Ends::Wanted(&wanted));
        // Nobody wants the lock.
        fails(pages, "does not answer in time", context);
        wanted.fetch_add(1, Ordering::Release);
        fails(pages, "others wait for a lock", context);
        wanted.fetch_sub(1, Ordering::Release);
    }
}

#[test]
fn pages_of_a_vm_that_keeps_no_cluster_wait_and_are_not_lost() {
    // The server has no page.
    let ours = played(move |stream| serve(&stream, &|_| Some((vec![b"$-1\r\n".to_vec()], Duration::ZERO))));
    let store = store(&ours);
    store.recover(&mut (0..9).map(|page| (key(page), nobodys()))).expect("recover");
    has_map(&ours);
    let mut out = [0; PAGE_SIZE];
    // A reply that is late on a busy machine is asked for again.
    until(|| {
        assert_eq!(store.get(key(0), nobodys(), &mut out, IoContext::GUEST), GetOutcome::Busy);
        let why = store.last_refusal().expect("a reason");
        if why.contains("it is not kept which cluster") { Ok(()) } else { Err(why) }
    });
}
