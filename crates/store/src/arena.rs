//! The arena: one sparse shared-memory file that holds everything a RAM store knows.
//!
//! Before: `RamStore::create` or `RamStore::open`. After: `slab` reads the table entries, `alloc` hands out slots,
//! `ram` copies blobs in and out.
//! Threads: any, in any number of processes; every word of the header and the table is an atomic.
//! Units: offsets are bytes from the start of the file; a slab is 64 KiB, a table entry 128 bytes.
//! Promise: nothing in the file is trusted. Offsets come from the checked size of the mapping, never from its content.
//!
//! ```text
//! 0            header page: magic, layout version, slabs, slab size, fresh, held, reserved; counters from byte 1024
//! 4096         slab table: one entry of 16 words per slab (state word, 15 bitmap words)
//! slabs_start  slab 0, slab 1, ...   (the table rounded up to a whole slab)
//! ```

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};

use ballast_base::{Bytes, PAGE_SIZE};
use ballast_sys::{Mapping, memfd};

use crate::slab::Slab;

/// Bytes in a slab: what is charged to the budget, and punched when its last slot is freed.
pub const SLAB_BYTES: usize = 64 * 1024;
/// The most slabs one arena can have (256 GiB): a handle has 22 bits for the slab.
pub const MAX_SLABS: u32 = 1 << 22;

/// "BALSTORE", read as a little-endian word.
const MAGIC: u64 = u64::from_le_bytes(*b"BALSTORE");
/// Changes whenever the header, the table, the size classes or the blob header change their meaning.
const LAYOUT_VERSION: u64 = 1;

const ENTRY_WORDS: usize = 16;
const ENTRY_BYTES: usize = ENTRY_WORDS * 8;
const TABLE_START: usize = PAGE_SIZE;

const WORD_MAGIC: usize = 0;
const WORD_VERSION: usize = 1;
const WORD_SLABS: usize = 2;
const WORD_SLAB_BYTES: usize = 3;
const WORD_FRESH: usize = 4;
const WORD_HELD: usize = 5;
const HEADER_WORDS: usize = 16;

/// Counters are spread over this many cache lines, so that threads do not fight for one.
pub(crate) const SHARDS: usize = 16;
/// Words in one shard: one cache line.
pub(crate) const SHARD_WORDS: usize = 8;
const SHARDS_START: usize = 1024;
const _: () = assert!(SHARDS_START + SHARDS * SHARD_WORDS * 8 <= PAGE_SIZE && HEADER_WORDS * 8 <= SHARDS_START);

/// A mapped arena.
#[derive(Debug)]
pub(crate) struct Arena {
    map: Mapping,
    fd: OwnedFd,
    slabs: u32,
}

fn slabs_start(slabs: u32) -> usize {
    (TABLE_START + slabs as usize * ENTRY_BYTES).next_multiple_of(SLAB_BYTES)
}

fn file_bytes(slabs: u32) -> usize {
    slabs_start(slabs) + slabs as usize * SLAB_BYTES
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("Opening a RAM store arena: {what}"))
}

impl Arena {
    /// Make an empty arena of `slabs` slabs.
    pub(crate) fn create(slabs: u32) -> io::Result<Self> {
        if slabs == 0 || slabs > MAX_SLABS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!("Creating a RAM store arena: {slabs} slabs asked for, 1 to {MAX_SLABS} are possible"),
            ));
        }
        let fd = memfd::create("ballast-store", Bytes(file_bytes(slabs) as u64))?;
        let map = Mapping::shared(&fd, 0, file_bytes(slabs))?;
        let header = map.words(0, HEADER_WORDS);
        header[WORD_SLABS].store(slabs.into(), Ordering::Relaxed);
        header[WORD_SLAB_BYTES].store(SLAB_BYTES as u64, Ordering::Relaxed);
        header[WORD_VERSION].store(LAYOUT_VERSION, Ordering::Relaxed);
        header[WORD_MAGIC].store(MAGIC, Ordering::Release);
        Ok(Self { map, fd, slabs })
    }

    /// Map an arena that exists, after checking that it is one.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Self> {
        let size = memfd::size(&fd)?.0;
        if size < PAGE_SIZE as u64 {
            return Err(invalid(format!("the file has {size} bytes, less than a header")));
        }
        let header_map = Mapping::shared(&fd, 0, PAGE_SIZE)?;
        let header = header_map.words(0, HEADER_WORDS);
        let expect = |word: usize, name: &str, expected: u64| {
            let found = header[word].load(Ordering::Acquire);
            if found == expected { Ok(()) } else { Err(invalid(format!("{name} is {found:#x}, not {expected:#x}"))) }
        };
        expect(WORD_MAGIC, "the magic number", MAGIC)?;
        expect(WORD_VERSION, "the layout version", LAYOUT_VERSION)?;
        expect(WORD_SLAB_BYTES, "the slab size", SLAB_BYTES as u64)?;
        let stated = header[WORD_SLABS].load(Ordering::Relaxed);
        let slabs = u32::try_from(stated)
            .ok()
            .filter(|slabs| (1..=MAX_SLABS).contains(slabs))
            .ok_or_else(|| invalid(format!("it states {stated} slabs, 1 to {MAX_SLABS} are possible")))?;
        if size != file_bytes(slabs) as u64 {
            return Err(invalid(format!("the file has {size} bytes, {slabs} slabs need {}", file_bytes(slabs))));
        }
        let map = Mapping::shared(&fd, 0, file_bytes(slabs))?;
        Ok(Self { map, fd, slabs })
    }

    /// Another descriptor of the same file.
    pub(crate) fn dup(&self) -> io::Result<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned()
    }

    /// How many slabs the arena can hold.
    pub(crate) fn slabs(&self) -> u32 {
        self.slabs
    }

    /// The table entry of a slab.
    ///
    /// # Panics
    /// If there is no such slab.
    pub(crate) fn slab(&self, slab: u32) -> Slab<'_> {
        assert!(slab < self.slabs, "slab {slab} of {}", self.slabs);
        Slab::new(self.map.words(TABLE_START + slab as usize * ENTRY_BYTES, ENTRY_WORDS))
    }

    /// Where byte `within` of a slab is in the mapping.
    fn offset(&self, slab: u32, within: usize) -> usize {
        slabs_start(self.slabs) + slab as usize * SLAB_BYTES + within
    }

    /// Copy bytes out of a slab.
    ///
    /// # Panics
    /// If the range is not inside the slab.
    pub(crate) fn copy_out(&self, slab: u32, within: usize, out: &mut [u8]) {
        assert!(slab < self.slabs && within + out.len() <= SLAB_BYTES, "slab {slab} {within}+{}", out.len());
        self.map.copy_out(self.offset(slab, within), out);
    }

    /// Copy bytes into a slab.
    ///
    /// # Panics
    /// If the range is not inside the slab.
    pub(crate) fn copy_in(&self, slab: u32, within: usize, bytes: &[u8]) {
        assert!(slab < self.slabs && within + bytes.len() <= SLAB_BYTES, "slab {slab} {within}+{}", bytes.len());
        self.map.copy_in(self.offset(slab, within), bytes);
    }

    /// Give the memory of a slab back to the host; it reads as zeros afterwards.
    pub(crate) fn punch(&self, slab: u32) -> io::Result<()> {
        memfd::punch(&self.fd, self.offset(slab, 0) as u64, SLAB_BYTES as u64)
    }

    /// Slabs below this number were used at least once.
    pub(crate) fn fresh(&self) -> u32 {
        self.header(WORD_FRESH).load(Ordering::Acquire).min(self.slabs.into()) as u32
    }

    /// Set the number of slabs ever used to what the table's memory shows: an entry that was written is in a page that is
    /// present. For `recover`, which thus finds every slab even if the header word was damaged.
    pub(crate) fn fresh_rebuild(&self) -> io::Result<u32> {
        let table_end = TABLE_START + self.slabs as usize * ENTRY_BYTES;
        let (mut at, mut touched_end) = (TABLE_START, TABLE_START);
        while let Some((start, end)) = memfd::next_data(&self.fd, at as u64)? {
            if start >= table_end as u64 {
                break;
            }
            touched_end = table_end.min(end as usize);
            at = touched_end;
        }
        let fresh = (touched_end - TABLE_START) / ENTRY_BYTES;
        self.header(WORD_FRESH).store(fresh as u64, Ordering::Release);
        Ok(fresh as u32)
    }

    /// A slab number that was never used; `None` when there is none left.
    pub(crate) fn take_fresh(&self) -> Option<u32> {
        let limit = u64::from(self.slabs);
        self.header(WORD_FRESH)
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |fresh| (fresh < limit).then_some(fresh + 1))
            .ok()
            .map(|fresh| fresh as u32)
    }

    /// Slabs that are not FREE, over all processes.
    pub(crate) fn held(&self) -> u32 {
        self.header(WORD_HELD).load(Ordering::Acquire).min(self.slabs.into()) as u32
    }

    /// One more slab is held.
    pub(crate) fn held_add(&self) {
        self.header(WORD_HELD).fetch_add(1, Ordering::AcqRel);
    }

    /// One slab fewer is held.
    pub(crate) fn held_sub(&self) {
        self.header(WORD_HELD).fetch_sub(1, Ordering::AcqRel);
    }

    /// Set the number of held slabs; for `recover`.
    pub(crate) fn held_set(&self, held: u32) {
        self.header(WORD_HELD).store(held.into(), Ordering::Release);
    }

    /// The counters of one shard; any number is good.
    pub(crate) fn shard(&self, shard: usize) -> &[AtomicU64] {
        self.map.words(SHARDS_START + shard % SHARDS * SHARD_WORDS * 8, SHARD_WORDS)
    }

    fn header(&self, word: usize) -> &AtomicU64 {
        &self.map.words(0, HEADER_WORDS)[word]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reopened_with(word: usize, value: u64) -> String {
        let arena = Arena::create(4).expect("create");
        arena.header(word).store(value, Ordering::Relaxed);
        Arena::open(arena.dup().expect("dup")).expect_err("a damaged header was accepted").to_string()
    }

    #[test]
    fn a_wrong_header_is_refused_with_the_field_that_is_wrong() {
        assert!(reopened_with(WORD_MAGIC, 7).contains("the magic number is 0x7"));
        assert!(reopened_with(WORD_VERSION, 99).contains("the layout version is 0x63, not 0x1"));
        assert!(reopened_with(WORD_SLAB_BYTES, 4096).contains("the slab size"));
        assert!(reopened_with(WORD_SLABS, 0).contains("0 slabs"));
        assert!(reopened_with(WORD_SLABS, u64::MAX).contains("slabs"));
        assert!(reopened_with(WORD_SLABS, 5).contains("5 slabs need"), "size and slab count disagree");
    }

    #[test]
    fn a_file_too_small_for_a_header_is_refused() {
        let fd = memfd::create("ballast-test", Bytes(100)).expect("memfd");
        assert!(Arena::open(fd).expect_err("accepted").to_string().contains("100 bytes"));
        assert_eq!(Arena::create(0).expect_err("accepted").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(Arena::create(MAX_SLABS + 1).expect_err("accepted").kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn an_arena_of_the_largest_size_costs_one_page() {
        let arena = Arena::create(MAX_SLABS).expect("create");
        assert_eq!(memfd::resident(&arena.fd).expect("stat").0, 1);
        let again = Arena::open(arena.dup().expect("dup")).expect("open");
        assert_eq!(again.slabs(), MAX_SLABS);
    }
}
