//! What is promised to VMs on demand, and how much of the pool is set aside for it.
//!
//! Before: a VM is to have memory on demand. After: `live` has what is promised to it, and `demand` keeps the promise.
//! Threads: none; plain values. Units: slices. Promise: no more is set aside than is promised.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The name of what is set aside. No VM has it.
pub(crate) const ASIDE: &str = "-";
/// The file with the promises.
pub(crate) const FILE: &str = "demand.json";
/// Slices set aside at once: 256 MiB. They are given back as one.
pub(crate) const STEP: u32 = 128;
/// Part of the untouched places for which pages are set aside in advance; at least [`STEP`].
const AHEAD: u32 = 8;

/// The promises: VMs on demand, by their numbers.
pub(crate) type Promises = BTreeMap<u64, Promise>;

/// What was promised to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Promise {
    /// Its name.
    pub name: String,
    /// How much.
    pub slices: u32,
}

/// Memory on demand, in slices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OnDemand {
    /// Promised.
    pub promised: u32,
    /// Pages that VMs have of it.
    pub touched: u32,
    /// Set aside for it.
    pub aside: u32,
}

impl OnDemand {
    /// How many slices are to be set aside.
    pub(crate) fn wanted(self) -> u32 {
        let untouched = self.promised.saturating_sub(self.touched);
        // A VM that made its file longer has more than it was promised, and takes it from others.
        self.promised.min(self.touched + (untouched / AHEAD).max(STEP))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_set_aside_for_what_is_touched_and_a_part_of_the_rest_and_never_for_more_than_is_promised() {
        let wanted = |promised, touched| OnDemand { promised, touched, aside: 0 }.wanted();
        assert_eq!([wanted(0, 0), wanted(32, 0), wanted(32, 32), wanted(32, 40)], [0, 32, 32, 32]);
        assert_eq!([wanted(2048, 0), wanted(2048, 1024), wanted(2048, 2000)], [256, 1152, 2048]);
    }
}
