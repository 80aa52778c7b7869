//! Rates of a VM from sums that only grow.
//!
//! Before: sums at two samples. After: shares of time. Threads: any; plain values. Units: in the names; shares are 0 to
//! 1.

/// Sums of one VM, which only grow.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Time in which some thread waited for Ballast.
    pub stall_ns: u64,
    /// Time in which some thread waited for memory, as the kernel counts it.
    pub kernel_us: Option<u64>,
}

impl Sums {
    /// Shares of the time since `before` in which some thread waited: for Ballast, and for memory as the kernel counts
    /// it.
    pub fn stalls(&self, before: Option<&Self>, elapsed_ms: u64) -> (f64, Option<f64>) {
        let share = |more: u64, per_ms: u64| {
            if elapsed_ms == 0 { 0.0 } else { (more as f64 / (per_ms * elapsed_ms) as f64).clamp(0.0, 1.0) }
        };
        let stall = before.map_or(0.0, |before| share(self.stall_ns.saturating_sub(before.stall_ns), 1_000_000));
        let kernel = self.kernel_us.zip(before.and_then(|before| before.kernel_us));
        (stall, kernel.map(|(now, then)| share(now.saturating_sub(then), 1_000)))
    }
}
