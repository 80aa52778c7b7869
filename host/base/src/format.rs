//! Formats that programs of different versions share: messages between processes, and files in shared memory.
//!
//! Before: a program writes a message or makes a file. After: another one, older or newer, reads it or refuses it.
//! Promise: no I/O. The rule is the same for every format:
//!
//! 1. Every message and every file states the version of its writer and its *least reader*: the oldest version that may
//!    read it.
//! 2. A new field goes to the end of its message, or into a reserved word of its file. **Zero means not set**: a reader
//!    reads a field that the writer did not know as zero. The version is raised.
//! 3. If an older reader must not ignore the change, the least reader is raised, too. A message of a new kind has its
//!    own least reader; other messages keep theirs.
//! 4. A reader refuses input that it is too old for (least reader above its own version) or that it no longer knows
//!    (version below [`Format::oldest`]). The error names both sides.
//!
//! 5. A file is written by many programs in its life. A program that opens it to write raises the stamp to its own
//!    ([`Format::raise`]), and does not change fields that it does not know. A refused program has changed nothing.
//!
//! Each format has a test that holds its bytes or offsets against the version, so a change without a new version fails.

use serde::{Serialize, de::DeserializeOwned};

/// The versions that a program writes and reads of one format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The version that this program writes.
    pub version: u16,
    /// The oldest version of a program that may read it.
    pub least_reader: u16,
    /// The oldest version that this program reads.
    pub oldest: u16,
}

/// The versions that a message or file states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Version of the writer.
    pub version: u16,
    /// Oldest version that may read it.
    pub least_reader: u16,
}

/// The writer is too new, or too old, for this program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "it has version {} and needs a reader of at least {}; this program has version {} and reads from {} on",
    theirs.version, theirs.least_reader, ours.version, ours.oldest
)]
pub struct Unreadable {
    /// The versions that the message or file states.
    pub theirs: Stamp,
    /// The versions that this program knows.
    pub ours: Format,
}

impl Format {
    /// The versions that this program states in its output.
    pub const fn stamp(&self) -> Stamp {
        Stamp { version: self.version, least_reader: self.least_reader }
    }

    /// Check whether this program may read a file or message with this stamp.
    pub const fn check(&self, theirs: Stamp) -> Result<(), Unreadable> {
        if theirs.least_reader > self.version || theirs.version < self.oldest {
            return Err(Unreadable { theirs, ours: *self });
        }
        Ok(())
    }

    /// The format with this build's version, which is the next one in a test build (`next-format`).
    const fn of_message(self) -> Self {
        Self { version: self.version + cfg!(feature = "next-format") as u16, ..self }
    }

    /// Returns the new stamp of a file with this stamp, because this program also writes to it.
    pub const fn raise(&self, theirs: Stamp) -> Stamp {
        const fn larger(a: u16, b: u16) -> u16 {
            if a > b { a } else { b }
        }
        Stamp {
            version: larger(theirs.version, self.version),
            least_reader: larger(theirs.least_reader, self.least_reader),
        }
    }
}

impl Stamp {
    /// The stamp as one word of a file.
    pub const fn to_word(self) -> u64 {
        self.version as u64 | (self.least_reader as u64) << 32
    }

    /// Reads a stamp from a word of a file. Any value is read: larger numbers become the largest, which is refused.
    pub const fn from_word(word: u64) -> Self {
        const fn half(half: u64) -> u16 {
            if half > u16::MAX as u64 { u16::MAX } else { half as u16 }
        }
        Self { version: half(word & 0xFFFF_FFFF), least_reader: half(word >> 32) }
    }
}

/// First bytes of every message.
pub const MAGIC: [u8; 4] = *b"BLST";
/// Magic, version and least reader, in little-endian bytes.
pub const HEADER: usize = MAGIC.len() + 4;
/// A field that a test build, the next version, adds to the end of every message.
#[cfg(feature = "next-format")]
type Added = u8;
#[cfg(not(feature = "next-format"))]
type Added = ();
#[cfg(feature = "next-format")]
const ADDED: Added = 7;
#[cfg(not(feature = "next-format"))]
const ADDED: Added = ();

/// Zeros that stand for the fields an older writer did not know: no message has this many bytes of new fields.
const UNKNOWN_FIELDS: usize = 256;

/// A message between two processes.
pub trait Message: Serialize + DeserializeOwned {
    /// The format of the link it travels on.
    const FORMAT: Format;

    /// The oldest version that knows this kind of message.
    fn least_reader(&self) -> u16 {
        Self::FORMAT.least_reader
    }
}

/// A message that cannot be understood. Caused by a process of another version, or a hostile one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The first bytes are not ours.
    #[error("Reading a message: it does not begin with the Ballast magic")]
    Magic,
    /// The other side is too new or too old.
    #[error("Reading a message: {0}")]
    Version(Unreadable),
    /// The body is not a message of the expected kind.
    #[error("Reading a message: the body of {len} bytes is not understood")]
    Body {
        /// Length of the body.
        len: usize,
    },
}

/// The bytes of a message.
pub fn encode<T: Message>(message: &T) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(256);
    bytes.extend_from_slice(&MAGIC);
    bytes.extend_from_slice(&T::FORMAT.of_message().version.to_le_bytes());
    bytes.extend_from_slice(&message.least_reader().to_le_bytes());
    // Serialising our own plain data types into a growing buffer cannot fail.
    postcard::to_extend(&(message, ADDED), bytes).expect("messages serialise")
}

/// Decodes the message in `bytes`, which may have any content. Fields that a newer writer appended are ignored; fields
/// that an older one did not know read as zero.
pub fn decode<T: Message>(bytes: &[u8]) -> Result<T, WireError> {
    let Some((header, body)) = bytes.split_at_checked(HEADER) else { return Err(WireError::Magic) };
    if header[..4] != MAGIC {
        return Err(WireError::Magic);
    }
    let half = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let theirs = Stamp { version: half(4), least_reader: half(6) };
    let ours = T::FORMAT.of_message();
    ours.check(theirs).map_err(WireError::Version)?;
    let refused = WireError::Body { len: body.len() };
    if theirs.version < ours.version {
        let padded = [body, &[0; UNKNOWN_FIELDS]].concat();
        return match postcard::take_from_bytes::<(T, Added)>(&padded) {
            // All fields of the writer were read, and nothing after the zeros for the fields it did not know.
            Ok(((message, _), left)) if left.len() <= UNKNOWN_FIELDS => Ok(message),
            _ => Err(refused),
        };
    }
    match postcard::take_from_bytes::<(T, Added)>(body) {
        Ok(((message, _), left)) if left.is_empty() || theirs.version > ours.version => Ok(message),
        _ => Err(refused),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    const fn format(version: u16, least_reader: u16, oldest: u16) -> Format {
        Format { version, least_reader, oldest }
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum Old {
        Say { seq: u64, words: Vec<String> },
    }
    impl Message for Old {
        const FORMAT: Format = format(3, 2, 2);
    }

    /// The messages one version later: more fields, and one more kind of message.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    enum New {
        Say { seq: u64, words: Vec<String>, urgent: bool, why: Option<String>, count: u64, names: Vec<String> },
        Shout,
    }
    impl Message for New {
        const FORMAT: Format = format(4, 2, 2);
        fn least_reader(&self) -> u16 {
            if *self == Self::Shout { 4 } else { Self::FORMAT.least_reader }
        }
    }

    fn words() -> Vec<String> {
        vec!["a".into(), "b".into()]
    }

    #[test]
    fn an_older_reader_takes_what_it_knows_of_a_newer_message() {
        let (urgent, why, names) = (true, Some("fire".into()), words());
        let new = New::Say { seq: 7, words: words(), urgent, why, count: 300, names };
        assert_eq!(decode::<Old>(&encode(&new)), Ok(Old::Say { seq: 7, words: words() }));
    }

    #[test]
    fn a_newer_reader_takes_for_zero_what_an_older_writer_did_not_know() {
        let old = Old::Say { seq: 7, words: words() };
        let none = New::Say { seq: 7, words: words(), urgent: false, why: None, count: 0, names: Vec::new() };
        assert_eq!(decode::<New>(&encode(&old)), Ok(none));
        let mut cut = encode(&old);
        cut.truncate(cut.len() - 2);
        let read = decode::<Old>(&cut);
        assert!(matches!(read, Err(WireError::Body { .. })), "of its own version nothing may lack: {read:?}");
    }

    #[test]
    fn a_kind_that_an_older_reader_does_not_know_is_refused_with_both_versions() {
        let error = decode::<Old>(&encode(&New::Shout)).expect_err("it cannot be understood");
        let theirs = Stamp { version: 4, least_reader: 4 };
        assert_eq!(error, WireError::Version(Unreadable { theirs, ours: Old::FORMAT }));
        let said = error.to_string();
        assert!(said.contains("has version 4 and needs a reader of at least 4"), "{said}");
        assert!(said.contains("this program has version 3 and reads from 2 on"), "{said}");
    }

    #[test]
    fn every_pair_of_versions_reads_or_is_refused_by_the_rule() {
        for (theirs, least) in (0..6).flat_map(|version| (0..=version).map(move |least| (version, least))) {
            for ours in 1..6 {
                for oldest in 0..=ours {
                    let may = format(ours, 0, oldest).check(Stamp { version: theirs, least_reader: least }).is_ok();
                    assert_eq!(may, least <= ours && theirs >= oldest, "{theirs}/{least} by {ours} from {oldest}");
                }
            }
        }
    }

    #[test]
    fn a_file_says_the_newest_of_its_writers_and_what_any_of_them_needs() {
        let said = |version, least_reader| Stamp { version, least_reader };
        assert_eq!(format(5, 3, 1).raise(said(4, 1)), said(5, 3));
        assert_eq!(format(5, 3, 1).raise(said(7, 5)), said(7, 5));
        assert_eq!(format(5, 3, 1).raise(said(7, 2)), said(7, 3));
    }

    #[test]
    fn a_word_that_is_no_stamp_is_refused() {
        for stamp in [Stamp { version: 2, least_reader: 1 }, Stamp { version: u16::MAX, least_reader: 7 }] {
            assert_eq!(Stamp::from_word(stamp.to_word()), stamp);
        }
        for word in [u64::MAX, 1 << 50, 0] {
            assert!(format(2, 2, 1).check(Stamp::from_word(word)).is_err(), "{word:#x}");
        }
    }
}
