//! Whether this process is managed, and the settings in its environment.
//!
//! Threads: any.
//! Promise: no function waits.

use std::sync::atomic::{AtomicU8, Ordering};

pub const WAITING: u8 = 0;
pub const MANAGED: u8 = 1;
/// Not managed, and never will be: attaching failed, or this is a forked child.
pub const OFF: u8 = 2;

pub static MODE: AtomicU8 = AtomicU8::new(WAITING);

pub fn is_waiting() -> bool {
    MODE.load(Ordering::Relaxed) == WAITING
}

/// Whether a VM must be managed, or else must not start.
pub fn is_required() -> bool {
    text("BALLAST_REQUIRE").is_some_and(|value| value != "0")
}

/// `None` also if the variable is empty.
pub fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
