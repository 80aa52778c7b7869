//! Reclaim: which pages are evicted, and when.
//!
//! Before: a limit was written. After: resident memory is at or below it. `worker` runs the loop. `refault` and
//! `interval` tell it which pages refault and how soon, `kept` and `pinned` which pages must stay, and `growth` that a
//! VM at rest holds more.
//! Threads: one reclaim worker for each VM. Promise: a page is evicted only after its quarantine.

pub(crate) mod growth;
pub mod interval;
pub(crate) mod kept;
pub mod pinned;
mod quarantine;
pub mod refault;
pub mod worker;
