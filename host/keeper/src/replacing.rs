//! The keeper's state while it is about to become another program.
//!
//! Before: an upgrade's engine serves. After: this process has become the program; or the keeper stays, and operators
//! are told why.
//! Threads: the keeper's one.

use crate::program::Program;
use crate::stage::Deadline;

/// A replacement that waits: an obstacle still prevents the exec.
pub(crate) struct Replacing {
    pub program: Program,
    pub deadline: Deadline,
}
