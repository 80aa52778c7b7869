//! Tests which replicas a page must be on before it counts as stored.
//!
//! Before: `conformance` passed. After: whichever replica is elected, it has the page.
//! Threads: the test's. Units: pages. All tests need `valkey`.

use crate::common;

use std::time::{Duration, Instant};

use ballast_base::PAGE_SIZE;
use ballast_remote::RemoteStore;
use ballast_remote::check::check;
use ballast_store::{GetOutcome, Handle, IoContext, PutOutcome, SlowStore, Store};
use ballast_testkit::pages;
use ballast_testvm::valkey::Layout;
use common::{DEADLINE, cluster, key, start, store, stored, until};

fn put(store: &RemoteStore, page: u64) -> Handle {
    stored(store, key(page), &[pages::mixed(page)])[0]
}

/// Puts a page until it is refused because one replica has it and two must. As long as the store may not know the
/// second replica, the page may be stored.
fn needs_two(store: &RemoteStore, page: u64, may_be_stored: bool) {
    until(|| {
        match store.put(key(page), &pages::mixed(page)) {
            PutOutcome::Stored(handle) if may_be_stored => store.free(key(page), handle),
            outcome => {
                assert_eq!(outcome, PutOutcome::Busy);
                let why = store.last_refusal().expect("a reason");
                if why.contains("1 replicas") && why.contains("2 are needed") {
                    return Ok(());
                }
            }
        }
        Err(store.last_refusal())
    });
}

#[test]
fn a_page_is_stored_only_when_every_replica_that_may_be_elected_has_it() {
    // The cluster calls no node failed during the test.
    let node_timeout = Duration::from_secs(60);
    let Some(mut valkey) = start(Layout { primaries: 1, replicas: 2, node_timeout, ..Layout::default() }) else {
        return;
    };
    let ours = cluster(&valkey, 1);
    let store = store(&ours);
    // A server knows the other servers before it knows their shards.
    let begun = Instant::now();
    while !check(&ours).iter().any(|finding| !finding.serious && finding.text.contains("has 2 replicas")) {
        assert!(begun.elapsed() < DEADLINE, "{:?}", check(&ours));
    }
    valkey.stop(2).expect("stop");
    needs_two(&store, 0, false);
    valkey.go_on(2).expect("go on");
    let handle = put(&store, 0);
    valkey.kill(0);
    valkey.kill(1);
    valkey.say(2, &["CONFIG", "SET", "cluster-node-timeout", "1000"]).expect("CONFIG");
    valkey.say(2, &["CLUSTER", "FAILOVER", "TAKEOVER"]).expect("it is the primary");
    let mut out = [0; PAGE_SIZE];
    until(|| match store.get(key(0), handle, &mut out, IoContext::GUEST) {
        GetOutcome::Found => Ok(()),
        _ => Err(store.last_refusal()),
    });
    assert!(out == pages::mixed(0));
}

#[test]
fn a_replica_that_the_cluster_calls_failed_is_not_waited_for_and_one_that_is_back_is() {
    let Some(mut valkey) = start(Layout { primaries: 1, replicas: 2, ..Layout::default() }) else { return };
    let store = store(&cluster(&valkey, 1));
    put(&store, 0);
    valkey.kill(2);
    put(&store, 1);
    valkey.restart(2).expect("restart");
    valkey.wait_whole().expect("whole again");
    // The node is not called failed again.
    (0..3)
        .for_each(|node| drop(valkey.say(node, &["CONFIG", "SET", "cluster-node-timeout", "60000"]).expect("CONFIG")));
    valkey.stop(2).expect("stop");
    needs_two(&store, 2, true);
    valkey.go_on(2).expect("go on");
    put(&store, 2);
}
