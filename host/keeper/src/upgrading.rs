//! The keeper's state of an upgrade under way, and of an engine that was replaced.
//!
//! Before: `upgrade` began one. After: it goes from stage to stage.
//! Threads: the keeper's one.

use std::collections::HashMap;
#[cfg(test)]
use std::time::Duration;
use std::time::Instant;

use ballast_base::wire::VmId;
use ballast_handover::upgrading::Upgrading;

use crate::engine::{Engine, Who};
use crate::program::Program;
use crate::stage::{Deadline, Stage};

/// An upgrade that is under way.
pub(crate) struct Upgrade {
    pub next: Engine,
    /// The program that it was started from.
    pub program: Program,
    pub stage: Stage,
    /// The state that operators see.
    pub shown: Upgrading,
    pub begun: Instant,
    pub deadline: Deadline,
    /// The settings that the new engine began with.
    pub settings: Vec<u8>,
    /// Orders of this upgrade that have not been answered.
    pub asked: HashMap<u64, Asked>,
    /// VMs that the new engine opens, and since when no engine serves them.
    pub opening: HashMap<VmId, Instant>,
    /// VMs that two engines serve, and since when.
    pub both: HashMap<VmId, Instant>,
    /// VMs with a process that neither engine could serve.
    pub incomplete: Vec<VmId>,
    /// The new engine has said that it serves.
    pub serves: bool,
}

/// The subject of an order of the upgrade.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Asked {
    Begun,
    Check(VmId),
    Rest,
    /// The old engine only serves its faults.
    ServeFaults(VmId),
    Part(VmId),
    Opened(VmId),
    /// The old engine closes it, which the new one serves as well.
    Leave(VmId),
}

impl Asked {
    /// The engine that is asked.
    pub fn whom(self) -> Who {
        match self {
            Self::Begun | Self::Check(_) | Self::Opened(_) => Who::Next,
            Self::Rest | Self::ServeFaults(_) | Self::Part(_) | Self::Leave(_) => Who::Engine,
        }
    }
}

impl Upgrade {
    /// No message or act of the new engine counts any more.
    pub fn is_dead(&self) -> bool {
        self.stage == Stage::Returning
    }
}

#[cfg(test)]
impl Upgrade {
    /// As if it had been waited for longer, in rounds.
    pub fn age(&mut self, round: Duration) {
        self.deadline.age(round);
    }
}

/// An engine that was told to leave.
pub(crate) struct Leaving {
    pub engine: Engine,
    pub deadline: Deadline,
}
