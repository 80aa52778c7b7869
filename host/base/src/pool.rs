//! Requests of a VMM's process to the pool, and the replies: messages on the pool's socket.
//!
//! Before: a process is to have RAM from the pool. After: it has descriptors of files beside the reply, and maps them.
//! Threads: none; plain values. Units: bytes. Promise: as for `wire`: both sides check what they receive.

use serde::{Deserialize, Serialize};

use crate::extents::Extents;
use crate::format::{Format, Message};
use crate::invalid::Invalid;
use crate::units::Bytes;
use crate::wire::MAX_FILES;
use crate::{Extent, GIB, HUGE_SIZE};

/// The pages that a VM's memory is to consist of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pages {
    /// Huge pages of 2 MiB, wherever they are.
    #[default]
    Slices,
    /// Huge pages of 2 MiB, in whole GiB of addresses as far as possible.
    Mix,
    /// Pages of 1 GiB.
    Gib,
    /// Huge pages of 2 MiB, each of which comes when it is touched for the first time.
    OnDemand,
}

impl Pages {
    /// The size of one of these pages.
    pub const fn size(self) -> Bytes {
        match self {
            Self::Slices | Self::Mix | Self::OnDemand => Bytes(HUGE_SIZE as u64),
            Self::Gib => Bytes(GIB),
        }
    }
}

impl std::str::FromStr for Pages {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "2M" => Ok(Self::Slices),
            "mix" => Ok(Self::Mix),
            "1G" => Ok(Self::Gib),
            "on-demand" => Ok(Self::OnDemand),
            _ => Err(format!("{text:?} is none of 2M, mix, 1G and on-demand").into()),
        }
    }
}

impl std::fmt::Display for Pages {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Slices => "2M",
            Self::Mix => "mix",
            Self::Gib => "1G",
            Self::OnDemand => "on-demand",
        })
    }
}

/// The nodes of the host that a VM's memory comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Nodes {
    /// One node that has all of it, or else all nodes as evenly as possible.
    #[default]
    Any,
    /// This node.
    One(u32),
    /// As much from each of these; the VM's memory is divided in this order.
    Balanced(Vec<u32>),
    /// These amounts from each, in the order of the VM's memory.
    Split(Vec<(u32, Bytes)>),
}

impl Nodes {
    /// The nodes for a piece of RAM of this size. A split is for a VM's start; later memory is balanced over its nodes.
    #[must_use]
    pub fn of_piece(self, size: Bytes) -> Self {
        match self {
            Self::Split(parts) if parts.iter().map(|(_, part)| part.0).sum::<u64>() != size.0 => {
                Self::Balanced(parts.into_iter().map(|(node, _)| node).collect())
            }
            nodes => nodes,
        }
    }
}

impl std::str::FromStr for Nodes {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let wrong = || {
            let why = format!("{text:?} is no node, no list of nodes such as 0,1, and no split such as 0=3G,1=1G");
            Invalid::from(why)
        };
        let node = |text: &str| text.parse::<u32>().map_err(|_| wrong());
        if text.contains('=') {
            let part = |part: &str| {
                let (number, size) = part.split_once('=').ok_or_else(wrong)?;
                let size: Bytes = size.parse().map_err(|why| format!("{text:?}: {why}"))?;
                Ok::<_, Invalid>((node(number)?, size))
            };
            return Ok(Self::Split(text.split(',').map(part).collect::<Result<_, _>>()?));
        }
        let nodes = text.split(',').map(node).collect::<Result<Vec<_>, _>>()?;
        Ok(if let [one] = nodes[..] { Self::One(one) } else { Self::Balanced(nodes) })
    }
}

impl std::fmt::Display for Nodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let join = |parts: Vec<String>| parts.join(",");
        match self {
            Self::Any => f.write_str("any"),
            Self::One(node) => write!(f, "{node}"),
            Self::Balanced(nodes) => f.write_str(&join(nodes.iter().map(u32::to_string).collect())),
            // In bytes: a size that is rounded for display would be another size.
            Self::Split(parts) => {
                f.write_str(&join(parts.iter().map(|(node, size)| format!("{node}={}B", size.0)).collect()))
            }
        }
    }
}

/// Memory for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Take {
    /// The VM's name, for operators.
    pub name: String,
    /// Amount of memory, a multiple of [`Pages::size`].
    pub size: Bytes,
    /// Its pages.
    pub pages: Pages,
    /// Its nodes.
    pub nodes: Nodes,
}

/// The reply to a [`Take`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Given {
    /// The memory is in these parts of the files beside the message, in this order.
    Memory(Vec<Extent>),
    /// Refused, for this reason.
    Refused(String),
}

const FORMAT: Format = Format { version: 1, least_reader: 1, oldest: 1 };

impl Message for Take {
    const FORMAT: Format = FORMAT;
}

impl Message for Given {
    const FORMAT: Format = FORMAT;
}

/// Checks that a reply matches the request.
pub fn check(extents: &[Extent], size: Bytes, pages: Pages, files: usize) -> Result<Extents, Invalid> {
    let checked = Extents::new(extents).map_err(|error| error.to_string())?;
    if extents.iter().map(|extent| extent.len.0).sum::<u64>() != size.0 || files > MAX_FILES {
        return Err(format!("the pool gave {files} files and not {size}").into());
    }
    let is_aligned = |value: Bytes| value.0.is_multiple_of(pages.size().0);
    match extents
        .iter()
        .find(|extent| usize::from(extent.file) >= files || !is_aligned(extent.offset) || !is_aligned(extent.len))
    {
        Some(wrong) => Err(format!("the pool gave {wrong:?} of {files} files").into()),
        None => Ok(checked),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{HEADER, encode};

    #[test]
    fn messages_are_the_bytes_of_their_version() {
        assert_eq!(FORMAT.version, 1, "raise FORMAT, and put what is said now here");
        let hex = |bytes: Vec<u8>| bytes[HEADER..].iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let take = Take { name: "vm".into(), size: Bytes(5), pages: Pages::Gib, nodes: Nodes::One(7) };
        assert_eq!(hex(encode(&take)), "02766d05020107");
        let on_demand = Take { pages: Pages::OnDemand, ..take.clone() };
        assert_eq!(hex(encode(&on_demand)), "02766d05030107");
        let of = |nodes| hex(encode(&Take { nodes, ..take.clone() }))[10..].to_owned();
        assert_eq!((of(Nodes::Any).as_str(), of(Nodes::Balanced(vec![0, 1])).as_str()), ("00", "02020001"));
        assert_eq!(of(Nodes::Split(vec![(1, Bytes(5))])), "03010105");
        let extent = Extent { file: 1, offset: Bytes(2), len: Bytes(3) };
        assert_eq!(hex(encode(&Given::Memory(vec![extent]))), "0001010203");
        assert_eq!(hex(encode(&Given::Refused("no".into()))), "01026e6f");
    }

    #[test]
    fn an_answer_that_is_not_what_was_asked_for_is_refused() {
        let mib = |mib: u64| Bytes(mib << 20);
        let extent = |file, offset, len| Extent { file, offset: mib(offset), len: mib(len) };
        assert!(check(&[extent(0, 2, 4), extent(1, 0, 2)], mib(6), Pages::Slices, 2).is_ok());
        assert!(check(&[extent(1, 1024, 2048), extent(0, 0, 1024)], mib(3072), Pages::Gib, 2).is_ok());
        assert!(check(&[extent(0, 2, 1024)], mib(1024), Pages::Gib, 1).is_err(), "not at a GiB");
        for (extents, files) in [
            (vec![extent(0, 2, 4)], 1),
            (vec![extent(1, 0, 6)], 1),
            (vec![extent(0, 1, 6)], 1),
            (vec![extent(0, 0, 6)], 33),
            (vec![], 1),
            (vec![Extent { file: 0, offset: Bytes(0), len: Bytes(u64::MAX) }; 2], 1),
        ] {
            assert!(check(&extents, mib(6), Pages::Mix, files).is_err(), "{extents:?}");
        }
    }

    #[test]
    fn nodes_are_read_as_they_are_written() {
        let split = Nodes::Split(vec![(0, Bytes(3 << 30)), (1, Bytes(1 << 20))]);
        for nodes in [Nodes::One(3), Nodes::Balanced(vec![0, 2]), split.clone()] {
            assert_eq!(nodes.to_string().parse(), Ok(nodes));
        }
        assert_eq!("0=3G,1=1M".parse(), Ok(split.clone()));
        for wrong in ["", "x", "0,", "0=", "0=x,1", "0=1G,1", "-1"] {
            assert!(wrong.parse::<Nodes>().is_err(), "{wrong}");
        }
        assert_eq!(split.clone().of_piece(Bytes((3 << 30) + (1 << 20))), split);
        assert_eq!(split.of_piece(Bytes(2 << 20)), Nodes::Balanced(vec![0, 1]), "of a DIMM");
    }

    #[test]
    fn pages_are_read_as_they_are_written() {
        for pages in [Pages::Slices, Pages::Mix, Pages::Gib, Pages::OnDemand] {
            assert_eq!(pages.to_string().parse(), Ok(pages));
        }
        assert!("64K".parse::<Pages>().is_err());
    }
}
