//! The RAM of a region: extents of files, as one range of pages.
//!
//! Before: an attach or a hot-plug brought the files. After: a region reads, punches and counts pages in any of them.
//! Threads: any. Units: pages from the start of the region.
//! Promise: an operation over two extents is done in two parts, and touches no byte outside the extents.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ballast_base::extents::Piece;
use ballast_base::store::PageBytes;
use ballast_base::{Bytes, Extents, GIB, HUGE_SIZE, PAGE_SIZE, PAGES_PER_UNIT, PageCount, PageIdx, PageRange};
use ballast_page::memory::{Punched, ReadOutcome, punch_until_gone};
use ballast_sys::Mapping;
use ballast_sys::hugetlb::Presence;
use ballast_sys::memfd::{self, FileId};

use ballast_handover::state_file::RegionRecord;

/// A file of guest RAM.
#[derive(Clone, Debug)]
pub struct RamFile {
    file: Arc<File>,
    /// Identity of the file.
    pub id: FileId,
}

impl RamFile {
    /// Wraps a file.
    ///
    /// # Errors
    /// The kernel does not return its identity.
    pub fn new(file: OwnedFd) -> io::Result<Self> {
        let id = memfd::file_id(&file)?;
        Ok(Self { file: Arc::new(file.into()), id })
    }

    /// Returns whether it is a memfd, which is in no mounted file system.
    pub fn is_memfd(&self) -> bool {
        let path = std::fs::read_link(format!("/proc/self/fd/{}", self.file.as_raw_fd())).unwrap_or_default();
        path.as_os_str().as_encoded_bytes().starts_with(b"/memfd:")
    }

    /// Number of its names in its file system: other processes can open a file with a name.
    pub fn links(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.file)?.st_nlink as u64)
    }

    /// DRAM of the whole file, and its length.
    pub(crate) fn usage(&self) -> io::Result<(PageCount, Bytes)> {
        memfd::usage(&*self.file)
    }
}

impl AsFd for RamFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Extents and files of a region; no files once it is unplugged.
#[derive(Debug)]
pub(crate) struct Ram {
    /// In the order of the numbers in `extents`.
    pub files: Vec<RamFile>,
    pub extents: Extents,
    are_units: bool,
    /// Base pages that move as one.
    pub granule: u64,
    /// The files' pages are larger than a granule, so none can be far.
    pub is_fixed: bool,
    /// The pages are allocated on the first touch: see [`memfd::is_on_demand`].
    pub is_on_demand: bool,
    /// For each file, the NUMA node to allocate from, if pages come on demand and a node was named.
    pub nodes: Option<Arc<[Option<u32>]>>,
    /// For hugetlbfs: which huge pages are in the files.
    huge: Option<Presence>,
}

impl Ram {
    /// Opens the RAM of a region, whose files are among `files`. Fails if one is missing or too short, or is no RAM.
    pub fn open(number: u32, record: &RegionRecord, files: &[RamFile]) -> io::Result<Self> {
        let extents = record.extents.clone();
        let are_units = extents.are_units();
        if record.removed {
            return Ok(Self {
                files: Vec::new(),
                extents,
                are_units,
                granule: 1,
                is_fixed: false,
                is_on_demand: false,
                nodes: None,
                huge: None,
            });
        }
        let find = |id: &FileId| files.iter().find(|file| file.id == *id).cloned();
        let Some(files) = record.files.iter().map(find).collect::<Option<Vec<_>>>() else {
            return Err(invalid(format!("RAM file of region {number} is another file than before")));
        };
        let sizes = files.iter().map(|file| Ok(file.usage()?.1)).collect::<io::Result<Vec<_>>>()?;
        let page_of = |file: &RamFile| Ok(memfd::ram_page(file)?.filter(|page| page.0 > PAGE_SIZE as u64));
        let pages = files.iter().map(page_of).collect::<io::Result<Vec<_>>>()?;
        let page = pages[0];
        if pages.iter().any(|other| *other != page) {
            return Err(invalid(format!("RAM files of region {number} have pages of different sizes")));
        }
        if let Some(page) = page.filter(|page| page.0 > GIB) {
            return Err(invalid(format!("RAM file of region {number} has pages of {page}")));
        }
        extents
            .check(&sizes, page.map_or(PAGE_SIZE as u64, |page| page.0))
            .map_err(|error| invalid(format!("region {number}: {error}")))?;
        let (is_fixed, is_on_demand, nodes) = (false, false, None);
        let mut ram = Self { files, extents, are_units, granule: 1, is_fixed, is_on_demand, nodes, huge: None };
        if let Some(Bytes(page)) = page {
            ram.granule = PAGES_PER_UNIT;
            ram.is_fixed = page > HUGE_SIZE as u64;
            ram.is_on_demand = memfd::any_is_on_demand(&ram.files)?;
            if ram.is_on_demand {
                let nodes = ram.files.iter().map(memfd::on_demand_node).collect::<io::Result<Arc<[_]>>>()?;
                ram.nodes = Some(nodes).filter(|nodes| nodes.iter().any(Option::is_some));
            }
            ram.huge = Some(Presence::new(ram.map()?, page as usize)?);
        }
        Ok(ram)
    }

    /// Returns whether every 2 MiB of it, from its start on, are base pages of one file at an offset aligned to 2 MiB.
    pub fn are_units(&self) -> bool {
        self.granule == 1 && self.are_units
    }

    /// Maps all of it in this process, extent after extent. The mapping only lets the kernel fill holes or tell which
    /// pages are present; no thread touches it.
    pub fn map(&self) -> io::Result<Mapping> {
        let all = PageRange::of(PageIdx(0), self.extents.pages().0);
        let piece = |piece: Piece| (self.file(piece.file), piece.offset, piece.pages.bytes().0 as usize);
        Mapping::shared_pieces(&self.extents.pieces(all).map(piece).collect::<Vec<_>>())
    }

    fn file(&self, number: u16) -> &File {
        &self.files[usize::from(number)].file
    }

    /// The file of a page, and the page's index in it.
    pub fn place(&self, page: PageIdx) -> (&RamFile, u64) {
        let (file, offset) = self.extents.place(page);
        (&self.files[usize::from(file)], offset / PAGE_SIZE as u64)
    }

    pub fn lengths(&self) -> io::Result<Vec<Bytes>> {
        self.files.iter().map(|file| Ok(file.usage()?.1)).collect()
    }

    /// Returns whether a page, the first of its granule, is beyond the end of its file, for files of these lengths.
    pub fn is_beyond(&self, first: PageIdx, lengths: &[Bytes]) -> bool {
        let (file, offset) = self.extents.place(first);
        let end = offset + PageCount(self.granule).bytes().0;
        lengths.get(usize::from(file)).is_some_and(|length| length.0 < end)
    }

    /// Returns whether a page, the first of its granule, is in its file.
    pub fn is_present(&self, first: PageIdx) -> io::Result<bool> {
        if let Some(huge) = &self.huge {
            return huge.is_present(first.offset() as usize);
        }
        let (file, offset) = self.extents.place(first);
        memfd::is_present(self.file(file), offset)
    }

    /// The first run of `pages`, which are base pages, that is in a file.
    pub fn next_present(&self, pages: PageRange) -> io::Result<Option<PageRange>> {
        for Piece { pages, file, offset } in self.extents.pieces(pages) {
            let run = memfd::next_data_within(self.file(file), offset, offset + pages.bytes().0)?;
            if let Some((start, end)) = run {
                let page = |at: u64| PageIdx(pages.start().0 + PageIdx::containing(at - offset).0);
                return Ok(Some(PageRange::new(page(start), page(end))));
            }
        }
        Ok(None)
    }

    pub fn read(&self, first: PageIdx, mut out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
        for Piece { pages, file, offset } in self.extents.pieces(PageRange::of(first, out.len() as u64)) {
            let (now, rest) = out.split_at_mut(pages.count() as usize);
            match memfd::read_exact_at(self.file(file), offset, now.as_flattened_mut()) {
                Ok(()) => out = rest,
                Err(error) if memfd::is_memory_error(&error) => return Ok(ReadOutcome::Failed),
                Err(error) => return Err(error),
            }
        }
        if out.is_empty() { Ok(ReadOutcome::Done) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }

    /// Frees these pages; see [`ballast_page::memory::Backing::punch`].
    pub fn punch(&self, pages: PageRange) -> io::Result<Punched> {
        let mut all = Punched::Gone;
        for Piece { pages, file, offset } in self.extents.pieces(pages) {
            let (file, len) = (self.file(file), pages.bytes().0);
            // hugetlbfs frees a huge page as one.
            let is_hole = || Ok(self.huge.is_some() || memfd::is_hole(file, offset, len)?);
            if punch_until_gone(|| memfd::punch(file, offset, len), is_hole)? == Punched::Stuck {
                all = Punched::Stuck;
            }
        }
        Ok(all)
    }

    pub fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()> {
        let (file, offset) = self.extents.place(page);
        self.file(file).write_all_at(bytes, offset)
    }

    /// DRAM that it uses. The kernel knows it of a file that it covers completely; otherwise extents are counted.
    pub fn resident(&self) -> io::Result<PageCount> {
        let mut sum = PageCount(0);
        for (number, file) in (0..).zip(&self.files) {
            let (whole, size) = file.usage()?;
            sum += if self.extents.of_file(number) >= size { whole } else { self.count(file.id)? };
        }
        Ok(sum)
    }

    /// Length of its part of this file.
    pub fn of_file(&self, id: FileId) -> Bytes {
        self.number(id).map_or(Bytes(0), |number| self.extents.of_file(number))
    }

    /// Returns whether [`Ram::count`] takes no lock that a VMM may hold for long.
    pub fn counts_at_once(&self, id: FileId) -> bool {
        let file = self.number(id).filter(|_| self.huge.is_none()).map(|number| self.file(number));
        file.is_none_or(memfd::counts_at_once)
    }

    /// DRAM that its extents of this file use, counted: some milliseconds for each resident GiB.
    pub fn count(&self, id: FileId) -> io::Result<PageCount> {
        let Some(number) = self.number(id) else { return Ok(PageCount(0)) };
        let all = PageRange::of(PageIdx(0), self.extents.pages().0);
        let mut sum = PageCount(0);
        for Piece { pages, offset, .. } in self.extents.pieces(all).filter(|piece| piece.file == number) {
            if self.huge.is_none() {
                sum += memfd::resident_within(self.file(number), offset, pages.bytes().0)?;
                continue;
            }
            for first in pages.step_by(self.granule) {
                sum += PageCount(u64::from(self.is_present(first)?) * self.granule);
            }
        }
        Ok(sum)
    }

    fn number(&self, id: FileId) -> Option<u16> {
        (0..).zip(&self.files).find(|(_, file)| file.id == id).map(|(number, _)| number)
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}
