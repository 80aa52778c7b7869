//! Trace: samples in a file, to be replayed through any classifier.
//!
//! Before: a program's accesses were sampled. After: the same ranges as live, on any machine.
//! Units: addresses. Promise: input is never trusted. A file that is cut short or changed is refused, and the memory it
//! needs is bounded by its length.
//!
//! ```text
//! file    "BLSTRNGE" | version u16 | least reader u16 | XXH3 of the body u64 | body (postcard)
//! body    vCPUs | roots: first address, address after the last | epochs: each address as the difference to the last
//! ```
//!
//! The header's numbers are little-endian.

use ballast_base::format::{Format, Stamp, Unreadable};
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::range::Classifier;
use crate::roots::{Roots, RootsError};

const MAGIC: &[u8; 8] = b"BLSTRNGE";
/// Versions that this program writes and reads.
pub const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };
/// Bytes before the body.
const HEADER: usize = 20;

/// Samples of one program, epoch by epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// CPUs of the guest it ran in.
    pub vcpus: u64,
    /// The classified memory: first addresses, and the addresses after the last.
    pub roots: Vec<(u64, u64)>,
    /// Sampled addresses of each epoch, in order.
    pub epochs: Vec<Vec<u64>>,
}

/// A file that is no trace, or is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TraceError {
    /// The file does not begin as a trace.
    #[error("Reading a trace of accesses: it does not begin as one")]
    Magic,
    /// The file is of a program that is too new or too old.
    #[error("Reading a trace of accesses: {0}")]
    Version(#[source] Unreadable),
    /// Cut short or changed.
    #[error("Reading a trace of accesses: the checksum of its {0} bytes is wrong")]
    Checksum(usize),
    /// The checksum is right, but the content is no trace.
    #[error("Reading a trace of accesses: its {0} bytes are not understood")]
    Body(usize),
    /// Its roots are invalid.
    #[error("Reading a trace of accesses")]
    Roots(#[source] RootsError),
}

#[derive(Serialize, Deserialize)]
struct Body {
    vcpus: u64,
    roots: Vec<(u64, u64)>,
    epochs: Vec<Vec<i64>>,
}

impl Trace {
    /// Returns the bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        let mut last = 0;
        let mut difference = |address: &u64| address.wrapping_sub(std::mem::replace(&mut last, *address)).cast_signed();
        let epochs = self.epochs.iter().map(|epoch| epoch.iter().map(&mut difference).collect()).collect();
        let body = Body { vcpus: self.vcpus, roots: self.roots.clone(), epochs };
        let body = postcard::to_extend(&body, Vec::new()).expect("plain data serialises into a growing buffer");
        let mut file = MAGIC.to_vec();
        file.extend(FORMAT.version.to_le_bytes());
        file.extend(FORMAT.least_reader.to_le_bytes());
        file.extend(xxh3_64(&body).to_le_bytes());
        file.extend(body);
        file
    }

    /// Reads a file, which may have any content.
    ///
    /// # Errors It is no trace, has another version, is damaged, or has invalid roots.
    pub fn decode(file: &[u8]) -> Result<Self, TraceError> {
        let (header, body) = file.split_at_checked(HEADER).ok_or(TraceError::Magic)?;
        if header[..8] != *MAGIC {
            return Err(TraceError::Magic);
        }
        let number = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
        FORMAT.check(Stamp { version: number(8), least_reader: number(10) }).map_err(TraceError::Version)?;
        if header[12..] != xxh3_64(body).to_le_bytes() {
            return Err(TraceError::Checksum(body.len()));
        }
        let (read, left): (Body, _) = postcard::take_from_bytes(body).map_err(|_| TraceError::Body(body.len()))?;
        if !left.is_empty() {
            return Err(TraceError::Body(body.len()));
        }
        Roots::new(&read.roots).map_err(TraceError::Roots)?;
        let mut last = 0u64;
        let mut address = |difference: i64| {
            last = last.wrapping_add_signed(difference);
            last
        };
        let epochs = read.epochs.into_iter().map(|epoch| epoch.into_iter().map(&mut address).collect()).collect();
        Ok(Self { vcpus: read.vcpus, roots: read.roots, epochs })
    }

    /// Plays it to a classifier that was made for its roots; calls `each` after every epoch.
    pub fn replay(&self, classifier: &mut dyn Classifier, mut each: impl FnMut(&dyn Classifier)) {
        for epoch in &self.epochs {
            epoch.iter().for_each(|address| classifier.record(*address, 1));
            classifier.end_epoch();
            each(classifier);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Fitted, Parameters, Published, UNIT};
    use proptest::prelude::*;

    fn trace() -> impl Strategy<Value = Trace> {
        let roots = Just(vec![(UNIT, 300 * UNIT), (1 << 40, (1 << 40) + 5)]);
        let epochs = proptest::collection::vec(proptest::collection::vec(any::<u64>(), 0..20), 0..5);
        (any::<u64>(), roots, epochs).prop_map(|(vcpus, roots, epochs)| Trace { vcpus, roots, epochs })
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_back_and_can_be_replayed(trace in trace()) {
            let read = Trace::decode(&trace.encode());
            prop_assert_eq!(read.as_ref(), Ok(&trace));
            let roots = Roots::new(&trace.roots).expect("checked");
            let mut epochs = 0;
            trace.replay(&mut Fitted::new(roots.clone()), |_| epochs += 1);
            trace.replay(&mut Published::new(roots, Parameters::of(trace.vcpus)), |_| epochs += 1);
            prop_assert_eq!(epochs, 2 * trace.epochs.len());
        }

        #[test]
        fn a_damaged_trace_is_refused_wherever_it_is_hit(trace in trace(), at: prop::sample::Index, bit in 0u8..8) {
            let mut file = trace.encode();
            let at = at.index(file.len());
            file[at] ^= 1 << bit;
            // A least reader of 0, or a newer version, makes no difference.
            prop_assert!(Trace::decode(&file).map_or(true, |read| (8..12).contains(&at) && read == trace));
        }

        #[test]
        fn a_body_with_a_valid_checksum_may_hold_anything(body in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut file = Trace::default().encode()[..12].to_vec();
            file.extend(xxh3_64(&body).to_le_bytes());
            file.extend(&body);
            let _ = Trace::decode(&file);
        }
    }

    #[test]
    fn the_bytes_of_this_version_do_not_change() {
        let trace = Trace { vcpus: 4, roots: vec![(0, UNIT)], epochs: vec![vec![5, 3], vec![]] };
        let file = trace.encode();
        assert_eq!(file[..12], *b"BLSTRNGE\x01\0\x01\0");
        assert_eq!(file[20..], [4, 1, 0, 0x80, 0x80, 0x80, 1, 2, 2, 10, 3, 0]);
    }

    #[test]
    fn an_error_names_what_is_wrong() {
        let error = |file: &[u8]| Trace::decode(file).expect_err("refused").to_string();
        assert_eq!(error(b"PNG"), "Reading a trace of accesses: it does not begin as one");
        let none = Trace::default().encode();
        assert_eq!(Trace::decode(&none), Err(TraceError::Roots(RootsError::Count(0))));
        let mut newer = none.clone();
        newer[8..12].copy_from_slice(&[9, 0, 8, 0]);
        assert!(error(&newer).contains("needs a reader of at least 8"), "{}", error(&newer));
        assert!(error(&none[..none.len() - 1]).contains("checksum of its 2 bytes"), "{}", error(&none[..22]));
    }
}
