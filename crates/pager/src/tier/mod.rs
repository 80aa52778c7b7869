//! Tiers: where far pages are, and their way between the RAM store and the file store.
//!
//! Before: `evict` put pages into the RAM store. After: old ones are in the file; faults on those are served by the
//! `slow` workers. Threads: a spill worker and some slow workers for each VM with a file store.
//! Promise: moving a copy costs time, never bytes.

pub(crate) mod slow;
pub mod slow_queue;
pub(crate) mod spill;
pub mod spill_request;
pub mod stores;
