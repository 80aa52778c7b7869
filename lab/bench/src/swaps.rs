//! The swap devices of this host: their list, their use, and guards that end each when dropped.
//!
//! Before: this is root. After: `zram` and `leftover` use or restore these devices.
//! Threads: one. Units: bytes, pages. Promise: a read changes nothing; a drop that fails says so on standard error.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::swap;
use anyhow::{Context, Result, ensure};
use ballast_base::PAGE_SIZE;
use rustix::fs::{FlockOperation, flock};

use crate::setting::{read, selected, warn};

const BLOCK: &str = "/sys/block";
pub(crate) const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
pub(crate) const ZSWAP: &str = "/sys/module/zswap/parameters/enabled";

/// A sized zram device. Drop resets it, so that it has no memory.
#[derive(Debug)]
pub(crate) struct Sized(pub PathBuf);

impl Drop for Sized {
    fn drop(&mut self) {
        warn(&format!("resetting {}", self.0.display()), fs::write(self.0.join("reset"), "1"));
    }
}

/// An active swap device.
#[derive(Debug)]
pub(crate) struct Active(pub PathBuf);

impl Drop for Active {
    fn drop(&mut self) {
        warn(&format!("ending swap on {}", self.0.display()), swap::off(&self.0));
    }
}

/// A file that is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct Named(pub PathBuf);

impl Drop for Named {
    fn drop(&mut self) {
        warn(&format!("removing {}", self.0.display()), fs::remove_file(&self.0));
    }
}

/// Take the lock for changes of the machine; waits for another bench.
pub(crate) fn lock() -> Result<File> {
    ensure!(rustix::process::geteuid().is_root(), "the kernel's swap can be measured by root only");
    let lock = File::open(BLOCK).with_context(|| format!("Opening {BLOCK}"))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        eprintln!("ballast bench: waiting for another bench to end");
        flock(&lock, FlockOperation::LockExclusive).context("Waiting for another bench")?;
    }
    Ok(lock)
}

/// The zram devices: their directories in sysfs, their nodes, and whether they are in use.
pub(crate) fn devices() -> Result<Vec<(PathBuf, PathBuf, bool)>> {
    let mut devices = Vec::new();
    for entry in fs::read_dir(BLOCK).with_context(|| format!("Reading {BLOCK}"))? {
        let block = entry?.path();
        let Some(name) = block.file_name().and_then(|name| name.to_str()).filter(|name| name.starts_with("zram"))
        else {
            continue;
        };
        let device = Path::new("/dev").join(name);
        let used = read(&block.join("disksize"))?.trim() != "0";
        devices.push((block.clone(), device, used));
    }
    Ok(devices)
}

/// The active swap devices.
pub(crate) fn swaps() -> Result<Vec<String>> {
    let text = read(Path::new("/proc/swaps"))?;
    Ok(text.lines().skip(1).filter_map(|line| line.split_ascii_whitespace().next()).map(str::to_owned).collect())
}

/// Pages on all swap devices.
pub(crate) fn used_pages() -> Result<u64> {
    let text = read(Path::new("/proc/swaps"))?;
    let used_kib = |line: &str| line.split_ascii_whitespace().nth(3)?.parse::<u64>().ok();
    Ok(text.lines().skip(1).filter_map(used_kib).sum::<u64>() * 1024 / PAGE_SIZE as u64)
}

/// Bytes of memory that a zram device of this name uses for its pages, and its compression.
pub(crate) fn used(device: &Path) -> Result<(u64, String)> {
    let block = Path::new(BLOCK).join(device.file_name().context("a device has a name")?);
    let stat = read(&block.join("mm_stat"))?;
    let used = stat.split_ascii_whitespace().nth(2).and_then(|bytes| bytes.parse().ok());
    Ok((
        used.with_context(|| format!("mm_stat says {stat:?}"))?,
        selected(&read(&block.join("comp_algorithm"))?).into(),
    ))
}
