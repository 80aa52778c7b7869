//! Reads the kernel's count of the host's memory, and kills an engine.

use anyhow::{Context, Result};
use ballast_base::PageCount;
use ballast_sys::meminfo;

/// Memory as the host's kernel counts it, in bytes.
pub struct HostMemory {
    /// `MemAvailable` plus the free pages on per-CPU lists, which `MemAvailable` leaves out: up to 190 MiB per CPU
    /// right after a large free (Linux 6.7 and newer).
    pub available: u64,
    /// `Shmem`. It counts guest RAM and the arenas of the store.
    pub shmem: u64,
    pub zram: u64,
}

impl HostMemory {
    pub fn now() -> Result<Self> {
        let field = |key| meminfo::bytes(key).with_context(|| format!("/proc/meminfo has no {key}"));
        let zones = std::fs::read_to_string("/proc/zoneinfo").context("Reading /proc/zoneinfo")?;
        let listed = PageCount(on_cpu_lists(&zones)).bytes().0;
        Ok(Self { available: field("MemAvailable")? + listed, shmem: field("Shmem")?, zram: zram() })
    }
}

/// RAM of all zram devices: the third number of each `mm_stat`.
fn zram() -> u64 {
    let devices = std::fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let stats = devices.filter_map(|device| std::fs::read_to_string(device.path().join("mm_stat")).ok());
    stats.filter_map(|stat| stat.split_ascii_whitespace().nth(2)?.parse::<u64>().ok()).sum()
}

/// Pages on per-CPU lists: the fields `count` of `/proc/zoneinfo`.
fn on_cpu_lists(zoneinfo: &str) -> u64 {
    let counts = zoneinfo.lines().filter_map(|line| line.trim_start().strip_prefix("count:"));
    counts.filter_map(|count| count.trim().parse::<u64>().ok()).sum()
}

pub fn kill(pid: u32) -> Result<()> {
    let pid = rustix::process::Pid::from_raw(pid as i32).context("the engine has no pid")?;
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).context("Killing the engine")
}

#[cfg(test)]
mod tests {
    #[test]
    fn free_pages_on_per_cpu_lists_are_counted() {
        let text = "Node 0, zone Normal\n  pages free 100\n  pagesets\n    cpu: 0\n              count:    35\n    \
                    high:     2270\n    cpu: 1\n              count:    7\n  vm stats threshold: 24\n";
        assert_eq!(super::on_cpu_lists(text), 42);
        assert_eq!(super::on_cpu_lists(""), 0);
    }
}
