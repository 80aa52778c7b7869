//! NUMA nodes of a guest, in the messages.
//!
//! Before: an agent has counted the pages of its guest's nodes. After: the host has the counts, by number.
//! Units: pages of 4 KiB.
//! Promise: the nodes of a message have different numbers, all below [`NODES_END`]. The host keeps state per number
//! (balloon, metrics), so that state is bounded over all messages of a guest.

use crate::bytes::{Reader, Refused, Writer};

/// Most nodes of a guest in a message.
pub const MAX_NODES: usize = 16;
/// Numbers of nodes end here: the most that Linux has (`MAX_NUMNODES`).
pub const NODES_END: u32 = 1024;
const NODE_BYTES: usize = 28;

/// A NUMA node of the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub node: u32,
    /// Its memory.
    pub pages: u64,
    /// Pages of it that are free in the kernel's allocator.
    pub free: u64,
    /// Pages of it that the agent holds.
    pub ballooned: u64,
}

/// Writes the first [`MAX_NODES`] of these.
pub(crate) fn put(body: &mut Writer, nodes: &[Node]) {
    body.list(&nodes[..nodes.len().min(MAX_NODES)], |body, node| {
        body.u32(node.node);
        body.u64(node.pages);
        body.u64(node.free);
        body.u64(node.ballooned);
    });
}

pub(crate) fn get(body: &mut Reader<'_>) -> Result<Vec<Node>, Refused> {
    let nodes = body.list(MAX_NODES, NODE_BYTES, |body| {
        Ok(Node { node: body.u32()?, pages: body.u64()?, free: body.u64()?, ballooned: body.u64()? })
    })?;
    let is_valid =
        |at: usize| nodes[at].node < NODES_END && nodes[..at].iter().all(|other| other.node != nodes[at].node);
    if (0..nodes.len()).all(is_valid) { Ok(nodes) } else { Err(Refused) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn through(numbers: &[u32]) -> Option<usize> {
        let node = |node: &u32| Node { node: *node, ..Node::default() };
        let (nodes, mut body): (Vec<Node>, _) = (numbers.iter().map(node).collect(), Writer::default());
        put(&mut body, &nodes);
        get(&mut Reader::new(&body.0, false)).ok().map(|nodes| nodes.len())
    }

    #[test]
    fn nodes_that_linux_cannot_have_or_that_are_named_twice_are_refused() {
        assert_eq!(through(&[0, 1, NODES_END - 1]), Some(3));
        assert_eq!(through(&[1, 0]), Some(2));
        for numbers in [&[NODES_END][..], &[0, u32::MAX], &[3, 0, 3]] {
            assert_eq!(through(numbers), None, "{numbers:?}");
        }
    }
}
