//! A cluster: its nodes and its slot map, shared by all stores of a process.
//!
//! Before: some nodes of the cluster are configured. After: callers get the owner of a slot, if a node reports it.
//! Threads: any. One thread at a time requests a new map, and the others continue with the old one; those that write
//! wait if it is too old for that.
//! Promise: an outdated map costs a redirection and never gives a wrong result, because the nodes refuse keys that are
//! not theirs. How many replicas must have a write is said by no map that is older than 20 s.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, TryLockError};
use std::time::{Duration, Instant};

use ballast_store::IoContext;
use ballast_sys::lock::Lock;

use crate::link::{Access, Link};
use crate::map::SlotMap;
use crate::nodes::{Kind, Node, NodeFigures, is_late};
use crate::refusal::Addr;
use crate::resp::Commands;
use crate::stream::is_giving_way;

/// Options of a cluster.
#[derive(Clone, Debug)]
pub struct ClusterOptions {
    /// Some of its nodes. They report the others.
    pub nodes: Vec<Addr>,
    /// User, password and TLS files for the servers.
    pub access: Access,
    /// Replicas that must have a page at least before it counts as stored.
    pub replicas: u32,
}

/// Shortest time between two requests for the map.
const REFRESH: Duration = Duration::from_millis(100);
/// Age of the map at which a writer requests a new one: a replica that came since the last map may be elected.
const OLD: Duration = Duration::from_secs(5);
/// Age of the map from which on it no longer tells which replicas must have a write.
const TOO_OLD: Duration = Duration::from_secs(20);
/// Time that a node may take to return its map and to open a connection for it, at first and at most. It is doubled
/// when no node returned one in time, and falls again. So a silent node delays a quick cluster by the first value only.
const MAP_TIMEOUT: Duration = Duration::from_millis(300);
const MAP_TIMEOUT_MAX: Duration = Duration::from_millis(2400);

/// A cluster.
#[derive(Debug)]
pub struct Cluster {
    options: ClusterOptions,
    /// The last map, and when it was requested.
    map: RwLock<(Arc<SlotMap>, Option<Instant>)>,
    nodes: Mutex<HashMap<Addr, Arc<Node>>>,
    refreshed: Mutex<Option<Instant>>,
    /// Index of the node that is asked next: in turn, so that a node with an old map is not asked again and again.
    turn: AtomicUsize,
    map_timeout_ms: AtomicU32,
    silence: Mutex<Option<String>>,
    /// The identity that was seen last, when, and by which map.
    seen: Mutex<Option<(u64, Instant, Arc<SlotMap>)>>,
}

impl Cluster {
    /// Creates the cluster object. It sends nothing.
    pub fn new(options: ClusterOptions) -> Self {
        Self {
            options,
            map: RwLock::default(),
            nodes: Mutex::default(),
            refreshed: Mutex::default(),
            turn: AtomicUsize::new(0),
            map_timeout_ms: AtomicU32::new(MAP_TIMEOUT.as_millis() as u32),
            silence: Mutex::default(),
            seen: Mutex::default(),
        }
    }

    /// Returns the options.
    pub fn options(&self) -> &ClusterOptions {
        &self.options
    }

    /// Returns the last map received.
    pub fn map(&self) -> Arc<SlotMap> {
        self.map.read().unwrap_or_else(PoisonError::into_inner).0.clone()
    }

    /// Returns whether the last map is too old to tell which replicas must have a write.
    fn is_too_old(&self) -> bool {
        let requested = self.map.read().unwrap_or_else(PoisonError::into_inner).1;
        requested.is_none_or(|at| at.elapsed() >= TOO_OLD)
    }

    /// Returns the reason why a node did not return its map when it was last asked; `None` if it did.
    pub fn silence(&self) -> Option<String> {
        self.silence.locked().clone()
    }

    /// A node of this map says that the cluster has this identity ([`crate::identity`]).
    pub(crate) fn saw(&self, identity: u64, map: &Arc<SlotMap>) {
        *self.seen.locked() = Some((identity, Instant::now(), map.clone()));
    }

    /// No node says that the cluster has the identity any more.
    pub(crate) fn saw_another(&self) {
        *self.seen.locked() = None;
    }

    /// Returns whether a node of this map said, within that time, that the cluster has this identity.
    pub(crate) fn was_seen(&self, identity: u64, map: &Arc<SlotMap>, within: Duration) -> bool {
        let seen = self.seen.locked();
        seen.as_ref().is_some_and(|(id, at, by)| *id == identity && at.elapsed() < within && Arc::ptr_eq(by, map))
    }

    /// Returns the node at this address.
    pub fn node(&self, addr: &Addr) -> Arc<Node> {
        let mut nodes = self.nodes.locked();
        if let Some(node) = nodes.get(addr) {
            return node.clone();
        }
        let node = Arc::new(Node::new(addr.clone()));
        nodes.insert(addr.clone(), node.clone());
        node
    }

    /// Forgets nodes that are no longer part of the cluster, with their idle connections and figures.
    fn forget_all_but(&self, map: &SlotMap) {
        let known: HashSet<&Addr> = map.nodes().chain(&self.options.nodes).collect();
        self.nodes.locked().retain(|addr, _| known.contains(addr));
    }

    /// Returns the figures of each node of the cluster that was ever asked.
    pub fn figures(&self) -> Vec<(Addr, NodeFigures)> {
        let nodes = self.nodes.locked();
        let mut figures: Vec<_> = nodes.values().map(|node| (node.addr.clone(), node.figures())).collect();
        figures.sort_by(|(a, _), (b, _)| a.cmp(b));
        figures
    }

    /// Runs `work` with a connection to a node.
    pub fn with<T>(
        &self,
        addr: &Addr,
        context: IoContext<'_>,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        self.with_as(Kind::Other, addr, context, work)
    }

    /// As [`Cluster::with`], for a request of this kind, whose result its timeout follows.
    pub fn with_as<T>(
        &self,
        kind: Kind,
        addr: &Addr,
        context: IoContext<'_>,
        work: impl FnOnce(&mut Link) -> io::Result<T>,
    ) -> io::Result<T> {
        self.node(addr).with(kind, &self.options.access, context, work)
    }

    /// Returns the owner of this slot. Requests a new map if the current one names none.
    pub fn owner(&self, slot: u16, context: IoContext<'_>) -> io::Result<Addr> {
        let known = || self.map().primary(slot).cloned();
        let owner = known().or_else(|| {
            self.refresh(context);
            known()
        });
        owner.ok_or_else(|| {
            let nodes = self.options.nodes.iter().map(Addr::to_string).collect::<Vec<_>>().join(", ");
            let why = self.silence().map(|why| format!("; {why}")).unwrap_or_default();
            let text = format!("no node is known to have slot {slot} (asked: {nodes}{why})");
            io::Error::new(io::ErrorKind::NotFound, text)
        })
    }

    /// Returns how many replicas must have a write to this primary before it counts as stored: all that may be elected
    /// in its place, and at least as many as the options say.
    ///
    /// # Errors
    /// By the map it is no primary, or the map is too old, so its replicas are not known.
    pub fn replicas_of(&self, primary: &Addr) -> io::Result<u32> {
        // The map that is read afterwards is this one, or a newer one.
        if self.is_too_old() {
            let why = self.silence().map(|why| format!(" ({why})")).unwrap_or_default();
            return Err(io::Error::other(format!("no node has said recently which replicas {primary} has{why}")));
        }
        let electable = self.map().electable(primary);
        let unknown = || io::Error::other(format!("which replicas {primary} has is not known yet"));
        let electable = electable.ok_or_else(unknown)?;
        Ok(electable.max(self.options.replicas))
    }

    /// Returns the map of this node.
    pub fn map_of(&self, addr: &Addr, context: IoContext<'_>) -> io::Result<SlotMap> {
        let asks = Commands::one(&[b"CLUSTER", b"SHARDS"]);
        self.with(addr, context, |link| {
            let replies = link.ask(&asks, context)?;
            if let Some(error) = replies.get(0).error() {
                return Err(io::Error::other(error));
            }
            SlotMap::read(replies.get(0), addr, self.options.access.tls.is_some())
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error.to_string()))
        })
    }

    /// Returns the time of the last request for the map; `None` while a thread is requesting one.
    fn refreshed(&self) -> Option<MutexGuard<'_, Option<Instant>>> {
        match self.refreshed.try_lock() {
            Ok(refreshed) => Some(refreshed),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Requests a new map, for a write, if the last one is old. If the last one is too old for a write, and another
    /// thread is requesting a map, waits for that thread.
    pub fn refresh_if_old(&self) {
        let refreshed = if self.is_too_old() { Some(self.refreshed.locked()) } else { self.refreshed() };
        let Some(refreshed) = refreshed else { return };
        if self.is_too_old() || refreshed.is_none_or(|at| at.elapsed() >= OLD) {
            self.refresh_with(refreshed, IoContext::BACKGROUND);
        }
    }

    /// Requests a new map, unless this was done a moment ago, another thread is doing it, or a thread waits for a lock
    /// of the caller. A map without slots is ignored.
    pub fn refresh(&self, context: IoContext<'_>) {
        if let Some(refreshed) = self.refreshed() {
            self.refresh_with(refreshed, context);
        }
    }

    fn refresh_with(&self, mut refreshed: MutexGuard<'_, Option<Instant>>, context: IoContext<'_>) {
        if context.is_wanted() || refreshed.is_some_and(|at| at.elapsed() < REFRESH) {
            return;
        }
        let mut known: Vec<Addr> = self.map().nodes().chain(&self.options.nodes).cloned().collect();
        known.sort();
        known.dedup();
        let turn = self.turn.fetch_add(1, Relaxed) % known.len().max(1);
        known.rotate_left(turn);
        let timeout = Duration::from_millis(self.map_timeout_ms.load(Relaxed).into());
        let (mut next, round) = (timeout, Instant::now());
        // The timeouts of silent nodes must not add up: the next round begins with another node.
        for addr in known.iter().take_while(|_| round.elapsed() < MAP_TIMEOUT_MAX && !context.is_wanted()) {
            let begun = Instant::now();
            let map = match self.map_of(addr, context.until(begun + timeout)) {
                Ok(map) => map,
                // This error says nothing about the cluster, and the next thread may request a map at once.
                Err(error) if is_giving_way(&error) => return,
                Err(error) => {
                    if is_late(&error) {
                        next = (timeout * 2).min(MAP_TIMEOUT_MAX);
                    }
                    let why = Some(format!("{addr}: {error}"));
                    *self.silence.locked() = why;
                    continue;
                }
            };
            // This node then counts, even if others were late.
            let least = MAP_TIMEOUT.max(self.node(addr).opening() * 2).min(timeout);
            next = if begun.elapsed() < timeout / 4 { (timeout / 2).max(least) } else { timeout };
            if map.shards().next().is_some() {
                self.forget_all_but(&map);
                *self.map.write().unwrap_or_else(PoisonError::into_inner) = (Arc::new(map), Some(begun));
                *self.silence.locked() = None;
                break;
            }
        }
        self.map_timeout_ms.store(next.as_millis() as u32, Relaxed);
        *refreshed = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Shard;

    fn cluster() -> Cluster {
        let nobody = Addr { host: "127.0.0.1".into(), port: 1 };
        Cluster::new(ClusterOptions { nodes: vec![nobody], access: Access::default(), replicas: 1 })
    }

    #[test]
    fn a_map_that_is_too_old_says_not_how_many_replicas_must_have_a_write() {
        let (cluster, primary) = (cluster(), Addr { host: "127.0.0.1".into(), port: 1 });
        let set = |age: Duration| {
            let shard = Shard { slots: vec![(0, 5)], primary: Some(primary.clone()), electable: 2, ..Shard::default() };
            let map = Arc::new(SlotMap::new(vec![shard]).expect("a map"));
            *cluster.map.write().expect("no panic") = (map, Instant::now().checked_sub(age));
            *cluster.refreshed.lock().expect("no panic") = Some(Instant::now());
            cluster.refresh_if_old();
            cluster.replicas_of(&primary)
        };
        assert_eq!(set(Duration::ZERO).expect("the map is new"), 2);
        set(TOO_OLD).expect_err("it may have more");
        assert_eq!(cluster.map().primary(0), Some(&primary), "pages are read by it all the same");
    }
}
