//! Waits for the engine: of a client for a reply, of an attach for a file store, of a VM without processes for its end.
//!
//! Before: the engine was given an order. After: it says that it is done; or it dies, and the next one is asked again.
//! Threads: the keeper's one.

use std::time::Instant;

use ballast_base::wire::{Attach, VmId};
use ballast_handover::orders::Order;
use ballast_sys::file_ranges::FileRanges;

use crate::admit::Admitted;
use crate::closer::SentFd;
use crate::losses::Losses;
use crate::regions::VmEntry;

/// Number of an order without a waiting caller.
pub const UNASKED: u64 = u64::MAX;

/// A client's wait.
pub struct Asked {
    pub client: u64,
    /// The order whose end it waits for; a new engine is given it again.
    pub order: Order,
    pub answer: Answer,
}

/// The message to a client once the order it waits for has been carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Ok,
    Attached,
}

/// An attach that waits.
pub struct Making {
    pub seq: u64,
    pub client: u64,
    pub attach: Attach,
    pub admitted: Admitted,
    pub since: Instant,
}

/// The place of a file store's file, and its index; or why there is none.
pub type Made = Result<[SentFd; 2], String>;

impl Making {
    /// The order that makes its store.
    pub fn order(&self) -> Order {
        Order::MakeFileStore { seq: self.seq }
    }
}

/// A VM without processes.
pub struct Closing {
    /// Number of the order to close it.
    pub seq: u64,
    pub entry: VmEntry,
    /// The engine has it.
    pub given: bool,
    /// The engine could not open it, so its memory did not go back: it is given it again at this time.
    pub again_at: Option<Instant>,
    /// How often that was so.
    pub losses: Losses,
}

impl Closing {
    /// A VM that the engine is to close.
    pub fn new(seq: u64, entry: VmEntry, given: bool) -> Self {
        Self { seq, entry, given, again_at: None, losses: Losses::default() }
    }

    /// Its engine is dead.
    pub fn take_back(&mut self) {
        self.given = false;
    }
}

/// A VM that was told to come again.
pub struct Returning {
    pub vm: VmId,
    /// The RAM of the process that came.
    pub ram: FileRanges,
    /// Until when no other VM gets its RAM.
    pub until: Instant,
}
