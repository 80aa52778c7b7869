//! Faults on pages, and the outcomes of filling or mapping a page.
//!
//! Before: userfaultfd reported a fault, or was asked to fill a hole. After: the moves of a page depend on it.
//! Threads: any; plain values.

/// The state of the page in the file at the fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// A hole: the page was never touched, was discarded, or is far.
    Missing,
    /// The page is in the file but not mapped: it was zapped.
    Minor,
}

/// The outcome of filling or mapping a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillOutcome {
    /// The page is in the file and mapped; its waiters were woken.
    Done,
    /// Another thread was first. No thread was woken: wake them.
    AlreadyThere,
    /// `CONTINUE` only: the file has a hole there.
    NotInFile,
    /// The address space is changing; ask again.
    Retry,
    /// The range is not registered (any more), or the process is gone.
    Gone,
    /// The page is in the file, but its bytes are lost: its memory failed, or its swap device. No thread was woken.
    Failed,
}
