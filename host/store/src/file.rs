//! The file store: far pages in a file on a disk, one block each, with direct I/O.
//!
//! Before: `Store::put` brings a page, or `put_run` up to 2 MiB of them. After: a same-filled page is only a handle;
//! any other page is in a block of the file, with its checksum in the index.
//! Threads: any. Each has its own io_urings (see `disk` and `reading`), and so has each asynchronous read (`begun`).
//! Several processes may use one file, as with `RamStore`. Units: a block is 4096 bytes, an area 512 blocks. Disk space
//! is charged and returned in areas: `tidy` punches emptied areas, and so does the next put, except for 16 MiB. A query
//! of the usage reads counters and never waits for the disk.
//! Promise: `Stored` means that the device took the bytes. `Found` means the exact bytes that were put under that key
//! and handle, whatever the disk or the index contain. A page that cannot be read is `Corrupt`, never zeros.
//!
//! On a file system that became read-only the store still opens: pages can be read, and none is put.
//!
//! The file has no name, and the index is a shared-memory file (an `Arena` whose slabs hold 16 bytes for each block),
//! so both exist as long as a process holds their descriptors. They survive each process, but not the host: nothing is
//! flushed (`fdatasync`), because after a restart of the host no guest needs the pages.
//!
//! The steps of a put, each of which may be the last before a crash: the block's bit is set (it is taken); its header
//! is changed to match no handle; the bytes are written; the header gets checksum, key and tag; only then does a handle
//! exist. Until a word has that handle, `recover` finds a block that no word names, and frees it. A write that a dead
//! process left *in the kernel* may still reach the disk; `recover` waits for it before it frees anything.

mod batch;
mod begun;
mod blocks;
mod disk;
mod errors;
mod faults;
mod layout;
mod limits;
mod reading;
mod unread;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ballast_base::format::Format;
use ballast_base::store::OnReply;
use ballast_base::{Bytes, PAGE_SIZE};
use ballast_handover::arena::{MAX_SLABS, WORD_FILE_DEV, WORD_FILE_INO, WORD_TODAY};
use ballast_sys::direct;
use ballast_sys::memfd;
use ballast_sys::slow_fd::SlowFd;

pub use disk::{has_late_writes, notice_late_writes};
pub use faults::{DiskFault, DiskFaults};
pub use layout::AREA_BYTES;
pub use limits::Refusal;

use crate::alloc::{Allocator, Inconsistent};
use crate::arena::Arena;
use crate::budget::Budget;
use crate::handle::Named;
use crate::{
    DurableStore, Ends, GetOutcome, Handle, IoContext, PageBytes, PageKey, PutOutcome, Recovered, SlowStore, Store,
    StoreUsage,
};
use batch::Wait;
use blocks::{BAD, BEING_WRITTEN, Counter, Inner, page_after};
use disk::{Disk, Moved};
use layout::{AREA_BLOCKS, INDEX, spare_block};
use limits::Limits;
use reading::{Came, Reading};

/// Parameters of a file store.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Charged for the disk space.
    pub budget: Arc<Budget>,
    /// Largest size of a *new* file, which is sparse: 2 MiB to 8 TiB, rounded up to 2 MiB. An old file keeps its size.
    pub max_bytes: Bytes,
    /// Bytes that may be written to the device in a day (UTC), to limit its wear; 0: no limit.
    pub writes_per_day: Bytes,
    /// How long the device must report errors of a block before its page is given up. A guest's thread waits that long,
    /// so it is less than the 20 s after which Linux reports a soft lockup.
    pub unreadable_for: Duration,
    /// Fault injection, for tests.
    pub faults: Option<Arc<DiskFaults>>,
}

impl FileOptions {
    /// Options with this budget, a file of at most the budget's limit, and no limit of writes per day.
    pub fn new(budget: Arc<Budget>) -> Self {
        let max_bytes = budget.limit();
        Self { budget, max_bytes, writes_per_day: Bytes(0), unreadable_for: Duration::from_secs(10), faults: None }
    }
}

/// Contents and history of a file store, in more detail than [`StoreUsage`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileUsage {
    /// Pages held in blocks.
    pub block_pages: u64,
    /// Areas of 2 MiB held.
    pub areas: u64,
    /// Blocks that the device could not write or read, and that are never used again.
    pub bad_blocks: u64,
    /// Bytes ever written to the device.
    pub written_bytes: u64,
    /// Bytes written today (UTC).
    pub written_today_bytes: u64,
    /// Why a put was last refused in this process.
    pub last_refusal: Option<Refusal>,
}

/// A store in a file, which exists as long as a process has its descriptor.
#[derive(Debug)]
pub struct FileStore {
    inner: Arc<Inner>,
}

/// One block more than the areas have: `create` tests the disk with it, and `recover` punches it to wait for I/O.
fn file_bytes(areas: u32) -> u64 {
    (spare_block(areas) + 1) * PAGE_SIZE as u64
}

impl FileStore {
    /// The layout of the index.
    pub const FORMAT: Format = INDEX.layout.format;

    /// Makes an empty store in a file without a name in `dir`. Also returns the descriptors of the file's place (see
    /// [`direct::place_of`]) and of the index: a process with both can `open` the store.
    ///
    /// # Errors
    /// `dir` cannot hold the file (the message says why), io_uring is not available, or `max_bytes` is too large.
    pub fn create(dir: &Path, options: FileOptions) -> io::Result<(Self, OwnedFd, OwnedFd)> {
        let areas = u32::try_from(options.max_bytes.0.div_ceil(AREA_BYTES)).unwrap_or(u32::MAX);
        let index = Arena::create(&INDEX, areas)?;
        let file = Arc::new(SlowFd::from(direct::create_unnamed(dir, Bytes(file_bytes(areas)))?));
        let id = memfd::file_id(&file)?;
        index.set_own_word(WORD_FILE_DEV, id.dev);
        index.set_own_word(WORD_FILE_INO, id.ino);
        let index_fd = index.dup()?;
        let store = Self::on(index, Arc::clone(&file), options, false);
        store.try_disk().map_err(|error| {
            io::Error::new(error.kind(), format!("Making a file store in {}: {error}", dir.display()))
        })?;
        Ok((store, direct::place_of(file.as_fd())?, index_fd))
    }

    /// Opens a store. Its contents are charged to the budget, even above the limit. If the last process that used it
    /// died, call [`DurableStore::recover`] next. Waits for the disk. `place` may be a descriptor of the file's place.
    ///
    /// # Errors
    /// This program cannot read the index, or the file does not belong to it or cannot be opened.
    pub fn open(place: impl AsFd, index_fd: OwnedFd, options: FileOptions) -> io::Result<Self> {
        let index = Arena::open(&INDEX, index_fd)?;
        let invalid =
            |what: String| Err(io::Error::new(io::ErrorKind::InvalidData, format!("Opening a file store: {what}")));
        let (id, size) = (memfd::file_id(&place)?, memfd::size(&place)?.0);
        let own = |word: usize| index.own_words()[word].load(Ordering::Acquire);
        if (id.dev, id.ino) != (own(WORD_FILE_DEV), own(WORD_FILE_INO)) {
            return invalid(format!("the index belongs to another file than inode {} of device {:#x}", id.ino, id.dev));
        }
        let (file, read_only) = match direct::reopen(place.as_fd(), true) {
            Err(error) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
                (direct::reopen(place.as_fd(), false)?, true)
            }
            file => (file?, false),
        };
        if !direct::is_direct_file(&file, !read_only)? || size != file_bytes(index.slabs()) {
            return invalid(format!(
                "a file of {size} bytes, {} are needed, for direct I/O",
                file_bytes(index.slabs())
            ));
        }
        Ok(Self::on(index, Arc::new(file.into()), options, read_only))
    }

    fn on(index: Arena, file: Arc<SlowFd>, options: FileOptions, read_only: bool) -> Self {
        let allocator = Allocator::new(index.on_disk(Arc::clone(&file)), options.budget, usize::MAX);
        let disk = Disk { file, faults: options.faults, read_only };
        let limits = Limits::new(options.writes_per_day);
        Self { inner: Arc::new(Inner::new(allocator, disk, limits, options.unreadable_for)) }
    }

    /// Writes, reads and punches a block: a file system that cannot do so is noticed now, not when memory is short.
    fn try_disk(&self) -> io::Result<()> {
        disk::ready()?;
        let spare = spare_block(self.inner.allocator.arena().slabs());
        let unfaulty = Disk { file: Arc::clone(&self.inner.disk.file), faults: None, read_only: false };
        let failed =
            |what: &str, error: &io::Error| Err(io::Error::new(error.kind(), format!("{what} 4096 bytes: {error}")));
        let late =
            |what: &str| Err(io::Error::new(io::ErrorKind::TimedOut, format!("{what} 4096 bytes takes too long")));
        match unfaulty.write(&[(spare, &[[0x5a; PAGE_SIZE]])], disk::WRITE_TIMEOUT, |_| || (), || ()).first() {
            Some(Moved::Done) => {}
            Some(Moved::Failed(error)) => return failed("writing", error),
            _ => return late("writing"),
        }
        let reading = Reading::default();
        let wait = Wait { timeout: disk::read_timeout(u8::MAX), context: IoContext::GUEST };
        match reading.read(&unfaulty, &[(spare, 1)], wait, |_, _| true).first() {
            Some(Came::Done { .. }) => {}
            Some(Came::Failed(error, _)) => return failed("reading", error),
            _ => return late("reading"),
        }
        self.wait_for_writes()
    }

    /// Whether its file system is read-only. Then nothing is put, and no space is returned to the disk.
    pub fn is_read_only(&self) -> bool {
        self.inner.disk.read_only
    }

    /// Waits until no write to the file is in flight, not even one of a dead process. To punch a block, ext4 and XFS
    /// wait for all direct I/O on the file; on btrfs no process ends before its I/O. Measured on a device throttled to
    /// 1 MiB/s: a process was gone 0.5 ms after its kill, its write 1.8 s later, and without this wait that write
    /// overwrote what a successor had written.
    pub fn wait_for_writes(&self) -> io::Result<()> {
        let spare = spare_block(self.inner.allocator.arena().slabs()) * PAGE_SIZE as u64;
        memfd::punch(&self.inner.disk.file, spare, PAGE_SIZE as u64)
            .map_err(|error| io::Error::new(error.kind(), format!("punching a hole: {error}")))
    }

    /// After an unclean death and [`FileStore::wait_for_writes`]: frees blocks that no live handle names, and corrects
    /// the counts. A live handle without a block is counted; `get` returns `Absent` for it. Bad blocks stay unused.
    ///
    /// No other thread or process may use the store during this call.
    pub fn sweep(&self, live: impl Iterator<Item = Handle>) -> Recovered {
        let inner = &self.inner;
        let mut bad = Vec::new();
        for place in inner.taken() {
            match inner.header(place).encoding {
                BAD => bad.push(place),
                BEING_WRITTEN => inner.disown(place),
                _ => {}
            }
        }
        let mut same_filled = 0;
        let places = live.filter_map(|handle| match Named::by(handle) {
            Named::SameFilled(_) => {
                same_filled += 1;
                None
            }
            Named::Blob { place, .. } => Some(place),
        });
        let mut report = inner.allocator.recover(places.chain(bad.iter().copied()));
        inner.allocator.settle(0);
        report.same_filled = same_filled;
        report.kept_blobs = report.kept_blobs.saturating_sub(bad.len() as u64);
        let arena = inner.allocator.arena();
        arena.set_counter(Counter::LiveBlocks as usize, report.kept_blobs);
        arena.set_counter(Counter::LiveSameFilled as usize, same_filled);
        arena.set_counter(Counter::BadBlocks as usize, bad.len() as u64);
        report
    }

    /// Checks that area table, bitmaps, counters and charge agree. Nobody may use the store during this call. Late
    /// writes may be in flight: their blocks are taken, and neither live nor bad. The error is the first contradiction.
    pub fn validate(&self) -> Result<(), Inconsistent> {
        let inner = &self.inner;
        inner.allocator.settle(0);
        let taken = inner.allocator.validate()?;
        let written = inner.taken().filter(|place| inner.header(*place).encoding == BEING_WRITTEN).count() as u64;
        let (live, bad) = (inner.sum(Counter::LiveBlocks), inner.sum(Counter::BadBlocks));
        if taken == live.saturating_add(bad).saturating_add(written) {
            Ok(())
        } else {
            Err(Inconsistent(format!(
                "{taken} blocks are taken; {live} live, {bad} bad and {written} being written are counted"
            )))
        }
    }

    /// The contents and the history now.
    pub fn usage_detail(&self) -> FileUsage {
        let inner = &self.inner;
        let today = inner.limits.written_today(&inner.allocator.arena().own_words()[WORD_TODAY]);
        FileUsage {
            block_pages: inner.sum(Counter::LiveBlocks),
            areas: inner.allocator.resync().into(),
            bad_blocks: inner.sum(Counter::BadBlocks),
            written_bytes: inner.sum(Counter::WrittenBlocks).saturating_mul(PAGE_SIZE as u64),
            written_today_bytes: today.0,
            last_refusal: inner.limits.last_refusal(),
        }
    }

    /// Pages of the index that were lost to memory errors since it was opened. `recover` finds the free blocks again.
    pub fn lost(&self) -> u64 {
        self.inner.allocator.arena().lost()
    }

    /// Texts of the losses not returned before; and whether they need a `recover`.
    pub fn losses(&self) -> (Vec<String>, bool) {
        self.inner.allocator.arena().losses()
    }

    /// Changes the limit of bytes written in a day, from the next put on; 0: no limit.
    pub fn set_writes_per_day(&self, limit: Bytes) {
        self.inner.limits.set_writes_per_day(limit);
    }
}

impl Store for FileStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        let mut outcomes = Vec::with_capacity(1);
        self.put_run(key, std::slice::from_ref(bytes), &mut outcomes);
        outcomes.pop().unwrap_or(PutOutcome::Busy)
    }

    fn put_run(&self, first: PageKey, pages: &[PageBytes], outcomes: &mut Vec<PutOutcome>) {
        let (lost, before) = (self.lost(), outcomes.len());
        for (number, pages) in pages.chunks(AREA_BLOCKS).enumerate() {
            let start = outcomes.len();
            outcomes.resize(start + pages.len(), PutOutcome::Full);
            let first = page_after(first, number * AREA_BLOCKS);
            Inner::put_extent(&self.inner, first, pages, &mut outcomes[start..]);
        }
        if self.lost() > lost {
            // The blocks of some may be lost. `recover` frees them.
            outcomes[before..].fill(PutOutcome::Busy);
        }
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, context: IoContext<'_>) -> GetOutcome {
        if let Ends::AtOnce(watch) = context.ends {
            return self.inner.get_begun(key, handle, out, watch);
        }
        if self.inner.wait_for_begun(key, handle, out) {
            return GetOutcome::Found;
        }
        let mut outcome = [GetOutcome::Busy];
        self.inner.get_run(key, &[handle], std::slice::from_mut(out), &mut outcome, context);
        outcome[0]
    }

    /// Consecutive blocks are read together.
    fn get_run(&self, pages: &[(PageKey, Handle)], out: &mut [PageBytes], context: IoContext<'_>) -> Vec<GetOutcome> {
        let mut outcomes = vec![GetOutcome::Busy; pages.len().min(out.len())];
        let mut done = 0;
        for run in pages[..outcomes.len()].chunk_by(|(a, _), (b, _)| a.page.0 + 1 == b.page.0) {
            let handles: Vec<Handle> = run.iter().map(|(_, handle)| *handle).collect();
            let (out, outcomes) = (&mut out[done..][..run.len()], &mut outcomes[done..][..run.len()]);
            self.inner.get_run(run[0].0, &handles, out, outcomes, context);
            done += run.len();
            if outcomes.contains(&GetOutcome::Busy) {
                break;
            }
        }
        outcomes
    }

    fn free(&self, key: PageKey, handle: Handle) {
        self.inner.free(key, handle);
    }

    fn tidy(&self) {
        self.inner.drop_forgotten();
        self.inner.allocator.settle(0);
    }

    fn usage(&self) -> StoreUsage {
        let inner = &self.inner;
        StoreUsage {
            pages: inner.sum(Counter::LiveBlocks).saturating_add(inner.sum(Counter::LiveSameFilled)),
            bytes: u64::from(inner.allocator.resync()) * AREA_BYTES,
            budget_bytes: inner.allocator.budget_limit().0,
        }
    }
}

impl DurableStore for FileStore {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        self.wait_for_writes()?;
        Ok(self.sweep(live.map(|(_, handle)| handle)))
    }
}

impl SlowStore for FileStore {
    fn begin(&self, key: PageKey, handle: Handle, watch: OnReply<'_>) -> bool {
        self.inner.begin(key, handle, watch)
    }

    /// A late write: its block is not reused before its end, and only this process notices that.
    fn must_recover(&self) -> bool {
        self.inner.has_late()
    }

    fn last_refusal(&self) -> Option<String> {
        self.inner.limits.last_refusal().map(|why| why.to_string())
    }

    fn refuses(&self) -> bool {
        let today = &self.inner.allocator.arena().own_words()[WORD_TODAY];
        self.inner.disk.read_only || self.inner.limits.refuses(today)
    }
}

const _: () = assert!(MAX_SLABS as u64 * AREA_BYTES < i64::MAX as u64);
