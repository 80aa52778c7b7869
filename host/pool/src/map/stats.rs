//! The memory of a node, by its state.
//!
//! Before: a request. After: a report, or metrics. Units: slices, and frames of 1 GiB where a name says so.

use crate::map::layout::NodeSpec;
use crate::map::state::{Content, SliceState};
use crate::map::table::Table;
use crate::map::unit::{FrameIdx, NodeIdx};
use crate::map::words::Words;

/// Numbers of a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeStats {
    /// Its number on the host.
    pub numa: u32,
    /// Most slices that the pool may have of it.
    pub slices: u32,
    /// Used by VMs.
    pub used: u32,
    /// Zeroed, so that they can be handed out.
    pub ready: u32,
    /// Part of `ready` in files of a trust domain: only its VMs can have them.
    pub fenced: u32,
    /// Not zeroed yet.
    pub dirty: u32,
    /// Being zeroed.
    pub zeroing: u32,
    /// Lent to the host.
    pub lent: u32,
    /// Places without memory.
    pub holes: u32,
    /// Slices whose memory failed.
    pub mce: u32,
    /// Slices whose memory failed, and that VMs have.
    pub mce_used: u32,
    /// Whole frames that are ready.
    pub ready_frames: u32,
}

impl NodeStats {
    pub(crate) fn of<W: Words>(table: &Table<W>, node: NodeIdx) -> Self {
        let place = table.layout.nodes[usize::from(node.0)];
        let NodeSpec { numa, slices } = place.spec;
        let mut stats = Self { numa, slices, ..Self::default() };
        for frame in (place.first..place.first + place.frames).map(FrameIdx) {
            stats.ready_frames += u32::from(table.count(frame).is_whole());
            for at in frame.extent().each().filter(|at| table.layout.has(*at)) {
                *match table.state(at) {
                    SliceState::Hole => &mut stats.holes,
                    SliceState::Free(Content::Zeroed) => &mut stats.ready,
                    SliceState::Free(Content::Dirty) => &mut stats.dirty,
                    SliceState::Free(Content::Zeroing) => &mut stats.zeroing,
                    SliceState::Used => &mut stats.used,
                    SliceState::Mce => &mut stats.mce,
                    SliceState::MceUsed => &mut stats.mce_used,
                    SliceState::Borrow => &mut stats.lent,
                } += 1;
                stats.fenced += u32::from(table.state(at).is_ready() && table.owner(at).is_some());
            }
        }
        stats
    }
}
