//! Whether this process is managed, and what the environment asks for.
//!
//! Before: nothing. After: every file of the library may ask. Threads: any. Promise: none waits.

use std::sync::atomic::{AtomicU8, Ordering};

/// No RAM seen yet.
pub const WAITING: u8 = 0;
/// Attached.
pub const MANAGED: u8 = 1;
/// Not managed, and never will be: attaching failed, or this is a forked child.
pub const OFF: u8 = 2;

/// One of these.
pub static MODE: AtomicU8 = AtomicU8::new(WAITING);

/// Has no RAM been found yet?
pub fn is_waiting() -> bool {
    MODE.load(Ordering::Relaxed) == WAITING
}

/// Must a VM be managed, or not start?
pub fn is_required() -> bool {
    text("BALLAST_REQUIRE").is_some_and(|value| value != "0")
}

/// A variable of the environment, if it is not empty.
pub fn text(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}
