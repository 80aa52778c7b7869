//! Locking that outlives the panic of a thread which had the mutex.
//!
//! Before: a thread needs the data that a mutex guards. After: it has the lock, also if another thread panicked with
//! it.
//! Promise: one thread's panic does not become every thread's. The data may be in any state that a death of the process
//! could leave.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// A method of mutexes beside `lock`.
pub trait Lock<T> {
    /// Locks it, poisoned or not.
    fn locked(&self) -> MutexGuard<'_, T>;
}

impl<T> Lock<T> for Mutex<T> {
    fn locked(&self) -> MutexGuard<'_, T> {
        self.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
