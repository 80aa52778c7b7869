//! What the keeper holds while it is about to become another program.
//!
//! Before: an upgrade's engine serves. After: this process is the other program's; or it stays, and it is said why.
//! Threads: the keeper's one.

use std::path::PathBuf;

use crate::checker::Checker;
use crate::stage::Deadline;

/// See the file's head.
pub(crate) struct Replacing {
    pub program: PathBuf,
    pub step: Step,
}

/// Where it is.
pub(crate) enum Step {
    /// The program is asked whether it could be the keeper.
    Checking(Checker),
    /// It could. Something is in the way yet.
    Waiting(Deadline),
}
