//! Log: the last cycles, kept while a recorder asks for them; and how recorded cycles are absorbed again.
//!
//! Before: a recorder asks about every second ([`Tracker::cycles_after`]). After: `record` has the file, and replays
//! it.
//! Threads: under the tracker's lock. Units: bytes of encoded frames. Promise: without a recorder nothing grows; a
//! cycle that is replayed leaves the same state as the first time.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use super::{Phase, Tracker};
use crate::record::{self, Frame, Line, Recorded};
use crate::source::{Report, Seen, UnitId};
use crate::units::Moment;

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

impl Tracker {
    /// A recording of the cycles after number `after` that are still kept. The first call begins to keep them and
    /// returns none; after half a minute without a call, none are kept.
    pub fn cycles_after(&mut self, now: Duration, after: u64, source: &str) -> Vec<u8> {
        self.log.wanted_until = now + CycleLog::TIMEOUT;
        let mut out = record::header(source);
        out.extend(Frame::Layout(self.log.layout.clone()).encode());
        // The number is another engine's: the recorder has none of these.
        let after = if after > self.version { 0 } else { after };
        let late = self.log.frames.iter().filter(|(number, _)| *number > after);
        late.for_each(|(_, frame)| out.extend(frame));
        out
    }

    /// A cycle as it is recorded. Call this before the cycle is absorbed.
    pub(crate) fn recorded(&self, number: u64, ended: Duration, phase: Phase, report: &Report) -> Recorded {
        let mut seen = report.units.iter().peekable();
        let lines = match phase {
            Phase::Fine => {
                let line = |(unit, seen): &(UnitId, Seen)| (*unit, Some(*seen));
                report.units.iter().map(line).collect::<Vec<_>>()
            }
            Phase::Coarse => {
                let line = |unit: UnitId| {
                    while seen.next_if(|(other, _)| *other < unit).is_some() {}
                    (unit, seen.next_if(|(other, _)| *other == unit).map(|(_, seen)| *seen))
                };
                self.units.present().map(line).collect()
            }
        };
        let line = |(unit, seen)| Line { unit, present: self.units.present_pages(unit) as u16, seen };
        let lines = lines.into_iter().map(line).filter(|line| line.present > 0).collect();
        Recorded { number, phase, begun: self.begun, ended, cost: report.cost, lines }
    }

    /// Absorb a recorded cycle.
    pub(crate) fn replay(&mut self, cycle: &Recorded) {
        let (at, birth) = (Moment::at(cycle.begun), self.generations.youngest());
        if cycle.phase == Phase::Coarse {
            let listed: HashSet<UnitId> = cycle.lines.iter().map(|line| line.unit).collect();
            let gone: Vec<UnitId> = self.units.present().filter(|unit| !listed.contains(unit)).collect();
            gone.into_iter().for_each(|unit| self.units.set_present(unit, 0, at, birth));
        }
        for line in &cycle.lines {
            let most = self.units.pages_of(line.unit) as u16;
            self.units.set_present(line.unit, line.present.min(most), at, birth);
        }
        let units = cycle.lines.iter().filter_map(|line| Some((line.unit, line.seen?))).collect();
        let report = Report { units, cost: cycle.cost };
        self.begun = cycle.begun;
        self.absorb(cycle.ended, cycle.phase, &report);
    }
}
