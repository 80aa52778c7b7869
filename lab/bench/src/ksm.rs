//! The kernel's samepage merging, as the benches run it.
//!
//! Before: a bench has private memory with equal pages. After: the settings of KSM are as they were.
//! Units: microseconds of CPU time. Promise: a KSM that already runs for others is left alone.

use anyhow::{Context, Result, ensure};
use ballast_base::PAGE_SIZE;
use ballast_base::units::MIB;

use crate::cpu;
use crate::setting::{self, Setting};

const KSM: &str = "/sys/kernel/mm/ksm";
/// Merges as fast as possible, because the CPU time of a page is measured. Pages of zeros do not count.
const SETTINGS: [(&str, &str); 4] =
    [("use_zero_pages", "1"), ("pages_to_scan", "5000"), ("sleep_millisecs", "1"), ("run", "1")];

/// Runs KSM until it is dropped.
#[derive(Debug)]
pub(crate) struct Ksm {
    pid: u32,
    cpu_us: f64,
    _settings: Vec<Option<Setting>>,
}

impl Ksm {
    pub(crate) fn start() -> Result<Self> {
        ensure!(counter("run")? == 0, "it runs already, for others");
        let pid = ksmd()?;
        let cpu_us = cpu::of_threads(pid, |_| true)?;
        let set = SETTINGS.map(|(name, value)| Setting::change(format!("{KSM}/{name}"), value));
        // Drop restores them in this order, so KSM stops first.
        Ok(Self { pid, cpu_us, _settings: set.into_iter().rev().collect::<Result<_>>()? })
    }

    pub(crate) fn saved_mib(&self) -> Result<f64> {
        Ok(counter("pages_sharing")? as f64 * PAGE_SIZE as f64 / MIB as f64)
    }

    pub(crate) fn cpu_us(&self) -> Result<f64> {
        Ok(cpu::of_threads(self.pid, |_| true)? - self.cpu_us)
    }
}

fn counter(name: &str) -> Result<u64> {
    let text = setting::read(format!("{KSM}/{name}").as_ref())?;
    text.trim().parse().with_context(|| format!("{KSM}/{name} is {text:?}"))
}

fn ksmd() -> Result<u32> {
    let is_it = |pid: &u32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "ksmd\n");
    let all = std::fs::read_dir("/proc").context("Reading /proc")?;
    let pids = all.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.into_iter().find(is_it).context("there is no thread ksmd")
}
