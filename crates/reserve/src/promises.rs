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
    /// How many slices are to be set aside: whole steps, since each call that sets some aside takes a place in the
    /// state.
    pub(crate) fn wanted(self) -> u32 {
        let untouched = self.promised.saturating_sub(self.touched);
        let wanted = self.touched + (untouched / AHEAD).max(STEP);
        // A VM that made its file longer has more than it was promised, and takes it from others.
        self.promised.min(wanted.next_multiple_of(self.step()))
    }

    /// Slices that are set aside at once, so that there are some 500 such pieces at most.
    pub(crate) fn step(self) -> u32 {
        STEP.max((self.promised / 512).next_multiple_of(STEP))
    }

    /// How many to set aside now, of this many that are ready. Less than is wanted only if touches need it: the rest
    /// is being zeroed, and comes as one.
    pub(crate) fn lacks(self, ready: u32) -> u32 {
        let lacks = self.wanted().saturating_sub(self.aside);
        if lacks <= ready || self.aside <= self.touched { lacks.min(ready) } else { 0 }
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

    #[test]
    fn a_large_vm_that_is_touched_page_by_page_has_some_hundred_pieces_set_aside() {
        for promised in [512, 8192, 1 << 20] {
            let (mut aside, mut pieces) = (0, 0);
            for touched in 0..=promised {
                let now = OnDemand { promised, touched, aside };
                let lacks = now.lacks(u32::MAX);
                pieces += lacks.div_ceil(now.step());
                aside += lacks;
                assert!(aside > touched || aside == promised);
            }
            assert!(pieces <= 600 && aside == promised, "{pieces} pieces for {promised}");
        }
    }

    #[test]
    fn a_part_of_a_step_is_set_aside_only_if_touches_need_it() {
        let lacks = |touched, ready| OnDemand { promised: 8192, touched, aside: 1280 }.lacks(ready);
        assert_eq!([lacks(1000, 3), lacks(1279, 3), lacks(1280, 3), lacks(1000, 9000)], [0, 0, 3, 640]);
    }
}
