//! Which memory is fast: the NUMA nodes of this machine in tiers, and the free memory of each.
//!
//! Before: a kernel that knows its memory from firmware. After: [`crate::engine`] fills the fast tier with hot pages.
//! Threads: any. Units: bytes; nanoseconds; numbers of nodes.
//!
//! The speed of nodes is known by the kernel's own memory tiers, which it makes from HMAT (Linux 6.7).
//! Promise: nothing is guessed. Nodes without a known difference are one tier, and then nothing is moved.

use std::collections::BTreeMap;
use std::io;

use crate::kernel_files::{Files, list};

/// The kernel's files about nodes.
pub const NODES: &str = "/sys/devices/system/node";
const TIERS: &str = "/sys/devices/virtual/memory_tiering";

/// Memory of one speed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tier {
    /// Its nodes.
    pub nodes: Vec<u32>,
    /// Longest read latency of its nodes in HMAT, if HMAT has it for all of them.
    pub read_latency_ns: Option<u64>,
}

/// The tiers of this machine, the fastest first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiers {
    /// The fastest first; nodes without memory are in none.
    pub list: Vec<Tier>,
    /// First frame, frame after the last one, node; ascending.
    frames: Vec<(u64, u64, u32)>,
}

/// How full a node is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Use {
    /// All of it.
    pub size: u64,
    /// Free.
    pub free: u64,
    /// Memory that must stay free so that the kernel does not reclaim (its high watermarks).
    pub high: u64,
}

impl Tiers {
    /// Reads the tiers from sysfs.
    ///
    /// # Errors
    /// No sysfs, or a kernel without NUMA.
    pub fn detect(files: &Files) -> io::Result<Self> {
        let nodes = list(&files.text(&format!("{NODES}/has_memory"))?);
        let mut tiers: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for tier in files.numbered(TIERS, "memory_tier")? {
            let members = files.optional(&format!("{TIERS}/memory_tier{tier}/nodelist"))?.unwrap_or_default();
            let members: Vec<u32> = list(&members).into_iter().filter(|node| nodes.contains(node)).collect();
            tiers.extend((!members.is_empty()).then_some((tier, members)));
        }
        if tiers.values().map(Vec::len).sum::<usize>() != nodes.len() {
            tiers = BTreeMap::from([(0, nodes.clone())]);
        }
        let latency = |node: &u32| -> io::Result<Option<u64>> {
            let said = files.optional(&format!("{NODES}/node{node}/access0/initiators/read_latency"))?;
            // 0 if firmware has no value.
            Ok(said.and_then(|text| text.parse().ok()).filter(|ns| *ns > 0))
        };
        let tier = |nodes: Vec<u32>| {
            let read = nodes.iter().map(latency).collect::<io::Result<Option<Vec<u64>>>>()?;
            Ok(Tier { read_latency_ns: read.and_then(|read| read.into_iter().max()), nodes })
        };
        let list = tiers.into_values().map(tier).collect::<io::Result<_>>()?;
        Ok(Self { list, frames: frames(files, &nodes)? })
    }

    /// Returns the node of this frame (physical address in pages); `None` if the kernel does not say.
    pub fn node_of(&self, frame: u64) -> Option<u32> {
        let after = self.frames.partition_point(|(first, ..)| *first <= frame);
        self.frames[..after].last().filter(|(_, end, _)| frame < *end).map(|(.., node)| *node)
    }

    /// Returns whether this node is in the fastest tier.
    pub fn is_fast(&self, node: u32) -> bool {
        self.list.first().is_some_and(|tier| tier.nodes.contains(&node))
    }

    /// Returns whether the kernel says which node has a frame.
    pub fn knows_frames(&self) -> bool {
        !self.frames.is_empty()
    }
}

/// Frames of each node's memory blocks, joined.
fn frames(files: &Files, nodes: &[u32]) -> io::Result<Vec<(u64, u64, u32)>> {
    // Written as hexadecimal without a prefix.
    let block = files.optional("/sys/devices/system/memory/block_size_bytes")?;
    let Some(block) = block.and_then(|text| u64::from_str_radix(&text, 16).ok()) else { return Ok(Vec::new()) };
    let pages = block / ballast_base::PAGE_SIZE as u64;
    let mut found = Vec::new();
    for node in nodes {
        for number in files.numbered(&format!("{NODES}/node{node}"), "memory")? {
            found.push((u64::from(number) * pages, (u64::from(number) + 1) * pages, *node));
        }
    }
    found.sort_unstable();
    let mut joined: Vec<(u64, u64, u32)> = Vec::new();
    for (first, end, node) in found {
        match joined.last_mut() {
            Some(last) if last.1 == first && last.2 == node => last.1 = end,
            _ => joined.push((first, end, node)),
        }
    }
    Ok(joined)
}

/// How full a node is now.
///
/// # Errors
/// The kernel does not say.
pub fn usage(files: &Files, node: u32) -> io::Result<Use> {
    let path = format!("{NODES}/node{node}/meminfo");
    let text = files.text(&path)?;
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.split_once(name).map(|(_, rest)| rest))?;
        line.split_ascii_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    let (Some(size), Some(free)) = (value("MemTotal:"), value("MemFree:")) else {
        return Err(io::Error::other(format!("{path} does not say how much memory is there, or free")));
    };
    Ok(Use { size, free, high: high(&files.text("/proc/zoneinfo")?, node) })
}

/// The sum of the high watermarks of a node's zones, in bytes.
fn high(zones: &str, node: u32) -> u64 {
    let mut pages = 0;
    let mut here = false;
    for line in zones.lines() {
        if let Some(head) = line.strip_prefix("Node ") {
            here = head.split(',').next().and_then(|number| number.trim().parse().ok()) == Some(node);
        }
        let mut words = line.split_ascii_whitespace();
        if here && words.next() == Some("high") {
            pages += words.next().and_then(|word| word.parse::<u64>().ok()).unwrap_or(0);
        }
    }
    // Lines of per-CPU lists have `high:`, which is another value.
    pages.saturating_mul(ballast_base::PAGE_SIZE as u64)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::path::Path;

    pub(crate) fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("folder");
        std::fs::write(path, text).expect("file");
    }

    /// The kernel has these tiers, the fastest first.
    pub(crate) fn tell_apart(root: &Path, tiers: &[&str]) {
        for (tier, nodes) in tiers.iter().enumerate() {
            put(root, &format!("{TIERS}/memory_tier{tier}/nodelist"), &format!("{nodes}\n"));
        }
    }

    /// Writes two nodes in blocks of 128 MiB: the first is fast and has the first 1 GiB, the second the next 2 GiB.
    pub(crate) fn two_nodes(root: &Path) {
        put(root, "/sys/devices/system/node/has_memory", "0-1\n");
        put(root, "/sys/devices/system/node/online", "0-1\n");
        tell_apart(root, &["0", "1"]);
        put(root, "/sys/devices/system/memory/block_size_bytes", "8000000\n");
        for block in 0..24 {
            let node = u32::from(block >= 8);
            put(root, &format!("/sys/devices/system/node/node{node}/memory{block}/state"), "online\n");
        }
        for (node, free) in [(0, 2048), (1, 4096)] {
            let text = format!("\nNode {node} MemTotal:  1048576 kB\nNode {node} MemFree:   {free} kB\n");
            put(root, &format!("/sys/devices/system/node/node{node}/meminfo"), &text);
        }
        let zones = "Node 0, zone      DMA\n  pages free 9\n        min      8\n        high     12\n    pagesets\n    \
                     cpu: 0\n              high:  7\nNode 0, zone    DMA32\n        high     100\n\
                     Node 1, zone   Normal\n        high     5\n";
        put(root, "/proc/zoneinfo", zones);
    }

    #[test]
    fn nodes_are_told_apart_by_the_kernels_tiers() {
        let root = tempfile::tempdir().expect("directory");
        let files = Files::below(root.path());
        assert!(Tiers::detect(&files).is_err(), "no NUMA at all");
        two_nodes(root.path());
        let nodes = |tiers: &Tiers| tiers.list.iter().map(|tier| tier.nodes.clone()).collect::<Vec<_>>();
        let tiers = Tiers::detect(&files).expect("detected");
        assert_eq!((nodes(&tiers), tiers.list[0].read_latency_ns), (vec![vec![0], vec![1]], None));
        tell_apart(root.path(), &["1", "0", ""]);
        for (node, ns) in [(0, 180), (1, 70)] {
            put(root.path(), &format!("{NODES}/node{node}/access0/initiators/read_latency"), &format!("{ns}\n"));
        }
        let tiers = Tiers::detect(&files).expect("detected");
        assert_eq!((nodes(&tiers), tiers.list[0].read_latency_ns), (vec![vec![1], vec![0]], Some(70)));
        assert!(tiers.is_fast(1) && !tiers.is_fast(0));
        // Tiers of the kernel that leave out a node, or that have both nodes in one.
        for lists in [["1", ""], ["0-1", ""]] {
            tell_apart(root.path(), &lists);
            assert_eq!(nodes(&Tiers::detect(&files).expect("detected")), [[0, 1]]);
        }
    }

    #[test]
    fn a_frame_is_of_the_node_that_has_its_memory_block() {
        let root = tempfile::tempdir().expect("directory");
        two_nodes(root.path());
        let tiers = Tiers::detect(&Files::below(root.path())).expect("detected");
        let gib = 1u64 << 18;
        assert_eq!(
            [0, gib - 1, gib, 3 * gib - 1, 3 * gib].map(|frame| tiers.node_of(frame)),
            [Some(0), Some(0), Some(1), Some(1), None]
        );
    }

    #[test]
    fn what_is_free_and_what_must_stay_free_is_read_of_each_node() {
        let root = tempfile::tempdir().expect("directory");
        two_nodes(root.path());
        let files = Files::below(root.path());
        let first = usage(&files, 0).expect("read");
        assert_eq!(first, Use { size: 1 << 30, free: 2 << 20, high: 112 * 4096 });
        assert_eq!(usage(&files, 1).expect("read").high, 5 * 4096);
        put(root.path(), &format!("{NODES}/node1/meminfo"), "nothing\n");
        assert!(usage(&files, 1).expect_err("refused").to_string().contains("node1/meminfo"));
    }

    #[test]
    fn this_machine_has_tiers_or_says_that_it_has_none() {
        match Tiers::detect(&Files::default()) {
            Ok(tiers) => assert!(!tiers.list.is_empty() && tiers.list.iter().all(|tier| !tier.nodes.is_empty())),
            Err(error) => ballast_testkit::skip("numa", error),
        }
    }
}
