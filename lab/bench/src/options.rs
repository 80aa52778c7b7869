//! What to measure, and how: the words of the command line as types.
//!
//! Before: `main` has parsed them. After: `rig` and every bench read them.
//! Threads: none. Units: none. Promise: only what a user can ask for is here.

use std::path::PathBuf;

use crate::order::{Data, GuestKind};

/// What to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Which {
    /// How long a touch of a far page takes.
    Restore,
    /// How many cold pages per second leave DRAM.
    Reclaim,
    /// What a second VM adds to both.
    Scale,
    /// How many small VMs fare at once, and what the service costs with each of them.
    Density,
    /// What being attached costs a VM that nobody squeezes.
    Idle,
    /// What a neighbour's fault storm does to a VM's restores.
    Storm,
    /// How fast far pages go to a disk, and how long a touch of one there takes.
    Spill,
    /// Far pages on other machines beside those in RAM and on a disk, and beside bare connections.
    Far,
    /// What equal pages of several VMs save in a group, beside compression alone and KSM.
    Share,
    /// What a guest on 2 MiB pages gains and loses against 4 KiB.
    Huge,
    /// How eight VMs fare in less memory than they want, by policy and by the kernel.
    Balance,
    /// How well it is known who is hot, and what knowing costs.
    Track,
    /// One VM before, under and after a limit, over time.
    Limit,
    /// Which pages belong into fast memory: classifiers against an oracle, simulated.
    Tiers,
    /// What the memory pool needs to know, can sell, and how soon memory of it can be used.
    Pool,
    /// What VMs notice when another engine follows.
    Upgrade,
}

impl Which {
    /// As it stands in JSON and tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Restore => "restore",
            Self::Reclaim => "reclaim",
            Self::Scale => "scale",
            Self::Density => "density",
            Self::Idle => "idle",
            Self::Storm => "storm",
            Self::Spill => "spill",
            Self::Far => "far",
            Self::Share => "share",
            Self::Huge => "huge",
            Self::Balance => "balance",
            Self::Track => "track",
            Self::Limit => "limit",
            Self::Tiers => "tiers",
            Self::Pool => "pool",
            Self::Upgrade => "upgrade",
        }
    }
}

/// A part of what [`Which::Balance`] or [`Which::Density`] measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Part {
    /// Eight VMs at falling levels of memory.
    Levels,
    /// A VM whose need jumps.
    Jump,
    /// Two VMs that want the same memory all the time.
    Pairs,
    /// Two VMs whose needs change.
    Stages,
    /// How much of one VM's memory can go.
    Memory,
    /// Many VMs that read, with the kernel beside them.
    Busy,
    /// The engine is killed under many VMs that read.
    Recovery,
    /// Many VMs that do nothing.
    Idle,
}

impl Part {
    /// Whose part it is.
    pub fn of(self) -> Which {
        match self {
            Self::Levels | Self::Jump | Self::Pairs | Self::Stages | Self::Memory => Which::Balance,
            Self::Busy | Self::Recovery | Self::Idle => Which::Density,
        }
    }
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
    /// Balance, density: this part alone.
    pub part: Option<Part>,
    /// Density: this number of VMs alone.
    pub vms: Option<usize>,
    /// Balance: the levels of memory, in percent; the bench's own if there is none.
    pub levels: Vec<u64>,
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
