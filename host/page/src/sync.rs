//! The atomics of the page-state word and the unit byte: the standard ones, or loom's when the model checker runs.

#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU8, AtomicU64, Ordering};
#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
