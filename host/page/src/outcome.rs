//! The result of a granule's move: the word it replaced, the word it stored, and what the guest sees.
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
    /// Did the granule leave Quarantine, or an eviction, because it was touched?
    pub fn is_quarantine_hit(self) -> bool {
        matches!(self.from.state(), State::Quarantine | State::Evicting)
    }

    /// Does it leave a copy that no word names any more?
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
    /// The page was far, and its hole in the file was filled by another process.
    Filled {
        /// With zeros, which the copy has replaced; other bytes are the page now.
        zeros: bool,
    },
    /// The store lost the page.
    Poisoned {
        /// The loss was found by this fault, not by an earlier one.
        newly: bool,
    },
    /// The memory of a page in its file failed: it is Poisoned now.
    Failed,
    /// Serve it again soon: another thread holds this page, its store is busy or was not given, or the address space is
    /// changing.
    Later,
    /// The range is not ours any more, or the process is gone. This wakes no thread that still waits there.
    Gone,
}

/// The result of one try to bring a granule in.
#[derive(Debug)]
pub struct Outcome {
    /// `None` if the granule was not locked.
    pub moved: Option<Move>,
    /// What the guest sees. An error is an unexpected refusal of the kernel; nothing was lost.
    pub served: io::Result<Served>,
}

impl From<Served> for Outcome {
    /// No word was replaced.
    fn from(served: Served) -> Self {
        Self { moved: None, served: Ok(served) }
    }
}
