//! Faults: how they are served, and which decisions are made on the way.
//!
//! Before: the guest touched a page that is not mapped. After: it runs on. `server` reads and resolves faults, within
//! the fault throttle (`throttle`), and brings the next pages of a thread in order (`readahead`, `ahead`).
//! Threads: a fault worker for each CPU (`run/servers.rs`). Promise: every fault that was read is served, or raised
//! again by a wake.

pub(crate) mod ahead;
pub(crate) mod begun;
pub mod follow;
pub(crate) mod forgotten;
pub(crate) mod server;
