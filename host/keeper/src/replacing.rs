//! The keeper's state while it is about to become another program.
//!
//! Before: an upgrade's engine serves. After: this process is the other program's; or it stays, and operators are told
//! why.
//! Threads: the keeper's one.

use crate::checker::Checker;
use crate::program::Program;
use crate::stage::Deadline;

/// The replacement under way.
pub(crate) struct Replacing {
    pub program: Program,
    pub step: Step,
}

/// The step it is at.
pub(crate) enum Step {
    /// The program is asked whether it could be the keeper.
    Checking(Checker),
    /// It can be the keeper. Something still prevents the exec.
    Waiting(Deadline),
}
