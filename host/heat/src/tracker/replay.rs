//! Replay: hands a recorder the last cycles, and absorbs recorded cycles again.
//!
//! Before: a recorder asks about every second ([`Tracker::cycles_after`]). After: `record` has the file, and a new
//! tracker absorbs it. Threads: under the tracker's lock. Units: bytes of encoded frames.
//! Promise: a cycle that is replayed leaves the same state as the first time.

use std::collections::HashSet;
use std::time::Duration;

use super::{Settings, Tracker};
use crate::moment::Moment;
use crate::record::{self, Frame, Line, Recorded, Recording};
use crate::source::{CycleReport, Phase, Seen, UnitId};

impl Tracker {
    /// A recording of the cycles after number `after` that are still kept. The first call begins to keep them and
    /// returns none; after half a minute without a call, none are kept.
    pub fn cycles_after(&mut self, now: Duration, after: u64, source: &str) -> Vec<u8> {
        self.log.keep(now);
        let mut out = record::header(source);
        out.extend(Frame::Layout(self.log.layout().to_vec()).encode());
        // The number is another engine's: the recorder has none of these.
        let after = if after > self.version { 0 } else { after };
        self.log.frames_after(after).for_each(|frame| out.extend(frame));
        out
    }

    /// A cycle as it is recorded. Call this before the cycle is absorbed.
    pub(crate) fn recorded(&self, number: u64, ended: Duration, phase: Phase, report: &CycleReport) -> Recorded {
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
    fn replay(&mut self, cycle: &Recorded) {
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
        let report = CycleReport { units, cost: cycle.cost };
        self.begun = cycle.begun;
        self.absorb(cycle.ended, cycle.phase, &report);
    }
}

impl Recording {
    /// Feed it to a new tracker. `each` is called after each cycle.
    pub fn replay(&self, settings: Settings, mut each: impl FnMut(&Tracker, &Recorded)) -> Tracker {
        let mut tracker = Tracker::new(settings, 0);
        for frame in &self.frames {
            match frame {
                Frame::Layout(regions) => tracker.units.layout(regions.iter().copied()),
                Frame::Cycle(cycle) => {
                    tracker.replay(cycle);
                    each(&tracker, cycle);
                }
                Frame::Memory(_) => {}
            }
        }
        tracker
    }
}
