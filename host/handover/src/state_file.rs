//! The state file: everything of one VM that must outlive an engine, in one shared memory file.
//!
//! Before: the keeper creates it at the first attach, or a client brings it back after the keeper died. After: each
//! engine maps it and continues where its predecessor was.
//! Threads: the header is atomics; only the keeper adds regions, one at a time. Units: offsets are bytes from the start
//! of the file.
//! Promise: a file of another VM, with a layout that this program cannot read, or with impossible numbers is refused
//! with the reason, unchanged. After a memory error, a lost page gets contents that are safe until recovery has
//! examined it: flags and words that stand for lost ones ([`Lost`]), counters of zero, or a list of threads that says
//! "unknown". The first page is replaced by this process's copy of it.
//!
//! ```text
//! 0        magic, stamp (version and least reader), VM id, epoch, limit, engine pid and start time, region count, end
//!          of used space, target, settings, kept, journal of lost pages, pid and start time of an engine that leaves,
//!          cluster, unmanaged RAM, UUID, owner, sources of settings; the rest is reserved
//! 384      the key that pages on other machines are sealed with (`secret`)
//! 512      name, padded with zeros
//! 1024     region table: 32 records of 64 bytes (`records`)
//! 3072     guest-physical addresses of regions (`guest`)
//! 4096     counters          4608  threads (`threads`)  8192  histograms     32768  end of the header
//! then, per region, at a 4096-aligned offset: one byte per registration chunk, padded; one 8-byte word per page; and
//! of a region of several extents, their list, twice
//! ```
//!
//! `ballast_base::format` says which versions read which. Zero in a reserved word has no meaning.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ballast_base::format::{Format, Stamp};
use ballast_base::wire::{MAX_NAME, MAX_REGIONS, VmId};
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::Mapping;
use ballast_sys::memfd::{self, create};
use ballast_sys::memory_error::{self, Fill, Losses, PageCopy, Survival, Surviving};

use crate::records;
pub use crate::records::RegionRecord;
use crate::table::Lost;
use crate::threads::{self, ThreadList};

mod regions;

const MAGIC: u64 = u64::from_le_bytes(*b"BALLASTS");
/// The versions of the layout of the file and of page-state words.
pub const FORMAT: Format = Format { version: if NEXT_LAYOUT { 2 } else { 1 }, least_reader: 1, oldest: 1 };
/// A build for tests, which can precede or follow this one: its layout is as if the next version had one more word.
const NEXT_LAYOUT: bool = cfg!(feature = "next-layout");
const HEADER_LEN: usize = 32 * 1024;
const SECRET_OFFSET: usize = 384;
pub(crate) const SECRET_WORDS: usize = 6;
const NAME_OFFSET: usize = 512;
const REGIONS_OFFSET: usize = 1024;
const REGION_RECORD: usize = records::WORDS * 8;
const GUEST_OFFSET: usize = 3072;
pub(crate) const GUEST_WORDS: usize = 126;
const COUNTERS_OFFSET: usize = 4096;
const THREADS_OFFSET: usize = COUNTERS_OFFSET + COUNTERS * 8;
const HISTOGRAMS_OFFSET: usize = 8192;
const _: () = assert!(FIELDS * 8 <= SECRET_OFFSET && SECRET_OFFSET + SECRET_WORDS * 8 <= NAME_OFFSET);
const _: () = assert!(REGIONS_OFFSET + MAX_REGIONS * REGION_RECORD <= GUEST_OFFSET);
const _: () = assert!(GUEST_OFFSET + GUEST_WORDS * 8 <= COUNTERS_OFFSET);

/// Number of counters.
pub const COUNTERS: usize = 64;
/// Number of words for histograms.
pub const HISTOGRAM_WORDS: usize = (HEADER_LEN - HISTOGRAMS_OFFSET) / 8;

#[repr(usize)]
pub(crate) enum Field {
    Magic = 0,
    /// A [`Stamp`].
    Layout = 1,
    Id0 = 2,
    Id1 = 3,
    Epoch = 4,
    Limit = 5,
    EnginePid = 6,
    EngineStart = 7,
    RegionCount = 8,
    End = 9,
    Target = 10,
    Settings = 11,
    Kept = 11 + SETTINGS,
    /// The part of the file that is being replaced after a memory error (`ballast_sys::memory_error`).
    Journal = 12 + SETTINGS,
    /// The engine that leaves, while there are two ([`crate::beside`]).
    LeavingPid = 13 + SETTINGS,
    LeavingStart = 14 + SETTINGS,
    /// The identity of the cluster with the VM's pages on other machines.
    Cluster = 15 + SETTINGS,
    /// Bytes of guest RAM outside all regions.
    Unmanaged = 16 + SETTINGS,
    /// The operator's UUID of the VM; 0 if it has none.
    Uuid0 = 17 + SETTINGS,
    Uuid1 = 18 + SETTINGS,
    /// The uid that attached first, plus one, in the upper half; its pid in the lower.
    Owner = 19 + SETTINGS,
    /// The sources of the VM's settings, as the daemon encodes them.
    Sources = 20 + SETTINGS,
    /// How often a program with the feature `next-layout` has taken the VM over. For other programs, a reserved word.
    Next = 21 + SETTINGS,
}
const FIELDS: usize = 22 + SETTINGS;
/// Words for the operator's settings, besides the limit. The pager only stores them.
pub const SETTINGS: usize = 5;

/// Why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The kernel refused.
    #[error("Mapping a VM's state file")]
    Io(#[from] io::Error),
    /// The file is invalid: another version wrote it, or it is damaged.
    #[error("Reading a VM's state file: {0}")]
    Invalid(String),
}

/// An open state file.
#[derive(Debug)]
pub struct StateFile {
    fd: Arc<OwnedFd>,
    header: Arc<Surviving>,
    /// The first page, as this process last wrote or checked it.
    remembered: Arc<PageCopy>,
    /// The tag of the engine that opened the file, if this process is one ([`threads`]).
    tag: AtomicU64,
    /// Records that were read already: only the end of a record changes.
    records: Mutex<Vec<RegionRecord>>,
}

impl StateFile {
    /// Makes the file of a new VM, without regions and without a limit.
    pub fn create(id: VmId, name: &str) -> Result<Self, StateError> {
        let fd = create("ballast-state", Bytes(HEADER_LEN as u64))?;
        // Only the owner may write: clients have a read-only descriptor and must not gain more by reopening it.
        rustix::fs::fchmod(&fd, rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR).map_err(io::Error::from)?;
        let file = Self::map(fd)?;
        let (a, b) = id.0.split_at(8);
        file.set(Field::Id0, u64::from_le_bytes(a.try_into().expect("8 bytes")));
        file.set(Field::Id1, u64::from_le_bytes(b.try_into().expect("8 bytes")));
        file.set(Field::Limit, u64::MAX);
        file.set(Field::End, HEADER_LEN as u64);
        file.set(Field::Layout, FORMAT.stamp().to_word());
        file.header.copy_in(NAME_OFFSET, &name.as_bytes()[..name.len().min(MAX_NAME)]);
        file.set(Field::Magic, MAGIC);
        file.remember();
        Ok(file)
    }

    fn map(fd: OwnedFd) -> io::Result<Self> {
        let (fd, remembered) = (Arc::new(fd), Arc::new(PageCopy::default()));
        let fills = vec![(PAGE_SIZE, Fill::Copy(remembered.clone())), (HEADER_LEN, Fill::Zeros)];
        let survival = Survival { file: fd.clone(), offset: 0, fills, journal: None };
        let header = Arc::new(Surviving::new(Mapping::shared(&*fd, 0, HEADER_LEN)?, survival));
        Ok(Self { fd, header, remembered, tag: AtomicU64::new(0), records: Mutex::default() })
    }

    /// Keeps a copy of the first page, for the case of a memory error. A program that has the file open calls this from
    /// time to time, because other processes also write to that page.
    pub fn remember(&self) {
        if self.get(Field::Magic) != MAGIC {
            // Another process is just replacing the page.
            return;
        }
        let words = self.header.words(0, PAGE_SIZE / 8);
        for (at, (word, copy)) in words.iter().zip(self.remembered.words()).enumerate() {
            let value = if at == Field::Journal as usize { 0 } else { word.load(Ordering::Acquire) };
            copy.store(value, Ordering::Release);
        }
    }

    /// Maps an existing file, and checks every part of it that is ever trusted.
    pub fn open(fd: OwnedFd) -> Result<Self, StateError> {
        let invalid = |what: String| Err(StateError::Invalid(what));
        let size = memfd::size(&fd)?.0;
        if size < HEADER_LEN as u64 {
            return invalid(format!("it has {size} bytes, fewer than its header"));
        }
        let file = Self::map(fd)?;
        let magic = file.get(Field::Magic);
        if file.header.lost() > 0 {
            return invalid("memory of the host failed under its header".into());
        }
        if magic != MAGIC {
            return invalid("it does not begin with the Ballast magic".into());
        }
        if let Err(unreadable) = FORMAT.check(file.stamp()) {
            return invalid(unreadable.to_string());
        }
        // In the opposite order of a keeper that adds a region, which may happen now.
        let (count, end) = (file.get(Field::RegionCount), file.get(Field::End));
        let size = memfd::size(&file.fd)?.0;
        if count > MAX_REGIONS as u64 || end > size {
            return invalid(format!("it claims {count} regions in {end} of its {size} bytes"));
        }
        for index in 0..count as usize {
            let record = records::read(file.record_words(index), &file.fd, size);
            let record = record.map_err(|why| StateError::Invalid(format!("region {index}: {why}")))?;
            file.records.lock().expect("no panic while held").push(record);
        }
        file.remember();
        Ok(file)
    }

    /// Another handle of this open file, with the same descriptor.
    #[must_use]
    pub fn share(&self) -> Self {
        let Self { fd, header, remembered, .. } = self;
        let records = Mutex::new(self.records.lock().expect("no panic while held").clone());
        let tag = AtomicU64::new(self.own_tag());
        Self { fd: fd.clone(), header: header.clone(), remembered: remembered.clone(), tag, records }
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        self.header.words(0, FIELDS)
    }

    pub(crate) fn get(&self, field: Field) -> u64 {
        self.words()[field as usize].load(Ordering::Acquire)
    }

    pub(crate) fn set(&self, field: Field, value: u64) {
        self.words()[field as usize].store(value, Ordering::Release);
    }

    pub(crate) fn stamp(&self) -> Stamp {
        Stamp::from_word(self.get(Field::Layout))
    }

    /// The descriptor of the file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The VM of the file.
    pub fn id(&self) -> VmId {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&self.get(Field::Id0).to_le_bytes());
        id[8..].copy_from_slice(&self.get(Field::Id1).to_le_bytes());
        VmId(id)
    }

    /// The VM's name, at most [`MAX_NAME`] bytes.
    pub fn name(&self) -> String {
        let mut name = [0; MAX_NAME];
        self.header.copy_out(NAME_OFFSET, &mut name);
        String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()
    }

    /// Bytes of guest RAM outside all regions.
    pub fn unmanaged(&self) -> Bytes {
        Bytes(self.get(Field::Unmanaged))
    }

    /// Sets the guest RAM outside all regions, which is not part of the VM's size.
    pub fn set_unmanaged(&self, len: Bytes) {
        self.set(Field::Unmanaged, len.0);
        self.remember();
    }

    /// The engine that serves the VM, as pid and start time; `None` before the first.
    pub fn engine(&self) -> Option<(u32, u64)> {
        Some((self.get(Field::EnginePid) as u32, self.get(Field::EngineStart))).filter(|engine| engine.0 != 0)
    }

    /// The number of engines that have served the VM.
    pub fn epoch(&self) -> u64 {
        self.get(Field::Epoch)
    }

    /// Changes the name, before an engine opens the file. The name is cut to [`MAX_NAME`] bytes.
    pub fn rename(&self, name: &str) {
        let mut padded = [0; MAX_NAME];
        let len = name.len().min(MAX_NAME);
        padded[..len].copy_from_slice(&name.as_bytes()[..len]);
        self.header.copy_in(NAME_OFFSET, &padded);
        self.remember();
    }

    /// Records the engine that may open the VM from now on. The keeper calls this *before* it gives the order: a later
    /// keeper ends each engine named here, even one that has not opened the VM yet.
    pub fn name_engine(&self, pid: u32, start_time: u64) {
        self.set(Field::Layout, FORMAT.raise(self.stamp()).to_word());
        match self.is_one_of_two(pid, start_time) {
            // The list may have threads of both engines, and of no other.
            true => self.thread_list().own(pid, start_time),
            false => self.thread_list().begin(pid, start_time),
        }
        // A keeper that dies between the two words leaves a pair that names no engine, and has not given the order.
        self.set(Field::EngineStart, start_time);
        self.set(Field::EnginePid, u64::from(pid));
        self.forget_leaving();
        self.remember();
    }

    /// Records that this engine serves the VM from now on; returns its epoch. `lost` goes into pages that a dead engine
    /// had begun to replace.
    ///
    /// # Errors
    /// An engine died while it replaced a lost part of the file, and that replacement cannot be completed now.
    pub fn take_over(&self, pid: u32, start_time: u64, lost: Lost) -> io::Result<u64> {
        self.finish_journal(lost)?;
        self.name_engine(pid, start_time);
        Ok(self.begin_epoch(pid, start_time))
    }

    /// Begins this engine's epoch, and returns it.
    pub(crate) fn begin_epoch(&self, pid: u32, start_time: u64) -> u64 {
        self.open_as(pid, start_time);
        let epoch = self.words()[Field::Epoch as usize].fetch_add(1, Ordering::AcqRel) + 1;
        if NEXT_LAYOUT {
            self.words()[Field::Next as usize].fetch_add(1, Ordering::AcqRel);
        }
        self.remember();
        epoch
    }

    /// Completes the replacement of lost pages that a dead engine had begun. Otherwise words of zeros could remain,
    /// which mean Resident.
    fn finish_journal(&self, lost: Lost) -> io::Result<()> {
        let Some((offset, len)) = memory_error::in_journal(self.get(Field::Journal)) else { return Ok(()) };
        let pages = (offset..offset.saturating_add(len)).step_by(PAGE_SIZE);
        for record in self.regions() {
            let table = record.table_offset..record.table_end();
            for page in pages.clone().filter(|page| table.contains(page)) {
                // The engine may have died before it punched the page, and bad memory cannot be written to.
                memfd::punch(&*self.fd, page, PAGE_SIZE as u64)?;
                let value = if page < record.words_at() { lost.flags } else { lost.word };
                let bytes: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), PAGE_SIZE / 8).flatten().collect();
                rustix::io::pwrite(&self.fd, &bytes, page)?;
            }
        }
        self.set(Field::Journal, 0);
        Ok(())
    }

    /// The identity of the cluster that has the VM's pages on other machines; 0 if there is none.
    pub fn cluster(&self) -> u64 {
        self.get(Field::Cluster)
    }

    /// Sets the identity of the cluster, unless one is set: another engine may set it at the same time.
    pub fn keep_cluster(&self, identity: u64) {
        let word = &self.words()[Field::Cluster as usize];
        if word.compare_exchange(0, identity, Ordering::AcqRel, Ordering::Acquire).is_ok() {
            self.remember();
        }
    }

    /// Removes the identity: no cluster has a page of the VM.
    pub fn forget_cluster(&self) {
        self.set(Field::Cluster, 0);
        self.remember();
    }

    /// Pages of the header that were lost to memory errors since this process opened it.
    pub fn lost(&self) -> u64 {
        self.header.lost()
    }

    /// The losses that were not reported yet.
    pub fn losses(&self) -> Losses {
        self.header.losses()
    }

    pub(crate) fn guest_words(&self) -> &[AtomicU64] {
        self.header.words(GUEST_OFFSET, GUEST_WORDS)
    }

    pub(crate) fn secret_words(&self) -> &[AtomicU64] {
        self.header.words(SECRET_OFFSET, SECRET_WORDS)
    }

    pub(crate) fn thread_list(&self) -> ThreadList<'_> {
        ThreadList(self.header.words(THREADS_OFFSET, (HISTOGRAMS_OFFSET - THREADS_OFFSET) / 8))
    }

    /// Sets the engine whose threads this process lists.
    pub fn open_as(&self, pid: u32, start_time: u64) {
        self.tag.store(threads::tag(pid, start_time), Ordering::Release);
    }

    pub(crate) fn own_tag(&self) -> u64 {
        self.tag.load(Ordering::Acquire)
    }

    /// The counters of `ballast_pager::vm::stats`.
    pub fn counters(&self) -> &[AtomicU64] {
        self.header.words(COUNTERS_OFFSET, COUNTERS)
    }

    /// The histograms of `ballast_pager::vm::stats`.
    pub fn histograms(&self) -> &[AtomicU64] {
        self.header.words(HISTOGRAMS_OFFSET, HISTOGRAM_WORDS)
    }
}

#[cfg(test)]
mod tests;
