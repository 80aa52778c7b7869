//! The cycle log: the last cycles, kept while a recorder asks for them.
//!
//! Before: the tracker absorbs a cycle. After: `replay` hands the frames to the recorder. Threads: under the tracker's
//! lock.
//! Units: bytes of encoded frames. Promise: without a recorder nothing grows.

use std::collections::VecDeque;
use std::time::Duration;

/// The last cycles, ready to be written to a file, while a recorder asks for them.
#[derive(Debug, Default)]
pub(super) struct CycleLog {
    wanted_until: Duration,
    /// Pages of the regions, the same for all frames.
    layout: Vec<u64>,
    frames: VecDeque<(u64, Vec<u8>)>,
    bytes: usize,
}

impl CycleLog {
    /// A recorder asks about every second; after this time it is gone.
    const TIMEOUT: Duration = Duration::from_secs(30);
    /// Most bytes that are kept for a late recorder.
    const MOST_BYTES: usize = 16 << 20;

    /// Is there a recorder?
    pub(super) fn is_wanted(&self, now: Duration) -> bool {
        now < self.wanted_until
    }

    /// A recorder asked: keep cycles for some time from now on.
    pub(super) fn keep(&mut self, now: Duration) {
        self.wanted_until = now + Self::TIMEOUT;
    }

    /// Pages of the regions.
    pub(super) fn layout(&self) -> &[u64] {
        &self.layout
    }

    /// The frames of the cycles after number `after`.
    pub(super) fn frames_after(&self, after: u64) -> impl Iterator<Item = &[u8]> {
        self.frames.iter().filter(move |(number, _)| *number > after).map(|(_, frame)| &frame[..])
    }

    /// Keep the frame of a cycle. Another layout drops those before.
    pub(super) fn push(&mut self, layout: Vec<u64>, number: u64, frame: Vec<u8>) {
        if self.layout != layout {
            *self = Self { wanted_until: self.wanted_until, layout, ..Self::default() };
        }
        self.bytes += frame.len();
        self.frames.push_back((number, frame));
        while self.bytes > Self::MOST_BYTES && self.frames.len() > 1 {
            self.bytes -= self.frames.pop_front().map_or(0, |(_, frame)| frame.len());
        }
    }
}
