//! Loss: a page that its slot's owner does not have. Only after everybody who might have it was asked is it lost.
//!
//! Before: `Found::Nothing` for a page that a word names. After: the page after all, or that it is lost, or that nobody
//! can tell now.
//! Threads: any; the calling one waits. Units: nodes.
//! Promise: silence is not loss. A node that cannot be asked, a vote without a majority, a slot that is moving: then
//! nobody can tell, and threads that want the page wait.
//!
//! Why the owner's word is not enough: a primary that was cut off, or stopped, takes itself for the owner still, and
//! has none of what was written to its successor. So a majority of the primaries must name it as the owner; then it is
//! asked again, and all of its replicas are, since one of them may have what a primary that began anew has lost.

use std::io;
use std::time::{Duration, Instant};

use crate::cluster::Cluster;
use crate::map::Shard;
use crate::refusal::Addr;
use crate::resp::Commands;
use crate::slot::slot_of;

/// How long one node may take. It is asked about a single key, and seldom.
const TIMEOUT: Duration = Duration::from_secs(1);
/// How long all of them may. Then nobody can tell, and the reader of the page asks again.
const ALL: Duration = Duration::from_secs(10);

/// What is known of a page.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Somebody has it.
    Found(Vec<u8>),
    /// Nobody has it.
    Lost,
    /// Nobody can tell.
    Unknown(String),
}

/// Look for a key everywhere.
pub fn look(cluster: &Cluster, key: &[u8]) -> Verdict {
    look_for(cluster, key).unwrap_or_else(|error| Verdict::Unknown(error.to_string()))
}

fn look_for(cluster: &Cluster, key: &[u8]) -> io::Result<Verdict> {
    let until = Instant::now() + ALL;
    let shard = elected(cluster, slot_of(key), until)?;
    let owner = shard.primary.iter().map(|addr| (addr, false));
    for (addr, replica) in owner.chain(shard.replicas.iter().map(|addr| (addr, true))) {
        if let Some(value) = ask(cluster, addr, replica, key, until)? {
            return Ok(Verdict::Found(value));
        }
    }
    Ok(Verdict::Lost)
}

/// The shard that a majority of all primaries says has this slot.
fn elected(cluster: &Cluster, slot: u16, until: Instant) -> io::Result<Shard> {
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
            // Any node that another one lists as a replica may have it.
            let mut all = shard.clone();
            let others = said.iter().flat_map(|other| other.replicas.iter().chain(&other.primary));
            for other in others.filter(|other| Some(*other) != shard.primary.as_ref()) {
                if !all.replicas.contains(other) {
                    all.replicas.push(other.clone());
                }
            }
            return Ok(all);
        }
    }
    Err(io::Error::other(format!("no majority of the {voters} primaries says who has slot {slot}")))
}

/// Does this node have it? An error of any kind is no answer.
fn ask(cluster: &Cluster, addr: &Addr, replica: bool, key: &[u8], until: Instant) -> io::Result<Option<Vec<u8>>> {
    let until = until.min(Instant::now() + TIMEOUT);
    let mut commands = Commands::default();
    // On a primary it changes nothing. It is taken back, since others use the connection after us.
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
            return Err(io::Error::other(format!("{addr} says: {error}")));
        }
        let said = replies.get(usize::from(replica));
        match said.bytes() {
            Some(bytes) => Ok(Some(bytes.to_vec())),
            None if said.is_nil() => Ok(None),
            None => Err(io::Error::other(format!("{addr} says something that makes no sense"))),
        }
    })
}
