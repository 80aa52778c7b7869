//! The balloon: how much free memory of a guest its agent should hold, if the VM may have less than its size.
//!
//! Before: a plan gives a VM less than its size, and its guest's agent reports free memory. After: the agent holds free
//! memory, of the slowest node first. Paging would evict that memory, too, but with a copy, and restore it when the
//! guest allocates it; memory that an agent holds is unallocated zeros. Units: bytes.
//! Promise: a pure function; memory that a guest uses, also for page cache, is never requested. A guest with little
//! free memory gets some back.

/// The guest keeps 1/N of its memory free, and at least this much.
const SPARE_PART: u64 = 16;
const SPARE_LEAST: u64 = 64 << 20;
/// Changes below 1/N of the guest's memory are not worth a message.
const STEP_PART: u64 = 64;

/// A node of a guest, as its agent reports it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestNode {
    /// Its number.
    pub node: u32,
    /// Its memory.
    pub size_bytes: u64,
    /// Memory that is free in the guest's kernel.
    pub free_bytes: u64,
    /// Memory that the agent holds.
    pub held_bytes: u64,
}

/// How much the agent should hold of each node. The VM has `used_bytes` in memory and in stores, without zeros, and may
/// have `may_have_bytes` in memory (`None`: all). A node without a change is left out.
pub fn balloon(used_bytes: u64, may_have_bytes: Option<u64>, nodes: &[GuestNode]) -> Vec<(u32, u64)> {
    let sum = |of: fn(&GuestNode) -> u64| nodes.iter().map(of).fold(0, u64::saturating_add);
    let (total, free, held) = (sum(|node| node.size_bytes), sum(|node| node.free_bytes), sum(|node| node.held_bytes));
    // Without the held memory, the guest would use that much more.
    let mut excess = may_have_bytes.map_or(0, |may| used_bytes.saturating_add(held).saturating_sub(may));
    let spare = (total / SPARE_PART).max(SPARE_LEAST);
    let (mut room, mut lack) = (free.saturating_sub(spare), spare.saturating_sub(free));
    let mut wanted = Vec::new();
    for node in nodes.iter().rev() {
        let back = node.held_bytes.min(lack);
        let kept = node.held_bytes - back;
        let holds = kept.saturating_add(node.free_bytes.min(room)).min(excess);
        lack -= back;
        room -= holds.saturating_sub(kept);
        excess -= holds;
        let differs = holds.abs_diff(node.held_bytes);
        if differs > total / STEP_PART || (holds == 0 && differs > 0) {
            wanted.push((node.node, holds));
        }
    }
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::collection::vec;
    use proptest::prelude::*;

    const G: u64 = 1 << 30;

    fn node(node: u32, size_bytes: u64, free_bytes: u64, held_bytes: u64) -> GuestNode {
        GuestNode { node, size_bytes, free_bytes, held_bytes }
    }

    #[test]
    fn free_memory_of_the_slow_node_is_taken_first_and_no_more_than_the_vm_must_give() {
        let nodes = [node(0, G, G / 2, 0), node(1, 3 * G, 2 * G, 0)];
        assert_eq!(balloon(4 * G, Some(3 * G), &nodes), [(1, G)]);
        // A sixteenth of 4 GiB stays free.
        assert_eq!(balloon(4 * G, Some(G), &nodes), [(1, 2 * G), (0, G / 4)]);
        assert_eq!(balloon(4 * G, None, &nodes), [], "nothing is held, and nothing is to be");
        assert_eq!(balloon(2 * G, Some(3 * G), &nodes), [], "memory that was never touched costs nothing");
    }

    #[test]
    fn held_memory_stays_held_while_the_rest_needs_all_that_the_vm_may_have() {
        let holds = [node(0, 4 * G, G / 4, G)];
        assert_eq!(balloon(3 * G, Some(3 * G), &holds), []);
        assert_eq!(balloon(2 * G, Some(3 * G), &holds), [(0, 0)]);
        assert_eq!(balloon(3 * G - G / 2, Some(3 * G), &holds), [(0, G / 2)]);
    }

    #[test]
    fn a_guest_that_is_short_gets_memory_back_and_small_changes_are_skipped() {
        let holds = [node(0, 4 * G, G / 8, 2 * G)];
        assert_eq!(balloon(4 * G, Some(3 * G), &holds), [(0, 2 * G - G / 8)], "it has an eighth, and needs a quarter");
        assert_eq!(balloon(4 * G, None, &holds), [(0, 0)]);
        assert_eq!(balloon(4 * G, Some(3 * G), &[node(0, 4 * G, G / 4 + (1 << 20), 2 * G)]), []);
    }

    proptest! {
        #[test]
        fn no_node_must_hold_more_than_is_free_there_or_than_the_vm_must_give(
            sizes in vec((0u64..64, 0u64..64, 0u64..64), 0..5), used in 0u64..300,
            may in proptest::option::of(0u64..300),
        ) {
            let unit = 64 << 20;
            let of = |(at, (used, free, held)): (u32, &(u64, u64, u64))| {
                node(at, (used + free + held) * unit, free * unit, held * unit)
            };
            let nodes: Vec<GuestNode> = (0..).zip(&sizes).map(of).collect();
            let wanted = balloon(used * unit, may.map(|may| may * unit), &nodes);
            let held: u64 = sizes.iter().map(|(_, _, held)| held).sum();
            let must = may.map_or(0, |may| (used + held).saturating_sub(may)) * unit;
            let of = |number| wanted.iter().find(|(node, _)| *node == number).map(|(_, bytes)| *bytes);
            let mut sum = 0;
            for node in &nodes {
                if let Some(bytes) = of(node.node) {
                    prop_assert!(bytes <= node.held_bytes + node.free_bytes);
                    sum += bytes;
                }
            }
            prop_assert!(sum <= must);
        }
    }
}
