//! Rates of a VM from sums that only grow.
//!
//! Before: sums at two samples. After: shares of time, and restores within a window.
//! Threads: any; plain values. Units: in the names; shares are 0 to 1.

use std::collections::VecDeque;

use ballast_policy::Setup;

/// Sums of one VM, which only grow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Time for which some thread waited, in nanoseconds, as Ballast knows it.
    pub stall_ns: u64,
    /// The kernel's figure, in microseconds.
    pub kernel_us: Option<u64>,
    /// Pages restored.
    pub restores: u64,
}

/// Sums of one VM at its last sample.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    stall_ns: u64,
    kernel_us: Option<u64>,
    /// Restores at times within one window.
    restores: VecDeque<(u64, u64)>,
}

/// Rates since the last sample.
#[derive(Clone, Copy, Debug)]
pub struct Rates {
    /// Share of the time in which some thread waited.
    pub stall: f64,
    /// The kernel's figure.
    pub kernel_stall: Option<f64>,
    /// Restores within the window.
    pub came_back: u64,
}

impl Seen {
    /// These sums, after those before.
    pub fn new(before: Option<&Self>, sums: Sums, setup: &Setup, at_ms: u64) -> Self {
        let mut restores = before.map(|seen| seen.restores.clone()).unwrap_or_default();
        restores.push_back((at_ms, sums.restores));
        while restores.len() > 1 && restores[0].0 + setup.params.window_ms < at_ms {
            restores.pop_front();
        }
        Self { stall_ns: sums.stall_ns, kernel_us: sums.kernel_us, restores }
    }

    /// Rates since those before.
    pub fn rates(&self, before: Option<&Self>, elapsed_ms: u64) -> Rates {
        let share = |more: u64, per_ms: u64| {
            if elapsed_ms == 0 { 0.0 } else { (more as f64 / (per_ms * elapsed_ms) as f64).clamp(0.0, 1.0) }
        };
        let stall = before.map_or(0.0, |seen| share(self.stall_ns.saturating_sub(seen.stall_ns), 1_000_000));
        let kernel_stall = self.kernel_us.zip(before.and_then(|seen| seen.kernel_us));
        let kernel_stall = kernel_stall.map(|(now, then)| share(now.saturating_sub(then), 1_000));
        let last = self.restores.back().map_or(0, |last| last.1);
        Rates { stall, kernel_stall, came_back: last.saturating_sub(self.restores[0].1) }
    }
}
