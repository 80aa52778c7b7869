//! Units of the pool: slices, 1 GiB blocks, nodes, and the names of VMs and trust domains.
//!
//! Before: nothing. After: every other file of this crate.
//! Units: a *slice* is 2 MiB. A *frame* is 512 slices that begin at a multiple of 512: 1 GiB, aligned.
//! Promise: an index of the pool and an index of guest memory are different types.

use std::fmt;
use std::num::{NonZeroU32, NonZeroU64};

use ballast_base::{Bytes, HUGE_SIZE};

/// Bytes in a slice.
pub const SLICE_SIZE: u64 = HUGE_SIZE as u64;
/// Slices in a frame, which is 1 GiB.
pub const FRAME_SLICES: u32 = 512;

/// Returns the size of a number of slices.
pub const fn slices_to_bytes(slices: u32) -> Bytes {
    Bytes(slices as u64 * SLICE_SIZE)
}

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

    /// True if it is made of whole frames.
    pub const fn is_whole_frames(self) -> bool {
        self.start.0.is_multiple_of(FRAME_SLICES) && self.slices.is_multiple_of(FRAME_SLICES)
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

impl GuestIdx {
    /// The guest-physical address of its first byte.
    pub const fn address(self) -> u64 {
        self.0 as u64 * SLICE_SIZE
    }
}

/// The index of a node in the pool's own table. Its number on the host is [`crate::NodeSpec::numa`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeIdx(pub u8);

/// A VM, by a number that its owner chooses and never uses twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VmId(pub NonZeroU64);

/// A trust domain: VMs that may share a file. A VM of its own domain shares with no other VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Domain(pub NonZeroU32);

/// The class of a frame's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// One huge page of 1 GiB.
    Gib,
    /// Huge pages of 2 MiB. A page of 1 GiB becomes 512 of these (the kernel's `demote`), and never one again.
    Huge,
    /// Shared memory of base pages, which the kernel has collapsed as far as it could.
    Shmem,
}

impl Class {
    /// The class that a VM requests for it.
    pub const fn kind(self) -> Kind {
        match self {
            Self::Gib | Self::Huge => Kind::Hugetlb,
            Self::Shmem => Kind::Shmem,
        }
    }

    pub(crate) const fn to_byte(class: Option<Self>) -> u8 {
        match class {
            None => 0,
            Some(Self::Gib) => 0x0F,
            Some(Self::Huge) => 0x33,
            Some(Self::Shmem) => 0x55,
        }
    }

    pub(crate) const fn from_byte(byte: u8) -> Option<Option<Self>> {
        Some(match byte {
            0 => None,
            0x0F => Some(Self::Gib),
            0x33 => Some(Self::Huge),
            0x55 => Some(Self::Shmem),
            _ => return None,
        })
    }
}

/// The class of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Huge pages, which are paged as a whole.
    Hugetlb,
    /// Base pages, each of which can be evicted.
    Shmem,
}

/// How a VM's memory is aligned (Vmem, 4.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Pages of 1 GiB only.
    Gib,
    /// Slices.
    Slices,
    /// Whole frames, as far as there are any and the guest's memory is aligned, and slices for the rest.
    Mix,
}
