//! Faults: how they are served, and which decisions are made on the way.
//!
//! Before: the guest touched a page that is not mapped. After: it runs on. `server` reads and resolves faults, within
//! the fault throttle (`throttle`); it restores the next pages of a sequential reader (`readahead`), and pages that
//! were evicted together (`prefetch`).
//! Threads: a fault worker for each CPU (`run/servers.rs`), a prefetch task for each VM. Promise: every fault that was
//! read is served, or raised again by a wake.

pub(crate) mod begun;
pub mod busy;
pub mod cluster;
pub(crate) mod far_run;
pub mod follow;
pub(crate) mod forgotten;
pub(crate) mod prefetch;
pub mod prefetch_queue;
pub mod readahead;
pub(crate) mod resolve;
pub(crate) mod server;
pub(crate) mod stages;
pub(crate) mod stall;
pub mod throttle;
