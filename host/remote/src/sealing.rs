//! Sealing: the seal that a store uses now, which may change once.
//!
//! Before: an engine opens a store, which another engine may still have. After: once it is alone, pages are sealed with
//! a key that the other one does not know. Threads: any. Units: none.
//! Promise: the seal changes only when no other process has the store.

use std::sync::{Arc, PoisonError, RwLock};

use crate::seal::Seal;

#[derive(Debug)]
pub struct Sealing {
    seal: RwLock<Arc<Seal>>,
    when_alone: Option<WhenAlone>,
}

struct WhenAlone(Box<dyn Fn() -> Seal + Send + Sync>);

impl std::fmt::Debug for WhenAlone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WhenAlone")
    }
}

impl Sealing {
    pub fn with(seal: Seal) -> Self {
        Self { seal: RwLock::new(Arc::new(seal)), when_alone: None }
    }

    /// Keeps `make`, which makes the seal that [`Sealing::alone`] sets.
    pub fn when_alone(&mut self, make: impl Fn() -> Seal + Send + Sync + 'static) {
        self.when_alone = Some(WhenAlone(Box::new(make)));
    }

    pub fn get(&self) -> Arc<Seal> {
        self.seal.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// No other process has the store: makes and sets the seal of `when_alone`.
    pub fn alone(&self) {
        if let Some(WhenAlone(make)) = &self.when_alone {
            *self.seal.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(make());
        }
    }
}
