//! The regions in a state file: how they are added and end, and where their words are.
//!
//! Before: the keeper makes room for a region that a client brings. After: each engine maps its table of words
//! (`table`), and recovery reads which of its words were ever written.
//! Threads: the keeper adds, one region at a time; any may read, in any process. Units: bytes from the start of the
//! file; pages of the region.
//! Promise: a region's number never changes, and its record changes only when it ends. A new table is zeros.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::wire::MAX_REGIONS;
use ballast_base::{Extents, PAGE_SIZE, PageIdx, PageRange};
use ballast_sys::Mapping;
use ballast_sys::memfd::{self, FileId};
use ballast_sys::memory_error::{Fill, Survival, Surviving};

use super::{Field, REGION_RECORD, REGIONS_OFFSET, StateError, StateFile};
use crate::records::{self, RegionRecord};
use crate::table::{Lost, flags_len, table_len};

impl StateFile {
    /// The regions, including removed ones: a region's number is its index.
    pub fn regions(&self) -> Vec<RegionRecord> {
        let count = (self.get(Field::RegionCount) as usize).min(MAX_REGIONS);
        let mut known = self.records.lock().expect("no panic while held");
        while known.len() < count {
            // The keeper, another process, has added it. A record that cannot be read counts as absent.
            let size = memfd::size(&self.fd).map_or(0, |size| size.0);
            let Ok(record) = records::read(self.record_words(known.len()), &self.fd, size) else { break };
            known.push(record);
        }
        let of = |(index, record): (usize, &RegionRecord)| record.at_end(self.record_words(index));
        known.iter().enumerate().map(of).collect()
    }

    pub(super) fn record_words(&self, index: usize) -> &[AtomicU64] {
        self.header.words(REGIONS_OFFSET + index * REGION_RECORD, records::WORDS)
    }

    /// Makes room for a region of these extents of these files, and returns its number.
    pub fn add_region(
        &self,
        files: &[FileId],
        extents: &Extents,
        guest_address: Option<u64>,
    ) -> Result<u32, StateError> {
        let index = self.get(Field::RegionCount) as usize;
        if index >= MAX_REGIONS {
            return Err(StateError::Invalid(format!("a VM may have at most {MAX_REGIONS} regions in its life")));
        }
        if extents.files() > files.len() {
            return Err(StateError::Invalid("a region has an extent of a file that is not there".into()));
        }
        let table_offset = self.get(Field::End);
        let lists_offset = table_offset + table_len(extents.pages());
        let lists = records::lists(files, extents);
        let end = lists_offset + lists.len() as u64;
        // Words of a region that was added only in part must not become words of this one.
        rustix::fs::ftruncate(&self.fd, table_offset).map_err(io::Error::from)?;
        rustix::fs::ftruncate(&self.fd, end).map_err(io::Error::from)?;
        records::write_lists(&self.fd, lists_offset, &lists)?;
        let values = records::words(files, extents, guest_address, table_offset, lists_offset);
        for (word, value) in self.record_words(index).iter().zip(values) {
            word.store(value, Ordering::Release);
        }
        self.set(Field::End, end);
        self.set(Field::RegionCount, index as u64 + 1);
        self.remember();
        Ok(index as u32)
    }

    /// Records that a region was unplugged.
    pub fn remove_region(&self, index: u32) {
        self.record_words(index as usize)[records::END].store(records::UNPLUGGED, Ordering::Release);
        self.remember();
    }

    /// Records that a region counts as unplugged, because no process has brought its RAM back.
    pub fn give_up_region(&self, index: u32) {
        self.record_words(index as usize)[records::END].store(records::GIVEN_UP, Ordering::Release);
        self.remember();
    }

    /// Maps a region's table.
    pub fn map_table(&self, record: &RegionRecord, lost: Lost) -> io::Result<Surviving> {
        let (offset, len) = (record.table_offset, table_len(record.pages()) as usize);
        let flags = (flags_len(record.pages()) as usize, Fill::Pattern(lost.flags));
        let fills = vec![flags, (len, Fill::Pattern(lost.word))];
        let journal = Some((self.header.clone(), Field::Journal as usize * 8));
        let survival = Survival { file: self.fd.clone(), offset, fills, journal };
        Ok(Surviving::new(Mapping::shared(&*self.fd, offset, len)?, survival))
    }

    /// The ranges of pages whose words were ever written; all other words are Resident, age 0.
    pub fn written_words(&self, record: &RegionRecord) -> io::Result<Vec<PageRange>> {
        let words_start = record.words_at();
        let words_end = words_start + record.pages().0 * 8;
        let mut ranges = Vec::new();
        let mut at = words_start;
        while let Some((start, end)) = memfd::next_data(&self.fd, at)? {
            if start >= words_end {
                break;
            }
            let page = |offset: u64| PageIdx((offset - words_start) / 8);
            ranges.push(PageRange::new(page(start), page(end.min(words_end))));
            at = end;
        }
        Ok(ranges)
    }

    /// Like [`Self::written_words`], for a part of the region; the cost depends on that part alone.
    pub fn written_words_within(&self, record: &RegionRecord, pages: PageRange) -> io::Result<Vec<PageRange>> {
        let page_size = PAGE_SIZE as u64;
        let place = |page: PageIdx| record.words_at() + page.0 * 8;
        let page = |offset: u64| PageIdx((offset - record.words_at()) / 8);
        let mut at = place(pages.start()) / page_size * page_size;
        let end = place(pages.end()).next_multiple_of(page_size);
        let mut ranges = Vec::new();
        while let Some((start, stop)) = memfd::next_data_within(&self.fd, at, end)? {
            ranges.push(PageRange::new(page(start), page(stop)).from(pages.start()).before(pages.end()));
            at = stop;
        }
        Ok(ranges)
    }

    /// Frees the memory of a region's words: from now on all are Resident, age 0. No thread may use them during this
    /// call.
    ///
    /// # Errors
    /// The kernel refuses; some words may be left.
    pub fn forget_words(&self, record: &RegionRecord) -> io::Result<()> {
        memfd::punch(&self.fd, record.words_at(), record.table_end() - record.words_at())
    }

    /// Whether each region was unplugged or given up, and at least one given up. Then no process can be served any
    /// more.
    pub fn is_given_up(&self) -> bool {
        let regions = self.regions();
        regions.iter().any(|region| region.given_up) && regions.iter().all(|region| region.removed)
    }
}
