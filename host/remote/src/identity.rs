//! Identity: tells whether the cluster in the settings is the one that has a VM's pages. Another, empty cluster has no
//! page of any VM either, and its nodes agree on that.
//!
//! Before: a VM is about to put a page, or no node has a page that a word names. After: the VM's state file names the
//! cluster before the first page is there; and only that cluster can lose a page.
//! Threads: any; the caller waits. Units: an identity is a random number other than zero.
//! Promise: nothing here removes or replaces a key. A cluster is asked by one map of its slots, so two clusters are
//! never taken for one.
//!
//! An identity is under 16 keys spread over the slots, so it outlives any shard. One key that has it is enough. The
//! first engine that finds none of them makes the identity; engines add keys that are missing (`mend`).
//!
//! | The VM keeps | The cluster says | Nobody has a page: | A put: |
//! |---|---|---|---|
//! | X | X | it is lost | goes on |
//! | X | only others, or nothing, under all keys | unknown, and an event | refused |
//! | X | not X, and some keys cannot be asked for | unknown | refused |
//! | nothing, and words name pages | any | unknown | keeps what the cluster says, goes on |
//! | nothing, and no word names one | Y | it is nobody's: absent | keeps Y, goes on |
//! | the same | nothing, under all keys | absent | makes Y, keeps it, goes on |
//!
//! A cluster that was emptied looks like another one. Only operators know, and say so by giving it the identity again.

use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use ballast_store::IoContext;
use ballast_sys::lock::Lock;

use crate::cluster::Cluster;
use crate::map::SlotMap;
use crate::name;
use crate::nodes::Kind;
use crate::refusal::Addr;
use crate::resp::Commands;
use crate::seal;
use crate::slot::slot_of;
use crate::stream::gives_way;

const KEYS: usize = 16;
/// Longest time that one node may take, and all of them together.
const TIMEOUT: Duration = Duration::from_secs(1);
const ALL: Duration = Duration::from_secs(5);
/// As long as the map of the slots is the same, a put relies on the last answer for this time.
const FRESH: Duration = Duration::from_secs(1);

/// Storage, for all engines of a VM, of the identity of the cluster that has the VM's pages.
pub trait Kept: fmt::Debug + Send + Sync {
    /// Returns the kept identity, or zero.
    fn get(&self) -> u64;
    /// Keeps this identity, unless one is kept.
    fn keep(&self, identity: u64);
    /// Deletes the kept identity: no page of the VM is in any cluster.
    fn forget(&self);
}

/// For a store that outlives no process, as in tests.
impl Kept for Arc<AtomicU64> {
    fn get(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn keep(&self, identity: u64) {
        // An identity that is kept stays.
        let _ = self.compare_exchange(0, identity, Ordering::AcqRel, Ordering::Acquire);
    }

    fn forget(&self) {
        self.store(0, Ordering::Release);
    }
}

/// Tells operators a sentence.
pub type Tell = Box<dyn Fn(String) + Send + Sync>;

/// The cluster that has, or will have, the pages of one VM.
pub(crate) struct Home {
    kept: Box<dyn Kept>,
    tell: Option<Tell>,
    has_pages: AtomicBool,
    /// The sentence that operators were told, as long as it is true.
    elsewhere: Mutex<Option<String>>,
}

impl fmt::Debug for Home {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Home({:x})", self.kept.get())
    }
}

impl Home {
    pub fn new(kept: Box<dyn Kept>, tell: Option<Tell>) -> Self {
        Self { kept, tell, has_pages: AtomicBool::new(false), elsewhere: Mutex::default() }
    }

    /// Returns whether it is known which cluster has pages of the VM.
    pub fn is_kept(&self) -> bool {
        self.kept.get() != 0
    }

    /// Notes that words name pages of the VM, or may do so.
    pub fn has_pages(&self) {
        self.has_pages.store(true, Ordering::Release);
    }

    /// Notes that no cluster has a page of the VM: all words are known, none names one, and no other engine puts any.
    pub fn has_no_pages(&self) {
        self.kept.forget();
        self.has_pages.store(false, Ordering::Release);
    }

    /// Returns what operators were told, if this is not the cluster of the VM.
    pub fn elsewhere(&self) -> Option<String> {
        self.elsewhere.locked().clone()
    }

    /// Checks that this is the cluster to which the next page may go.
    ///
    /// # Errors
    /// It is not, or that is not known; the reason.
    pub fn takes(&self, cluster: &Cluster) -> io::Result<()> {
        let (context, map) = (IoContext::BACKGROUND, with_nodes(cluster)?);
        let kept = self.kept.get();
        if kept != 0 && cluster.was_seen(kept, &map, FRESH) {
            return Ok(());
        }
        self.ask(cluster, &map, context).inspect_err(|_| cluster.refresh(context))
    }

    /// Checks whether a page is lost if no node of this map has it.
    ///
    /// # Errors
    /// It is not lost, or that is not known; the reason.
    pub fn loses(&self, cluster: &Cluster, map: &Arc<SlotMap>, context: IoContext<'_>) -> io::Result<()> {
        if self.is_kept() {
            return self.ask(cluster, map, context);
        }
        // Each put keeps the identity first, so the state file was damaged: nothing may count as lost.
        match self.has_pages.load(Ordering::Acquire) {
            true => Err(io::Error::other("it is not kept which cluster has the VM's pages")),
            false => Ok(()),
        }
    }

    fn ask(&self, cluster: &Cluster, map: &Arc<SlotMap>, context: IoContext<'_>) -> io::Result<()> {
        let context = context.until(Instant::now() + ALL);
        let mut kept = self.kept.get();
        let said = read(cluster, map, kept, context);
        if kept == 0 {
            let here = said.most().map_or_else(|| make(cluster, map, &said, context), Ok)?;
            self.kept.keep(here);
            // Another engine of the VM may have kept an identity first.
            kept = self.kept.get();
            if kept == here {
                cluster.saw(kept, map);
                return Ok(());
            }
        }
        if said.has(kept) {
            cluster.saw(kept, map);
            *self.elsewhere.locked() = None;
            return Ok(());
        }
        if let Some(why) = said.silent {
            let why = format!("it is not known whether this cluster has the VM's pages: {why}");
            return Err(io::Error::other(why));
        }
        cluster.saw_another();
        Err(io::Error::other(self.not_here(kept, said.most())))
    }

    /// Tells that this is not the cluster of the VM.
    fn not_here(&self, kept: u64, here: Option<u64>) -> String {
        let here = here.map_or_else(|| "none".into(), |here| format!("{here:016x}"));
        self.say(format!(
            "its pages are in the cluster {kept:016x}, and the one in [remote] is another ({here}), or was emptied: \
             they wait, and no more go there. If it is another one, put the right nodes back within a day. If it was \
             emptied, SET {} {kept:016x} there says so, and its pages are lost",
            String::from_utf8_lossy(&name::identity(0))
        ))
    }

    /// Tells operators, once, that the cluster does not have the VM's pages.
    fn say(&self, text: String) -> String {
        let before = self.elsewhere.locked().replace(text.clone());
        if let Some(tell) = self.tell.as_ref().filter(|_| before.as_ref() != Some(&text)) {
            tell(text.clone());
        }
        text
    }
}

fn with_nodes(cluster: &Cluster) -> io::Result<Arc<SlotMap>> {
    if cluster.map().shards().next().is_none() {
        cluster.owner(slot_of(&name::identity(0)), IoContext::BACKGROUND)?;
    }
    Ok(cluster.map())
}

/// What the nodes returned for the keys of the identity.
#[derive(Debug, Default)]
struct Said {
    /// Number of the key, and the identity under it.
    found: Vec<(usize, u64)>,
    missing: Vec<usize>,
    /// The reason if some keys could not be asked for.
    silent: Option<String>,
}

impl Said {
    fn has(&self, identity: u64) -> bool {
        self.found.iter().any(|(_, here)| *here == identity)
    }

    fn most(&self) -> Option<u64> {
        let count = |identity| self.found.iter().filter(|(_, here)| *here == identity).count();
        self.found.iter().map(|(_, here)| *here).max_by_key(|here| (count(*here), *here))
    }
}

/// Returns the numbers of the keys by their nodes, with slow nodes at the end.
fn by_node(cluster: &Cluster, map: &SlotMap) -> Vec<(Option<Addr>, Vec<usize>)> {
    let mut nodes: Vec<(Option<Addr>, Vec<usize>)> = Vec::new();
    for at in 0..KEYS {
        let addr = map.primary(slot_of(&name::identity(at))).cloned();
        match nodes.iter_mut().find(|(node, _)| *node == addr) {
            Some((_, keys)) => keys.push(at),
            None => nodes.push((addr, vec![at])),
        }
    }
    let timeout =
        |node: &Option<Addr>| node.as_ref().map_or(Duration::MAX, |addr| cluster.node(addr).timeout(Kind::Other));
    nodes.sort_by_key(|(node, _)| timeout(node));
    nodes
}

/// Asks node by node, until one returns `wanted`.
fn read(cluster: &Cluster, map: &SlotMap, wanted: u64, context: IoContext<'_>) -> Said {
    let mut said = Said::default();
    for (addr, keys) in by_node(cluster, map) {
        let Some(addr) = addr else {
            said.silent = Some("some slots have no node".into());
            continue;
        };
        if context.is_wanted() {
            said.silent = Some(gives_way().to_string());
            break;
        }
        let context = context.until(Instant::now() + TIMEOUT);
        let mut asks = Commands::default();
        keys.iter().for_each(|at| asks.add(&[b"GET", &name::identity(*at)]));
        let asked = cluster.with(&addr, context, |link| {
            let replies = link.ask(&asks, context)?;
            for (number, at) in keys.iter().enumerate() {
                let reply = replies.get(number);
                match reply.text().and_then(parse) {
                    Some(identity) => said.found.push((*at, identity)),
                    None if reply.is_nil() => said.missing.push(*at),
                    None => {
                        let why = reply.error().unwrap_or_else(|| "its identity makes no sense".into());
                        said.silent = Some(format!("{addr}: {why}"));
                    }
                }
            }
            Ok(())
        });
        if let Err(error) = asked {
            said.silent = Some(format!("{addr}: {error}"));
        }
        if said.has(wanted) {
            break;
        }
    }
    said
}

fn parse(text: &str) -> Option<u64> {
    let is_it = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    u64::from_str_radix(text, 16).ok().filter(|identity| is_it && *identity != 0)
}

/// Gives an identity to a cluster that was asked for all keys and has none of them.
fn make(cluster: &Cluster, map: &SlotMap, said: &Said, context: IoContext<'_>) -> io::Result<u64> {
    if let Some(why) = &said.silent {
        return Err(io::Error::other(format!("the cluster's identity is not known: {why}")));
    }
    let random = seal::new_key()?;
    let identity = random.as_chunks::<8>().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).find(|number| *number != 0);
    let identity = identity.ok_or_else(|| io::Error::other("the kernel has no random numbers"))?;
    // Engines may do this at the same time: the identity of the engine that sets the first key counts.
    let here = set(cluster, map, 0, identity, context)?;
    // `mend` sets the keys that cannot be set now.
    (1..KEYS).take_while(|_| !context.is_wanted()).for_each(|at| drop(set(cluster, map, at, here, context)));
    Ok(here)
}

/// Sets a key that is missing. Returns the identity that is there then.
fn set(cluster: &Cluster, map: &SlotMap, at: usize, identity: u64, context: IoContext<'_>) -> io::Result<u64> {
    let key = name::identity(at);
    let addr = map.primary(slot_of(&key)).ok_or_else(|| io::Error::other("some slots have no node"))?;
    let context = context.until(Instant::now() + TIMEOUT);
    let mut asks = Commands::one(&[b"SET", &key, format!("{identity:016x}").as_bytes(), b"NX"]);
    asks.add(&[b"GET", &key]);
    let asked = cluster.with(addr, context, |link| {
        let replies = link.ask(&asks, context)?;
        let there = replies.get(1).text().and_then(parse);
        there.ok_or_else(|| io::Error::other(replies.get(0).error().unwrap_or_default()))
    });
    asked.map_err(|error| io::Error::other(format!("the cluster's identity cannot be set: {addr}: {error}")))
}

/// Adds keys of the cluster's identity that are missing, if every key can be asked for and one is there.
pub fn mend(cluster: &Cluster) {
    let (map, context) = (cluster.map(), IoContext::BACKGROUND.until(Instant::now() + ALL));
    let said = read(cluster, &map, 0, context);
    if let (Some(identity), None) = (said.most(), &said.silent) {
        said.missing.iter().for_each(|at| drop(set(cluster, &map, *at, identity, context)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_spread_over_the_slots_and_a_value_that_is_no_identity_is_none() {
        let mut quarters = [0; 4];
        (0..KEYS).for_each(|at| quarters[usize::from(slot_of(&name::identity(at)) / 4096)] += 1);
        assert!(quarters.iter().all(|keys| *keys >= 3), "{quarters:?}");
        assert_eq!(parse("00000000000000ff"), Some(255));
        for none in ["0000000000000000", "ff", "+0000000000000ff", "00000000000000fg", ""] {
            assert_eq!(parse(none), None, "{none}");
        }
    }
}
