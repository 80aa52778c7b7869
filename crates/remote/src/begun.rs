//! Begun: requests for single pages that were sent, and whose replies another thread reads.
//!
//! Before: a fault worker met a page of the cluster, and hands the fault to a slow worker. After: the request is on its
//! way while that worker wakes up, which takes about as long as the reply.
//! Threads: any; `begin` never waits for a server. Units: one key a request.
//! Promise: a request that nobody reads costs its connection and nothing else. A reply that is no value says nothing:
//! the page is asked for again, in the usual way.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::link::Link;
use crate::nodes::{Kind, Node};
use crate::resp::Commands;
use crate::slot::slot_of;

/// Requests that are kept; the oldest goes first.
const KEPT: usize = 8;

/// The requests of one store.
#[derive(Debug, Default)]
pub struct Begun(Mutex<Vec<Request>>);

#[derive(Debug)]
struct Request {
    name: Vec<u8>,
    node: Arc<Node>,
    link: Link,
    since: Instant,
    timeout: Duration,
}

impl Begun {
    fn requests(&self) -> MutexGuard<'_, Vec<Request>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request for the value of this key, if a connection to its node is there and takes it at once.
    pub fn begin(&self, cluster: &Cluster, name: Vec<u8>) {
        let map = cluster.map();
        let Some(node) = map.primary(slot_of(&name)).map(|addr| cluster.node(addr)) else { return };
        let Some(link) = node.begin(&Commands::one(&[b"GET", &name])) else { return };
        let request = Request { name, timeout: node.timeout(Kind::Read), node, link, since: Instant::now() };
        let mut requests = self.requests();
        let oldest = (requests.len() == KEPT).then(|| requests.remove(0));
        requests.push(request);
        drop(requests);
        // A connection is closed here, because it will bring a reply that nobody reads.
        drop(oldest);
    }

    /// Waits for the reply to the request for this key, if there is one. Returns what `read` made of the value.
    pub fn end<T>(&self, name: &[u8], read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let request = {
            let mut requests = self.requests();
            let at = requests.iter().position(|request| request.name == name)?;
            requests.remove(at)
        };
        let Request { node, link, since, timeout, .. } = request;
        let until = since + timeout;
        let value = node.end(link, Kind::Read, since, timeout, |link| {
            let replies = link.receive(1, until)?;
            Ok(replies.get(0).bytes().map(read))
        });
        value.ok().flatten()
    }
}
