//! Sweep: scans all keys that match a pattern, and unlinks those that no word names.
//!
//! Before: an engine, a VM or a host ended. After: the cluster has removed the pages that it left. Threads: one at a
//! time for each sweep; it runs in steps. Units: keys. Promise: only keys that the caller declares garbage are
//! unlinked. A step that fails is repeated after those of other nodes, and no other step is: a sweep ends even if many
//! steps fail. It may miss keys of a slot that moves meanwhile or of a server that restarts, and writes of a dead
//! process that a stopped server has not read yet. The next sweep finds them, at the latest the one at the VM's end.

use std::collections::{HashSet, VecDeque};
use std::io;
use std::time::{Duration, Instant};

use ballast_store::IoContext;

use crate::cluster::Cluster;
use crate::refusal::Addr;
use crate::request::{self, Found, Verb};
use crate::resp::Commands;

/// Longest time that one node may take for one step. It scans [`COUNT`] keys in about 0.3 ms.
const TIMEOUT: Duration = Duration::from_secs(2);
const COUNT: &[u8] = b"1000";

#[derive(Debug)]
pub struct Scan {
    pattern: Vec<u8>,
    /// Primaries with keys that were not scanned yet, and the cursor of each.
    todo: VecDeque<(Addr, u64)>,
    /// All primaries that were ever in `todo`.
    known: HashSet<Addr>,
    /// The node and the cursor of the last step.
    last: Option<(Addr, u64)>,
}

impl Scan {
    /// A sweep of all keys that match, on all primaries. It sends nothing.
    pub fn new(pattern: Vec<u8>) -> Self {
        Self { pattern, todo: VecDeque::new(), known: HashSet::new(), last: None }
    }

    /// Adds nodes that are primaries now, and drops those that no longer are.
    fn follow(&mut self, cluster: &Cluster) -> io::Result<()> {
        if self.known.is_empty() {
            cluster.refresh(IoContext::BACKGROUND);
        }
        let map = cluster.map();
        let primaries: HashSet<&Addr> = map.shards().filter_map(|shard| shard.primary.as_ref()).collect();
        self.todo.retain(|(addr, _)| primaries.contains(addr));
        self.known.retain(|addr| primaries.contains(addr));
        for addr in primaries.iter().copied() {
            if !self.known.contains(addr) {
                self.todo.push_back((addr.clone(), 0));
                self.known.insert(addr.clone());
            }
        }
        if self.todo.is_empty() && (primaries.len() < map.shards().count() || primaries.is_empty()) {
            cluster.refresh(IoContext::BACKGROUND);
            return Err(io::Error::other("a shard of the cluster has no primary now"));
        }
        Ok(())
    }

    /// Returns the next keys, possibly some of them again; `None` if all were scanned. If a node does not respond, this
    /// fails, and the next step is at another node, if there is one.
    pub fn step(&mut self, cluster: &Cluster) -> io::Result<Option<Vec<Vec<u8>>>> {
        self.follow(cluster)?;
        let Some((addr, cursor)) = self.todo.pop_front() else { return Ok(None) };
        let text = cursor.to_string();
        let words = [b"SCAN", text.as_bytes(), b"MATCH", &self.pattern, b"COUNT", COUNT];
        let asks = Commands::one(&words);
        let context = IoContext::BACKGROUND.until(Instant::now() + TIMEOUT);
        let scanned = cluster.with(&addr, context, |link| {
            let replies = link.ask(&asks, context)?;
            if let Some(error) = replies.get(0).error() {
                return Err(io::Error::other(error));
            }
            let mut said = replies.get(0).array().into_iter().flatten();
            let next = said.next().and_then(|next| next.text()?.parse::<u64>().ok());
            let keys = said.next().and_then(|keys| keys.array()?.map(|key| Some(key.bytes()?.to_vec())).collect());
            let read: Option<(u64, Vec<Vec<u8>>)> = next.zip(keys);
            read.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a scan's reply is malformed"))
        });
        match scanned {
            Ok((next, keys)) => {
                if next != 0 {
                    self.todo.push_front((addr.clone(), next));
                }
                self.last = Some((addr, cursor));
                Ok(Some(keys))
            }
            Err(error) => {
                self.todo.push_back((addr, cursor));
                // The node may not be a primary any more.
                cluster.refresh(IoContext::BACKGROUND);
                Err(error)
            }
        }
    }

    /// The keys of the last step could not be unlinked: a later step returns them again.
    pub fn again(&mut self) {
        let Some((addr, cursor)) = self.last.take() else { return };
        self.todo.retain(|(other, _)| *other != addr);
        self.todo.push_back((addr, cursor));
    }
}

/// Unlinks these keys without a check. Returns how many existed. After an error some of the keys may be unlinked.
pub fn unlink(cluster: &Cluster, mut keys: Vec<Vec<u8>>) -> io::Result<u64> {
    let tag_end = |key: &[u8]| key.iter().position(|byte| *byte == b'}').map_or(key.len(), |at| at + 1);
    keys.sort();
    let mut gone = 0;
    for chunk in keys.chunk_by(|a, b| a[..tag_end(a)] == b[..tag_end(b)]) {
        let mut count = |_: usize, found: Found<'_>| {
            if let Found::Done(count) = found {
                gone += count;
            }
        };
        let asked = request::run(cluster, Verb::Unlink, chunk, &mut count, IoContext::BACKGROUND);
        asked.map_err(|failed| io::Error::other(failed.why))?;
    }
    Ok(gone)
}
