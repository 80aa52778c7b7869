//! What to measure, and how: the words of the command line as types.
//!
//! Before: `main` has parsed them. After: `rig` and every bench read them.
//! Threads: none. Units: none. Promise: only what a user can ask for is here.

use std::path::PathBuf;

use crate::order::{Data, GuestKind};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// How long a touch of a far page takes.
    Restore,
    /// How fast cold pages go.
    Reclaim,
    /// What a second VM adds.
    Scale,
    /// What being attached costs when nothing is wanted.
    Idle,
    /// What a neighbour's faults do to a VM's.
    Storm,
    /// How fast far pages go to a disk, and how long a touch of one there takes.
    Spill,
    /// 4 KiB against 2 MiB.
    Huge,
    /// Many VMs in less memory than they want.
    Balance,
    /// Who is hot: how well that is known, and what knowing costs.
    Track,
    /// One VM under a limit, over time.
    Limit,
}

impl Which {
    /// As it stands in JSON and tables.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Reclaim => "reclaim",
            Self::Scale => "scale",
            Self::Idle => "idle",
            Self::Storm => "storm",
            Self::Spill => "spill",
            Self::Huge => "huge",
            Self::Balance => "balance",
            Self::Track => "track",
            Self::Limit => "limit",
        }
    }
}

/// A part of what [`Which::Balance`] measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Eight VMs, at falling levels of memory.
    Levels,
    /// A VM whose need jumps.
    Jump,
    /// Two VMs that want the same memory all the time.
    Pairs,
    /// Two VMs whose needs change.
    Stages,
    /// One VM, and how much of its memory can go.
    Memory,
}

/// How to measure it.
#[derive(Clone, Debug)]
pub struct Options {
    /// What.
    pub which: Which,
    /// What touches the memory.
    pub guest: GuestKind,
    /// Fewer pages and repetitions.
    pub quick: bool,
    /// Spill: a directory on the disk.
    pub dir: PathBuf,
    /// Balance: this part alone.
    pub part: Option<Part>,
}

impl Options {
    /// Does this guest touch the memory?
    pub(crate) fn is(&self, guest: GuestKind) -> bool {
        self.guest == guest
    }

    /// What guest memory holds, one row each. A quick run of QEMU guests, which boot slowly, has one.
    pub(crate) fn data(&self) -> Vec<Data> {
        let all = [Data::HalfCompressible, Data::Incompressible];
        all.into_iter().take(if self.quick && self.is(GuestKind::Qemu) { 1 } else { 2 }).collect()
    }

    /// The name of what touches the memory.
    pub(crate) fn guest(&self) -> &'static str {
        self.guest.name()
    }
}
