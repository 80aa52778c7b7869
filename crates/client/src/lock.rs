//! Locks of a process that must go on even if one of its threads panics.
//!
//! Promise: a lock is always taken, also after a panic.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A panic elsewhere leaves plain data behind that is still usable; the VMM must go on.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
