//! The figures of one turn of a side, and the times that all parts of this bench have.
//!
//! Units: in every name; times of a quick run end in `QUICK`.

use std::fmt;
use std::time::Duration;

use ballast_realmem::load::Window;

pub(super) const SETTLE_QUICK: Duration = Duration::from_secs(3);
pub(super) const LIMITED: Duration = Duration::from_secs(20);
pub(super) const LIMITED_QUICK: Duration = Duration::from_secs(3);
pub(super) const SEED: u64 = 42;

/// The figures of one turn.
#[derive(Clone, Debug, Default)]
pub(super) struct Turn {
    /// Speed under the limit, of that without one.
    pub(super) speed: f64,
    /// The requests a second without a limit.
    pub(super) free_per_s: f64,
    pub(super) limited: Window,
    pub(super) restores_per_s: f64,
    pub(super) soon_per_s: f64,
    pub(super) evictions_per_s: f64,
    pub(super) minor_per_s: f64,
    pub(super) us_per_fault: f64,
    pub(super) us_per_eviction: f64,
    pub(super) engine_pct: f64,
    pub(super) wrong: f64,
}

impl fmt::Display for Turn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "speed {:.2}, restores {:.0}/s, soon {:.0}/s, minor {:.0}/s, evictions {:.0}/s, {:.1} us a fault, {:.1} us \
             an eviction, engine {:.1} %, p99 {:.0} us",
            self.speed,
            self.restores_per_s,
            self.soon_per_s,
            self.minor_per_s,
            self.evictions_per_s,
            self.us_per_fault,
            self.us_per_eviction,
            self.engine_pct,
            self.limited.p99_us,
        )
    }
}
