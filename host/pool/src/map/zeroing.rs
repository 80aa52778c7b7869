//! Dirty slices on their way through a worker.
//!
//! Before: slices are dirty. After: they are ready, or dirty again. Threads: the owner's. Units: slices. Promise: as in
//! `zero`; a slice that a VM may have written to while a worker had it is dirty afterwards.

use crate::map::intent::{self, Intent};
use crate::map::pool::Pool;
use crate::map::state::{Content, Move, SliceState};
use crate::map::unit::{Extent, FrameIdx, SliceIdx};
use crate::map::words::Words;
use crate::map::zero::{Dirty, Zeroed};

impl<W: Words> Pool<W> {
    /// Returns up to `most` dirty slices of one brick, for one worker to zero, until they come back.
    pub fn next_dirty(&mut self, most: u32) -> Option<Dirty> {
        let has_dirty = |frame: &FrameIdx| self.table.count(*frame).free > self.table.count(*frame).ready;
        let is_dirty = |at: &SliceIdx| self.table.state(*at) == SliceState::Free(Content::Dirty);
        let frames = (0..self.table.layout.frames).map(FrameIdx).filter(has_dirty);
        let start = frames.flat_map(|frame| frame.extent().each()).find(is_dirty)?;
        let brick = self.table.brick(start);
        let run = (start.0..brick.end()).map(SliceIdx).take(most.max(1) as usize).take_while(is_dirty);
        let extent = Extent { start, slices: run.count() as u32 };
        intent::run(&mut self.table, Intent::Range { by: Move::Begin, extent });
        Some(Dirty(extent, self.run))
    }

    /// Takes zeroed slices, which can now be handed out. A slice whose memory failed meanwhile stays out of service.
    /// Slices from a worker of another run are ignored: they are dirty, or another worker has them.
    pub fn clean(&mut self, zeroed: Zeroed) {
        let Zeroed(extent, run) = zeroed;
        if run != self.run {
            return;
        }
        let was_exposed = |at: &SliceIdx| self.exposed.contains(at);
        let all: Vec<SliceIdx> = extent.each().collect();
        for part in all.chunk_by(|one, next| was_exposed(one) == was_exposed(next)) {
            let by = if was_exposed(&part[0]) { Move::Stop } else { Move::Clean };
            let extent = Extent { start: part[0], slices: part.len() as u32 };
            intent::run(&mut self.table, Intent::Range { by, extent });
        }
        for at in &all {
            self.exposed.remove(at);
        }
    }
}
