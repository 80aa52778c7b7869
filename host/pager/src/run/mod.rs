//! Run: the work for all VMs, on few threads.
//!
//! Before: a VM has work that no fault waits for (reclaim, scans, spill), or that may wait (a disk, an
//! order). After: a thread of the pool has done a piece of it. Threads: see [`pool`]. Promise: a task with nothing to
//! do costs no thread and no wake-up. However many tasks of one VM are ready, they delay another VM's by a piece of
//! work each at most.
//!
//! [`queue`] decides which task runs next, without a thread or a clock; [`pool`] has the threads. [`servers`] are the
//! workers that guests wait for, one for each CPU, and one for messages of clients; [`set`] is the set of descriptors
//! that one of them serves, with the `input` that it waits for, and [`serve`] the trait that they implement. Nothing
//! here knows what a VM is.

mod input;
pub mod pool;
pub mod queue;
pub mod serve;
pub mod servers;
pub mod set;

/// Waits until this is so; panics after five minutes, because then it never will be.
#[cfg(test)]
fn until(what: impl Fn() -> bool) {
    let begun = std::time::Instant::now();
    while !what() {
        assert!(begun.elapsed() < std::time::Duration::from_mins(5), "never");
        std::thread::yield_now();
    }
}
