//! Requests of a VM, their results, and refusals.
//!
//! Before: a VM is about to start. After: `plan` finds the memory, [`crate::map::Pool::allocate`] hands it out.
//! Units: slices. Promise: a request says for each part of guest memory which node it comes from; there is no default
//! that could put it elsewhere.

use crate::map::unit::{Domain, Extent, GuestIdx, Mode, NodeIdx, VmId};

/// A part of guest memory, and its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Where the guest has it.
    pub guest: GuestIdx,
    /// How much.
    pub slices: u32,
    /// Where the pool has it.
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

/// All of a VM's memory from one node.
pub fn on_one_node(ranges: &[(GuestIdx, u32)], node: NodeIdx) -> Vec<Part> {
    ranges.iter().map(|(guest, slices)| Part { guest: *guest, slices: *slices, node }).collect()
}

/// As much from each of these nodes; the parts differ by a slice if the size is not divisible. Guest memory is divided
/// in order, so that each node has one piece of it, or as few as its holes allow.
pub fn balanced(ranges: &[(GuestIdx, u32)], nodes: &[NodeIdx]) -> Vec<Part> {
    let total: u64 = ranges.iter().map(|(_, slices)| u64::from(*slices)).sum();
    let count = nodes.len().max(1) as u64;
    let share = |at: u64| total / count + u64::from(at < total % count);
    let shares: Vec<(NodeIdx, u64)> = (0..).zip(nodes).map(|(at, node)| (*node, share(at))).collect();
    split(ranges, &shares)
}

/// This much from each node, in the order of guest memory. Memory beyond the sum is in no part, and parts beyond the
/// memory are left out: the caller compares the sums.
pub fn split(ranges: &[(GuestIdx, u32)], shares: &[(NodeIdx, u64)]) -> Vec<Part> {
    let mut parts = Vec::new();
    let mut shares = shares.iter().copied().filter(|(_, slices)| *slices > 0);
    let mut now = shares.next();
    for (guest, slices) in ranges {
        let mut done = 0;
        while let Some((node, left)) = now.filter(|_| done < *slices) {
            let take = u64::from(slices - done).min(left) as u32;
            parts.push(Part { guest: GuestIdx(guest.0 + done), slices: take, node });
            done += take;
            now = if left > u64::from(take) { Some((node, left - u64::from(take))) } else { shares.next() };
        }
    }
    parts
}

/// Memory of a VM that lies in one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where the guest has it.
    pub guest: GuestIdx,
    /// Where the pool has it.
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

    fn part(guest: u32, slices: u32, node: u8) -> Part {
        Part { guest: GuestIdx(guest), slices, node: NodeIdx(node) }
    }

    #[test]
    fn a_guest_with_a_hole_is_divided_evenly_and_in_order() {
        // 3 GiB below the hole, 1 GiB above it, on two nodes.
        let ranges = [(GuestIdx(0), 1536), (GuestIdx(2048), 512)];
        let two = [NodeIdx(0), NodeIdx(1)];
        assert_eq!(balanced(&ranges, &two), [part(0, 1024, 0), part(1024, 512, 1), part(2048, 512, 1)]);
        assert_eq!(on_one_node(&ranges, NodeIdx(1)), [part(0, 1536, 1), part(2048, 512, 1)]);
        let split = split(&ranges, &[(NodeIdx(1), 100), (NodeIdx(0), 1948)]);
        assert_eq!(split, [part(0, 100, 1), part(100, 1436, 0), part(2048, 512, 0)]);
    }

    proptest! {
        #[test]
        fn a_balanced_request_has_all_and_nodes_differ_by_a_slice(
            lens in proptest::collection::vec(1u32..5000, 1..4), nodes in 1u8..9,
        ) {
            let mut at = 0;
            let ranges: Vec<_> = lens.iter().map(|len| { at += len + 7; (GuestIdx(at - len), *len) }).collect();
            let nodes: Vec<NodeIdx> = (0..nodes).map(NodeIdx).collect();
            let parts = balanced(&ranges, &nodes);
            let of = |node: &NodeIdx| parts.iter().filter(|p| p.node == *node).map(|p| p.slices).sum::<u32>();
            let shares: Vec<u32> = nodes.iter().map(of).collect();
            prop_assert_eq!(shares.iter().sum::<u32>(), lens.iter().sum::<u32>());
            prop_assert!(shares.iter().max().unwrap() - shares.iter().min().unwrap() <= 1);
            prop_assert!(parts.windows(2).all(|two| two[0].guest.0 + two[0].slices <= two[1].guest.0));
        }
    }
}
