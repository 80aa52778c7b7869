//! Records of perf's ring buffer: samples of accesses, and counts of lost ones.
//!
//! Before: [`crate::perf`] copies bytes out of a ring that the kernel writes. After: a source of heat has addresses.
//! Threads: none. Units: bytes; nanoseconds of perf's clock. Promise: pure; no bytes cause a panic or a read outside of
//! them. A damaged record ends the reading, because the start of the next one is unknown.
//!
//! The kernel writes the fields of a sample in a fixed order, those that [`FIELDS`] asks for (`perf_event_open(2)`):
//!
//! ```text
//! record   kind u32 | misc u16 | size u16, header included | body
//! sample   ip u64 | pid u32 | tid u32 | time u64 | address u64 | weight u64 | data source u64
//! ```

use std::fmt;
use std::ops::Range;

/// The fields of a sample (`perf_event_attr.sample_type`): instruction, thread, time, address, weight, data source.
pub const FIELDS: u64 = 1 | 1 << 1 | 1 << 2 | 1 << 3 | 1 << 14 | 1 << 15;

const HEADER: usize = 8;
const LOST: u32 = 2;
const THROTTLE: u32 = 5;
const UNTHROTTLE: u32 = 6;
const SAMPLE: u32 = 9;
const LOST_SAMPLES: u32 = 13;

/// One sampled access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sample {
    /// Address of the instruction.
    pub ip: u64,
    /// Its process.
    pub pid: u32,
    /// Its thread.
    pub tid: u32,
    /// Time by perf's clock.
    pub time_ns: u64,
    /// The accessed virtual address of the process. 0 if the event has none.
    pub address: u64,
    /// The latency in core cycles for a load-latency event; else 0.
    pub weight: u64,
    /// Where the data came from (`union perf_mem_data_src`).
    pub source: u64,
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Record {
    /// An access.
    Sample(Sample),
    /// The ring was full, or the hardware dropped some: this number of samples is missing here.
    Lost(u64),
    /// The kernel has stopped the event: too many samples in one tick.
    Throttled,
    /// It has started it again.
    Unthrottled,
    /// A record of another kind, which has no accesses.
    Other(u32),
}

/// A malformed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Damaged {
    /// Where it begins, among the bytes that were read.
    pub offset: usize,
    /// The size that it states; the bytes that are there, if they are less than a header.
    pub size: usize,
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reading perf's ring: the record at byte {} cannot have {} bytes", self.offset, self.size)
    }
}

impl std::error::Error for Damaged {}

/// The records in these bytes, which begin with one. Ends after the first that is damaged.
pub fn records(bytes: &[u8]) -> Records<'_> {
    Records { bytes, offset: 0 }
}

/// The iterator that [`records`] returns.
#[derive(Clone, Debug)]
pub struct Records<'a> {
    bytes: &'a [u8],
    offset: usize,
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_ne_bytes(*bytes))
}

fn long(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().map(|bytes| u64::from_ne_bytes(*bytes))
}

fn sample(body: &[u8]) -> Option<Sample> {
    Some(Sample {
        ip: long(body, 0)?,
        pid: word(body, 8)?,
        tid: word(body, 12)?,
        time_ns: long(body, 16)?,
        address: long(body, 24)?,
        weight: long(body, 32)?,
        source: long(body, 40)?,
    })
}

fn record(kind: u32, body: &[u8]) -> Option<Record> {
    Some(match kind {
        SAMPLE => Record::Sample(sample(body)?),
        // The identity of the event precedes the number.
        LOST => Record::Lost(long(body, 8)?),
        LOST_SAMPLES => Record::Lost(long(body, 0)?),
        THROTTLE => Record::Throttled,
        UNTHROTTLE => Record::Unthrottled,
        other => Record::Other(other),
    })
}

impl Iterator for Records<'_> {
    type Item = Result<Record, Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        let rest = self.bytes.get(self.offset..).filter(|rest| !rest.is_empty())?;
        let stated = half(rest, 6).map_or(rest.len().min(HEADER), usize::from);
        let whole = rest.get(..stated).filter(|_| stated >= HEADER && stated.is_multiple_of(8));
        let read = whole.and_then(|whole| record(word(whole, 0)?, whole.get(HEADER..)?));
        let offset = self.offset;
        self.offset = if read.is_some() { offset + stated } else { self.bytes.len() };
        Some(read.ok_or(Damaged { offset, size: stated }))
    }
}

/// The places of the bytes between `tail` and `head`, which only grow, in a ring of `size` bytes: up to two pieces.
/// `None` if that is impossible: they are more than the ring has, or no ring has this size.
pub fn pieces(tail: u64, head: u64, size: usize) -> Option<[Range<usize>; 2]> {
    let new = usize::try_from(head.wrapping_sub(tail)).ok().filter(|new| *new <= size && size.is_power_of_two())?;
    let from = (tail % size as u64) as usize;
    let first = new.min(size - from);
    Some([from..from + first, 0..new - first])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A record in the kernel's layout.
    fn written(record: Record) -> Vec<u8> {
        let numbers = |list: &[u64]| list.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
        let (kind, body) = match record {
            Record::Sample(Sample { ip, pid, tid, time_ns, address, weight, source }) => {
                let thread = [pid.to_ne_bytes(), tid.to_ne_bytes()].concat();
                (SAMPLE, [numbers(&[ip]), thread, numbers(&[time_ns, address, weight, source])].concat())
            }
            Record::Lost(count) => (LOST, numbers(&[77, count])),
            Record::Throttled => (THROTTLE, numbers(&[1, 2, 3])),
            Record::Unthrottled => (UNTHROTTLE, numbers(&[1, 2, 3])),
            Record::Other(kind) => (kind, numbers(&[9; 5])),
        };
        let size = (HEADER + body.len()) as u16;
        [&kind.to_ne_bytes()[..], &[2, 0], &size.to_ne_bytes(), &body].concat()
    }

    fn any_record() -> impl Strategy<Value = Record> {
        prop_oneof![
            any::<([u64; 5], u32, u32)>().prop_map(|([ip, time_ns, address, weight, source], pid, tid)| {
                Record::Sample(Sample { ip, pid, tid, time_ns, address, weight, source })
            }),
            any::<u64>().prop_map(Record::Lost),
            Just(Record::Throttled),
            Just(Record::Unthrottled),
            (14u32..1000).prop_map(Record::Other),
        ]
    }

    proptest! {
        #[test]
        fn records_that_the_kernel_writes_are_read_in_order(list in proptest::collection::vec(any_record(), 0..20)) {
            let bytes: Vec<u8> = list.iter().flat_map(|record| written(*record)).collect();
            let read: Result<Vec<Record>, Damaged> = records(&bytes).collect();
            prop_assert_eq!(read, Ok(list));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let read: Vec<_> = records(&bytes).collect();
            prop_assert!(read.len() <= bytes.len().div_ceil(HEADER));
            prop_assert!(read.iter().rev().skip(1).all(Result::is_ok), "nothing is read behind damage");
        }

        #[test]
        fn damage_is_named_by_its_place_and_what_comes_before_it_is_read(
            list in proptest::collection::vec(any_record(), 1..10), hit: prop::sample::Index, size: u16,
            cut in 1usize..8,
        ) {
            let mut bytes = Vec::new();
            let starts: Vec<usize> = list.iter().map(|record| {
                bytes.extend(written(*record));
                bytes.len() - written(*record).len()
            }).collect();
            let at = hit.index(starts.len());
            let mut wrong = bytes.clone();
            wrong[starts[at] + 6..][..2].copy_from_slice(&size.to_ne_bytes());
            let read: Vec<_> = records(&wrong).collect();
            prop_assert!(read.iter().zip(&list[..at]).all(|(read, record)| *read == Ok(*record)));
            if size < 8 || size % 8 != 0 || usize::from(size) > bytes.len() - starts[at] {
                prop_assert_eq!(read.last(), Some(&Err(Damaged { offset: starts[at], size: size.into() })));
            }
            // Cut short in the middle of the last one.
            let read: Vec<_> = records(&bytes[..bytes.len() - cut]).collect();
            prop_assert!(read.len() == list.len() && read[list.len() - 1].is_err());
        }

        #[test]
        fn a_ring_that_wraps_around_reads_as_one_that_does_not(
            list in proptest::collection::vec(any_record(), 0..12), start in any::<u64>(),
        ) {
            const SIZE: usize = 1024;
            let bytes: Vec<u8> = list.iter().flat_map(|record| written(*record)).collect();
            prop_assume!(bytes.len() <= SIZE);
            let tail = start / 8 * 8;
            let mut ring = [0xEE; SIZE];
            for (offset, byte) in bytes.iter().enumerate() {
                ring[(tail.wrapping_add(offset as u64) % SIZE as u64) as usize] = *byte;
            }
            let pieces = pieces(tail, tail.wrapping_add(bytes.len() as u64), SIZE).expect("they fit");
            let read = pieces.map(|piece| ring[piece].to_vec()).concat();
            prop_assert_eq!(read, bytes);
        }

        #[test]
        fn impossible_positions_are_refused(tail: u64, head: u64, size in 0usize..5000) {
            if let Some([first, second]) = pieces(tail, head, size) {
                let wraps = first.end == size && second.end <= first.start;
                prop_assert!(first.end <= size && (second.is_empty() || wraps));
                prop_assert_eq!((first.len() + second.len()) as u64, head.wrapping_sub(tail));
            }
        }
    }

    #[test]
    fn a_load_of_pebs_is_read_as_the_abi_lays_it_out() {
        // perf_event.h: type 9, misc (user, exact ip), size 56; then the fields of FIELDS in their order.
        let mut bytes = vec![9, 0, 0, 0, 2, 0x40, 56, 0];
        for number in [0x40_1234u64, 22 << 32 | 11, 5_000_000_000, 0x7f12_3456_7040, 231, 0x2_6810_0842] {
            bytes.extend(number.to_le_bytes());
        }
        let expected = Sample {
            ip: 0x40_1234,
            pid: 11,
            tid: 22,
            time_ns: 5_000_000_000,
            address: 0x7f12_3456_7040,
            weight: 231,
            source: 0x2_6810_0842,
        };
        if cfg!(target_endian = "little") {
            assert_eq!(records(&bytes).collect::<Vec<_>>(), [Ok(Record::Sample(expected))]);
        }
        let short = Damaged { offset: 0, size: 48 };
        bytes[6] = 48;
        bytes.truncate(48);
        assert_eq!(records(&bytes).next(), Some(Err(short)));
        assert_eq!(short.to_string(), "Reading perf's ring: the record at byte 0 cannot have 48 bytes");
    }
}
