//! Faults: their service, and the decisions on the way.
//!
//! Before: the guest touched a page that is not mapped. After: it continues. `server` reads and resolves faults, within
//! the fault throttle (`throttle`), and brings in the next pages of sequential faults (`readahead`, `ahead`).
//! Threads: a fault worker for each CPU (`run/servers.rs`).
//! Promise: each fault that was read is served, or raised again by a wake.

pub(crate) mod ahead;
pub(crate) mod begun;
pub mod follow;
pub(crate) mod forgotten;
pub(crate) mod server;
