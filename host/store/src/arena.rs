//! The arena: one sparse shared-memory file with the whole state of a store. `ballast_handover::arena` defines its
//! layout.
//!
//! Before: a store is created or opened. After: `slab` reads the table entries, `alloc` hands out slots; `ram` copies
//! blobs in and out, and `file` the headers of blocks on a disk.
//! Threads: any, in any number of processes; each word of the header and the table is an atomic. Units: offsets are
//! bytes from the start of the file; a table entry is 128 bytes, the shape has the size of a slab.
//! Promise: a layout that this program cannot read is refused, unchanged. Nothing in the file is trusted: offsets come
//! from the checked size of the mapping, never from its content. After a memory error, the lost page is replaced by
//! what costs least: blobs by zeros, which match no handle; table entries by words without meaning, so that none of
//! their slabs is handed out or emptied before the next `recover`; the header is written again.
//!
//! `ballast_base::format` says which versions read which: zero in a reserved word has no meaning. A lost header is
//! written again as this program's own, without the reserved words of a newer one.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use ballast_base::PAGE_SIZE;
use ballast_base::format::Stamp;
use ballast_handover::arena::{
    self, ENTRY_BYTES, ENTRY_WORDS, HEADER_WORDS, Layout, MEMBERS, MEMBERS_START, OWN_WORDS, OWN_WORDS_START,
    SHARD_WORDS, SHARDS, SHARDS_START, TABLE_START, WORD_FRESH, WORD_HELD, WORD_LAYOUT,
};
use ballast_sys::memory_error::{Fill, Losses, PageCopy, Survival, Surviving};
use ballast_sys::slow_fd::SlowFd;
use ballast_sys::{Mapping, memfd};

use crate::slab::{CAPACITIES, SLAB_BYTES, Slab};

#[derive(Debug)]
pub(crate) struct Shape {
    pub(crate) layout: &'static Layout,
    /// Bytes charged to the budget per slab: its own, or those of the area on a disk that it describes.
    pub(crate) charge_bytes: u64,
    pub(crate) capacities: &'static [usize],
}

/// The arena of a RAM store, with the blobs in the slabs.
pub(crate) static RAM: Shape = Shape { layout: &arena::RAM, charge_bytes: SLAB_BYTES as u64, capacities: &CAPACITIES };

/// The arena of a group: a RAM store's, with members.
pub(crate) static GROUP: Shape =
    Shape { layout: &arena::GROUP, charge_bytes: SLAB_BYTES as u64, capacities: &CAPACITIES };

#[derive(Debug)]
pub(crate) struct Arena {
    map: Surviving,
    fd: Arc<OwnedFd>,
    /// The header, for the case that its page is lost.
    header_copy: Arc<PageCopy>,
    /// The header was lost when the arena was opened, and this is not reported yet.
    header_was_lost: AtomicBool,
    slabs: u32,
    shape: &'static Shape,
    /// A file with `charge_bytes` per slab, which is punched with the slab.
    disk: Option<Arc<SlowFd>>,
}

/// Threads mostly have different shards.
fn shard_of_thread() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    thread_local!(static SHARD: usize = NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
    SHARD.with(|shard| *shard)
}

impl Arena {
    pub(crate) fn create(shape: &'static Shape, slabs: u32) -> io::Result<Self> {
        let fd = arena::create()?;
        arena::format(shape.layout, &fd, slabs)?;
        Self::open(shape, fd)
    }

    fn map(shape: &'static Shape, fd: Arc<OwnedFd>, slabs: u32) -> io::Result<Self> {
        let header_copy = Arc::new(PageCopy::default());
        let layout = shape.layout;
        layout.write_header(slabs, header_copy.words());
        let fills = vec![
            (TABLE_START, Fill::Copy(header_copy.clone())),
            (layout.slabs_start(slabs), Fill::Pattern(u64::MAX)),
            (layout.file_bytes(slabs), Fill::Zeros),
        ];
        let survival = Survival { file: fd.clone(), offset: 0, fills, journal: None };
        let map = Surviving::new(Mapping::shared(&*fd, 0, layout.file_bytes(slabs))?, survival);
        Ok(Self { map, fd, header_copy, header_was_lost: AtomicBool::new(false), slabs, shape, disk: None })
    }

    /// Refuses a file that is not an arena of this shape.
    pub(crate) fn open(shape: &'static Shape, fd: OwnedFd) -> io::Result<Self> {
        let fd = Arc::new(fd);
        let head = arena::read(shape.layout, &fd)?;
        let arena = Self::map(shape, fd, head.slabs)?;
        arena.header_was_lost.store(head.was_lost, Ordering::Release);
        for (word, copy) in head.words.iter().zip(arena.header_copy.words()) {
            copy.store(*word, Ordering::Release);
        }
        for (at, member) in arena.members().iter().enumerate() {
            arena.copy_of_member(at).store(member.load(Ordering::Acquire), Ordering::Release);
        }
        Ok(arena)
    }

    /// Pages lost to memory errors since the mapping, and replaced.
    pub(crate) fn lost(&self) -> u64 {
        self.map.lost() + u64::from(self.header_was_lost.load(Ordering::Acquire))
    }

    /// Texts of the losses that were not reported yet; and whether they need a `recover`.
    pub(crate) fn losses(&self) -> (Vec<String>, bool) {
        let Losses { offsets, pages } = self.map.losses();
        let header = self.header_was_lost.swap(false, Ordering::AcqRel).then_some(0);
        let told = offsets.len() as u64;
        let what = |offset: u64| {
            let (name, table, slabs) =
                (self.shape.layout.name, TABLE_START as u64, self.shape.layout.slabs_start(self.slabs) as u64);
            let lost = match offset {
                0 => "the header, which was written again".into(),
                offset if offset < table => "the header".into(),
                offset if offset < slabs => {
                    let first = (offset - table) / ENTRY_BYTES as u64;
                    format!("the table entries of slabs {first} to {}", first + (PAGE_SIZE / ENTRY_BYTES) as u64 - 1)
                }
                offset => format!("a part of slab {}", (offset - slabs) / self.shape.layout.slab_bytes as u64),
            };
            format!("4096 bytes at {offset:#x} of the {name}: {lost}")
        };
        let of_table = |offset: &u64| *offset < self.shape.layout.slabs_start(self.slabs) as u64;
        let is_damaged = pages > told || header.is_some() || offsets.iter().any(of_table);
        let mut said: Vec<String> = header.into_iter().chain(offsets).map(what).collect();
        if pages > told {
            said.push(format!("{} more pages of the {}", pages - told, self.shape.layout.name));
        }
        (said, is_damaged)
    }

    /// From now on, the part of this file that belongs to a slab is punched with it.
    pub(crate) fn on_disk(self, disk: Arc<SlowFd>) -> Self {
        Self { disk: Some(disk), ..self }
    }

    /// Records in the header that this program writes to it from now on.
    pub(crate) fn raise_stamp(&self) {
        let stamp = self.shape.layout.format.raise(Stamp::from_word(self.header(WORD_LAYOUT).load(Ordering::Acquire)));
        self.header(WORD_LAYOUT).store(stamp.to_word(), Ordering::Release);
        self.header_copy.words()[WORD_LAYOUT].store(stamp.to_word(), Ordering::Release);
    }

    pub(crate) fn shape(&self) -> &'static Shape {
        self.shape
    }

    pub(crate) fn dup(&self) -> io::Result<OwnedFd> {
        self.fd.as_fd().try_clone_to_owned()
    }

    pub(crate) fn slabs(&self) -> u32 {
        self.slabs
    }

    /// Panics if there is no such slab.
    pub(crate) fn slab(&self, slab: u32) -> Slab<'_> {
        assert!(slab < self.slabs, "slab {slab} of {}", self.slabs);
        Slab::new(self.map.words(TABLE_START + slab as usize * ENTRY_BYTES, ENTRY_WORDS), self.shape.capacities)
    }

    fn offset(&self, slab: u32, within: usize) -> usize {
        self.shape.layout.slabs_start(self.slabs) + slab as usize * self.shape.layout.slab_bytes + within
    }

    /// Panics if the range is not inside the slab.
    pub(crate) fn copy_out(&self, slab: u32, within: usize, out: &mut [u8]) {
        assert!(
            slab < self.slabs && within + out.len() <= self.shape.layout.slab_bytes,
            "slab {slab} {within}+{}",
            out.len()
        );
        self.map.copy_out(self.offset(slab, within), out);
    }

    /// Panics if the range is not inside the slab.
    pub(crate) fn copy_in(&self, slab: u32, within: usize, bytes: &[u8]) {
        assert!(
            slab < self.slabs && within + bytes.len() <= self.shape.layout.slab_bytes,
            "slab {slab} {within}+{}",
            bytes.len()
        );
        self.map.copy_in(self.offset(slab, within), bytes);
    }

    /// Allocates the memory of a slab, and its part of the disk, before use. One call costs 0.4 us a page less than 16
    /// minor faults, and an allocated block of a disk is written in half the time (60 us, not 120). If the kernel
    /// declines (no memory, no space), the later use reports it.
    pub(crate) fn populate(&self, slab: u32) {
        if let Some(disk) = &self.disk {
            let _ = memfd::allocate(disk, u64::from(slab) * self.shape.charge_bytes, self.shape.charge_bytes);
        }
        let _ = self.map.populate(self.offset(slab, 0), self.shape.layout.slab_bytes);
    }

    /// Unmaps runs of slabs from this process in one call, and so in one TLB flush; each punch would need its own. If
    /// the kernel declines, the punch unmaps them.
    pub(crate) fn unmap(&self, runs: &[Range<u32>]) {
        let in_bytes = |run: &Range<u32>| (self.offset(run.start, 0), run.len() * self.shape.layout.slab_bytes);
        let _ = self.map.zap_all(&runs.iter().map(in_bytes).collect::<Vec<_>>());
    }

    /// Returns the memory of a run of slabs to the host; it then reads as zeros.
    pub(crate) fn punch(&self, run: &Range<u32>) -> io::Result<()> {
        let slabs = run.len() as u64;
        if let Some(disk) = &self.disk {
            memfd::punch(disk, u64::from(run.start) * self.shape.charge_bytes, slabs * self.shape.charge_bytes)?;
        }
        memfd::punch(&self.fd, self.offset(run.start, 0) as u64, slabs * self.shape.layout.slab_bytes as u64)
    }

    /// Slabs below this number were used at least once.
    pub(crate) fn fresh(&self) -> u32 {
        self.header(WORD_FRESH).load(Ordering::Acquire).min(self.slabs.into()) as u32
    }

    /// Counts the slabs ever used by the table's allocated memory, for `recover`, which so survives a damaged header.
    pub(crate) fn fresh_rebuild(&self) -> io::Result<u32> {
        let fresh = arena::touched_slabs(&self.fd, self.slabs)?;
        self.header(WORD_FRESH).store(fresh.into(), Ordering::Release);
        self.header_copy.words()[WORD_FRESH].store(fresh.into(), Ordering::Release);
        Ok(fresh)
    }

    /// A slab that was never used; `None` if each was.
    pub(crate) fn take_fresh(&self) -> Option<u32> {
        let limit = u64::from(self.slabs);
        let one_more = |fresh| (fresh < limit).then_some(fresh + 1);
        let fresh = self.header(WORD_FRESH).fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more).ok()?;
        self.header_copy.words()[WORD_FRESH].fetch_max(fresh + 1, Ordering::AcqRel);
        Some(fresh as u32)
    }

    /// Slabs that are not FREE, as counted by all processes.
    pub(crate) fn held(&self) -> u32 {
        // After the loss of the header, the word may be too small and wrap, until `recover` counts again.
        let held = self.header(WORD_HELD).load(Ordering::Acquire);
        if held > u64::from(self.slabs) { 0 } else { held as u32 }
    }

    pub(crate) fn held_add(&self) {
        let held = self.header(WORD_HELD).fetch_add(1, Ordering::AcqRel).wrapping_add(1);
        self.header_copy.words()[WORD_HELD].store(held, Ordering::Release);
    }

    pub(crate) fn held_sub(&self) {
        let held = self.header(WORD_HELD).fetch_sub(1, Ordering::AcqRel).wrapping_sub(1);
        self.header_copy.words()[WORD_HELD].store(held, Ordering::Release);
    }

    pub(crate) fn held_set(&self, held: u32) {
        self.header(WORD_HELD).store(held.into(), Ordering::Release);
        self.header_copy.words()[WORD_HELD].store(held.into(), Ordering::Release);
    }

    /// Header words that belong to the kind of store; 0 in a new arena.
    pub(crate) fn own_words(&self) -> &[AtomicU64] {
        self.map.words(OWN_WORDS_START * 8, OWN_WORDS)
    }

    /// Sets a word of [`Self::own_words`], also in the copy of the header.
    pub(crate) fn set_own_word(&self, word: usize, value: u64) {
        self.own_words()[word].store(value, Ordering::Release);
        self.header_copy.words()[OWN_WORDS_START + word].store(value, Ordering::Release);
    }

    pub(crate) fn members(&self) -> &[AtomicU64] {
        self.map.words(MEMBERS_START, MEMBERS)
    }

    fn copy_of_member(&self, at: usize) -> &AtomicU64 {
        &self.header_copy.words()[MEMBERS_START / 8 + at]
    }

    /// Changes a member's word from exactly `from`; false if it was another.
    pub(crate) fn set_member(&self, at: usize, from: u64, to: u64) -> bool {
        let set = self.members()[at].compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if set {
            self.copy_of_member(at).store(to, Ordering::Release);
        }
        set
    }

    pub(crate) fn header_was_lost(&self) -> bool {
        self.header_was_lost.load(Ordering::Acquire)
    }

    fn shard(&self, shard: usize) -> &[AtomicU64] {
        self.map.words(SHARDS_START + shard % SHARDS * SHARD_WORDS * 8, SHARD_WORDS)
    }

    pub(crate) fn count(&self, counter: usize, by: u64) {
        self.shard(shard_of_thread())[counter].fetch_add(by, Ordering::Relaxed);
    }

    pub(crate) fn uncount(&self, counter: usize) {
        self.shard(shard_of_thread())[counter].fetch_sub(1, Ordering::Relaxed);
    }

    /// Sum of a counter over all shards. One thread may add in its shard what another subtracts in its own, so a single
    /// shard may wrap. A sum below zero (a handle was freed that was never returned by `put`) reads as 0.
    pub(crate) fn sum(&self, counter: usize) -> u64 {
        let sum =
            (0..SHARDS).fold(0u64, |sum, shard| sum.wrapping_add(self.shard(shard)[counter].load(Ordering::Relaxed)));
        if sum > i64::MAX as u64 { 0 } else { sum }
    }

    pub(crate) fn set_counter(&self, counter: usize, value: u64) {
        for shard in 0..SHARDS {
            self.shard(shard)[counter].store(if shard == 0 { value } else { 0 }, Ordering::Relaxed);
        }
    }

    fn header(&self, word: usize) -> &AtomicU64 {
        &self.map.words(0, HEADER_WORDS)[word]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use ballast_handover::arena::{MAX_SLABS, WORD_MAGIC, WORD_SLAB_BYTES, WORD_SLABS};

    fn reopened_with(word: usize, value: u64) -> String {
        let arena = Arena::create(&RAM, 4).expect("create");
        arena.header(word).store(value, Ordering::Relaxed);
        Arena::open(&RAM, arena.dup().expect("dup")).expect_err("a damaged header was accepted").to_string()
    }

    #[test]
    fn a_wrong_header_is_refused_with_the_field_that_is_wrong() {
        assert!(reopened_with(WORD_MAGIC, 7).contains("the magic number is 0x7"));
        let newer = Stamp { version: 99, least_reader: 98 }.to_word();
        let said = reopened_with(WORD_LAYOUT, newer);
        assert!(said.contains("RAM store arena: it has version 99 and needs a reader of at least 98"), "{said}");
        assert!(reopened_with(WORD_SLAB_BYTES, 4096).contains("the slab size"));
        assert!(reopened_with(WORD_SLABS, 0).contains("0 slabs"));
        assert!(reopened_with(WORD_SLABS, u64::MAX).contains("slabs"));
        assert!(reopened_with(WORD_SLABS, 5).contains("5 slabs need"), "size and slab count disagree");
    }

    #[test]
    fn a_file_too_small_for_a_header_is_refused() {
        let fd = memfd::create("ballast-test", Bytes(100)).expect("memfd");
        assert!(Arena::open(&RAM, fd).expect_err("accepted").to_string().contains("100 bytes"));
        assert_eq!(Arena::create(&RAM, 0).expect_err("accepted").kind(), io::ErrorKind::InvalidInput);
        assert_eq!(Arena::create(&RAM, MAX_SLABS + 1).expect_err("accepted").kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn an_arena_of_the_largest_size_costs_one_page() {
        let arena = Arena::create(&RAM, MAX_SLABS).expect("create");
        assert_eq!(memfd::resident(&arena.fd).expect("stat").0, 1);
        let again = Arena::open(&RAM, arena.dup().expect("dup")).expect("open");
        assert_eq!(again.slabs(), MAX_SLABS);
    }
}
