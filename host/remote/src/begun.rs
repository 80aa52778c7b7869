//! Requests for single pages that were sent before their replies are waited for.
//!
//! Before: a fault worker met a page of the cluster. After: it has the page when the reply is there ([`Begun::now`]),
//! and serves other faults meanwhile; or a slow worker waits for the reply ([`Begun::end`]).
//! Threads: any; only `end` waits for a server. Units: one key a request.
//! Promise: a request that nobody reads costs its connection and nothing else. A reply without a value says nothing
//! about the page: a usual read asks for it again.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_base::store::{IoContext, OnReply};
use ballast_sys::lock::Lock;

use crate::cluster::Cluster;
use crate::link::Link;
use crate::nodes::{Kind, Node};
use crate::resp::Commands;
use crate::slot::slot_of;

/// Requests under way at a time.
const MOST: usize = 8;

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
    /// Sends a request for the value of this key, if a connection to its node is there and takes it at once. Before
    /// that `watch` gets the descriptor that has input when the reply comes. Returns whether the request was sent.
    pub fn begin(&self, cluster: &Cluster, name: Vec<u8>, watch: OnReply<'_>) -> bool {
        {
            let mut requests = self.0.locked();
            // Requests that nobody waits for any more: their connections are closed, because each will bring a reply.
            requests.retain(|request| request.since.elapsed() < request.timeout);
            if let Some(request) = requests.iter().find(|request| request.name == name) {
                watch(request.link.fd());
                return true;
            }
            if requests.len() >= MOST {
                return false;
            }
        }
        let map = cluster.map();
        let Some(node) = map.primary(slot_of(&name)).map(|addr| cluster.node(addr)) else { return false };
        let Some(link) = node.begin(&Commands::one(&[b"GET", &name]), watch) else { return false };
        let request = Request { name, timeout: node.timeout(Kind::Read), node, link, since: Instant::now() };
        self.0.locked().push(request);
        true
    }

    fn take(&self, name: &[u8]) -> Option<Request> {
        let mut requests = self.0.locked();
        let at = requests.iter().position(|request| request.name == name)?;
        Some(requests.remove(at))
    }

    /// Waits for the reply to the request for this key, if there is one. Returns what `read` made of the value.
    pub fn end<T>(&self, name: &[u8], context: IoContext<'_>, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let Request { node, link, since, timeout, .. } = self.take(name)?;
        let context = context.until(since + timeout);
        let value = node.end(link, Kind::Read, since, timeout, |link| {
            let replies = link.receive(1, context)?;
            Ok(replies.get(0).bytes().map(read))
        });
        value.ok().flatten()
    }

    /// As [`Begun::end`], but never waits: if the reply is not there, `watch` gets the descriptor again.
    pub fn now<T>(&self, name: &[u8], watch: OnReply<'_>, read: impl FnOnce(&[u8]) -> T) -> Option<T> {
        let mut request = self.take(name)?;
        let there = request.link.has_received(1);
        if matches!(there, Ok(false)) {
            watch(request.link.fd());
            self.0.locked().push(request);
            return None;
        }
        let Request { node, link, since, timeout, .. } = request;
        let value = node.end(link, Kind::Read, since, timeout, |link| {
            there?;
            let replies = link.receive(1, IoContext::GUEST.until(since))?;
            Ok(replies.get(0).bytes().map(read))
        });
        value.ok().flatten()
    }
}
