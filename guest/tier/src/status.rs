//! The QoS statistics of Demeter §3.3, for the owner of the guest and, through the agent, for the host.
//!
//! Before: [`crate::engine`] counts. After: the agent sends it, a log shows it. Units: in each name.
//! Promise: counters only grow; an unknown value is `None`.

use crate::mover::Moves;
use crate::nodes::Use;

/// One tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TierStatus {
    /// Its nodes.
    pub nodes: Vec<u32>,
    /// All of it.
    pub size_bytes: u64,
    /// Free.
    pub free_bytes: u64,
    /// Read latency that firmware states.
    pub read_latency_ns: Option<u64>,
}

impl TierStatus {
    pub(crate) fn add(&mut self, node: u32, now: Use) {
        self.nodes.push(node);
        self.size_bytes += now.size;
        self.free_bytes += now.free;
    }
}

/// State of tiering.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Status {
    /// The fastest first.
    pub tiers: Vec<TierStatus>,
    /// Why nothing is moved, if so.
    pub aside: Option<String>,
    /// Other programs that move pages and do not disturb ours.
    pub notes: Vec<String>,
    /// Programs that are managed.
    pub programs: u64,
    /// Memory of these programs that can be moved, as far as page tables have been read.
    pub managed_bytes: u64,
    /// Part of it in the fast tier.
    pub managed_fast_bytes: u64,
    /// Epochs so far.
    pub epochs: u64,
    /// Samples so far.
    pub samples: u64,
    /// In the last epoch, the share of samples whose page is in the fast tier, in percent: estimates the hit ratio.
    pub fast_hit_pct: Option<f64>,
    /// Ranges of all programs.
    pub ranges: u64,
    /// Pages moved, and those that stayed.
    pub moves: Moves,
    /// CPU time of all this.
    pub cpu_us: u64,
    /// CPU time of the kernel's monitor for tiering.
    pub monitor_cpu_us: u64,
}
