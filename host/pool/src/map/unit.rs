//! Units of the pool: slices, 1 GiB blocks, nodes, and the names of VMs and trust domains.
//!
//! Before: nothing. After: every other file of this crate.
//! Units: a *slice* is 2 MiB. A *frame* is 512 slices that begin at a multiple of 512: 1 GiB, aligned.
//! Promise: an index of the pool and an index of guest memory are different types.

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

/// Slices in a frame, which is 1 GiB.
pub const FRAME_SLICES: u32 = 512;

/// A slice of the pool. Nodes follow each other; each begins at a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SliceIdx(pub u32);

impl SliceIdx {
    /// The frame it is in.
    pub const fn frame(self) -> FrameIdx {
        FrameIdx(self.0 / FRAME_SLICES)
    }
}

impl fmt::Display for SliceIdx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slice {}", self.0)
    }
}

/// A frame of the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FrameIdx(pub u32);

impl FrameIdx {
    /// Its first slice.
    pub const fn first(self) -> SliceIdx {
        SliceIdx(self.0 * FRAME_SLICES)
    }

    /// All of its slices.
    pub const fn extent(self) -> Extent {
        Extent { start: self.first(), slices: FRAME_SLICES }
    }
}

/// Slices that follow each other in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Extent {
    /// The first one.
    pub start: SliceIdx,
    /// Number of slices.
    pub slices: u32,
}

impl Extent {
    /// The slice after the last one.
    pub const fn end(self) -> u32 {
        self.start.0 + self.slices
    }

    /// Each of them.
    pub fn each(self) -> impl DoubleEndedIterator<Item = SliceIdx> {
        (self.start.0..self.end()).map(SliceIdx)
    }

    /// The frames that it touches.
    pub fn frames(self) -> impl DoubleEndedIterator<Item = FrameIdx> {
        (self.start.frame().0..self.end().div_ceil(FRAME_SLICES)).map(FrameIdx)
    }

    /// The part of it that is in this frame; empty if there is none.
    pub fn within(self, frame: FrameIdx) -> Self {
        let start = self.start.0.max(frame.first().0);
        let end = self.end().min(frame.extent().end());
        Self { start: SliceIdx(start), slices: end.saturating_sub(start) }
    }
}

impl fmt::Display for Extent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "slices {} to {}", self.start.0, self.end())
    }
}

/// Guest-physical memory in units of 2 MiB: 0 is the guest's first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GuestIdx(pub u32);

/// The index of a node in the pool's own table. Its number on the host is [`crate::map::NodeSpec::numa`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIdx(pub u8);

/// A VM, by a number that its owner chooses and never uses twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub NonZeroU64);

/// A trust domain: VMs that may share a file. A VM of its own domain shares with no other VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain(pub NonZeroU32);

/// How a VM's memory is aligned (Vmem, 4.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Slices.
    Slices,
    /// Whole frames, as far as there are any and the guest's memory is aligned, and slices for the rest.
    Mix,
}
