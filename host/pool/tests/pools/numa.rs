//! A pool on a machine with several NUMA nodes: the memory that each gives, and the nodes of a VM's pages.
//! `scripts/newer-kernel-suite.sh` runs the first test in a machine that has two, of different sizes.

use crate::common;

use std::collections::BTreeMap;
use std::os::fd::AsFd;
use std::sync::atomic::Ordering;

use ballast_base::pool::Nodes;
use ballast_base::{Bytes, HUGE_SIZE, MIB};
use ballast_pool::map::Mode;
use ballast_pool::{Grant, Host, Reserve};
use ballast_sys::Mapping;
use ballast_testkit::skip;

use common::{Place, zero_all};

fn two_nodes() -> Option<[u32; 2]> {
    match Host::default().nodes().expect("nodes")[..] {
        [one, other, ..] => Some([one, other]),
        ref fewer => {
            skip("numa", format!("the machine has {} node", fewer.len()));
            None
        }
    }
}

fn pages_by_node(grant: &Grant) -> BTreeMap<u32, u64> {
    let mut pages = BTreeMap::new();
    for extent in &grant.extents {
        let map =
            Mapping::shared(grant.files[usize::from(extent.file)].as_fd(), extent.offset.0, extent.len.0 as usize);
        let map = map.expect("map");
        for at in (0..map.len()).step_by(HUGE_SIZE) {
            assert_eq!(map.words(at, 1)[0].load(Ordering::Relaxed), 0);
            map.words(at, 1)[0].store(1, Ordering::Relaxed);
        }
        map.populate(0, map.len()).expect("map every page");
        let text = std::fs::read_to_string("/proc/self/numa_maps").expect("numa_maps");
        let start = format!("{:x} ", map.addr());
        let line = text.lines().find(|line| line.starts_with(&start)).expect("its line");
        for word in line.split(' ').filter_map(|word| word.strip_prefix('N')) {
            let (node, count) = word.split_once('=').expect("N0=1");
            let count = count.parse::<u64>().expect("a number");
            *pages.entry(node.parse().expect("a node")).or_default() += count;
        }
    }
    pages
}

fn grant(reserve: &mut Reserve, mib: u64, nodes: &Nodes) -> Grant {
    reserve.grant("vm", Bytes(mib * MIB), Mode::Slices, nodes).expect("granted")
}

#[test]
fn a_vms_pages_are_of_the_nodes_that_were_asked_for_also_after_another_vm_had_them() {
    let Some([one, other]) = two_nodes() else { return };
    let Some(place) = Place::new() else { return };
    let Some(mut reserve) = place.pool_of(128, 16, None) else { return };
    let sizes: Vec<u64> = reserve.overview().nodes.iter().map(|node| node.ready.0 / MIB).collect();
    assert_eq!(sizes[..2], [64, 64], "balanced");
    for _ in 0..2 {
        let cases = [
            (32, Nodes::One(other), vec![(other, 16)]),
            (32, Nodes::One(one), vec![(one, 16)]),
            (32, Nodes::Balanced(vec![one, other]), vec![(one, 8), (other, 8)]),
            (30, Nodes::Balanced(vec![other, one]), vec![(one, 7), (other, 8)]),
            (32, Nodes::Split(vec![(other, Bytes(26 * MIB)), (one, Bytes(6 * MIB))]), vec![(one, 3), (other, 13)]),
            (96, Nodes::Any, vec![(one, 24), (other, 24)]),
            (64, Nodes::Any, vec![(one, 32)]),
        ];
        for (mib, nodes, expected) in cases {
            let given = grant(&mut reserve, mib, &nodes);
            let expected: BTreeMap<u32, u64> = expected.into_iter().collect();
            assert_eq!(pages_by_node(&given), expected, "{mib} MiB of {nodes}");
            drop(given);
            assert_eq!(reserve.tend().expect("tend"), 1);
            zero_all(&mut reserve);
            reserve.validate().expect("valid");
        }
    }
    let said = |result: Result<Grant, ballast_pool::Error>| result.expect_err("refused").to_string();
    let mut ask = |mib: u64, nodes| said(reserve.grant("vm", Bytes(mib * MIB), Mode::Slices, &nodes));
    let text = ask(66, Nodes::One(other));
    assert!(text.contains(&format!("from node {other}: it wants 33 slices, and 32 are ready")), "{text}");
    let text = ask(8, Nodes::Split(vec![(one, Bytes(2 * MIB)), (other, Bytes(4 * MIB))]));
    assert!(text.contains("the parts by nodes are 6 MiB; the VM wants 8 MiB"), "{text}");
    assert!(ask(8, Nodes::Split(vec![(one, Bytes(MIB)), (other, Bytes(7 * MIB))])).contains("no multiple"));
    assert!(ask(8, Nodes::Balanced(vec![one, 99])).contains("no node 99"));
    assert!(ask(8, Nodes::Balanced(vec![])).contains("no node is named"));
}
