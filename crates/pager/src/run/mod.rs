//! Run: what is done for all VMs, on few threads.
//!
//! Before: a VM has something to do that no fault waits for (reclaim, prefetch, scans, spill), or that may wait (a
//! disk, an order). After: a thread of the pool has done a piece of it. Threads: see [`pool`]. Promise: a task that has
//! nothing to do costs no thread and no wake-up. One VM's tasks, however many are ready, delay another's by a piece of
//! work each at most.
//!
//! [`queue`] decides which task runs next, without a thread or a clock; [`pool`] has the threads; [`listener`] waits
//! for what clients say. [`servers`] are the workers that guests wait for, one for each CPU; [`set`] is what one of
//! them serves, [`serve`] what it asks of those. Nothing here knows what a VM is.

pub mod listener;
pub mod pool;
pub mod queue;
pub mod serve;
pub mod servers;
pub mod set;
