//! The keeper's state while it is about to become another program.
//!
//! Before: an upgrade's engine serves. After: this process is the other program's; or it stays, and operators are told
//! why.
//! Threads: the keeper's one.

use crate::program::Program;
use crate::stage::Deadline;

/// The replacement under way: something still prevents the exec.
pub(crate) struct Replacing {
    pub program: Program,
    pub deadline: Deadline,
}
