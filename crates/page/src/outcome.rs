//! What a move of a granule came to: the word it replaced, the one it left, and what the guest sees.
//!
//! Before: `fault` has tried to bring a granule in. After: the ledger books it. Threads: any.
//! Promise: the words are those of the lock, so a count that is made from them counts each move once.

use std::io;

use crate::page_state::{State, Word};

/// The word that a granule had when it was locked, and the one that it was left with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Before.
    pub from: Word,
    /// After.
    pub to: Word,
}

impl Move {
    /// Did the granule leave Quarantine, or an eviction, because it was touched?
    pub fn is_quarantine_hit(self) -> bool {
        matches!(self.from.state(), State::Quarantine | State::Evicting)
    }

    /// Is what the first word names in a store not needed any more?
    pub fn drops_copies(self) -> bool {
        let names = |word: Word| matches!(word.state(), State::Far | State::Restoring);
        names(self.from) && !names(self.to)
    }
}

/// What became of a fault.
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
    /// The page was far, and its hole in the file was filled by another process.
    Filled {
        /// With zeros, which the copy has replaced, as opposed to bytes, which now are the page.
        zeros: bool,
    },
    /// The store lost the page.
    Poisoned {
        /// Found lost just now, as opposed to touched again.
        newly: bool,
    },
    /// The memory of a page in its file failed: it is Poisoned now.
    Failed,
    /// Another thread holds this page, the store is busy or not among those given, or the address space is changing:
    /// serve it again soon.
    Later,
    /// The range is not ours any more, or the process is gone. A thread that still waits there is not woken by this.
    Gone,
}

/// What became of one try to bring a granule in.
#[derive(Debug)]
pub struct Outcome {
    /// `None` if the granule was not locked.
    pub moved: Option<Move>,
    /// What the guest sees. On an error the kernel refused in a way it never should, and nothing was lost.
    pub served: io::Result<Served>,
}

impl From<Served> for Outcome {
    /// No word was replaced.
    fn from(served: Served) -> Self {
        Self { moved: None, served: Ok(served) }
    }
}
