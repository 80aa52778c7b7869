//! RAM as the VMM describes it, and the checks before it is announced.
//!
//! Before: the VMM has mapped it. After: [`crate::regions::Table`] has it, and the keeper is told.
//! Threads: any; plain values. Units: bytes; addresses of this process.
//! Promise: RAM that passes the checks is a shared mapping of those files at those offsets.

use std::io;
use std::os::fd::OwnedFd;

use ballast_base::stripes::Stripes;
use ballast_base::wire::{RegionInfo, Span, check_spans};
use ballast_base::{Bytes, Extent, Extents, Hva, Invalid, PageIdx, PageRange};
use ballast_sys::Uffd;
use ballast_sys::memfd::{self, FileId};

/// A piece of a file that is mapped as guest RAM.
#[derive(Debug)]
pub struct RamExtent {
    /// The file.
    pub fd: OwnedFd,
    /// Offset of the piece in the file.
    pub offset: Bytes,
    /// Length of the piece.
    pub len: Bytes,
}

/// A contiguous range of guest RAM: pieces of files, mapped `MAP_SHARED` one after the other.
#[derive(Debug)]
pub struct Ram {
    /// Address of the first piece.
    pub hva: Hva,
    /// The pieces, in the order of their addresses. Some may be of one file.
    pub extents: Vec<RamExtent>,
    /// The guest-physical address of the first byte, if the VMM knows it and the guest sees the RAM as one range.
    pub guest_address: Option<u64>,
}

impl Ram {
    /// One piece of one file.
    pub fn one(fd: OwnedFd, hva: Hva, len: Bytes, offset: Bytes) -> Self {
        Self { hva, extents: vec![RamExtent { fd, offset, len }], guest_address: None }
    }
}

#[derive(Debug)]
pub(crate) struct Checked {
    pub span: Span,
    pub extents: Extents,
    pub guest_address: Option<u64>,
    /// The files of the extents, without repetition.
    pub files: Vec<(OwnedFd, FileId)>,
    /// Bytes of a page of the files.
    pub page: u64,
    /// The pages are allocated when they are touched, so the engine must see each touch.
    pub is_on_demand: bool,
}

impl Checked {
    /// Check that these addresses really are shared mappings of those files.
    pub fn new(Ram { hva, extents: pieces, guest_address }: Ram) -> Result<Self, Invalid> {
        let len = pieces.iter().fold(0u64, |sum, piece| sum.saturating_add(piece.len.0));
        let span = Span { hva, len: Bytes(len) };
        check_spans(&[span])?;
        let wrong = |what: &dyn std::fmt::Display| Invalid::from(format!("RAM at {hva} of {}: {what}", span.len));
        let io = |error: io::Error| wrong(&format_args!("looking at its file: {error}"));
        let mut files: Vec<(OwnedFd, FileId)> = Vec::new();
        let mut list = Vec::with_capacity(pieces.len());
        for RamExtent { fd, offset, len } in pieces {
            let id = memfd::file_id(&fd).map_err(io)?;
            let number = files.iter().position(|(_, other)| *other == id).unwrap_or(files.len());
            if number == files.len() {
                files.push((fd, id));
            }
            list.push(Extent { file: number as u16, offset, len });
        }
        let extents = Extents::new(&list).map_err(|error| wrong(&error))?;
        let is_on_demand = memfd::any_is_on_demand(files.iter().map(|(fd, _)| fd)).map_err(io)?;
        let mut pages = files.iter().map(|(fd, _)| memfd::check_ram_file(fd).map_err(|error| wrong(&error)));
        let page = pages.next().ok_or_else(|| wrong(&"it has no file"))??;
        for other in pages {
            if other? != page {
                return Err(wrong(&"its files have pages of different sizes"));
            }
        }
        let sizes = files.iter().map(|(fd, _)| memfd::size(fd).map_err(io)).collect::<Result<Vec<_>, _>>()?;
        extents.check(&sizes, page.0).map_err(|error| wrong(&error))?;
        if !hva.0.is_multiple_of(page.0) {
            return Err(wrong(&format_args!("its address is not a multiple of its pages of {page}")));
        }
        let text =
            std::fs::read_to_string("/proc/self/maps").map_err(|e| wrong(&format_args!("/proc/self/maps: {e}")))?;
        let maps: Vec<Line> = text.lines().filter_map(line).collect();
        let mut at = hva.0;
        for Extent { file, offset, len } in extents.list() {
            if !is_shared_mapping(&maps, (at, at + len.0), offset.0, files[usize::from(*file)].1.ino) {
                return Err(wrong(&format_args!(
                    "the {len} at {:#x} are not one shared (MAP_SHARED) mapping of that file and offset",
                    at
                )));
            }
            at += len.0;
        }
        Ok(Self { span, extents, guest_address, files, page: page.0, is_on_demand })
    }

    /// If the pages are allocated on demand, registers all of the RAM before the first touch: until an engine serves
    /// it, a touch waits. The engine finds the RAM registered, by the same rule.
    pub fn register(&self, uffds: &[Uffd]) -> io::Result<()> {
        if !self.is_on_demand {
            return Ok(());
        }
        let all = PageRange::of(PageIdx(0), self.extents.pages().0);
        let mut parts = Stripes::new(self.extents.pages(), uffds.len()).split(all);
        parts.try_for_each(|(shard, part)| uffds[shard].register(self.span.hva + part.start().offset(), part.bytes().0))
    }

    /// The description for the keeper; `number` maps each file to its number in the message.
    pub fn info(&self, number: impl Fn(FileId) -> u16) -> RegionInfo {
        let extents = self.extents.renumbered(|file| number(self.files[usize::from(file)].1));
        RegionInfo { span: self.span, extents: extents.list().to_vec(), guest_address: self.guest_address }
    }
}

/// A line of `/proc/self/maps`: start, end, whether it is shared, offset, inode.
type Line = (u64, u64, bool, u64, u64);

fn line(text: &str) -> Option<Line> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut fields = text.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let shared = fields.next()?.ends_with('s');
    let offset = fields.next()?;
    let inode = fields.nth(1)?;
    Some((hex(from)?, hex(to)?, shared, hex(offset)?, inode.parse().ok()?))
}

/// Whether this range of addresses consists of shared mappings of that inode, in file order from this offset on.
fn is_shared_mapping(maps: &[Line], (start, end): (u64, u64), file_offset: u64, inode: u64) -> bool {
    let mut next = start;
    for &(from, to, shared, offset, ino) in maps {
        if to <= next || from > next {
            continue;
        }
        if !shared || ino != inode || offset + (next - from) != file_offset + (next - start) {
            return false;
        }
        next = to;
        if next >= end {
            return true;
        }
    }
    false
}
