//! A region: one contiguous range of guest RAM, with its extents of files (`ram.rs`) and its table of page-state words.
//!
//! Before: an attach or a hot-plug brought the files. After: `fault`, `evict` and `heat` work on it.
//! Threads: any. Units: pages from the start of the region.
//! Promise: reads and punches go through file descriptors; the engine never touches a mapping of guest RAM.

use std::collections::BTreeSet;
use std::io;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};

use ballast_base::store::{RegionKey, StoreSet, is_zero};
use ballast_base::stripes::{PAGES_PER_CHUNK, Stripes};
use ballast_base::wire::VmId;
use ballast_base::{Bytes, Extent, Extents, PAGE_SIZE, PageCount, PageIdx, PageRange};
use ballast_handover::state_file::RegionRecord;
use ballast_store::{PageBytes, PageKey};
use ballast_sys::memfd::FileId;
use ballast_sys::memory_error::Losses;

use crate::vm::interval::Departures;
use crate::vm::ram::{Ram, RamFile};
use crate::vm::region_table::RegionTable;
use crate::vm::units::Units;
use ballast_page::granule::Granule;
use ballast_page::memory::{Backing, Holds, Punched, ReadOutcome};
use ballast_page::page_state::{State, Word};

/// Returns whether a chunk with this flag is registered with the userfaultfds of every view.
pub(crate) fn is_registered(flag: &AtomicU8) -> bool {
    flag.load(Ordering::Acquire) != 0
}

pub(crate) fn set_registered(flag: &AtomicU8, registered: bool) {
    flag.store(registered.into(), Ordering::Release);
}

/// One region of a VM; see the module.
#[derive(Debug)]
pub struct Region {
    vm: VmId,
    /// Its number in the VM.
    pub number: u32,
    pages: PageCount,
    pub(crate) ram: Ram,
    table: RegionTable,
    not_near: StoreSet,
    units: Units,
    departures: Departures,
    /// First pages of granules with failed memory, which are never picked again; the flag saves the look-up.
    unreadable: Mutex<BTreeSet<PageIdx>>,
    has_unreadable: AtomicBool,
    removed: AtomicBool,
    /// One process has unplugged it, and others still map it.
    unplugged: AtomicBool,
}

impl Region {
    /// The region of `record`; its RAM files are among `files`. `not_near`: the stores whose reads may wait.
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

    pub(crate) fn set_unplugged(&self, unplugged: bool) {
        self.unplugged.store(unplugged, Ordering::Release);
    }

    /// Returns whether one process has unplugged it while others mapped it.
    pub fn is_unplugged(&self) -> bool {
        self.unplugged.load(Ordering::Acquire)
    }

    /// Returns whether it is no part of the VM any more.
    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::Acquire)
    }

    /// Makes it no part of the VM: it has no pages from now on.
    pub fn remove(&self) {
        self.removed.store(true, Ordering::Release);
    }

    pub(crate) fn is_shorter(&self) -> io::Error {
        let text = format!("a RAM file of region {} was made shorter than its RAM", self.number);
        io::Error::new(io::ErrorKind::UnexpectedEof, text)
    }

    /// Its RAM files.
    pub fn files(&self) -> &[RamFile] {
        &self.ram.files
    }

    /// Its extents in files: file, first byte, end.
    pub fn places(&self) -> Vec<(FileId, u64, u64)> {
        let files = self.files();
        let place = |extent: &Extent| Some((files.get(usize::from(extent.file))?.id, extent.offset.0, extent.end()));
        self.extents().list().iter().filter_map(place).collect()
    }

    /// Its extents.
    pub fn extents(&self) -> &Extents {
        &self.ram.extents
    }

    /// DRAM that it uses.
    pub fn resident(&self) -> io::Result<PageCount> {
        self.ram.resident()
    }

    /// Base pages that move as one.
    pub fn granule_pages(&self) -> u64 {
        self.ram.granule
    }

    /// Returns whether it has pages of 1 GiB: the kernel can neither map nor fill a part of one, so the VM is pinned.
    pub fn is_fixed(&self) -> bool {
        self.ram.is_fixed
    }

    /// Returns whether its pages are allocated on the first touch. It is registered from its first view on, and never
    /// unregistered, because the kernel kills a VMM that touches such a page while none is free.
    pub fn is_on_demand(&self) -> bool {
        self.ram.is_on_demand
    }

    /// First page of a page's granule.
    pub fn first_of(&self, page: PageIdx) -> PageIdx {
        PageIdx(page.0 - page.0 % self.ram.granule)
    }

    /// The granule of a page.
    pub fn granule(&self, page: PageIdx) -> Granule<'_> {
        Granule::new(self.table.words(self.first_of(page), self.ram.granule))
    }

    /// The page-state word of a page's granule.
    pub fn word(&self, page: PageIdx) -> Word {
        self.granule(page).cell().load()
    }

    /// Returns whether a page's bytes are only in a store.
    pub fn is_far(&self, page: PageIdx) -> bool {
        matches!(self.word(page).state(), State::Far | State::Restoring)
    }

    /// First pages of the granules that begin in `pages`.
    pub fn granules(&self, pages: PageRange) -> impl Iterator<Item = PageIdx> + use<> {
        let granule = self.ram.granule;
        pages.from(PageIdx(pages.start().0.next_multiple_of(granule))).step_by(granule)
    }

    /// All its pages.
    pub fn range(&self) -> PageRange {
        PageRange::new(PageIdx(0), PageIdx(self.pages().0))
    }

    /// Pages of its table lost to memory errors.
    pub(crate) fn lost(&self) -> u64 {
        self.table.lost()
    }

    /// Fails if a part of the table was lost: a page there stays locked until the VM is opened again.
    pub(crate) fn check_table(&self) -> io::Result<()> {
        match self.lost() {
            0 => Ok(()),
            _ => Err(io::Error::other("memory of the host failed under the page-state words")),
        }
    }

    /// Descriptions of losses of its table that were not reported yet.
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

    /// Records that memory of this page's granule failed: it is not evicted any more. The guest finds out on touch
    /// whether the page can still be read.
    pub(crate) fn set_aside(&self, page: PageIdx) {
        self.unreadable.lock().expect("no panic while held").insert(self.first_of(page));
        self.has_unreadable.store(true, Ordering::Release);
    }

    pub(crate) fn is_set_aside(&self, page: PageIdx) -> bool {
        self.has_unreadable.load(Ordering::Acquire)
            && self.unreadable.lock().expect("no panic while held").contains(&self.first_of(page))
    }

    /// Records a discard of these pages: memory after it is new.
    pub(crate) fn take_back(&self, discarded: PageRange) {
        if self.has_unreadable.load(Ordering::Acquire) {
            self.unreadable.lock().expect("no panic while held").retain(|page| !discarded.contains(*page));
        }
    }

    /// Times at which its pages were evicted.
    pub fn departures(&self) -> &Departures {
        &self.departures
    }

    /// Its units of 2 MiB.
    pub fn units(&self) -> &Units {
        &self.units
    }

    /// Returns whether the kernel may map its units huge: base pages, each unit at an aligned offset in one file.
    pub fn is_unit_aligned(&self) -> bool {
        self.ram.are_units()
    }

    /// Its name in stores.
    pub fn region_key(&self) -> RegionKey {
        RegionKey { vm: self.vm, number: self.number }
    }

    /// Returns whether a page is far, and in no near store.
    pub fn is_slow(&self, page: PageIdx) -> bool {
        self.granule(page).is_in(self.not_near)
    }

    /// Returns whether a page is far and unlocked, in a store whose read may wait.
    pub fn is_slow_and_free(&self, page: PageIdx) -> bool {
        let word = self.word(page);
        word.state() == State::Far && !word.is_locked() && self.is_slow(page)
    }

    /// Returns whether a page can be brought in at once: unlocked, and zero, in quarantine, or far in a near store.
    pub fn is_out_and_free(&self, page: PageIdx) -> bool {
        let word = self.word(page);
        let is_out = match word.state() {
            State::Quarantine | State::Evicting | State::Zero => true,
            State::Far => !self.is_slow(page),
            State::Resident | State::Restoring | State::Poisoned => false,
        };
        is_out && !word.is_locked()
    }

    /// The page's name in stores.
    pub fn key(&self, page: PageIdx) -> PageKey {
        self.region_key().page(page)
    }

    /// Returns whether a page is in its file.
    pub fn is_present(&self, page: PageIdx) -> io::Result<bool> {
        self.ram.is_present(self.first_of(page))
    }

    /// The first run of `pages` that is in a file, or a part of that run.
    pub fn next_present(&self, pages: PageRange) -> io::Result<Option<PageRange>> {
        let (pages, granule) = (pages.before(PageIdx(self.pages.0)), self.ram.granule);
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

    /// The chunks of these pages, with their registration flags.
    pub(crate) fn chunks(&self, pages: PageRange) -> impl Iterator<Item = (PageRange, &AtomicU8)> {
        let chunks = pages.start().0 / PAGES_PER_CHUNK..pages.end().0.div_ceil(PAGES_PER_CHUNK);
        let end = PageIdx(self.pages.0);
        chunks.map(move |chunk| {
            let whole = PageRange::of(PageIdx(chunk * PAGES_PER_CHUNK), PAGES_PER_CHUNK);
            (whole.before(end), &self.table.chunk_flags()[chunk as usize])
        })
    }

    /// Its division among this number of userfaultfds, which depends only on its first length.
    pub(crate) fn stripes(&self, shards: usize) -> Stripes {
        Stripes::new(self.pages, shards)
    }

    pub(crate) fn registered_chunks(&self) -> impl Iterator<Item = PageRange> {
        self.chunks(self.range()).filter(|(_, flag)| is_registered(flag)).map(|(chunk, _)| chunk)
    }

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
