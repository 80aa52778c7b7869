//! Sweep: scans all keys that match a pattern, and unlinks those that no word names.
//!
//! Before: an engine, a VM or a host ended. After: the cluster has removed the pages that it left.
//! Threads: one at a time for each sweep; it runs in steps, so that it need not be done at once. Units: keys.
//! Promise: only keys that the caller declares garbage are unlinked. A sweep may miss keys of a slot that moves
//! meanwhile, and writes of a dead process that a stopped server has not read yet. The next sweep finds them, at the
//! latest the one at the VM's end.

use std::io;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::refusal::Addr;
use crate::request::{self, Failed, Found, Verb};
use crate::resp::Commands;

/// Longest time that one node may take for one step. It scans [`COUNT`] keys in about 0.3 ms.
const TIMEOUT: Duration = Duration::from_secs(2);
const COUNT: &[u8] = b"1000";

/// A sweep under way.
#[derive(Debug)]
pub struct Scan {
    pattern: Vec<u8>,
    /// Primaries that were not scanned yet.
    todo: Vec<Addr>,
    at: Option<(Addr, u64)>,
}

impl Scan {
    /// Starts a sweep of all keys that match, on all current primaries.
    ///
    /// # Errors
    /// The cluster cannot be reached.
    pub fn begin(cluster: &Cluster, pattern: Vec<u8>) -> io::Result<Self> {
        cluster.refresh();
        let map = cluster.map();
        let todo: Vec<Addr> = map.shards().filter_map(|shard| shard.primary.clone()).collect();
        if todo.len() < map.shards().count() || todo.is_empty() {
            return Err(io::Error::other("a shard of the cluster has no primary now"));
        }
        Ok(Self { pattern, todo, at: None })
    }

    /// Returns the next keys, possibly some of them again; `None` if all were scanned.
    ///
    /// # Errors
    /// A node does not respond: start a new sweep.
    pub fn step(&mut self, cluster: &Cluster) -> io::Result<Option<Vec<Vec<u8>>>> {
        let Some((addr, cursor)) = self.at.take().or_else(|| Some((self.todo.pop()?, 0))) else { return Ok(None) };
        let cursor = cursor.to_string();
        let words = [b"SCAN", cursor.as_bytes(), b"MATCH", &self.pattern, b"COUNT", COUNT];
        let asks = Commands::one(&words);
        let until = Instant::now() + TIMEOUT;
        let (next, keys) = cluster.with(&addr, until, |link| {
            let replies = link.ask(&asks, until)?;
            if let Some(error) = replies.get(0).error() {
                return Err(io::Error::other(error));
            }
            let mut said = replies.get(0).array().into_iter().flatten();
            let next = said.next().and_then(|next| next.text()?.parse::<u64>().ok());
            let keys = said.next().and_then(|keys| keys.array()?.map(|key| Some(key.bytes()?.to_vec())).collect());
            let read: Option<(u64, Vec<Vec<u8>>)> = next.zip(keys);
            read.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a scan's reply is malformed"))
        })?;
        if next != 0 {
            self.at = Some((addr, next));
        }
        Ok(Some(keys))
    }
}

/// Returns the timeout of a request that writes, from the timeout of its node.
pub fn write_timeout(timeout: Duration) -> Duration {
    (timeout * 10).min(Duration::from_secs(4))
}

/// Unlinks these keys without a check. Returns how many existed.
///
/// # Errors
/// A node does not respond. Some of the keys may be unlinked.
pub fn unlink(cluster: &Cluster, mut keys: Vec<Vec<u8>>) -> Result<u64, Failed> {
    let tag_end = |key: &[u8]| key.iter().position(|byte| *byte == b'}').map_or(key.len(), |at| at + 1);
    keys.sort();
    let mut gone = 0;
    for chunk in keys.chunk_by(|a, b| a[..tag_end(a)] == b[..tag_end(b)]) {
        request::run(cluster, Verb::Unlink, chunk, write_timeout, &mut |_, found| {
            if let Found::Done(count) = found {
                gone += count;
            }
        })?;
    }
    Ok(gone)
}
