//! Away: for how long pages that come back had been far.
//!
//! Before: a page's word was stamped as it became Far. After: the VM's counter says for how long all that came back had been
//! away together, from which policies tell how much of what is far is wanted at all (Little's law: what comes back in a
//! second, times how long it was away, is how much is away at a time).
//! Threads: any. Units: milliseconds, in steps of 256, modulo [`WRAPS_MS`]. Promise: the stamp is the age byte, which a far
//! page has no other use for; it means the same to a later engine.

use rustix::time::{ClockId, clock_gettime};

const STEP_MS: u64 = 256;
/// A page that was away for longer is counted with what is left after this was taken off, as often as need be.
pub const WRAPS_MS: u64 = 256 * STEP_MS;

/// Now.
pub fn stamp() -> u8 {
    let now = clock_gettime(ClockId::Monotonic);
    let ms = now.tv_sec.unsigned_abs() * 1000 + now.tv_nsec.unsigned_abs() / 1_000_000;
    (ms / STEP_MS) as u8
}

/// From one stamp to another, milliseconds: off by up to a step, and right on average.
pub fn between_ms(from: u8, to: u8) -> u64 {
    u64::from(to.wrapping_sub(from)) * STEP_MS
}

/// How soon something came back that was away for so long (as told above): one over the time, in thousandths of 1/s.
pub fn milli_hz(away_ms: u64) -> u64 {
    // Within one step it was half of one, on average.
    1_000_000 / away_ms.max(STEP_MS / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_across_the_wrap_and_none_is_nothing() {
        assert_eq!(between_ms(3, 3), 0);
        assert_eq!(between_ms(250, 4), 2560);
        assert!(between_ms(stamp(), stamp()) <= STEP_MS);
    }

    #[test]
    fn what_comes_back_sooner_weighs_more_and_at_once_is_half_a_step() {
        assert_eq!([0, 128, 256, 1000, 60_000].map(milli_hz), [7812, 7812, 3906, 1000, 16]);
    }
}
