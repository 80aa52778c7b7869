//! Settings of one VM's workers.
//!
//! Before: the engine reads its configuration. After: [`crate::vm::Vm`] has them. Threads: any; nothing here changes.

use std::time::Duration;

use ballast_heat::Settings;

/// Pause between two passes over all units, normally: a unit must be whole in two passes in a row.
const COALESCE_EVERY: Duration = Duration::from_secs(1);

/// When a VM is tracked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Track {
    /// While it has a limit below its size, because then reclaim needs it.
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Settings of the two loops.
#[derive(Clone, Copy, Debug)]
pub struct Tuning {
    /// How long a page stays zapped before it is evicted (T).
    pub quarantine: Duration,
    /// The same, at most, when the VM is over its limit and nothing can have its memory pinned. Then T is no safety
    /// matter, and reclaim shortens it where it must (`reclaim/controller.rs`): with a long one the guest would touch
    /// every page of a working set larger than the limit in quarantine, for ever. It begins several times as long as
    /// hot pages usually go untouched: with 20 ms, a guest that touches each of them every 50 ms lost 2 of 3 that were
    /// picked.
    pub direct_quarantine: Duration,
    /// Least time a page is in the RAM store before it goes to the file store; `None` if none is to go.
    pub spill_after: Option<Duration>,
    /// Pause between two searches for memory that can be mapped huge again.
    pub coalesce_every: Duration,
    /// When to track which memory is hot; [`Vm::set_track`] changes it.
    pub track: Track,
    /// How to track it.
    pub heat: Settings,
    /// Nodes of fast and of slow memory to keep it on, by heat; `None`: it stays where the kernel puts it.
    pub tiers: Option<HostTiers>,
}

/// Two nodes of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostTiers {
    /// The node of fast memory.
    pub fast_node: u32,
    /// The node of slow memory.
    pub slow_node: u32,
    /// Most of a VM's memory on the fast node, in percent.
    pub fast_percent: u32,
    /// Most memory of a VM moved each way in a second.
    pub mib_per_s: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            quarantine: Duration::from_secs(1),
            direct_quarantine: Duration::from_millis(300),
            spill_after: None,
            coalesce_every: COALESCE_EVERY,
            track: Track::Auto,
            heat: Settings::default(),
            tiers: None,
        }
    }
}
