//! Host states: high, clear, soft, hard, low.
//!
//! Before: every snapshot. After: the frame divides less in `hard`, and still less in `low`; a change is an event.
//! Units: bytes, milliseconds. Promise: worse at once; better only by a margin, and after a while.
//!
//! Names and fractions of `min_free` are ESX's. Reclaim takes time, so free memory alone would show it too late: each
//! state also has a *time to exhaustion*, free memory over the rate at which it falls.

use serde::{Deserialize, Serialize};

use crate::host_state::HostState;
use crate::snapshot::HostSample;

/// State, share of `min_free`, milliseconds to exhaustion: the host is in the state if it is below either. The shares
/// are ESX's. The times are an estimate: reclaim moves some GiB in ten seconds.
const STEPS: [(HostState, f64, u64); 4] = [
    (HostState::Low, 0.16, 500),
    (HostState::Hard, 0.32, 2_000),
    (HostState::Soft, 0.64, 5_000),
    (HostState::Clear, 1.0, 15_000),
];
/// Factor between the bound of entering a state and that of leaving it.
const MARGIN: f64 = 1.25;
/// Time for which it must be better without interruption, in milliseconds.
const DWELL_MS: u64 = 5_000;
/// A longer time to exhaustion is not reported, in milliseconds.
const SAID_UP_TO_MS: u64 = 3_600_000;
/// Time over which the rate is averaged, in milliseconds.
const RATE_OVER_MS: f64 = 3_000.0;

/// The state, and the history on which the next one depends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Ladder {
    /// The state now.
    pub state: HostState,
    /// Since when it has been better than this state, if it is.
    better_since_ms: Option<u64>,
    /// Free memory at the last sample, and its time.
    last: Option<(u64, u64)>,
    /// Bytes per second that become used, averaged.
    rate: f64,
}

impl Ladder {
    /// Updates the state from a sample. Returns the state, and the milliseconds to exhaustion if free memory falls.
    pub fn update(&mut self, host: &HostSample, at_ms: u64) -> (HostState, Option<u64>) {
        if let Some((free, then)) = self.last {
            let elapsed = at_ms.saturating_sub(then) as f64;
            if elapsed > 0.0 {
                let now = (free as f64 - host.free_bytes as f64) / elapsed * 1e3;
                let keep = (-elapsed / RATE_OVER_MS).exp();
                self.rate = self.rate * keep + now * (1.0 - keep);
            }
        }
        self.last = Some((host.free_bytes, at_ms));
        let left = (self.rate > 0.0).then(|| (host.free_bytes as f64 / self.rate * 1e3) as u64);
        let exhaustion_ms = left.filter(|left| *left <= SAID_UP_TO_MS);
        let entered = level(host, exhaustion_ms, 1.0);
        let left = level(host, exhaustion_ms, MARGIN);
        if entered >= self.state || left >= self.state {
            self.better_since_ms = None;
            self.state = self.state.max(entered);
        } else if at_ms.saturating_sub(*self.better_since_ms.get_or_insert(at_ms)) >= DWELL_MS {
            self.better_since_ms = None;
            self.state = left;
        }
        (self.state, exhaustion_ms)
    }
}

/// The worst state whose bounds, widened by `margin`, hold.
fn level(host: &HostSample, exhaustion_ms: Option<u64>, margin: f64) -> HostState {
    let free = host.free_bytes as f64;
    let short = |share: f64| free < share * margin * host.min_free_bytes as f64;
    let soon = |ms: u64| exhaustion_ms.is_some_and(|left| (left as f64) < ms as f64 * margin);
    let found = STEPS.iter().find(|(_, share, ms)| short(*share) || soon(*ms));
    found.map_or(HostState::High, |(state, ..)| *state)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::{GIB, MIB};

    fn host(free_bytes: u64) -> HostSample {
        HostSample { budget_bytes: 64 * GIB, free_bytes, min_free_bytes: GIB, ..HostSample::default() }
    }

    #[test]
    fn free_memory_alone_goes_through_the_states_of_esx() {
        for (free, state) in
            [(2 * GIB, "high"), (900 * MIB, "clear"), (600 * MIB, "soft"), (300 * MIB, "hard"), (100 * MIB, "low")]
        {
            assert_eq!(Ladder::default().update(&host(free), 0).0.to_string(), state, "{free}");
        }
    }

    #[test]
    fn memory_that_falls_fast_is_short_while_much_is_free() {
        let mut ladder = Ladder::default();
        let mut free = 40 * GIB;
        let mut worst = HostState::High;
        for at_ms in (0..4000).step_by(500) {
            let (state, left) = ladder.update(&host(free), at_ms);
            assert!(at_ms == 0 || left.is_some());
            worst = worst.max(state);
            free -= 4 * GIB;
        }
        assert!(worst >= HostState::Soft, "8 GiB a second with {} left is {worst}", ballast_base::Bytes(free));
    }

    #[test]
    fn worse_comes_at_once_and_better_after_some_time_and_by_a_margin() {
        let mut ladder = Ladder::default();
        assert_eq!(ladder.update(&host(2 * GIB), 0).0, HostState::High);
        ladder.last = None;
        assert_eq!(ladder.update(&host(900 * MIB), 1_000).0, HostState::Clear);
        // Above the bound of entering, below the bound of leaving.
        assert_eq!(ladder.update(&host(1100 * MIB), 20_000).0, HostState::Clear);
        // Better, but it must last without interruption.
        assert_eq!(ladder.update(&host(2 * GIB), 21_000).0, HostState::Clear);
        assert_eq!(ladder.update(&host(1100 * MIB), 24_000).0, HostState::Clear);
        ladder.last = None;
        assert_eq!(ladder.update(&host(2 * GIB), 25_000).0, HostState::Clear);
        assert_eq!(ladder.update(&host(2 * GIB), 29_999).0, HostState::Clear);
        assert_eq!(ladder.update(&host(2 * GIB), 30_000).0, HostState::High);
        ladder.last = None;
        assert_eq!(ladder.update(&host(100 * MIB), 31_000).0, HostState::Low);
        assert_eq!(ladder.update(&host(60 * GIB), 32_000).0, HostState::Low);
        assert_eq!(ladder.update(&host(60 * GIB), 37_000).0, HostState::High);
    }

    #[test]
    fn a_steady_host_changes_nothing_and_never_runs_out() {
        let mut ladder = Ladder::default();
        for at_ms in (0..100_000).step_by(1000) {
            assert_eq!(ladder.update(&host(GIB + GIB / 8), at_ms), (HostState::High, None));
        }
    }
}
