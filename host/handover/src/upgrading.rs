//! The state of an upgrade, as keeper and engines report it to each other and to operators.
//!
//! Before: the keeper begins an upgrade, or a stage of it ends. After: each engine has the new state, and shows it.
//! Threads: any; a plain value. Units: microseconds, in the field names.
//! Promise: it is part of messages and of the keeper's record, so a changed field raises the version of both (`orders`,
//! `kept`).

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// An upgrade and its progress.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Upgrading {
    /// Counts the upgrades of this keeper; 0 before the first.
    pub number: u64,
    /// The program of the successor.
    pub program: String,
    /// See [`Stage`].
    pub stage: Stage,
    /// VMs when it began.
    pub vms: u32,
    /// VMs that the successor has checked.
    pub checked: u32,
    /// VMs that the successor serves.
    pub moved: u32,
    /// Its duration until now.
    pub took_us: u64,
    /// The longest time for which no engine served a VM.
    pub longest_gap_us: u64,
    /// Why it failed, or another note.
    pub message: String,
    /// Whether the keeper was replaced, too, or why not; `None` until that is known.
    pub keeper: Option<Result<(), Failure>>,
    /// The longest time for which two engines had a VM.
    pub longest_switch_us: u64,
}

/// The stage of an upgrade.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// There was no upgrade.
    #[default]
    None,
    /// The successor checks each VM, and changes nothing.
    Checking,
    /// VMs go to the successor, one after the other.
    Switching,
    /// VMs return to the last engine.
    Returning,
    /// The successor serves; its predecessor is gone.
    Done,
    /// The last engine serves as before.
    Failed,
}
