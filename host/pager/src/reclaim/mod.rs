//! Reclaim: decides which pages are evicted, and when.
//!
//! Before: a limit was written. After: resident memory is at or below it. `worker` runs the loop, `controller` decides
//! how far it goes, `candidates` picks pages, `quarantine` has them zapped and holds them for T, `growth` notices that
//! a VM at rest holds more, and `failures` limits reports.
//! Threads: one reclaim worker for each VM.
//! Promise: a page is evicted only after its quarantine.

mod candidates;
pub(crate) mod controller;
mod failures;
pub(crate) mod growth;
mod quarantine;
pub mod worker;
