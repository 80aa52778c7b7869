//! Loss: the owner of a slot does not have a page, or has a damaged value. The page is lost only after every node that
//! might have it was asked.
//!
//! Before: `Found::Nothing` for a page that a word names, or a value that is not its. After: the page was found, is
//! lost, or its state is unknown.
//! Threads: any; the caller waits. Units: nodes.
//! Promise: silence is not loss. If a node cannot be asked, a vote has no majority, a slot is moving, or the cluster is
//! not the one that has the VM's pages (`identity`), the state is unknown, and threads that want the page wait.
//!
//! The owner's reply is not enough: a primary that was cut off or stopped may still consider itself the owner, and has
//! none of the writes to its successor. So a majority of the primaries must name the owner. Then the owner is asked
//! again, and all of its replicas, since a replica may have pages that a restarted primary has lost.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::map::{Shard, SlotMap};
use crate::refusal::{Addr, is_of_another_type};
use crate::resp::Commands;
use crate::slot::slot_of;

/// Longest time that one node may take. It is asked about a single key, and rarely.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time that all nodes together may take. After that the state is unknown, and the reader of the page retries.
const ALL: Duration = Duration::from_secs(10);

/// Result of the search for a page.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// A node has it.
    Found,
    /// Some nodes have a value, and none of these is the page's.
    Damaged,
    /// No node has it.
    Lost,
    /// Its state cannot be determined now; the reason.
    Unknown(String),
}

/// Searches for a key on all nodes that may have it, until `opens` says that a value is the page's. `loses` says, for
/// the map of the nodes that were asked, whether that counts if none has it; else why not.
pub fn verdict(
    cluster: &Cluster,
    key: &[u8],
    opens: &mut dyn FnMut(&[u8]) -> bool,
    loses: &dyn Fn(&Arc<SlotMap>) -> Result<(), String>,
) -> Verdict {
    match ask_all(cluster, key, opens) {
        Ok((Verdict::Lost, map)) => loses(&map).map_or_else(Verdict::Unknown, |()| Verdict::Lost),
        Ok((verdict, _)) => verdict,
        Err(error) => Verdict::Unknown(error.to_string()),
    }
}

fn ask_all(cluster: &Cluster, key: &[u8], opens: &mut dyn FnMut(&[u8]) -> bool) -> io::Result<(Verdict, Arc<SlotMap>)> {
    let until = Instant::now() + ALL;
    let (shard, map) = elected(cluster, slot_of(key), until)?;
    let owner = shard.primary.iter().map(|addr| (addr, false));
    let mut without = Verdict::Lost;
    for (addr, replica) in owner.chain(shard.replicas.iter().map(|addr| (addr, true))) {
        match ask(cluster, addr, replica, key, until)? {
            Some(value) if opens(&value) => return Ok((Verdict::Found, map)),
            Some(_) => without = Verdict::Damaged,
            None => {}
        }
    }
    Ok((without, map))
}

/// Returns the shard that has this slot according to a majority of all primaries, and the map that names these.
fn elected(cluster: &Cluster, slot: u16, until: Instant) -> io::Result<(Shard, Arc<SlotMap>)> {
    cluster.refresh();
    let map = cluster.map();
    let primaries: Vec<&Addr> = map.shards().filter_map(|shard| shard.primary.as_ref()).collect();
    let voters = map.shards().count();
    let said: Vec<Shard> = primaries
        .iter()
        .filter_map(|addr| cluster.map_of(addr, until.min(Instant::now() + TIMEOUT)).ok()?.shard(slot).cloned())
        .collect();
    for shard in &said {
        let votes = said.iter().filter(|other| other.primary.is_some() && other.primary == shard.primary).count();
        if votes * 2 > voters {
            // Any node that another primary lists as a replica may have the page.
            let mut all = shard.clone();
            let others = said.iter().flat_map(|other| other.replicas.iter().chain(&other.primary));
            for other in others.filter(|other| Some(*other) != shard.primary.as_ref()) {
                if !all.replicas.contains(other) {
                    all.replicas.push(other.clone());
                }
            }
            return Ok((all, map));
        }
    }
    Err(io::Error::other(format!("no majority of the {voters} primaries says who has slot {slot}")))
}

/// Reads the key from this node. After an error, the state of the page at this node is unknown.
fn ask(cluster: &Cluster, addr: &Addr, replica: bool, key: &[u8], until: Instant) -> io::Result<Option<Vec<u8>>> {
    let until = until.min(Instant::now() + TIMEOUT);
    let mut commands = Commands::default();
    // On a primary, `READONLY` has no effect. It is undone afterwards, because others use the connection after us.
    if replica {
        commands.add(&[b"READONLY"]);
    }
    commands.add(&[b"GET", key]);
    if replica {
        commands.add(&[b"READWRITE"]);
    }
    cluster.with(addr, until, |link| {
        let replies = link.ask(&commands, until)?;
        if let Some(error) = replies.iter().find_map(|said| said.error()) {
            if is_of_another_type(&error) {
                return Ok(Some(Vec::new()));
            }
            return Err(io::Error::other(format!("{addr} says: {error}")));
        }
        let said = replies.get(usize::from(replica));
        match said.bytes() {
            Some(bytes) => Ok(Some(bytes.to_vec())),
            None if said.is_nil() => Ok(None),
            None => Err(io::Error::other(format!("{addr} sent a malformed reply"))),
        }
    })
}
