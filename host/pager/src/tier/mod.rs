//! Tiers: where far pages are, and how they move from the RAM store to slow stores.
//!
//! Before: `evict` put pages into the RAM store. After: old ones are in a slow store, a file on a disk for instance;
//! faults on those are served by the `slow` workers. Threads: a spill worker and some slow workers for each VM with a
//! slow store.
//! Promise: moving a copy costs time, never bytes.

pub(crate) mod slow;
pub(crate) mod spill;
