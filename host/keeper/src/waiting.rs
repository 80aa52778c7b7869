//! An attach that waits for the engine, which makes a file store.
//!
//! Before: the engine was given an order. After: the engine reports that the store is made; or it dies, and the next
//! engine gets the order. Threads: the keeper's one.

use std::time::Instant;

use ballast_base::wire::Attach;
use ballast_handover::failure::Failure;
use ballast_handover::orders::Order;

use crate::admit::Admitted;
use ballast_sys::slow_fd::SlowFd;

/// Number of an order for whose reply nobody waits.
pub const UNASKED: u64 = u64::MAX;

pub struct Making {
    pub seq: u64,
    pub client: u64,
    pub attach: Attach,
    pub admitted: Admitted,
    pub since: Instant,
}

/// The place of a file store's file, and its index; or why there is none.
pub type Made = Result<[SlowFd; 2], Failure>;

impl Making {
    pub fn order(&self) -> Order {
        Order::MakeFileStore { seq: self.seq }
    }
}
