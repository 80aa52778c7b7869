//! Sweep: look at all keys of a pattern, and unlink those that nobody names.
//!
//! Before: an engine died, or a VM ended, or a host. After: what they left takes no room any more.
//! Threads: one at a time for each sweep; it goes in steps, so that it need not be done at once. Units: keys.
//! Promise: only keys that the caller says are garbage are unlinked. A sweep may miss keys of a slot that moves
//! meanwhile, and what a dead process wrote that a stopped server has yet to read: the next one finds them, the one at
//! the VM's end at the latest.

use std::io;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::refusal::Addr;
use crate::request::{self, Failed, Found, Verb};
use crate::resp::Commands;

/// How long one node may take for one step. It looks at [`COUNT`] keys in some 0.3 ms.
const TIMEOUT: Duration = Duration::from_secs(2);
const COUNT: &[u8] = b"1000";

/// A sweep under way.
#[derive(Debug)]
pub struct Scan {
    pattern: Vec<u8>,
    /// Primaries that were not looked at yet.
    todo: Vec<Addr>,
    at: Option<(Addr, u64)>,
}

impl Scan {
    /// All keys that match, on all primaries that there are now.
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

    /// The next keys, some of them perhaps again; `None` if all have been seen.
    ///
    /// # Errors
    /// A node does not answer: begin anew.
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
            read.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a scan's reply makes no sense"))
        })?;
        if next != 0 {
            self.at = Some((addr, next));
        }
        Ok(Some(keys))
    }
}

/// How long a request that writes may take, of how long its node is waited for.
pub fn write_timeout(timeout: Duration) -> Duration {
    (timeout * 10).min(Duration::from_secs(4))
}

/// Unlink these, whatever they are; returns how many there were.
///
/// # Errors
/// A node does not answer. Some may be gone.
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
