//! Settings of one VM's workers.
//!
//! Before: the engine reads its configuration. After: [`crate::vm::Vm`] has them. Threads: any; nothing here changes.

use std::time::Duration;

use ballast_heat::Settings;

/// Settings of the workers.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// T: time in quarantine before a page is evicted.
    pub quarantine: Duration,
    /// Longest quarantine while the VM is above its limit and nothing can pin its memory. T is then not needed for
    /// safety, and reclaim shortens it where it must (`reclaim/controller.rs`): with a long one, the guest would touch
    /// every page of a working set above the limit while it is in quarantine. It begins at several times the interval
    /// between two touches of a hot page: at 20 ms, a guest that touches each hot page every 50 ms lost 2 of 3 picked
    /// pages.
    pub direct_quarantine: Duration,
    /// Shortest stay of a page in the RAM store before it moves to a slow store; `None`: pages do not move.
    pub spill_after: Option<Duration>,
    /// Pause between two searches for units to map huge again: a unit must be whole in two of them in a row.
    pub coalesce_every: Duration,
    /// Whether accesses are tracked; an operator changes it.
    pub track: bool,
    /// Settings of access tracking.
    pub heat: Settings,
    /// NUMA nodes of fast and of slow memory, between which heat places its pages; `None`: the kernel places them.
    pub tiers: Option<HostTiers>,
}

/// Two NUMA nodes of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTiers {
    /// The node of fast memory.
    pub fast_node: u32,
    /// The node of slow memory.
    pub slow_node: u32,
    /// Most of a VM's memory on the fast node, in percent.
    pub fast_percent: u32,
    /// Most memory of a VM moved in each direction, MiB per second.
    pub mib_per_s: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            quarantine: Duration::from_secs(1),
            direct_quarantine: Duration::from_millis(300),
            spill_after: None,
            coalesce_every: Duration::from_secs(1),
            track: false,
            heat: Settings::default(),
            tiers: None,
        }
    }
}
