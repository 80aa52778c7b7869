//! Run: the threads that do the work of all VMs.
//!
//! Before: a VM has work for which no fault waits (reclaim, scans, spill), or that may wait (for a disk, an order).
//! After: a thread of the pool has done a part of it.
//! Threads: see [`pool`].
//! Promise: an idle task costs no thread and no wake-up. However many tasks of one VM are ready, each other VM's task
//! is delayed by at most one quantum and one run of them.
//!
//! [`queue`] decides which task runs next, without a thread or a clock; [`pool`] has the threads. [`servers`] has the
//! fault workers, one for each CPU, and a worker for messages of clients; [`set`] is the set of descriptors that one of
//! them serves, `input` waits for these, and [`serve`] is the trait of their servers. Nothing here knows about VMs.

mod input;
pub mod pool;
pub mod queue;
pub(crate) mod serve;
pub mod servers;
pub(crate) mod set;

/// Waits until `what` returns true; panics after five minutes.
#[cfg(test)]
fn until(what: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !what() {
        assert!(begun.elapsed() < std::time::Duration::from_mins(5), "never");
        std::thread::yield_now();
    }
}
