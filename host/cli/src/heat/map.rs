//! A heat map over time: a column for each cycle over all memory, a row for each piece of the address space.
//!
//! Before: a recording is read. After: `picture` draws it. Units: seconds, bytes.
//! Promise: its size is bounded, whatever the recording contains.

use ballast_base::PageCount;
use ballast_heat::ages::Cell;
use ballast_heat::record::{Frame, Memory, Recording};
use ballast_heat::{Phase, Settings, heat};

/// Rows of the map.
const ROWS: usize = 256;
/// Most columns; with more cycles, some are left out: the picture has hardly more pixels.
const MOST_COLUMNS: usize = 512;

/// The state at the end of one cycle. Times count from the beginning of tracking.
pub struct Column {
    /// The end of the column before, or the beginning of the first cycle.
    pub from_s: f64,
    /// The end of its cycle.
    pub to_s: f64,
    /// From low to high addresses.
    pub cells: Vec<Cell>,
    /// The working set.
    pub wss_bytes: u64,
}

/// A map ready to be drawn.
pub struct Map {
    /// The title.
    pub title: String,
    /// RAM of all regions.
    pub ram_bytes: u64,
    /// At least one, in order.
    pub columns: Vec<Column>,
    /// Times, with limit and resident memory of the VM.
    pub memory: Vec<(f64, Memory)>,
}

impl Map {
    /// The map of a recording; `None` if it has no cycle over all memory.
    pub fn of(recording: &Recording) -> Option<Self> {
        let coarse = recording.cycles().filter(|cycle| cycle.phase == Phase::Coarse).count();
        let every = coarse.div_ceil(MOST_COLUMNS).max(1);
        let (mut columns, mut seen): (Vec<Column>, _) = (Vec::new(), 0);
        recording.replay(Settings::default(), |tracker, cycle| {
            if cycle.phase == Phase::Coarse {
                seen += 1;
                if seen % every == 0 || seen == coarse {
                    let from_s = columns.last().map_or(cycle.begun.as_secs_f64(), |before| before.to_s);
                    let heat = heat(tracker, cycle.ended, ROWS);
                    let (to_s, wss_bytes) = (cycle.ended.as_secs_f64(), heat.wss_bytes);
                    columns.push(Column { from_s, to_s, cells: heat.strip, wss_bytes });
                }
            }
        });
        let (mut now, mut ram_bytes, mut memory) = (0.0, 0, Vec::new());
        for frame in &recording.frames {
            match frame {
                Frame::Layout(regions) => ram_bytes = PageCount(regions.iter().sum()).bytes().0,
                Frame::Cycle(cycle) => now = cycle.ended.as_secs_f64(),
                Frame::Memory(had) => memory.push((now, *had)),
            }
        }
        let title = format!("touched memory by address, {seen} cycles of {}", recording.source);
        (!columns.is_empty()).then_some(Self { title, ram_bytes, columns, memory })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use ballast_base::MIB;
    use ballast_heat::record::{Line, Recorded};
    use ballast_heat::source::{Cost, Seen, UnitId};
    use std::time::Duration;

    /// 8 MiB of RAM; the first 2 are touched, the next 2 are not, the rest is not in memory.
    pub fn recording(cycles: u64) -> Recording {
        let line = |unit, touched| Line {
            unit: UnitId { region: 0, unit },
            present: 512,
            seen: Some(Seen::Coarse { touched }),
        };
        let cycle = |number| Recorded {
            number,
            phase: Phase::Coarse,
            begun: Duration::from_secs(number),
            ended: Duration::from_secs(number + 1),
            cost: Cost::default(),
            lines: vec![line(0, true), line(1, false)],
        };
        let memory = |limit| Frame::Memory(Memory { limit, resident: 4 * MIB });
        let frames = std::iter::once(Frame::Layout(vec![4 * 512]))
            .chain((0..cycles).flat_map(|n| [Frame::Cycle(cycle(n)), memory((n > 0).then_some(6 * MIB))]));
        Recording { source: "a<b".into(), frames: frames.collect() }
    }

    #[test]
    fn a_long_recording_makes_a_picture_of_bounded_size_that_ends_with_its_last_cycle() {
        let map = Map::of(&recording(5000)).expect("cycles");
        assert!(map.columns.len() <= MOST_COLUMNS, "{}", map.columns.len());
        let ends = map.columns.first().zip(map.columns.last()).map(|(first, last)| (first.from_s, last.to_s));
        assert!(ends.is_some_and(|(_, to)| to == 5000.0), "{ends:?}");
        assert!(Map::of(&recording(0)).is_none());
    }
}
