//! The slot map: the node of each slot, as a node of the cluster reports it (`CLUSTER SHARDS`).
//!
//! Before: a reply. After: `cluster` asks the right node; `loss` knows all nodes that may have a copy.
//! Threads: any; plain values. Units: slots. Promise: a malformed reply is refused as a whole.

use crate::refusal::{Addr, HOST_MAX};
use crate::resp::{Malformed, Said};
use crate::slot::SLOTS;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shard {
    pub slots: Vec<(u16, u16)>,
    /// Node that takes writes. A shard whose primary has failed has none until a failover.
    pub primary: Option<Addr>,
    /// All other nodes, whether they respond or not.
    pub replicas: Vec<Addr>,
    /// Number of replicas that may become the primary: those that the cluster does not call failed.
    pub electable: u32,
}

/// Limit of nodes, and of shards, in a cluster. The cluster specification advises against more than 1,000.
const NODES_MAX: usize = 2048;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SlotMap {
    shards: Vec<Shard>,
    owner: Vec<Option<u16>>,
}

impl SlotMap {
    /// Builds the map of these shards. Fails if they are too many, or if a slot is out of range or in two ranges.
    pub fn new(shards: Vec<Shard>) -> Result<Self, Malformed> {
        let nodes: usize = shards.iter().map(|shard| shard.replicas.len() + 1).sum();
        if shards.len() > NODES_MAX || nodes > NODES_MAX {
            return Err(Malformed("more nodes than a cluster can have"));
        }
        let mut owner = vec![None; usize::from(SLOTS)];
        for (number, shard) in (0u16..=u16::MAX).zip(&shards) {
            for (first, last) in &shard.slots {
                let range = owner.get_mut(usize::from(*first)..=usize::from(*last));
                let range = range.ok_or(Malformed("slots are no ranges"))?;
                // With no slot in two ranges, there are at most as many ranges as slots.
                if range.iter().any(Option::is_some) {
                    return Err(Malformed("a slot is there twice"));
                }
                range.fill(Some(number));
            }
        }
        Ok(Self { shards, owner })
    }

    /// Reads a node's reply to `CLUSTER SHARDS`.
    pub fn read(reply: Said<'_, '_>, asked: &Addr, tls: bool) -> Result<Self, Malformed> {
        let shards = reply.array().ok_or(Malformed("shards are no list"))?;
        Self::new(shards.map(|shard| read_shard(shard, asked, tls)).collect::<Result<_, _>>()?)
    }

    pub fn shard(&self, slot: u16) -> Option<&Shard> {
        let number = (*self.owner.get(usize::from(slot))?)?;
        self.shards.get(usize::from(number))
    }

    pub fn primary(&self, slot: u16) -> Option<&Addr> {
        self.shard(slot)?.primary.as_ref()
    }

    /// Returns how many nodes may be elected in place of this primary. If the map has it twice, as with the id that it
    /// had before a reset, the larger number counts.
    pub fn electable(&self, primary: &Addr) -> Option<u32> {
        let all = self.shards.iter().filter(|shard| shard.primary.as_ref() == Some(primary));
        all.map(|shard| shard.electable).max()
    }

    pub fn shards(&self) -> impl Iterator<Item = &Shard> {
        self.shards.iter().filter(|shard| !shard.slots.is_empty())
    }

    /// Returns replicas whose shard is unknown.
    pub fn strays(&self) -> impl Iterator<Item = &Addr> {
        let is_stray = |shard: &&Shard| shard.slots.is_empty() && shard.primary.is_none() && shard.electable > 0;
        self.shards.iter().filter(is_stray).flat_map(|shard| &shard.replicas)
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Addr> {
        self.shards.iter().flat_map(|shard| shard.primary.iter().chain(&shard.replicas))
    }

    pub fn uncovered(&self) -> usize {
        self.owner.iter().filter(|owner| owner.is_none()).count()
    }
}

/// Returns the value of a key in a list of keys and values.
fn field<'a, 'r>(list: Said<'a, 'r>, name: &str) -> Option<Said<'a, 'r>> {
    let mut list = list.array()?;
    while let (Some(key), Some(value)) = (list.next(), list.next()) {
        if key.text() == Some(name) {
            return Some(value);
        }
    }
    None
}

fn read_shard(shard: Said<'_, '_>, asked: &Addr, tls: bool) -> Result<Shard, Malformed> {
    let numbers = field(shard, "slots").and_then(Said::array).ok_or(Malformed("a shard has no list of slots"))?;
    let numbers = numbers.map(|number| number.int().and_then(|slot| u16::try_from(slot).ok()).filter(|s| *s < SLOTS));
    let numbers = numbers.collect::<Option<Vec<_>>>().ok_or(Malformed("not a slot number"))?;
    let (ranges, rest) = numbers.as_chunks::<2>();
    if !rest.is_empty() || ranges.iter().any(|[first, last]| first > last) {
        return Err(Malformed("slots are no ranges"));
    }
    let mut found = Shard { slots: ranges.iter().map(|[first, last]| (*first, *last)).collect(), ..Shard::default() };
    for node in field(shard, "nodes").and_then(Said::array).ok_or(Malformed("a shard has no list of nodes"))? {
        let text = |name| field(node, name).and_then(Said::text).filter(|text| !text.is_empty() && *text != "?");
        let port = field(node, if tls { "tls-port" } else { "port" }).and_then(Said::int);
        let port = port.and_then(|port| u16::try_from(port).ok()).ok_or(Malformed("a node has no port"))?;
        // A node that has not met another node yet does not know its own address.
        let host = text("endpoint").or_else(|| text("ip")).unwrap_or(&asked.host);
        if host.len() > HOST_MAX {
            return Err(Malformed("a node's name is too long"));
        }
        let addr = Addr { host: host.into(), port };
        // The servers report `fail`, and their manuals say `failed`.
        let has_failed = text("health").is_some_and(|health| health.starts_with("fail"));
        match text("role") {
            // A failed node is a former primary; it may still have copies.
            Some("master") if !has_failed && found.primary.is_none() => found.primary = Some(addr),
            Some(role) => {
                found.replicas.push(addr);
                found.electable += u32::from(role != "master" && !has_failed);
            }
            None => return Err(Malformed("a node has no role")),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::{Replies, parse};
    use proptest::prelude::*;

    /// A reply as the server writes it: strings as values, numbers as numbers.
    fn reply(nodes: &[(&str, i64, &str, &str)], slots: &[i64]) -> Vec<u8> {
        let bulk = |text: &str| format!("${}\r\n{text}\r\n", text.len());
        let mut text = format!("*1\r\n*4\r\n{}*{}\r\n", bulk("slots"), slots.len());
        slots.iter().for_each(|slot| text += &format!(":{slot}\r\n"));
        text += &format!("{}*{}\r\n", bulk("nodes"), nodes.len());
        for (host, port, role, health) in nodes {
            text += &format!("*8\r\n{}:{port}\r\n{}{}", bulk("port"), bulk("endpoint"), bulk(host));
            text += &(bulk("role") + &bulk(role) + &bulk("health") + &bulk(health));
        }
        text.into_bytes()
    }

    fn read(bytes: &[u8]) -> Result<SlotMap, Malformed> {
        let asked = Addr { host: "asked".into(), port: 1 };
        let Some((reply, _)) = parse(bytes, 0)? else { return Err(Malformed("cut")) };
        SlotMap::read(Replies::new(bytes, vec![reply]).get(0), &asked, false)
    }

    #[test]
    fn slots_and_nodes_are_read() {
        let nodes = [("a", 1, "master", "fail"), ("b", 2, "master", "online"), ("", 3, "replica", "loading")];
        let map = read(&reply(&nodes, &[0, 5, 7, 7])).expect("a map");
        let addr = |host: &str, port| Addr { host: host.into(), port };
        assert_eq!([0, 5, 7].map(|slot| map.primary(slot).cloned()), [(); 3].map(|()| Some(addr("b", 2))));
        assert_eq!((map.primary(6), map.primary(16_383), map.uncovered()), (None, None, 16_384 - 7));
        let shard = map.shard(0).expect("a shard");
        assert_eq!(shard.replicas, [addr("a", 1), addr("asked", 3)], "a failed primary may have copies");
    }

    #[test]
    fn a_replica_that_loads_may_be_elected_and_one_that_failed_or_a_former_primary_may_not() {
        let nodes = [
            ("a", 1, "master", "online"),
            ("b", 2, "replica", "online"),
            ("c", 3, "replica", "loading"),
            ("d", 4, "replica", "fail"),
            ("e", 5, "replica", "failed"),
            ("f", 6, "master", "fail"),
        ];
        let map = read(&reply(&nodes, &[0, 5])).expect("a map");
        let primary = Addr { host: "a".into(), port: 1 };
        assert_eq!((map.electable(&primary), map.shards[0].replicas.len()), (Some(2), 5));
        assert_eq!(map.electable(&Addr { host: "b".into(), port: 2 }), None, "a replica is no primary");
        let former = Shard { primary: Some(primary.clone()), ..Shard::default() };
        let twice = SlotMap::new([vec![former.clone()], map.shards.clone(), vec![former]].concat()).expect("a map");
        assert_eq!(twice.electable(&primary), Some(2), "also if it is there with no slots, too");
        assert_eq!(map.strays().count(), 0);
        let alone = read(&reply(&nodes[1..2], &[])).expect("a map");
        assert_eq!(alone.strays().collect::<Vec<_>>(), [&Addr { host: "b".into(), port: 2 }]);
    }

    #[test]
    fn a_map_of_too_many_shards_nodes_ranges_or_long_names_is_refused() {
        let shard = |slots: &[(u16, u16)], replicas: usize| {
            let addr = Addr { host: "a".into(), port: 1 };
            Shard { slots: slots.to_vec(), replicas: vec![addr; replicas], ..Shard::default() }
        };
        let refused = |shards: Vec<Shard>| SlotMap::new(shards).expect_err("it makes no sense");
        refused(vec![shard(&[], 0); usize::from(u16::MAX) + 2]);
        refused(vec![shard(&[], 0); NODES_MAX + 1]);
        refused(vec![shard(&[], NODES_MAX)]);
        refused(vec![shard(&[(0, SLOTS)], 0)]);
        refused(vec![shard(&[(0, u16::MAX)], 0)]);
        refused(vec![shard(&[(5, 3)], 0)]);
        refused(vec![shard(&[(0, SLOTS - 1); 2], 0)]);
        refused(vec![shard(&[(0, 5)], 0), shard(&[(5, 6)], 0)]);
        let host = "a".repeat(HOST_MAX + 1);
        read(&reply(&[(&host, 1, "master", "online")], &[0, 5])).expect_err("no host has such a name");
        SlotMap::new((0..1000).map(|slot| shard(&[(slot, slot)], 1)).collect()).expect("a large cluster");
    }

    #[test]
    fn a_map_that_makes_no_sense_is_refused() {
        let node = [("a", 1, "master", "online")];
        for bad in [
            reply(&node, &[5, 0]),
            reply(&node, &[0]),
            reply(&node, &[0, 16_384]),
            reply(&node, &[-1, 4]),
            reply(&[("a", 70_000, "master", "online")], &[0, 5]),
            reply(&[("a", 1, "", "online")], &[0, 5]),
            b"+OK\r\n".to_vec(),
            b"*1\r\n:1\r\n".to_vec(),
        ] {
            read(&bad).expect_err(&String::from_utf8_lossy(&bad));
        }
    }

    proptest! {
        #[test]
        fn a_damaged_map_never_panics(at: prop::sample::Index, byte: u8, cut: prop::sample::Index) {
            let mut bytes = reply(&[("a", 1, "master", "online"), ("b", 2, "replica", "online")], &[0, 16_383]);
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = read(&bytes);
            bytes.truncate(cut.index(bytes.len()));
            let _ = read(&bytes);
        }
    }
}
