//! The compressed RAM store: far pages in a shared-memory file that outlives the process.
//!
//! Before: `Store::put` brings a page. After: a same-filled page is only a handle; any other page is a checksummed,
//! mostly compressed blob in a slab of the arena.
//! Threads: any, in any number of processes that opened the arena; `slab` says how they share it. Units: one object is
//! one page; memory is charged in slabs of 64 KiB.
//! Promise: `get` returns `Found` only with the bytes that were put under that key and handle, whatever the arena
//! contains.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ballast_base::format::Format;
use ballast_base::{Bytes, PAGE_SIZE};

pub use crate::alloc::Inconsistent;
pub use crate::budget::Budget;
pub use crate::codec::Codec;
pub use ballast_handover::arena::MAX_SLABS;

use crate::alloc::{Allocator, Place};
use crate::arena::{self, Arena};
use crate::codec::{self, BlobHeader, Encoding, HEADER_BYTES};
use crate::handle::{self, Named};
use crate::slab::{CLASS_BYTES, SLAB_BYTES, class_for};
use crate::{
    DurableStore, GetOutcome, Handle, IoContext, NearStore, PageBytes, PageKey, PutOutcome, Recovered, Store,
    StoreUsage,
};

/// Parameters of a RAM store.
#[derive(Clone, Debug)]
pub struct RamOptions {
    /// The compression of pages put from now on.
    pub codec: Codec,
    /// The budget that is charged for the memory. Stores with one budget share its limit.
    pub budget: Arc<Budget>,
    /// Slabs of 64 KiB that a *new* arena has; an existing arena keeps its number. The file is sparse: the largest
    /// costs no memory, but 256 GiB of the 128 TiB of addresses of a process.
    pub max_slabs: u32,
}

/// Fewest slabs of a VM's arena: 64 GiB. 1,000 VMs with arena and index fit a process, and a small VM may grow much.
const FEWEST_SLABS: u32 = 1 << 20;
/// Bytes of arena per byte of the VM's RAM. A blob is smaller than a page, but a slab can be partly empty.
const ARENA_PER_RAM: u64 = 4;

/// Memory is returned in `tidy`, not when `free` empties a slab: a punch takes 10 us, and a TLB shootdown on each CPU
/// that runs a thread of this process, and fault workers call `free`. Slabs that wait are charged, and reused first; at
/// most this number waits if the budget is short: 16 MiB.
const PUNCH_LATER_MAX: usize = 256;

impl RamOptions {
    /// Options with LZ4 and the largest arena.
    pub fn new(budget: Arc<Budget>) -> Self {
        Self { codec: Codec::default(), budget, max_slabs: MAX_SLABS }
    }

    /// Slabs of a new arena for a VM with this much RAM. Beyond that, pages stay in RAM or go to the next store.
    pub fn slabs_for(ram: Bytes) -> u32 {
        let slabs = ram.0.saturating_mul(ARENA_PER_RAM).div_ceil(arena::RAM.layout.slab_bytes as u64);
        u32::try_from(slabs).unwrap_or(MAX_SLABS).clamp(FEWEST_SLABS, MAX_SLABS)
    }
}

/// Contents and history of a RAM store, in more detail than [`StoreUsage`]. Counters of puts survive a restart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RamUsage {
    /// Same-filled pages held, which take no memory.
    pub same_filled_pages: u64,
    /// Pages held as blobs.
    pub blob_pages: u64,
    /// Slabs held, of 64 KiB each.
    pub slabs: u64,
    /// Same-filled pages ever put (a 32-bit pattern).
    pub same_filled_puts: u64,
    /// Pages ever put that were stored uncompressed.
    pub raw_puts: u64,
    /// Pages ever put that were compressed, also to a 64-bit pattern.
    pub compressed_puts: u64,
    /// Their bytes after compression, without headers.
    pub compressed_out_bytes: u64,
}

#[derive(Clone, Copy)]
enum Counter {
    LiveBlobs,
    LiveSameFilled,
    PutSameFilled,
    PutRaw,
    PutCompressed,
    CompressedOutBytes,
}

/// A store in an arena, which exists as long as a process has its descriptor.
#[derive(Debug)]
pub struct RamStore {
    allocator: Allocator,
    codec: Codec,
}

impl RamStore {
    /// The layout of the arena.
    pub const FORMAT: Format = arena::RAM.layout.format;

    /// Makes an empty store, and the descriptor of its arena, for a later `open`.
    ///
    /// # Errors
    /// If `max_slabs` is 0 or too large, or the kernel refuses the file or its mapping.
    pub fn create(options: RamOptions) -> io::Result<(Self, OwnedFd)> {
        let arena = Arena::create(&arena::RAM, options.max_slabs)?;
        let fd = arena.dup()?;
        Ok((Self::on(arena, options), fd))
    }

    /// Opens a store. Its contents are charged to the budget, even above the limit. If the last process that used it
    /// died, call `recover` next. A file without a layout becomes an empty store.
    ///
    /// # Errors
    /// The file is not an arena, has a layout that this program cannot read, or the wrong size.
    pub fn open(arena_fd: OwnedFd, options: RamOptions) -> io::Result<Self> {
        if ballast_handover::arena::is_new(&arena_fd)? {
            ballast_handover::arena::format(arena::RAM.layout, &arena_fd, options.max_slabs)?;
        }
        let arena = Arena::open(&arena::RAM, arena_fd)?;
        Ok(Self::on(arena, options))
    }

    pub(crate) fn on(arena: Arena, options: RamOptions) -> Self {
        Self { allocator: Allocator::new(arena, options.budget, PUNCH_LATER_MAX), codec: options.codec }
    }

    /// After an unclean death: frees blobs that no live handle names, completes what was begun, and corrects the
    /// counts. A live handle without a blob is counted; `get` returns `Absent` for it.
    ///
    /// No other thread or process may use the arena during this call.
    pub fn sweep(&self, live: impl Iterator<Item = Handle>) -> Recovered {
        let report = self.sweep_only(live);
        self.allocator.settle(0);
        report
    }

    /// As [`Self::sweep`], but the next `tidy` returns emptied slabs, when others may use the arena again.
    pub(crate) fn sweep_only(&self, live: impl Iterator<Item = Handle>) -> Recovered {
        let mut same_filled = 0;
        let places = live.filter_map(|handle| match Named::by(handle) {
            Named::SameFilled(_) => {
                same_filled += 1;
                None
            }
            Named::Blob { place, .. } => Some(place),
        });
        let mut report = self.allocator.recover(places);
        report.same_filled = same_filled;
        let arena = self.allocator.arena();
        arena.set_counter(Counter::LiveBlobs as usize, report.kept_blobs);
        arena.set_counter(Counter::LiveSameFilled as usize, report.same_filled);
        report
    }

    /// Checks that slab table, bitmaps, counters and charge agree, while nobody uses the store.
    pub fn validate(&self) -> Result<(), Inconsistent> {
        self.allocator.settle(0);
        let taken = self.allocator.validate()?;
        let counted = self.sum(Counter::LiveBlobs);
        if taken == counted {
            Ok(())
        } else {
            Err(Inconsistent(format!("{taken} slots are taken, {counted} blobs are counted")))
        }
    }

    /// The contents and the history now.
    pub fn usage_detail(&self) -> RamUsage {
        RamUsage {
            same_filled_pages: self.sum(Counter::LiveSameFilled),
            blob_pages: self.sum(Counter::LiveBlobs),
            slabs: self.allocator.resync().into(),
            same_filled_puts: self.sum(Counter::PutSameFilled),
            raw_puts: self.sum(Counter::PutRaw),
            compressed_puts: self.sum(Counter::PutCompressed),
            compressed_out_bytes: self.sum(Counter::CompressedOutBytes),
        }
    }

    /// The checksum of the blob that a handle names, and the bytes of its slot; `None` if there is no such blob.
    pub(crate) fn checksum_and_slot(&self, handle: Handle) -> Option<(u64, usize)> {
        let Named::Blob { place, tag } = Named::by(handle) else { return None };
        let (header, _, payload_max) = self.find(place, tag)?;
        Some((header.checksum, payload_max + HEADER_BYTES))
    }

    pub(crate) fn arena(&self) -> &Arena {
        self.allocator.arena()
    }

    pub(crate) fn budget_limit(&self) -> Bytes {
        self.allocator.budget_limit()
    }

    fn count(&self, counter: Counter, by: u64) {
        self.allocator.arena().count(counter as usize, by);
    }

    fn uncount(&self, counter: Counter) {
        self.allocator.arena().uncount(counter as usize);
    }

    fn sum(&self, counter: Counter) -> u64 {
        self.allocator.arena().sum(counter as usize)
    }

    /// Pages of the arena that were lost to memory errors since it was opened. `recover` finds the free slots again.
    pub fn lost(&self) -> u64 {
        self.allocator.arena().lost()
    }

    /// Texts of the losses not returned before; and whether they need a `recover`.
    pub fn losses(&self) -> (Vec<String>, bool) {
        self.allocator.arena().losses()
    }

    fn keep(&self, mut header: BlobHeader, payload: &[u8]) -> PutOutcome {
        let lost = self.lost();
        let Some(class) = class_for(HEADER_BYTES + payload.len()) else { return PutOutcome::Full };
        let Some(allocated) = self.allocator.alloc(class) else { return PutOutcome::Full };
        let Place { slab, slot } = allocated.place;
        let start = slot * CLASS_BYTES[class];
        let mut last_tag = [0];
        let arena = self.allocator.arena();
        arena.copy_out(slab, start + HEADER_BYTES - 1, &mut last_tag);
        header.tag = handle::next_tag(last_tag[0], allocated.generation);
        arena.copy_in(slab, start + HEADER_BYTES, payload);
        arena.copy_in(slab, start, &header.to_bytes());
        if self.lost() > lost {
            // The slot may be unusable. `recover` frees it.
            return PutOutcome::Busy;
        }
        self.count(Counter::LiveBlobs, 1);
        if header.encoding == Encoding::Raw as u8 {
            self.count(Counter::PutRaw, 1);
        } else {
            self.count(Counter::PutCompressed, 1);
            self.count(Counter::CompressedOutBytes, payload.len() as u64);
        }
        handle::of_blob(allocated.place, header.tag).map_or(PutOutcome::Full, PutOutcome::Stored)
    }

    /// [`NearStore::get_blob`] for a blob.
    fn open_copy(
        &self,
        key: PageKey,
        (place, tag): (Place, u8),
        out: &mut PageBytes,
        blob: &mut Vec<u8>,
    ) -> GetOutcome {
        blob.clear();
        let Some((header, payload_start, payload_max)) = self.find(place, tag) else { return GetOutcome::Absent };
        if usize::from(header.len) > payload_max {
            return GetOutcome::Corrupt;
        }
        blob.extend_from_slice(&header.to_bytes());
        blob.resize(HEADER_BYTES + usize::from(header.len), 0);
        let payload = &mut blob[HEADER_BYTES..];
        self.allocator.arena().copy_out(place.slab, payload_start, payload);
        // The copy is checked, because the arena may change at any time.
        let opens = codec::open(key, header, out, |buffer| buffer.copy_from_slice(payload));
        if opens { GetOutcome::Found } else { GetOutcome::Corrupt }
    }

    fn is_copy(&self, (place, tag): (Place, u8), blob: &[u8]) -> bool {
        let Some((header, payload_start, payload_max)) = self.find(place, tag) else { return false };
        let Some((kept, payload)) = blob.split_first_chunk::<HEADER_BYTES>() else { return false };
        let mut now: PageBytes = [0; PAGE_SIZE];
        let Some(now) = now.get_mut(..payload.len()).filter(|now| now.len() <= payload_max) else { return false };
        self.allocator.arena().copy_out(place.slab, payload_start, now);
        header.to_bytes() == *kept && now == payload
    }

    /// The header of the blob that a handle names, the offset of its payload, and the payload's largest size.
    fn find(&self, place: Place, tag: u8) -> Option<(BlobHeader, usize, usize)> {
        let (_, class) = self.allocator.occupied(place)?;
        let start = place.slot * CLASS_BYTES[class];
        let mut header = [0; HEADER_BYTES];
        self.allocator.arena().copy_out(place.slab, start, &mut header);
        let header = BlobHeader::from_bytes(header);
        (tag != 0 && header.tag == tag).then_some((header, start + HEADER_BYTES, CLASS_BYTES[class] - HEADER_BYTES))
    }
}

impl Store for RamStore {
    fn put(&self, key: PageKey, bytes: &PageBytes) -> PutOutcome {
        let fill = codec::fill_pattern(bytes);
        if let Some(handle) = fill.and_then(|pattern| handle::of_same_filled(key, pattern)) {
            self.count(Counter::LiveSameFilled, 1);
            self.count(Counter::PutSameFilled, 1);
            return PutOutcome::Stored(handle);
        }
        codec::seal(key, bytes, fill, self.codec, |header, payload| self.keep(header, payload))
    }

    fn get(&self, key: PageKey, handle: Handle, out: &mut PageBytes, _: IoContext<'_>) -> GetOutcome {
        let (place, tag) = match Named::by(handle) {
            Named::SameFilled(filled) => return filled.get(key, out),
            Named::Blob { place, tag } => (place, tag),
        };
        let Some((header, payload_start, payload_max)) = self.find(place, tag) else { return GetOutcome::Absent };
        let fits = usize::from(header.len) <= payload_max;
        let read = |buffer: &mut [u8]| self.allocator.arena().copy_out(place.slab, payload_start, buffer);
        if fits && codec::open(key, header, out, read) { GetOutcome::Found } else { GetOutcome::Corrupt }
    }

    fn free(&self, key: PageKey, handle: Handle) {
        match Named::by(handle) {
            Named::SameFilled(filled) => {
                if filled.may_be_of(key) {
                    self.uncount(Counter::LiveSameFilled);
                }
            }
            Named::Blob { place, tag } => {
                let ours = self.find(place, tag).is_some_and(|(header, ..)| header.key_check == codec::key_check(key));
                if ours && self.allocator.free(place) {
                    self.uncount(Counter::LiveBlobs);
                }
            }
        }
    }

    fn tidy(&self) {
        self.allocator.settle(0);
    }

    fn usage(&self) -> StoreUsage {
        StoreUsage {
            pages: self.sum(Counter::LiveBlobs).saturating_add(self.sum(Counter::LiveSameFilled)),
            bytes: Bytes(u64::from(self.allocator.resync()) * SLAB_BYTES as u64).0,
            budget_bytes: self.allocator.budget_limit().0,
        }
    }
}

impl DurableStore for RamStore {
    fn recover(&self, live: &mut dyn Iterator<Item = (PageKey, Handle)>) -> io::Result<Recovered> {
        Ok(self.sweep(live.map(|(_, handle)| handle)))
    }
}

impl NearStore for RamStore {
    fn get_blob(&self, key: PageKey, handle: Handle, out: &mut PageBytes, blob: &mut Vec<u8>) -> GetOutcome {
        match Named::by(handle) {
            Named::Blob { place, tag } => self.open_copy(key, (place, tag), out, blob),
            Named::SameFilled(filled) => {
                blob.clear();
                filled.get(key, out)
            }
        }
    }

    /// Compares the stored form, without decompression.
    fn still_has(&self, key: PageKey, handle: Handle, bytes: &PageBytes, blob: &[u8]) -> bool {
        match Named::by(handle) {
            Named::Blob { place, tag } => self.is_copy((place, tag), blob),
            Named::SameFilled(filled) => {
                let mut now: PageBytes = [0; PAGE_SIZE];
                filled.get(key, &mut now) == GetOutcome::Found && now == *bytes
            }
        }
    }

    fn takes_room(&self, handle: Handle) -> bool {
        matches!(Named::by(handle), Named::Blob { .. })
    }

    fn is_short(&self) -> bool {
        self.allocator.is_short()
    }
}
