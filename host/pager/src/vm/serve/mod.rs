//! Serving a fault, whichever worker does it.
//!
//! Before: a worker has a fault. After: `resolve` has moved its page and woken its thread, `throttle` has charged it,
//! `stall` and `stages` have counted its time. `readahead` knows which faults are sequential.
//! Threads: fault and slow workers.
//! Promise: nothing here waits for another worker.

pub mod readahead;
pub(crate) mod resolve;
pub(crate) mod stages;
pub(crate) mod stall;
pub mod throttle;
