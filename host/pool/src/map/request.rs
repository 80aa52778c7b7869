//! Requests of a VM, their results, and refusals.
//!
//! Before: a VM is about to start. After: `plan` finds the memory, [`crate::map::Pool::allocate`] hands it out.
//! Units: slices. Promise: a request says for each part of guest memory which node it comes from; there is no default
//! that could put it elsewhere.

use crate::map::unit::{Domain, Extent, GuestIdx, Mode, NodeIdx, VmId};

/// A part of guest memory, and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Its place in guest memory.
    pub guest: GuestIdx,
    /// Number of its slices.
    pub slices: u32,
    /// Its node.
    pub node: NodeIdx,
}

/// A request for memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The VM.
    pub vm: VmId,
    /// The VMs with which it may share a file.
    pub domain: Domain,
    /// Its alignment.
    pub mode: Mode,
    /// All of its memory.
    pub parts: Vec<Part>,
}

/// Parts for all of a VM's memory from one node.
pub fn on_one_node(slices: u32, node: NodeIdx) -> Vec<Part> {
    vec![Part { guest: GuestIdx(0), slices, node }]
}

/// Parts of equal size from these nodes; they differ by a slice if the size is not divisible. Guest memory is divided
/// in order, so that each node has one piece of it.
pub fn balanced(slices: u32, nodes: &[NodeIdx]) -> Vec<Part> {
    let count = nodes.len().max(1) as u32;
    let share = |at: u32| slices / count + u32::from(at < slices % count);
    split(&(0..).zip(nodes).map(|(at, node)| (*node, share(at))).collect::<Vec<_>>())
}

/// Parts of these sizes, in the order of guest memory.
pub fn split(shares: &[(NodeIdx, u32)]) -> Vec<Part> {
    let parts = shares.iter().scan(0, |start, (node, slices)| {
        let guest = GuestIdx(*start);
        *start += slices;
        Some(Part { guest, slices: *slices, node: *node })
    });
    parts.filter(|part| part.slices > 0).collect()
}

/// Memory of a VM that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its place in guest memory.
    pub guest: GuestIdx,
    /// Its place in the pool.
    pub extent: Extent,
}

/// Memory that a VM got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Grant {
    /// In the order of guest memory. All of it is zero.
    pub segments: Vec<Segment>,
}

/// Why a request was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The request is invalid. Caused by the VM's configuration.
    #[error("Taking memory for VM {}: {why}", vm.0)]
    Request {
        /// The VM.
        vm: VmId,
        /// What is wrong.
        why: String,
    },
    /// There is too little memory.
    #[error(
        "Taking memory for VM {} from node {numa}: it wants {wanted} slices, and {ready} are ready for it \
         ({unzeroed} are to be zeroed, {fenced} are in files of other trust domains)", vm.0
    )]
    NoRoom {
        /// The VM.
        vm: VmId,
        /// Number of the node on the host.
        numa: u32,
        /// Slices requested there.
        wanted: u32,
        /// Slices available.
        ready: u32,
        /// Slices available after zeroing.
        unzeroed: u32,
        /// Slices available to other trust domains only.
        fenced: u32,
    },
    /// All VM slots are used.
    #[error("Taking memory for VM {}: the pool has room for {most} VMs", vm.0)]
    TooManyVms {
        /// The VM.
        vm: VmId,
        /// Number of VM slots.
        most: u32,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_balanced_request_has_all_and_nodes_differ_by_a_slice(
            slices in 1u32..20_000, nodes in 1u8..9,
        ) {
            let nodes: Vec<NodeIdx> = (0..nodes).map(NodeIdx).collect();
            let parts = balanced(slices, &nodes);
            let of = |node: &NodeIdx| parts.iter().filter(|p| p.node == *node).map(|p| p.slices).sum::<u32>();
            let shares: Vec<u32> = nodes.iter().map(of).collect();
            prop_assert_eq!(shares.iter().sum::<u32>(), slices);
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            prop_assert!(parts.windows(2).all(|two| two[0].guest.0 + two[0].slices == two[1].guest.0));
        }
    }
}
