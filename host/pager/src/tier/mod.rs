//! Tiers: the stores of far pages, and the moves from the RAM store to slow stores.
//!
//! Before: `evict` put pages into the RAM store. After: old pages are in a slow store, for example a file on a disk;
//! the `slow` workers serve faults on them.
//! Threads: a spill worker and some slow workers for each VM with a slow store.
//! Promise: moving a copy costs time, never bytes.

pub(crate) mod slow;
pub(crate) mod spill;
