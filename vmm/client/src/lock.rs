//! Locks of a process that must continue after a panic of one of its threads.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Takes a lock, even after a panic: the data behind it is plain and still usable, and the VMM must continue.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
