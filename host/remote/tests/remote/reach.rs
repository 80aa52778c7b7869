//! Tests that a cluster is reached even if it is always slow, and that nodes that left it are forgotten.
//!
//! Before: the unit tests of `nodes` and `resolve`. After: the map of a slow cluster arrives.
//! Threads: the test's, and those of an emulated server.

use crate::common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use ballast_remote::{Addr, Cluster};
use ballast_store::IoContext;
use common::{played, shards, until};

/// Requests maps until one is there.
fn reach(cluster: &Cluster) {
    until(|| {
        cluster.refresh(IoContext::BACKGROUND);
        let is_there = cluster.map().uncovered() == 0 && cluster.map().shards().next().is_some();
        if is_there { Ok(()) } else { Err(cluster.silence()) }
    });
}

/// A server that replies with its map to every command, after this time.
fn server(after: Duration) -> Arc<Cluster> {
    played(move |mut stream| {
        let mut asked = [0; 8192];
        while let Ok(1..) = stream.read(&mut asked) {
            std::thread::sleep(after);
            let port = stream.local_addr().expect("an address").port();
            if stream.write_all(shards(port).as_bytes()).is_err() {
                return;
            }
        }
    })
}

#[test]
fn a_cluster_that_always_needs_longer_than_the_first_timeout_for_its_map_is_reached() {
    reach(&server(Duration::from_millis(500)));
}

#[test]
fn a_node_that_left_the_cluster_is_forgotten_with_its_figures_when_the_next_map_comes() {
    let cluster = server(Duration::ZERO);
    let gone = Addr { host: "127.0.0.1".into(), port: 1 };
    let node = cluster.node(&gone);
    assert_eq!(cluster.figures().len(), 1);
    reach(&cluster);
    let known: Vec<Addr> = cluster.figures().into_iter().map(|(addr, _)| addr).collect();
    assert!(!known.contains(&gone) && known.len() == 1, "{known:?}");
    assert_eq!(std::sync::Arc::strong_count(&node), 1, "its connections go with it");
}
