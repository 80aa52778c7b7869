//! State of the guest: free memory, stall, nodes.
//!
//! Before: a tick. After: the values that the host is told about the guest as a whole.
//! Units: pages; stall in microseconds since boot. Promise: a value that the kernel does not have is zero.

use std::fs;

use ballast_messages::message::{MAX_NODES, Node, Tick};
use ballast_tier::nodes::NODES;

use crate::files;

const KB_PER_PAGE: u64 = 4;
/// Memory that stays free: 1/N of it, and at least this much.
const FREE_PART: u64 = 32;
const FREE_LEAST: u64 = 16 << 8;

/// Returns how much of this memory stays free for the guest.
pub fn least_free(pages: u64) -> u64 {
    (pages / FREE_PART).max(FREE_LEAST)
}

/// Returns the guest's memory and its stall.
pub fn tick() -> Tick {
    let meminfo = files::read("/proc/meminfo").unwrap_or_default();
    let pages = |name: &str| files::number_after(&meminfo, name).unwrap_or(0) / KB_PER_PAGE;
    let pressure = files::read("/proc/pressure/memory").unwrap_or_default();
    let some = pressure.lines().find(|line| line.starts_with("some")).unwrap_or_default();
    let stall_some_us = some.rsplit_once("total=").and_then(|(_, total)| total.trim().parse().ok()).unwrap_or(0);
    Tick {
        total: pages("MemTotal"),
        free: pages("MemFree"),
        available: pages("MemAvailable"),
        stall_some_us,
        nodes: nodes(),
        ..Tick::default()
    }
}

/// Returns the nodes with memory, by number.
pub fn nodes() -> Vec<Node> {
    let numbers = fs::read_dir(NODES).into_iter().flatten().flatten();
    let mut numbers: Vec<u32> =
        numbers.filter_map(|entry| entry.file_name().to_str()?.strip_prefix("node")?.parse().ok()).collect();
    numbers.sort_unstable();
    let mut nodes: Vec<Node> = numbers.into_iter().map(node).filter(|node| node.pages > 0).collect();
    nodes.truncate(MAX_NODES);
    nodes
}

fn node(node: u32) -> Node {
    let text = files::read(format!("{NODES}/node{node}/meminfo")).unwrap_or_default();
    let pages = |name: &str| files::number_after(&text, name).unwrap_or(0) / KB_PER_PAGE;
    Node { node, pages: pages("MemTotal"), free: pages("MemFree"), ballooned: 0 }
}

/// Returns the memory that a node can give without a long wait of any program: its free pages, and half of its pages of
/// files.
pub fn spare(node: u32) -> u64 {
    let text = files::read(format!("{NODES}/node{node}/meminfo")).unwrap_or_default();
    let pages = |name: &str| files::number_after(&text, name).unwrap_or(0) / KB_PER_PAGE;
    let files = (pages("Active(file)") + pages("Inactive(file)")).saturating_sub(pages("Dirty"));
    pages("MemFree") + files / 2
}

/// Returns the CPU time of this process so far, in microseconds.
pub fn cpu_us() -> u64 {
    // SAFETY: a zeroed rusage is valid, and the kernel fills it.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_SELF, &mut usage);
        usage
    };
    let us = |time: libc::timeval| time.tv_sec as u64 * 1_000_000 + time.tv_usec as u64;
    us(usage.ru_utime) + us(usage.ru_stime)
}
