//! State of the guest: free memory, stall, nodes.
//!
//! Before: a tick. After: the guest's values as a whole, for the host.
//! Units: pages; stall in microseconds since boot. Promise: a value that the kernel does not have is zero.

use ballast_base::{Bytes, MIB};
use ballast_messages::message::{MAX_NODES, Node, Tick};
use ballast_sys::clock::process_time;
use ballast_tier::kernel_files::Files;
use ballast_tier::nodes::NODES;

use crate::files;

/// Returns how much of this memory stays free for the guest: 1/32 of it, and at least 16 MiB.
pub fn least_free(pages: u64) -> u64 {
    (pages / 32).max(Bytes(16 * MIB).pages_floor().0)
}

/// Returns the pages of a line in KiB of a `meminfo` file.
fn pages(meminfo: &str, name: &str) -> u64 {
    files::number_after(meminfo, name).map_or(0, |kib| Bytes(kib << 10).pages_floor().0)
}

fn meminfo_of(node: u32) -> String {
    files::read(format!("{NODES}/node{node}/meminfo")).unwrap_or_default()
}

pub fn tick() -> Tick {
    let meminfo = files::read("/proc/meminfo").unwrap_or_default();
    let pressure = files::read("/proc/pressure/memory").unwrap_or_default();
    let some = pressure.lines().find(|line| line.starts_with("some")).unwrap_or_default();
    let stall_some_us = some.rsplit_once("total=").and_then(|(_, total)| total.trim().parse().ok()).unwrap_or(0);
    Tick {
        total: pages(&meminfo, "MemTotal"),
        free: pages(&meminfo, "MemFree"),
        available: pages(&meminfo, "MemAvailable"),
        stall_some_us,
        nodes: nodes(),
        ..Tick::default()
    }
}

/// Returns the nodes with memory, by number.
pub fn nodes() -> Vec<Node> {
    let numbers = Files::default().numbered(NODES, "node").unwrap_or_default();
    let mut nodes: Vec<Node> = numbers.into_iter().map(node).filter(|node| node.pages > 0).collect();
    nodes.truncate(MAX_NODES);
    nodes
}

fn node(node: u32) -> Node {
    let text = meminfo_of(node);
    Node { node, pages: pages(&text, "MemTotal"), free: pages(&text, "MemFree"), ballooned: 0 }
}

/// Returns the memory that a node can give without long waits of programs: free pages, and half of its pages of files.
pub fn spare(node: u32) -> u64 {
    let text = meminfo_of(node);
    let pages = |name: &str| pages(&text, name);
    let files = (pages("Active(file)") + pages("Inactive(file)")).saturating_sub(pages("Dirty"));
    pages("MemFree") + files / 2
}

pub fn cpu_us() -> u64 {
    process_time(std::process::id()).map_or(0, |time| time.as_micros() as u64)
}
