//! The stores of a VM, and the queues of work for its slow ones.
//!
//! Before: the engine opened the stores. After: words name copies in them; faults, spill and readahead queue here.
//! Threads: any.
//! Promise: nothing here waits for a store.

pub(crate) mod live;
mod overdue;
pub mod slow_queue;
pub(crate) mod spill_request;
pub mod stores;
