//! Locks of a process that must continue even if one of its threads panics.
//!
//! Promise: a lock is always taken, also after a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Take a lock. A panic on another thread leaves plain data that is still usable, and the VMM must continue.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
