//! The data of the handler of memory errors: one slot for each mapping that is to survive them.
//!
//! Before: code maps a file and says what its pages become when they are lost. After: the handler finds the mapping by
//! an address in it, and a waiter learns which pages were lost.
//! Threads: any. A signal handler calls [`Slot::find`] and what follows from it, so slots are never freed, and nothing
//! here waits. Units: bytes; pages of 4 KiB.
//! Promise: the handler sees a slot only in a consistent state, and never one of a mapping that is gone.

use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, AtomicUsize, Ordering};

use ballast_base::PAGE_SIZE;

use crate::Mapping;

pub(super) const WORDS: usize = PAGE_SIZE / 8;
/// Most losses of a mapping that are listed; more would only repeat what their number says.
const TOLD: usize = 16;

/// What a lost page becomes.
#[derive(Clone, Debug)]
pub enum Fill {
    /// A hole, which reads as zeros.
    Zeros,
    /// These eight bytes, repeated over the page.
    Pattern(u64),
    /// The content of this copy at the time of the loss. If another process has replaced the page already, that page
    /// stays.
    Copy(Arc<PageCopy>),
}

/// The bytes of one page, kept in memory of this process.
#[derive(Debug)]
pub struct PageCopy([AtomicU64; WORDS]);

impl Default for PageCopy {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; WORDS])
    }
}

impl PageCopy {
    /// The words of the page.
    pub fn words(&self) -> &[AtomicU64] {
        &self.0
    }
}

/// How a mapping survives.
#[derive(Debug)]
pub struct Survival {
    /// The file that is mapped.
    pub file: Arc<OwnedFd>,
    /// Offset of the mapping in the file.
    pub offset: u64,
    /// What pages become: each entry holds up to this offset in the mapping, a multiple of the page size; the last
    /// holds for all that follows.
    pub fills: Vec<(usize, Fill)>,
    /// Where to record which part of the file is being replaced ([`in_journal`]): a word of another mapping.
    pub journal: Option<(Arc<Surviving>, usize)>,
}

/// The meaning of a word of a journal: offset and length in the file. `None` if it is zero.
pub fn in_journal(word: u64) -> Option<(u64, u64)> {
    let pages = word & (PAGE_SIZE as u64 - 1);
    (pages > 0).then_some((word - pages, pages * PAGE_SIZE as u64))
}

/// The losses of a mapping since the last query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Losses {
    /// Offsets of the lost pages in the file; if there are more than 16, those of the last 16.
    pub offsets: Vec<u64>,
    /// The number of lost pages in all.
    pub pages: u64,
}

/// One mapping, for the handler. Never freed, but reused.
pub(super) struct Slot {
    next: AtomicPtr<Slot>,
    /// Odd while the slot is being changed.
    sequence: AtomicUsize,
    taken: AtomicBool,
    pub(super) start: AtomicUsize,
    /// Zero while nothing is registered here.
    pub(super) len: AtomicUsize,
    pub(super) fd: AtomicI32,
    pub(super) offset: AtomicU64,
    fills: AtomicPtr<(usize, Fill)>,
    fill_count: AtomicUsize,
    journal: AtomicPtr<AtomicU64>,
    /// Pages lost since the mapping was registered, and how many of them were reported.
    lost: AtomicU64,
    told: AtomicU64,
    offsets: [AtomicU64; TOLD],
}

static SLOTS: AtomicPtr<Slot> = AtomicPtr::new(null_mut());

/// A mapping that survives memory errors, provided that [`super::install`] was called.
#[derive(Debug)]
pub struct Surviving {
    slot: &'static Slot,
    /// The array that the slot points to. It is boxed, so that its address stays.
    _fills: Box<[(usize, Fill)]>,
    _survival: (Arc<OwnedFd>, Option<(Arc<Surviving>, usize)>),
    /// Last: after the unmap, the handler must not replace pages of the next mapping there.
    mapping: Mapping,
}

impl Deref for Surviving {
    type Target = Mapping;

    fn deref(&self) -> &Mapping {
        &self.mapping
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slot").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

impl Surviving {
    /// From now on this process survives memory errors in this mapping, which is writable.
    ///
    /// # Panics
    /// If the journal's word is outside its mapping.
    pub fn new(mapping: Mapping, survival: Survival) -> Self {
        let Survival { file, offset, fills, journal } = survival;
        let fills = fills.into_boxed_slice();
        let slot = Slot::take();
        slot.sequence.fetch_add(1, Ordering::AcqRel);
        slot.start.store(mapping.addr(), Ordering::Release);
        slot.fd.store(file.as_raw_fd(), Ordering::Release);
        slot.offset.store(offset, Ordering::Release);
        slot.fills.store(fills.as_ptr().cast_mut(), Ordering::Release);
        slot.fill_count.store(fills.len(), Ordering::Release);
        let word = journal.as_ref().map_or(null_mut(), |(other, at)| other.ptr(*at, 8).cast());
        slot.journal.store(word, Ordering::Release);
        slot.lost.store(0, Ordering::Release);
        slot.told.store(0, Ordering::Release);
        slot.len.store(mapping.len(), Ordering::Release);
        slot.sequence.fetch_add(1, Ordering::AcqRel);
        Self { slot, _fills: fills, _survival: (file, journal), mapping }
    }

    /// The number of its pages that were lost since it was registered.
    pub fn lost(&self) -> u64 {
        self.slot.lost.load(Ordering::Acquire)
    }

    /// Losses that were not reported yet.
    pub fn losses(&self) -> Losses {
        let lost = self.lost();
        let told = self.slot.told.swap(lost, Ordering::AcqRel);
        let offsets = (told..lost).take(TOLD).map(|number| {
            let at = number as usize % TOLD;
            self.slot.offsets[at].load(Ordering::Acquire)
        });
        Losses { offsets: offsets.collect(), pages: lost - told }
    }
}

impl Drop for Surviving {
    fn drop(&mut self) {
        // Before the memory is unmapped: then no thread is in the handler for an address of it, and none enters.
        self.slot.sequence.fetch_add(1, Ordering::AcqRel);
        self.slot.len.store(0, Ordering::Release);
        self.slot.sequence.fetch_add(1, Ordering::AcqRel);
        self.slot.taken.store(false, Ordering::Release);
    }
}

impl Slot {
    /// An unused slot, or a new one.
    fn take() -> &'static Self {
        let mut at = SLOTS.load(Ordering::Acquire);
        // SAFETY: slots are leaked boxes, made below and linked when they are complete; none is ever freed.
        while let Some(slot) = unsafe { at.as_ref() } {
            if slot.taken.compare_exchange(false, true, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return slot;
            }
            at = slot.next.load(Ordering::Acquire);
        }
        let slot: &'static Self = Box::leak(Box::new(Self {
            next: AtomicPtr::new(null_mut()),
            sequence: AtomicUsize::new(0),
            taken: AtomicBool::new(true),
            start: AtomicUsize::new(0),
            len: AtomicUsize::new(0),
            fd: AtomicI32::new(-1),
            offset: AtomicU64::new(0),
            fills: AtomicPtr::new(null_mut()),
            fill_count: AtomicUsize::new(0),
            journal: AtomicPtr::new(null_mut()),
            lost: AtomicU64::new(0),
            told: AtomicU64::new(0),
            offsets: [const { AtomicU64::new(0) }; TOLD],
        }));
        let mut first = SLOTS.load(Ordering::Acquire);
        loop {
            slot.next.store(first, Ordering::Release);
            let new = std::ptr::from_ref(slot).cast_mut();
            match SLOTS.compare_exchange(first, new, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => return slot,
                Err(seen) => first = seen,
            }
        }
    }

    pub(super) fn find(addr: usize) -> Option<&'static Self> {
        let mut at = SLOTS.load(Ordering::Acquire);
        // SAFETY: as in `take`.
        while let Some(slot) = unsafe { at.as_ref() } {
            let sequence = slot.sequence.load(Ordering::Acquire);
            let (start, len) = (slot.start.load(Ordering::Acquire), slot.len.load(Ordering::Acquire));
            let whole = sequence.is_multiple_of(2) && slot.sequence.load(Ordering::Acquire) == sequence;
            if whole && addr.wrapping_sub(start) < len {
                return Some(slot);
            }
            at = slot.next.load(Ordering::Acquire);
        }
        None
    }

    /// The new content of the page at this offset in the mapping.
    pub(super) fn fill(&self, within: usize) -> &Fill {
        let (fills, count) = (self.fills.load(Ordering::Acquire), self.fill_count.load(Ordering::Acquire));
        // SAFETY: the thread that runs this touched the mapping, so its owner, which has the fills in a box, lives.
        let fills = unsafe { std::slice::from_raw_parts(fills, count) };
        fills.iter().find(|(end, _)| within < *end).or(fills.last()).map_or(&Fill::Zeros, |(_, fill)| fill)
    }

    pub(super) fn note(&self, offset: u64) {
        let number = self.lost.load(Ordering::Acquire);
        self.offsets[number as usize % TOLD].store(offset, Ordering::Release);
        self.lost.store(number + 1, Ordering::Release);
    }

    pub(super) fn write_journal(&self, word: u64) {
        // SAFETY: as in `fill`: the owner lives, and holds the mapping that this points into.
        if let Some(journal) = unsafe { self.journal.load(Ordering::Acquire).as_ref() } {
            journal.store(word, Ordering::Release);
        }
    }
}
