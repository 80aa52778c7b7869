//! Reading a recording: bytes of a file become frames, or an error that says where the file is damaged.
//!
//! Before: [`super::Frame::encode`] wrote the frames, or anybody did. After: a [`Recording`] that can be replayed.
//! Units: see [`super`]. Promise: no byte is trusted. Lengths are checked before they are used, so what is allocated is
//! bounded by the length of the file; units are in order and exist.

use std::time::Duration;

use ballast_base::PAGES_PER_UNIT;
use xxhash_rust::xxh3::xxh3_64;

use super::{
    ALL_WATCHED, BLOCKS, FINE, Frame, Line, MAGIC, Memory, RecordError, Recorded, Recording, SEEN, TOUCHED, VERSION,
};
use crate::source::{Cost, PageMap, Phase, Seen, UnitId};

/// Most bytes of a frame's body: a cycle of a guest of 4 TiB fits.
const MOST_BODY: usize = 64 << 20;
/// Most regions: a VM has a few.
const MOST_REGIONS: u64 = 4096;
/// Most pages of a region: 1 PiB.
const MOST_PAGES: u64 = 1 << 38;

/// Reads from the front of a slice. Errors are texts.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], String> {
        if self.0.len() < count {
            return Err(format!("it ends {} bytes too early", count - self.0.len()));
        }
        let (head, rest) = self.0.split_at(count);
        self.0 = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], String> {
        Ok(self.take(N)?.try_into().expect("as long as asked for"))
    }

    fn number(&mut self) -> Result<u64, String> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            let bits = u64::from(byte & 0x7F);
            if shift == 63 && bits > 1 {
                break;
            }
            number |= bits << shift;
            if byte & 0x80 == 0 {
                return Ok(number);
            }
        }
        Err("a number is longer than 64 bits".into())
    }

    fn at_most(&mut self, most: u64, what: &str) -> Result<u64, String> {
        match self.number()? {
            number if number <= most => Ok(number),
            number => Err(format!("{what} is {number}; at most {most} is possible")),
        }
    }

    fn map(&mut self) -> Result<PageMap, String> {
        let bytes: [u8; 64] = self.array()?;
        let word = |index: usize| bytes[index * 8..][..8].try_into().expect("eight bytes");
        Ok(PageMap(std::array::from_fn(|index| u64::from_le_bytes(word(index)))))
    }
}

impl Recording {
    /// Read a whole recording. Damage anywhere refuses all of it.
    pub fn decode(bytes: &[u8]) -> Result<Self, RecordError> {
        let mut reader = Reader(bytes);
        let source = read_header(&mut reader).map_err(RecordError::Header)?;
        let mut frames = Vec::new();
        // Pages of the regions as they are at this frame.
        let mut layout = Vec::new();
        while !reader.0.is_empty() {
            let offset = bytes.len() - reader.0.len();
            let frame = read_frame(&mut reader, &mut layout).map_err(|why| RecordError::Frame {
                frame: frames.len(),
                offset,
                why,
            })?;
            frames.push(frame);
        }
        Ok(Self { source, frames })
    }
}

fn read_header(reader: &mut Reader<'_>) -> Result<String, String> {
    if reader.take(MAGIC.len()).map_err(|_| "it is too short to be one")? != MAGIC {
        return Err("it does not begin as one; `ballast vm heat NAME --record FILE` makes one".into());
    }
    let version = u16::from_le_bytes(reader.array()?);
    if version != VERSION {
        return Err(format!("it has version {version}; this program reads version {VERSION}"));
    }
    let length = u16::from_le_bytes(reader.array()?);
    let name = reader.take(usize::from(length))?;
    let name = std::str::from_utf8(name).map_err(|_| "the name of its source is not text")?;
    Ok(name.to_owned())
}

fn read_frame(reader: &mut Reader<'_>, layout: &mut Vec<u64>) -> Result<Frame, String> {
    let length = u32::from_le_bytes(reader.array()?) as usize;
    if length > MOST_BODY {
        return Err(format!("it claims {length} bytes; at most {MOST_BODY} are possible"));
    }
    let sum = u64::from_le_bytes(reader.array()?);
    let body = reader.take(length)?;
    if xxh3_64(body) != sum {
        return Err("its checksum is wrong".into());
    }
    let mut body = Reader(body);
    let [kind] = body.array()?;
    let frame = match kind {
        1 => {
            let count = body.at_most(MOST_REGIONS, "the number of regions")?;
            *layout = (0..count).map(|_| body.at_most(MOST_PAGES, "a region's size")).collect::<Result<_, _>>()?;
            Frame::Layout(layout.clone())
        }
        2 | 3 => Frame::Cycle(read_cycle(&mut body, if kind == 2 { Phase::Coarse } else { Phase::Fine }, layout)?),
        4 => Frame::Memory(Memory { limit: body.number()?.checked_sub(1), resident: body.number()? }),
        other => return Err(format!("its kind is {other}, which this program does not know")),
    };
    if !body.0.is_empty() {
        return Err(format!("it has {} bytes too many", body.0.len()));
    }
    Ok(frame)
}

fn read_cycle(body: &mut Reader<'_>, phase: Phase, layout: &[u64]) -> Result<Recorded, String> {
    let number = body.number()?;
    let (begun, ended) = (Duration::from_millis(body.number()?), Duration::from_millis(body.number()?));
    if ended < begun {
        return Err("its cycle ends before it begins".into());
    }
    let (cpu, guest) = (Duration::from_nanos(body.number()?), Duration::from_nanos(body.number()?));
    let cost = Cost { cpu, guest, faults: body.number()? };
    // Each unit takes four bytes at least: this bounds what is allocated.
    let count = body.at_most(body.0.len() as u64 / 4, "the number of units")?;
    let mut lines: Vec<Line> = Vec::with_capacity(count as usize);
    for _ in 0..count {
        lines.push(read_line(body, lines.last().map(|line| line.unit), layout)?);
    }
    Ok(Recorded { number, phase, begun, ended, cost, lines })
}

fn read_line(body: &mut Reader<'_>, last: Option<UnitId>, layout: &[u64]) -> Result<Line, String> {
    let before = last.unwrap_or(UnitId { region: 0, unit: 0 });
    let region = u64::from(before.region) + body.at_most(MOST_REGIONS, "a step between regions")?;
    let pages =
        *layout.get(region as usize).ok_or_else(|| format!("it names region {region}, which does not exist"))?;
    let from = if region == u64::from(before.region) { u64::from(before.unit) } else { 0 };
    let unit = from.saturating_add(body.number()?);
    let units = pages.div_ceil(PAGES_PER_UNIT);
    if unit >= units {
        return Err(format!("it names unit {unit} of region {region}, which has {units}"));
    }
    let unit = UnitId { region: region as u32, unit: unit as u32 };
    if last.is_some_and(|last| unit <= last) {
        return Err(format!("unit {} of region {region} comes twice or out of order", unit.unit));
    }
    let present = body.at_most(PAGES_PER_UNIT, "the pages of a unit")? as u16;
    let [flags] = body.array()?;
    let has = |bit: u8| flags & bit != 0;
    let seen = match (has(SEEN), has(FINE)) {
        _ if flags >= BLOCKS * 2 => return Err(format!("the flags {flags:#x} are not known")),
        (false, _) => None,
        (true, false) if has(BLOCKS) => {
            let [touched] = body.array()?;
            Some(Seen::Blocks { touched })
        }
        (true, false) => Some(Seen::Coarse { touched: has(TOUCHED) }),
        (true, true) => Some(Seen::Fine {
            watched: if has(ALL_WATCHED) { PageMap::ALL } else { body.map()? },
            touched: body.map()?,
        }),
    };
    Ok(Line { unit, present, seen })
}
