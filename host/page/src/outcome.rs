//! The result of a granule's move: the word it replaced, the word it stored, and the guest's view.
//!
//! Before: `fault` has tried to bring a granule in. After: the ledger books it. Threads: any.
//! Promise: the words are those of the lock, so the ledger counts each move once.

use std::io;

use crate::page_state::{State, Word};

/// A granule's word when it was locked, and when it was unlocked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Before.
    pub from: Word,
    /// After.
    pub to: Word,
}

impl Move {
    /// Returns whether the granule left Quarantine, or an eviction, because it was touched.
    pub fn is_quarantine_hit(self) -> bool {
        matches!(self.from.state(), State::Quarantine | State::Evicting)
    }

    /// Returns whether it leaves a copy that no word names any more.
    pub fn drops_copies(self) -> bool {
        let names = |word: Word| matches!(word.state(), State::Far | State::Restoring);
        names(self.from) && !names(self.to)
    }
}

/// How a fault was served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    /// The page was in DRAM: zapped and now mapped again.
    Mapped,
    /// The page had never been touched, or was discarded: zeros.
    Fresh,
    /// The page was known to be all zero.
    Zeroed,
    /// The page was restored from its store.
    Restored,
    /// The page was far, and another process had filled its hole in the file.
    Filled {
        /// The hole was filled with zeros, which the copy has replaced; otherwise the bytes there are the page now.
        zeros: bool,
    },
    /// The store lost the page.
    Poisoned {
        /// This fault found the loss, not an earlier one.
        newly: bool,
    },
    /// The memory of a page in its file failed: it is Poisoned now.
    Failed,
    /// To be retried soon: the page is locked, its store is busy or was not given, or the address space is changing.
    Later,
    /// The range is no longer registered, or the process has ended. Threads that wait there must still be woken.
    Gone,
}

/// The result of one try to bring a granule in.
#[derive(Debug)]
pub struct Outcome {
    /// `None` if the granule was not locked.
    pub moved: Option<Move>,
    /// The guest's view. An error is an unexpected refusal of the kernel; nothing was lost.
    pub served: io::Result<Served>,
}

impl From<Served> for Outcome {
    /// No word was replaced.
    fn from(served: Served) -> Self {
        Self { moved: None, served: Ok(served) }
    }
}
