//! The disk of a side: the daemon's settings for its file store, and the kernel's swap file.
//!
//! Before: a bench has a directory on a disk. After: both sides write there. Threads: none. Units: in the names.
//! Promise: counters of the kernel are exact when they are read.

use std::path::Path;

use anyhow::{Context, Result};
use ballast_base::Bytes;
use ballast_base::units::GIB;

/// Size of the kernel's swap file.
pub(crate) const SWAP: Bytes = Bytes(GIB);
/// Seconds that a page is far before it goes to the disk: the least that can be set.
const AFTER_S: u64 = 1;

/// The daemon's settings.
pub(crate) fn settings(dir: &Path) -> String {
    format!("[spill]\ndir = {:?}\nbudget = \"1G\"\nafter_s = {AFTER_S}\n", dir.to_string_lossy())
}

/// Returns the exact value of a page counter of the kernel.
pub(crate) fn vmstat(name: &str) -> Result<u64> {
    // Without the refresh, the counts of single CPUs are missing.
    std::fs::write("/proc/sys/vm/stat_refresh", "1").context("Writing /proc/sys/vm/stat_refresh")?;
    let text = std::fs::read_to_string("/proc/vmstat").context("Reading /proc/vmstat")?;
    let pages = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
    pages.with_context(|| format!("/proc/vmstat has no {name}"))
}
