//! What a VMM's process asks of the pool, and what it gets: messages on the pool's socket.
//!
//! Before: a process is to have RAM from the pool. After: it has descriptors of files beside the answer, and maps them.
//! Threads: none; plain values. Units: bytes. Promise: as for `wire`: both sides check what they receive.

use serde::{Deserialize, Serialize};

use crate::extent::Extents;
use crate::format::{Format, Message};
use crate::units::Bytes;
use crate::wire::MAX_FILES;
use crate::{Extent, HUGE_SIZE};

/// What pages a VM's memory is to be made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// Huge pages of 2 MiB, wherever they are.
    #[default]
    Slices,
    /// The same; whole GiB of addresses first.
    Mix,
    /// Pages of 1 GiB.
    Gib,
}

impl std::str::FromStr for Pages {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "2M" => Ok(Self::Slices),
            "mix" => Ok(Self::Mix),
            "1G" => Ok(Self::Gib),
            _ => Err(format!("{text:?} is none of 2M, mix and 1G")),
        }
    }
}

impl std::fmt::Display for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Slices => "2M",
            Self::Mix => "mix",
            Self::Gib => "1G",
        })
    }
}

/// Memory for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Take {
    /// The VM's name, for operators.
    pub name: String,
    /// How much, a multiple of 2 MiB.
    pub size: Bytes,
    /// What it is made of.
    pub pages: Pages,
    /// From which node; none: any.
    pub node: Option<u32>,
}

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Given {
    /// It is in these parts of the files whose descriptors came along, in this order.
    Memory(Vec<Extent>),
    /// There is none, and why.
    Refused(String),
}

const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };

impl Message for Take {
    const FORMAT: Format = FORMAT;
}

impl Message for Given {
    const FORMAT: Format = FORMAT;
}

/// Is an answer what was asked for?
///
/// # Errors
/// What is wrong with it.
pub fn check(extents: &[Extent], size: Bytes, files: usize) -> Result<Extents, String> {
    let checked = Extents::new(extents).map_err(|error| error.to_string())?;
    if extents.iter().map(|extent| extent.len.0).sum::<u64>() != size.0 || files > MAX_FILES {
        return Err(format!("the pool gave {files} files and not {size}"));
    }
    let is_aligned = |value: Bytes| value.0.is_multiple_of(HUGE_SIZE as u64);
    match extents
        .iter()
        .find(|extent| usize::from(extent.file) >= files || !is_aligned(extent.offset) || !is_aligned(extent.len))
    {
        Some(wrong) => Err(format!("the pool gave {wrong:?} of {files} files")),
        None => Ok(checked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{HEADER, encode};

    #[test]
    fn messages_are_these_bytes_in_version_1() {
        let hex = |bytes: Vec<u8>| bytes[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let take = Take { name: "vm".into(), size: Bytes(5), pages: Pages::Gib, node: Some(7) };
        assert_eq!(hex(encode(&take)), "02766d05020107");
        let extent = Extent { file: 1, offset: Bytes(2), len: Bytes(3) };
        assert_eq!(hex(encode(&Given::Memory(vec![extent]))), "0001010203");
        assert_eq!(hex(encode(&Given::Refused("no".into()))), "01026e6f");
    }

    #[test]
    fn an_answer_that_is_not_what_was_asked_for_is_refused() {
        let mib = |mib: u64| Bytes(mib << 20);
        let extent = |file, offset, len| Extent { file, offset: mib(offset), len: mib(len) };
        assert!(check(&[extent(0, 2, 4), extent(1, 0, 2)], mib(6), 2).is_ok());
        for (extents, files) in [
            (vec![extent(0, 2, 4)], 1),
            (vec![extent(1, 0, 6)], 1),
            (vec![extent(0, 1, 6)], 1),
            (vec![extent(0, 0, 6)], 33),
            (vec![], 1),
            (vec![Extent { file: 0, offset: Bytes(0), len: Bytes(u64::MAX) }; 2], 1),
        ] {
            assert!(check(&extents, mib(6), files).is_err(), "{extents:?}");
        }
    }

    #[test]
    fn pages_are_read_as_they_are_written() {
        for pages in [Pages::Slices, Pages::Mix, Pages::Gib] {
            assert_eq!(pages.to_string().parse(), Ok(pages));
        }
        assert!("4K".parse::<Pages>().is_err());
    }
}
