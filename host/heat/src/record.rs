//! Record: access cycles in a file, to be replayed or analysed.
//!
//! Before: [`crate::Tracker`] keeps the last cycles while a recorder asks for them. After: `ballast vm heat --record`
//! writes them, `--replay` feeds them to a new tracker. Threads: any; plain values. Units: milliseconds and
//! nanoseconds, in the field names.
//! Promise: a file that is cut short or changed is refused, and the error says where (`read`).
//!
//! ```text
//! file    "BLSTHEAT" | version u16 | length u16 | name of the source | frame ...
//! frame   length u32 | XXH3 of the body u64 | body
//! body    kind u8 (1 layout, 2 coarse, 3 fine, 4 memory) | numbers of 7 bits a byte, low first
//! layout  regions | pages of each
//! cycle   number | begun_ms | ended_ms | cpu_ns | guest_ns | faults | units | unit ...
//! memory  limit + 1, or 0 for none | bytes in DRAM
//! unit    region - last region | unit - last unit (or unit, in a new region) | pages present | flags u8 | seen
//! seen    of a fine unit a map of 64 bytes each: watched unless all is, touched; of blocks u8; else nothing
//! flags   1 seen | 2 fine | 4 touched | 8 all pages watched | 16 blocks
//! ```
//!
//! All little-endian. A coarse cycle lists every unit in memory, also those that it did not report.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64;

use crate::source::{Cost, PageMap, Phase, Seen, UnitId};

mod read;

const MAGIC: &[u8; 8] = b"BLSTHEAT";
/// Version of the file's layout.
pub const VERSION: u16 = 1;
const SEEN: u8 = 1;
const FINE: u8 = 2;
const TOUCHED: u8 = 4;
const ALL_WATCHED: u8 = 8;
const BLOCKS: u8 = 16;

/// A file that is no recording, or is damaged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// No recording of this version.
    #[error("Reading a heat recording: {0}")]
    Header(String),
    /// Cut short or changed.
    #[error("Reading a heat recording: frame {frame} (byte {offset}): {why}")]
    Frame {
        /// Counted from 0.
        frame: usize,
        /// Where it begins in the file.
        offset: usize,
        /// What is wrong with it.
        why: String,
    },
}

/// One unit in a recorded cycle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line {
    /// Which.
    pub unit: UnitId,
    /// Its pages in memory.
    pub present: u16,
    /// What was seen; `None` if the cycle did not report the unit.
    pub seen: Option<Seen>,
}

/// One recorded cycle.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Counted since tracking began.
    pub number: u64,
    /// What it was for.
    pub phase: Phase,
    /// Since tracking began.
    pub begun: Duration,
    /// Since tracking began.
    pub ended: Duration,
    /// What it cost.
    pub cost: Cost,
    /// Ascending.
    pub lines: Vec<Line>,
}

/// What a VM had, and might have, when the cycle before was fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// The limit that held, in bytes, if there was one.
    pub limit: Option<u64>,
    /// Bytes in DRAM.
    pub resident: u64,
}

/// A part of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame {
    /// From here on the VM has these regions, in pages.
    Layout(Vec<u64>),
    /// A cycle.
    Cycle(Recorded),
    /// The recorder adds it; a tracker does not need it.
    Memory(Memory),
}

/// A whole recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recording {
    /// Name of the source.
    pub source: String,
    /// In order.
    pub frames: Vec<Frame>,
}

/// The beginning of a file.
pub fn header(source: &str) -> Vec<u8> {
    let name = &source.as_bytes()[..source.len().min(255)];
    let mut out = MAGIC.to_vec();
    out.extend(VERSION.to_le_bytes());
    out.extend((name.len() as u16).to_le_bytes());
    out.extend(name);
    out
}

fn put(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(number as u8 | 0x80);
        number >>= 7;
    }
    out.push(number as u8);
}

fn put_map(out: &mut Vec<u8>, map: PageMap) {
    map.0.iter().for_each(|word| out.extend(word.to_le_bytes()));
}

impl Frame {
    /// As bytes, ready to be appended to a file.
    pub fn encode(&self) -> Vec<u8> {
        let mut body = Vec::new();
        match self {
            Self::Layout(regions) => {
                body.push(1);
                put(&mut body, regions.len() as u64);
                regions.iter().for_each(|pages| put(&mut body, *pages));
            }
            Self::Memory(Memory { limit, resident }) => {
                body.push(4);
                put(&mut body, limit.map_or(0, |limit| limit.saturating_add(1)));
                put(&mut body, *resident);
            }
            Self::Cycle(cycle) => {
                body.push(if cycle.phase == Phase::Coarse { 2 } else { 3 });
                let ms = |time: Duration| time.as_millis() as u64;
                let ns = |time: Duration| time.as_nanos() as u64;
                let Cost { cpu, guest, faults } = cycle.cost;
                let units = cycle.lines.len() as u64;
                for number in [cycle.number, ms(cycle.begun), ms(cycle.ended), ns(cpu), ns(guest), faults, units] {
                    put(&mut body, number);
                }
                let mut last = UnitId { region: 0, unit: 0 };
                for line in &cycle.lines {
                    encode_line(&mut body, line, last);
                    last = line.unit;
                }
            }
        }
        let mut out = Vec::with_capacity(body.len() + 12);
        out.extend((body.len() as u32).to_le_bytes());
        out.extend(xxh3_64(&body).to_le_bytes());
        out.extend(body);
        out
    }
}

fn encode_line(body: &mut Vec<u8>, line: &Line, last: UnitId) {
    put(body, u64::from(line.unit.region - last.region));
    let from = if line.unit.region == last.region { last.unit } else { 0 };
    put(body, u64::from(line.unit.unit - from));
    put(body, u64::from(line.present));
    let flag = |bit: u8, set: bool| if set { bit } else { 0 };
    match line.seen {
        None => body.push(0),
        Some(Seen::Coarse { touched }) => body.push(SEEN | flag(TOUCHED, touched)),
        Some(Seen::Blocks { touched }) => body.extend([SEEN | BLOCKS, touched]),
        Some(Seen::Fine { watched, touched }) => {
            let all = watched == PageMap::ALL;
            body.push(SEEN | FINE | flag(ALL_WATCHED, all));
            if !all {
                put_map(body, watched);
            }
            put_map(body, touched);
        }
    }
}

impl Recording {
    /// The whole file.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = header(&self.source);
        self.frames.iter().for_each(|frame| out.extend(frame.encode()));
        out
    }

    /// The cycles.
    pub fn cycles(&self) -> impl DoubleEndedIterator<Item = &Recorded> {
        self.frames.iter().filter_map(|frame| match frame {
            Frame::Cycle(cycle) => Some(cycle),
            Frame::Layout(_) | Frame::Memory(_) => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;
    use ballast_base::PAGES_PER_UNIT;
    use proptest::prelude::*;

    const REGIONS: [u64; 2] = [20 * PAGES_PER_UNIT, 7 * PAGES_PER_UNIT - 100];

    fn seen() -> impl Strategy<Value = Option<Seen>> {
        let map = || proptest::array::uniform8(any::<u64>()).prop_map(PageMap);
        let watched = prop_oneof![Just(PageMap::ALL), map()];
        prop_oneof![
            Just(None),
            any::<bool>().prop_map(|touched| Some(Seen::Coarse { touched })),
            any::<u8>().prop_map(|touched| Some(Seen::Blocks { touched })),
            (watched, map()).prop_map(|(watched, touched)| Some(Seen::Fine { watched, touched })),
        ]
    }

    fn cycle() -> impl Strategy<Value = Recorded> {
        let units = proptest::collection::btree_map((0u32..2, 0u32..7), (1u16..=400, seen()), 0..12);
        (any::<bool>(), 0u64..5000, 0u64..100, any::<[u32; 3]>(), units).prop_map(
            |(coarse, begun, length, cost, units)| {
                let line = |((region, unit), (present, seen))| Line { unit: UnitId { region, unit }, present, seen };
                Recorded {
                    number: begun,
                    phase: if coarse { Phase::Coarse } else { Phase::Fine },
                    begun: Duration::from_millis(begun),
                    ended: Duration::from_millis(begun + length),
                    cost: Cost {
                        cpu: Duration::from_micros(cost[0].into()),
                        guest: Duration::from_micros(cost[1].into()),
                        faults: cost[2].into(),
                    },
                    lines: units.into_iter().map(line).collect(),
                }
            },
        )
    }

    fn recording() -> impl Strategy<Value = Recording> {
        proptest::collection::vec(cycle(), 0..6).prop_map(|mut cycles| {
            cycles.sort_by_key(|cycle| cycle.begun);
            let mut frames = vec![Frame::Layout(REGIONS.into())];
            for cycle in cycles {
                let memory = Memory { limit: cycle.number.checked_sub(1), resident: cycle.cost.faults };
                frames.extend([Frame::Cycle(cycle), Frame::Memory(memory)]);
            }
            Recording { source: "scripted".into(), frames }
        })
    }

    proptest! {
        #[test]
        fn what_was_recorded_is_read_back_and_can_be_replayed(recording in recording()) {
            prop_assert_eq!(Recording::decode(&recording.encode()), Ok(recording.clone()));
            let tracker = recording.replay(Settings::default(), |_, _| ());
            let coarse = recording.cycles().filter(|cycle| cycle.phase == Phase::Coarse).count() as u64;
            prop_assert_eq!(tracker.cycles().0, coarse);
        }

        #[test]
        fn a_damaged_recording_is_refused_wherever_it_is_hit(
            recording in recording(), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let mut bytes = recording.encode();
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
            match Recording::decode(&bytes) {
                // The name of the source has no checksum.
                Ok(read) => prop_assert_eq!(read.frames, recording.frames),
                Err(error) => prop_assert!(error.to_string().starts_with("Reading a heat recording: ")),
            }
        }

        #[test]
        fn one_that_was_cut_short_is_refused_unless_cut_between_frames(
            recording in recording(), at: prop::sample::Index,
        ) {
            let bytes = recording.encode();
            let cut = at.index(bytes.len());
            if let Ok(read) = Recording::decode(&bytes[..cut]) {
                prop_assert_eq!(&read.frames[..], &recording.frames[..read.frames.len()]);
                prop_assert_eq!(read.encode().len(), cut);
            }
        }

        #[test]
        fn a_body_with_a_valid_checksum_may_hold_anything(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut bytes = Recording { source: String::new(), frames: vec![Frame::Layout(REGIONS.into())] }.encode();
            bytes.extend((body.len() as u32).to_le_bytes());
            bytes.extend(xxh3_64(&body).to_le_bytes());
            bytes.extend(&body);
            let _ = Recording::decode(&bytes).map(|recording| recording.replay(Settings::default(), |_, _| ()));
        }
    }

    #[test]
    fn an_error_names_what_is_wrong_and_where() {
        let error = |bytes: &[u8]| Recording::decode(bytes).expect_err("refused").to_string();
        assert_eq!(error(b"PNG"), "Reading a heat recording: it is too short to be one");
        assert!(error(b"NOT-HEAT-AT-ALL").contains("does not begin as one"));
        let mut bytes = header("x");
        bytes[8] = 9;
        assert_eq!(error(&bytes), "Reading a heat recording: it has version 9; this program reads version 1");
        let mut bytes = Recording { source: "x".into(), frames: vec![Frame::Layout(vec![7])] }.encode();
        bytes.pop();
        assert_eq!(error(&bytes), "Reading a heat recording: frame 0 (byte 13): it ends 1 bytes too early");
    }
}
