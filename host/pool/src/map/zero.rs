//! Dirty memory, and the proof that it is zero.
//!
//! Before: [`crate::map::Pool::next_dirty`] gives dirty slices to a worker. After: [`crate::map::Pool::clean`] takes
//! the zeroed slices, and they may be handed out.
//! Threads: the worker's. Promise: a [`Zeroed`] is made by running a function on a [`Dirty`] and by nothing else, a
//! [`Dirty`] by the pool alone, and neither can be copied. So no path through safe code hands out a slice that was not
//! given to that function after its last VM had gone. If the worker dies, the slices are dirty again when the state is
//! next opened; a value of the pool that was open before is then refused.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::map::unit::Extent;

/// One opening of a pool, by this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ZeroRun(u64);

impl ZeroRun {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// Unused slices with unknown content. They belong to the holder of this value until they come back to the pool.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the slices stay out of use until they are given back to the pool"]
pub struct Dirty(pub(crate) Extent, pub(crate) ZeroRun);

/// Slices that are zero.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the slices stay out of use until they are given back to the pool"]
pub struct Zeroed(pub(crate) Extent, pub(crate) ZeroRun);

impl Dirty {
    /// The slices.
    pub fn extent(&self) -> Extent {
        self.0
    }

    /// Has `zero` fill them. The caller ensures that every byte is zero and in memory when `zero` returns.
    ///
    /// # Errors
    /// The error of `zero`, with the slices: try again.
    pub fn zero<E>(self, zero: impl FnOnce(Extent) -> Result<(), E>) -> Result<Zeroed, (Self, E)> {
        match zero(self.0) {
            Ok(()) => Ok(Zeroed(self.0, self.1)),
            Err(error) => Err((self, error)),
        }
    }
}

impl Zeroed {
    /// The slices.
    pub fn extent(&self) -> Extent {
        self.0
    }
}
