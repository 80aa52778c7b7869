//! How much memory each node gives to the pool, so that all nodes have the same amount for VMs (Vmem, 4.1.1), and the
//! reasons for giving less.
//!
//! Before: a part of the host is requested. After: `reserve` takes it from the kernel.
//! Units: slices. Promise: pure; the host keeps its margin.

use ballast_base::Bytes;

use crate::host::{Memory, Page};

/// Amount of memory wanted, from all nodes together or from the node that was named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// The amount.
    Bytes(Bytes),
    /// Percentage of the memory.
    Percent(u8),
}

/// Memory of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeMemory {
    /// Number of the node on the host.
    pub numa: u32,
    /// Slices of the node that the pool already has.
    pub has: u32,
    /// Memory of the node.
    pub memory: Memory,
}

/// The memory that each node gives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Slices that each node gives beyond those the pool has, by the number of the node on the host.
    pub more: Vec<(u32, u32)>,
    /// Reasons why the result differs from the request.
    pub notes: Vec<String>,
}

/// Memory that is left to the host.
pub fn margin(total: Bytes) -> Bytes {
    // 1/64 is what Vmem leaves to a host of 384 GB; a small host needs at least this much.
    const LEAST: u64 = 512 << 20;
    Bytes((total.0 / 64).max(LEAST))
}

/// Divides the wanted amount among the nodes. `available` is the kernel's estimate of the memory that programs can
/// still allocate, on all nodes together.
pub fn divide(want: Want, nodes: &[NodeMemory], available: Bytes, page: Page) -> Shares {
    let count = nodes.len().max(1) as u64;
    let total = Bytes(nodes.iter().map(|node| node.memory.total.0).sum());
    let wanted = match want {
        Want::Bytes(bytes) => bytes.0,
        Want::Percent(percent) => total.0 / 100 * u64::from(percent.min(100)),
    };
    let (slices, size) = (|bytes| slices(bytes, page), |slices| page.size(slices));
    let each = slices(wanted.div_ceil(count).checked_next_multiple_of(page.bytes()).unwrap_or(u64::MAX));
    let margin = margin(total);
    let left = |spare: Bytes, margin: u64| slices(spare.0.saturating_sub(margin));
    let could = |node: &NodeMemory| node.has + left(node.memory.spare, margin.0 / count);
    let mut notes = Vec::new();
    for node in nodes.iter().filter(|node| could(node) < each && node.has < each) {
        notes.push(format!(
            "node {} can give {} of the {} that are wanted of it: {} are free or can be freed, and {} stay with the \
             host",
            node.numa,
            size(could(node)),
            size(each),
            node.memory.spare,
            Bytes(margin.0 / count),
        ));
    }
    let has: u32 = nodes.iter().map(|node| node.has).sum();
    let all = (has + left(available, margin.0)) / count as u32;
    if all < each {
        notes.push(format!(
            "all nodes together can give {}: the host has {available} to spare, and {margin} stay with it",
            size(all * count as u32)
        ));
    }
    let reach = nodes.iter().map(could).min().unwrap_or(0).min(each).min(all);
    if nodes.iter().any(|node| could(node).min(each) > reach) {
        notes.push(format!("every node gives {}, so that they stay balanced", size(reach)));
    }
    let more = nodes.iter().map(|node| (node.numa, reach.saturating_sub(node.has))).filter(|(_, more)| *more > 0);
    Shares { more: more.collect(), notes }
}

fn slices(bytes: u64, page: Page) -> u32 {
    u32::try_from(bytes / page.bytes()).unwrap_or(u32::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::GIB;
    use proptest::prelude::*;

    fn node(numa: u32, has: u32, spare_gib: u64) -> NodeMemory {
        NodeMemory { numa, has, memory: Memory { total: Bytes(64 * GIB), spare: Bytes(spare_gib * GIB) } }
    }

    #[test]
    fn nodes_give_as_much_as_the_one_that_has_least() {
        let nodes = [node(0, 0, 11), node(1, 0, 41)];
        let shares = divide(Want::Percent(80), &nodes, Bytes(52 * GIB), Page::Huge);
        // 1 GiB of each node, 1/64 of all, stays with the host.
        assert_eq!(shares.more, [(0, 5120), (1, 5120)]);
        assert!(shares.notes[0].contains("node 0 can give 10 GiB of the 51.2 GiB"), "{:?}", shares.notes);
        assert!(shares.notes.last().expect("why").contains("every node gives 10 GiB"), "{:?}", shares.notes);
    }

    #[test]
    fn what_is_there_counts_and_asking_twice_changes_nothing() {
        let nodes = [node(0, 512, 20), node(1, 1024, 20)];
        let shares = divide(Want::Bytes(Bytes(4 * GIB)), &nodes, Bytes(40 * GIB), Page::Huge);
        assert_eq!(shares, Shares { more: vec![(0, 512)], notes: vec![] });
        let nodes = [node(0, 1024, 20), node(1, 1024, 20)];
        assert_eq!(divide(Want::Bytes(Bytes(4 * GIB)), &nodes, Bytes(40 * GIB), Page::Huge), Shares::default());
    }

    #[test]
    fn more_than_any_host_has_is_all_that_this_one_can_spare() {
        for page in Page::ALL {
            let shares = divide(Want::Bytes(Bytes(u64::MAX)), &[node(0, 0, 3)], Bytes(3 * GIB), page);
            assert_eq!(shares.more, [(0, (2 * GIB / page.bytes()) as u32)]);
            assert!(shares.notes[0].contains("node 0 can give 2 GiB"), "{:?}", shares.notes);
        }
    }

    #[test]
    fn pages_of_a_gib_are_given_whole() {
        let shares = divide(Want::Bytes(Bytes(5 << 29)), &[node(0, 1, 2)], Bytes(2 * GIB), Page::Gib);
        // 3 pages would be 2.5 GiB of each node. One is there, and of 2 free GiB 1 GiB stays with the host.
        assert_eq!(shares.more, [(0, 1)]);
        assert!(shares.notes[0].contains("node 0 can give 2 GiB of the 3 GiB"), "{:?}", shares.notes);
    }

    proptest! {
        #[test]
        fn the_host_keeps_its_margin_and_nodes_are_balanced(
            nodes in proptest::collection::vec(0u64..200, 1..8), available in 0u64..800, percent in 0u8..120,
        ) {
            let nodes: Vec<NodeMemory> = (0..).zip(&nodes).map(|(numa, spare)| node(numa, 0, *spare)).collect();
            let total = Bytes(nodes.len() as u64 * 64 * GIB);
            let shares = divide(Want::Percent(percent), &nodes, Bytes(available * GIB), Page::Huge);
            let taken: u64 = shares.more.iter().map(|(_, more)| u64::from(*more) * Page::Huge.bytes()).sum();
            prop_assert!(taken == 0 || taken + margin(total).0 <= available * GIB);
            prop_assert!(taken <= total.0);
            prop_assert!(shares.more.windows(2).all(|two| two[0].1 == two[1].1));
            let wanted = total.0 / 100 * u64::from(percent.min(100));
            prop_assert!(taken >= wanted || !shares.notes.is_empty(), "{taken} of {wanted}, and no reason");
        }
    }
}
