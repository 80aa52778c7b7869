//! One contiguous range of guest RAM: its extents of files (`ram.rs`) and its table of page-state words.
//!
//! Before: an attach or a hot-plug brought the files. After: `fault`, `evict` and `heat` work on it.
//! Threads: any. Units: pages from the start of the region.
//! Promise: reads and punches go through file descriptors; the engine never touches a mapping of guest RAM.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

use ballast_base::store::{RegionKey, StoreSet, is_zero};
use ballast_base::stripes::{PAGES_PER_CHUNK, Stripes};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, Extent, Extents, PAGE_SIZE, PageCount, PageIdx, PageRange};
use ballast_handover::state_file::RegionRecord;
use ballast_store::{PageBytes, PageKey};
use ballast_sys::Mapping;
use ballast_sys::memfd::FileId;
use ballast_sys::memory_error::Losses;

use crate::vm::interval::Departures;
use crate::vm::ram::{Ram, RamFile};
use crate::vm::region_table::RegionTable;
use crate::vm::units::Units;
use ballast_page::granule::Granule;
use ballast_page::memory::{Backing, Holds, Punched, ReadOutcome};
use ballast_page::page_state::{State, Word};

/// Is a chunk with this flag registered with the userfaultfds of every view, so that its faults come to us?
pub(crate) fn is_registered(flag: &AtomicU8) -> bool {
    flag.load(Ordering::Acquire) != 0
}

/// Writes that to the flag of a chunk.
pub(crate) fn set_registered(flag: &AtomicU8, registered: bool) {
    flag.store(registered.into(), Ordering::Release);
}

/// A region.
#[derive(Debug)]
pub struct Region {
    vm: VmId,
    /// Its number in the VM.
    pub number: u32,
    pages: PageCount,
    ram: Ram,
    table: RegionTable,
    /// Numbers of the stores that may wait.
    not_near: StoreSet,
    units: Units,
    departures: Departures,
    /// Pages that could not be read, by their granules' first ones: never to be picked again. The flag avoids the
    /// look-up.
    unreadable: Mutex<BTreeSet<PageIdx>>,
    has_unreadable: AtomicBool,
    removed: AtomicBool,
    /// A process has unplugged it that others still share it with.
    unplugged: AtomicBool,
}

impl Region {
    /// The region of a VM described by `record`, whose RAM is among `files`. `not_near` are the stores that may wait.
    ///
    /// # Errors
    /// Those of [`Ram::open`].
    pub fn new(
        (vm, not_near): (VmId, StoreSet),
        number: u32,
        record: &RegionRecord,
        files: &[RamFile],
        table: RegionTable,
    ) -> io::Result<Self> {
        Ok(Self {
            vm,
            not_near,
            number,
            pages: record.extents.pages(),
            ram: Ram::open(number, record, files)?,
            table,
            units: Units::new(record.extents.pages()),
            departures: Departures::new(if record.removed { 0 } else { record.extents.pages().0 }),
            unreadable: Mutex::default(),
            has_unreadable: AtomicBool::new(false),
            removed: AtomicBool::new(record.removed),
            unplugged: AtomicBool::new(false),
        })
    }

    /// Length; zero once it is unplugged.
    pub fn pages(&self) -> PageCount {
        if self.is_removed() { PageCount(0) } else { self.pages }
    }

    /// A process has unplugged it; or one has it anew.
    pub(crate) fn set_unplugged(&self, unplugged: bool) {
        self.unplugged.store(unplugged, Ordering::Release);
    }

    /// Has a process unplugged it that others shared it with?
    pub fn is_unplugged(&self) -> bool {
        self.unplugged.load(Ordering::Acquire)
    }

    /// Was it unplugged?
    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// From now on it has no pages.
    pub fn remove(&self) {
        self.removed.store(true, Ordering::Release);
    }

    /// The lengths of its files.
    pub(crate) fn lengths(&self) -> io::Result<Vec<Bytes>> {
        self.ram.lengths()
    }

    /// Is this page, the first one of its granule, beyond the end of its file?
    pub(crate) fn is_beyond(&self, first: PageIdx, lengths: &[Bytes]) -> bool {
        self.ram.is_beyond(first, lengths)
    }

    /// The error of a page for which [`Region::is_beyond`] is true.
    pub(crate) fn is_shorter(&self) -> io::Error {
        let text = format!("a RAM file of region {} was made shorter than its RAM", self.number);
        io::Error::new(io::ErrorKind::UnexpectedEof, text)
    }

    /// Its files.
    pub fn files(&self) -> &[RamFile] {
        self.ram.files()
    }

    /// Where its extents are: file, first byte, and the byte after the last one.
    pub fn places(&self) -> Vec<(FileId, u64, u64)> {
        let files = self.files();
        let place = |extent: &Extent| Some((files.get(usize::from(extent.file))?.id, extent.offset.0, extent.end()));
        self.extents().list().iter().filter_map(place).collect()
    }

    /// Its extents.
    pub fn extents(&self) -> &Extents {
        self.ram.extents()
    }

    /// Maps it in this process, only to have the kernel fill holes of it: no thread touches the mapping.
    pub(crate) fn map(&self) -> io::Result<Mapping> {
        self.ram.map()
    }

    /// The file of a page, and the page's number in it.
    pub(crate) fn place(&self, page: PageIdx) -> (&RamFile, u64) {
        self.ram.place(page)
    }

    /// DRAM it uses.
    pub fn resident(&self) -> io::Result<PageCount> {
        self.ram.resident()
    }

    /// Bytes of it that are in this file.
    pub(crate) fn of_file(&self, id: FileId) -> Bytes {
        self.ram.of_file(id)
    }

    /// DRAM that its extents of this file use, counted.
    pub(crate) fn count(&self, id: FileId) -> io::Result<PageCount> {
        self.ram.count(id)
    }

    /// Can that be counted without a lock that a VMM may hold for long?
    pub(crate) fn counts_at_once(&self, id: FileId) -> bool {
        self.ram.counts_at_once(id)
    }

    /// Pages that are paged as one.
    pub fn granule_pages(&self) -> u64 {
        self.ram.granule()
    }

    /// Returns whether it has pages of 1 GiB: the kernel can neither map nor fill a part of one, so the VM is pinned.
    pub fn is_fixed(&self) -> bool {
        self.ram.is_fixed()
    }

    /// Returns whether its pages come when they are touched: then it is registered from its first view on, for ever,
    /// because the kernel ends a VMM that touches such a page while none is free.
    pub fn is_on_demand(&self) -> bool {
        self.ram.is_on_demand()
    }

    /// The nodes that pages which come on demand are to be of, by file.
    pub(crate) fn nodes(&self) -> Option<&Arc<[Option<u32>]>> {
        self.ram.nodes()
    }

    /// The first page of the granule of a page.
    pub fn first_of(&self, page: PageIdx) -> PageIdx {
        PageIdx(page.0 - page.0 % self.ram.granule())
    }

    /// The granule of a page.
    pub fn granule(&self, page: PageIdx) -> Granule<'_> {
        Granule::new(self.table.words(self.first_of(page), self.ram.granule()))
    }

    /// The word that says where a page is: its granule's.
    pub fn word(&self, page: PageIdx) -> Word {
        self.granule(page).cell().load()
    }

    /// Are its bytes in a store only?
    pub fn is_far(&self, page: PageIdx) -> bool {
        matches!(self.word(page).state(), State::Far | State::Restoring)
    }

    /// First pages of the granules that begin in a range of pages.
    pub fn granules(&self, pages: PageRange) -> impl Iterator<Item = PageIdx> + use<> {
        {
            let granule = self.ram.granule();
            pages.from(PageIdx(pages.start().0.next_multiple_of(granule))).step_by(granule)
        }
    }

    /// All its pages.
    pub fn range(&self) -> PageRange {
        PageRange::new(PageIdx(0), PageIdx(self.pages().0))
    }

    /// Pages of its table that memory errors have cost.
    pub(crate) fn lost(&self) -> u64 {
        self.table.lost()
    }

    /// Fails if a part of the table was lost, so that no thread waits for such a page: it stays locked until the VM is
    /// opened again.
    ///
    /// # Errors
    /// Part of the table was lost.
    pub(crate) fn check_table(&self) -> io::Result<()> {
        match self.lost() {
            0 => Ok(()),
            _ => Err(io::Error::other("memory of the host failed under the page-state words")),
        }
    }

    /// Losses of its table that were not reported yet, in words.
    pub(crate) fn losses(&self, record: &RegionRecord) -> Vec<String> {
        let (Losses { offsets, pages }, words) = self.table.losses(record);
        let said = words
            .iter()
            .map(|of| format!("the state of pages {} to {} of region {}", of.start, of.end - 1, self.number));
        let flags = offsets.len() - words.len();
        let flags = (flags > 0).then(|| format!("which chunks of region {} are registered", self.number));
        let more = pages - offsets.len() as u64;
        let more = (more > 0).then(|| format!("{more} more pages of the table of region {}", self.number));
        said.chain(flags).chain(more).collect()
    }

    /// This page's memory failed, or that of another page of its huge page: it stays where it is. The guest finds out
    /// whether it can still be read, when it touches it.
    pub(crate) fn set_aside(&self, page: PageIdx) {
        self.unreadable.lock().expect("no panic while held").insert(self.first_of(page));
        self.has_unreadable.store(true, Ordering::Release);
    }

    /// Is it such a page?
    pub(crate) fn is_set_aside(&self, page: PageIdx) -> bool {
        self.has_unreadable.load(Ordering::Acquire)
            && self.unreadable.lock().expect("no panic while held").contains(&self.first_of(page))
    }

    /// These pages were discarded: the memory after them is new.
    pub(crate) fn take_back(&self, discarded: PageRange) {
        if self.has_unreadable.load(Ordering::Acquire) {
            self.unreadable.lock().expect("no panic while held").retain(|page| !discarded.contains(*page));
        }
    }

    /// When its pages were evicted.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Its units.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Returns whether the kernel may map its units huge: base pages, and all units at multiples of 2 MiB in a file.
    pub fn is_unit_aligned(&self) -> bool {
        self.ram.are_units()
    }

    /// Its name in stores.
    pub fn region_key(&self) -> RegionKey {
        RegionKey { vm: self.vm, number: self.number }
    }

    /// Is a page far, and in no near store?
    pub fn is_slow(&self, page: PageIdx) -> bool {
        self.granule(page).is_in(self.not_near)
    }

    /// Is a page far, in a store that may wait, and unlocked?
    pub fn is_slow_and_free(&self, page: PageIdx) -> bool {
        self.is_far_and_free(page) && self.is_slow(page)
    }

    /// Does a touch of this page fault, and may it be brought now: far in a near store, zero, or in quarantine, and
    /// unlocked?
    pub fn is_out_and_free(&self, page: PageIdx) -> bool {
        let word = self.word(page);
        let is_out = match word.state() {
            State::Quarantine | State::Evicting | State::Zero => true,
            State::Far => !self.is_slow(page),
            State::Resident | State::Restoring | State::Poisoned => false,
        };
        is_out && !word.is_locked()
    }

    fn is_far_and_free(&self, page: PageIdx) -> bool {
        let word = self.word(page);
        word.state() == State::Far && !word.is_locked()
    }

    /// A page's name in stores.
    pub fn key(&self, page: PageIdx) -> PageKey {
        self.region_key().page(page)
    }

    /// Is the page in the file?
    pub fn is_present(&self, page: PageIdx) -> io::Result<bool> {
        self.ram.is_present(self.first_of(page))
    }

    /// The first neighbouring pages among these that are in the file, or some of them.
    pub fn next_present(&self, pages: PageRange) -> io::Result<Option<PageRange>> {
        let (pages, granule) = (pages.before(PageIdx(self.pages.0)), self.ram.granule());
        if pages.is_empty() || granule == 1 {
            return self.ram.next_present(pages);
        }
        for page in self.granules(PageRange::new(self.first_of(pages.start()), pages.end())) {
            if self.is_present(page)? {
                return Ok(Some(pages.from(page).before(PageIdx(page.0 + granule))));
            }
        }
        Ok(None)
    }

    /// The chunks that contain these pages, with their registration flags.
    pub(crate) fn chunks(&self, pages: PageRange) -> impl Iterator<Item = (PageRange, &AtomicU8)> {
        let chunks = pages.start().0 / PAGES_PER_CHUNK..pages.end().0.div_ceil(PAGES_PER_CHUNK);
        let end = PageIdx(self.pages.0);
        chunks.map(move |chunk| {
            let whole = PageRange::of(PageIdx(chunk * PAGES_PER_CHUNK), PAGES_PER_CHUNK);
            (whole.before(end), &self.table.chunk_flags()[chunk as usize])
        })
    }

    /// How it is divided among this number of userfaultfds: by the length it has had from the start.
    pub(crate) fn stripes(&self, shards: usize) -> Stripes {
        Stripes::new(self.pages, shards)
    }

    /// The chunks that are registered.
    pub(crate) fn registered_chunks(&self) -> impl Iterator<Item = PageRange> {
        self.chunks(self.range()).filter(|(_, flag)| is_registered(flag)).map(|(chunk, _)| chunk)
    }

    /// Bytes of it that are registered with userfaultfd.
    pub(crate) fn registered(&self) -> Bytes {
        PageCount(self.registered_chunks().map(|chunk| chunk.count()).sum()).bytes()
    }
}

impl Backing for Region {
    fn read(&self, first: PageIdx, out: &mut [PageBytes]) -> io::Result<ReadOutcome> {
        self.ram.read(first, out)
    }

    fn punch(&self, pages: PageRange) -> io::Result<Punched> {
        self.ram.punch(pages)
    }

    fn holds(&self, pages: PageRange) -> io::Result<Holds> {
        if !self.is_present(pages.start())? {
            return Ok(Holds::Nothing);
        }
        let mut bytes = [[0; PAGE_SIZE]];
        for page in pages.iter() {
            if self.read(page, &mut bytes)? == ReadOutcome::Failed {
                return Ok(Holds::Failed);
            }
            if !is_zero(&bytes[0]) {
                return Ok(Holds::Bytes);
            }
        }
        Ok(Holds::Zeros)
    }

    fn write(&self, page: PageIdx, bytes: &PageBytes) -> io::Result<()> {
        self.ram.write(page, bytes)
    }
}
