//! Loss: the owner of a slot does not have a page, or has a damaged value. The page is lost only after every node that
//! might have it was asked.
//!
//! Before: `Found::Nothing` for a page that a word names, or a value that is not the page's. After: the page was found,
//! is lost, or its state is unknown.
//! Threads: any; the caller waits. Units: nodes.
//! Promise: silence is not loss. If a node cannot be asked, a vote has no majority, a slot is moving, or the cluster is
//! not the one that has the VM's pages (`identity`), the state is unknown, and threads that want the page wait.
//!
//! The owner's reply is not enough: a primary that was cut off or stopped may still consider itself the owner, and has
//! none of the writes to its successor. So a majority of the primaries must name the owner. Then the owner is asked
//! again, and all of its replicas, since a replica may have pages that a restarted primary has lost. All pages of a
//! request share one vote.

use std::collections::{BTreeSet, HashSet};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ballast_store::IoContext;

use crate::cluster::Cluster;
use crate::map::SlotMap;
use crate::refusal::Addr;
use crate::resp::Commands;
use crate::slot::slot_of;
use crate::stream::{gives_way, left};

/// Longest time that one node may take: it is asked for a few keys only.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Longest time that all nodes together may take. After that the state is unknown, and the reader of the page retries.
const ALL: Duration = Duration::from_secs(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Found,
    /// Some nodes have a value, and none of these is the page's.
    Damaged,
    Lost,
    /// The state of the page cannot be determined now; the reason.
    Unknown(String),
}

/// Searches for keys of one slot on all nodes that may have them, until `opens` accepts a value for each; its first
/// argument is the key's index. `loses` decides, from the map that names the nodes, whether a page that none has is
/// lost; else it says why not.
pub fn verdicts(
    cluster: &Cluster,
    keys: &[&[u8]],
    opens: &mut dyn FnMut(usize, &[u8]) -> bool,
    loses: &dyn Fn(&Arc<SlotMap>) -> io::Result<()>,
    context: IoContext<'_>,
) -> Vec<Verdict> {
    let Some(first) = keys.first() else { return Vec::new() };
    let context = context.until(Instant::now() + ALL);
    let mut said = vec![Verdict::Lost; keys.len()];
    let asked = elected(cluster, slot_of(first), context).and_then(|(owner, others, map)| {
        let mut silent = None;
        for node in [(&owner, false)].into_iter().chain(others.iter().map(|addr| (addr, true))) {
            let open: Vec<_> = (0..).zip(keys.iter().copied()).filter(|(at, _)| said[*at] != Verdict::Found).collect();
            if open.is_empty() {
                break;
            }
            let asked = ask(cluster, node, &open, context, &mut |at, value| {
                said[at] = if opens(at, value) { Verdict::Found } else { Verdict::Damaged };
            });
            // The next node may have the page.
            silent = silent.or(asked.err());
        }
        silent.map_or(Ok(map), Err)
    });
    let (open, why): (&[Verdict], String) = match asked {
        Err(error) => (&[Verdict::Lost, Verdict::Damaged], error.to_string()),
        Ok(map) => match said.contains(&Verdict::Lost).then(|| loses(&map)) {
            Some(Err(why)) => (&[Verdict::Lost], why.to_string()),
            _ => return said,
        },
    };
    said.iter_mut()
        .filter(|verdict| open.contains(verdict))
        .for_each(|verdict| *verdict = Verdict::Unknown(why.clone()));
    said
}

/// Returns the node that has this slot according to a majority of all primaries, all other nodes that may have its
/// pages, and the map that names the primaries.
fn elected(cluster: &Cluster, slot: u16, context: IoContext<'_>) -> io::Result<(Addr, Vec<Addr>, Arc<SlotMap>)> {
    cluster.refresh(context);
    let map = cluster.map();
    // A node that the map has in several shards has one vote.
    let primaries: BTreeSet<&Addr> = map.shards().filter_map(|shard| shard.primary.as_ref()).collect();
    let voters = map.shards().count();
    let (mut owners, mut nodes, mut known) = (Vec::new(), Vec::new(), HashSet::new());
    for addr in primaries.into_iter().take_while(|_| !context.is_wanted()) {
        let said = cluster.map_of(addr, context.until(Instant::now() + TIMEOUT));
        let Some(shard) = said.as_ref().ok().and_then(|said| said.shard(slot)) else { continue };
        owners.push(shard.primary.clone());
        // Any node that a primary names may have the page.
        let named = shard.replicas.iter().chain(&shard.primary);
        nodes.extend(named.filter(|node| known.insert((*node).clone())).cloned());
    }
    let votes = |owner: &Addr| owners.iter().flatten().filter(|other| *other == owner).count();
    let Some(owner) = owners.iter().flatten().find(|owner| votes(owner) * 2 > voters).cloned() else {
        return Err(io::Error::other(format!("no majority of the {voters} primaries says who has slot {slot}")));
    };
    nodes.retain(|node| *node != owner);
    Ok((owner, nodes, map))
}

/// Reads keys from this node (`replica`: it is one), and passes on the values with the numbers of their keys. After an
/// error, it is unknown whether the node has the pages.
fn ask(
    cluster: &Cluster,
    (addr, replica): (&Addr, bool),
    some: &[(usize, &[u8])],
    context: IoContext<'_>,
    value: &mut dyn FnMut(usize, &[u8]),
) -> io::Result<()> {
    if context.is_wanted() {
        return Err(gives_way());
    }
    left(context)?;
    let context = context.until(Instant::now() + TIMEOUT);
    let mut commands = Commands::default();
    // `READONLY` has no effect on a primary. It is undone below, because later requests use this connection, too.
    if replica {
        commands.add(&[b"READONLY"]);
    }
    some.iter().for_each(|(_, key)| commands.add(&[b"GET", key]));
    if replica {
        commands.add(&[b"READWRITE"]);
    }
    cluster.with(addr, context, |link| {
        let replies = link.ask(&commands, context)?;
        if let Some(error) = replies.iter().find_map(|said| said.error()) {
            return Err(io::Error::other(format!("{addr} says: {error}")));
        }
        for (number, (at, _)) in some.iter().enumerate() {
            let said = replies.get(number + usize::from(replica));
            match said.bytes() {
                Some(bytes) => value(*at, bytes),
                None if said.is_nil() => {}
                None => return Err(io::Error::other(format!("{addr} sent a malformed reply"))),
            }
        }
        Ok(())
    })
}
