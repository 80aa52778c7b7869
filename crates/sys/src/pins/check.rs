//! The program at work: a batch of pages in, what was found of each judged.
//!
//! Before: `program` is written for this kernel. After: `own` has seen that it is right, and `pins` lends it to the pager.
//! Threads: any, as many at once as there are slots. Units: pages of a file. Promise: what is not as it must be is
//! [`Pin::Unknown`].

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_base::PAGE_SIZE;

use super::program::{BATCH, DONE, Layout, found, program, slot};
use crate::Mapping;
use crate::bpf::{self, Program};

/// Threads that can look at the same time.
pub(super) const SLOTS: usize = 8;

/// Who holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Nobody but its file. (Of a large folio, other pages may be mapped.)
    Free,
    /// It is not in memory: a hole, or swapped out by the kernel.
    Absent,
    /// It is mapped somewhere, and nobody else holds it. Told of pages of 4 KiB only.
    Mapped,
    /// Its memory failed (the kernel holds it for that), so that it cannot be read either.
    Failed,
    /// Somebody: so many references more than the page cache and the mappings have.
    Held(u32),
    /// It changed while it was looked at, or could not be looked at.
    Unknown,
}

impl Pin {
    /// Is it sure that nobody holds it, so that it can be freed?
    pub fn may_go(self) -> bool {
        matches!(self, Self::Free | Self::Absent)
    }
}

/// What the program found of one page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) what: i32,
    pub(super) order: u32,
    pub(super) index: u64,
    /// As the kernel has it: one less than there are.
    pub(super) mapcount: i32,
    pub(super) refs: [i32; 3],
    pub(super) mappings: [i32; 3],
    pub(super) failed: bool,
}

impl Found {
    fn read(words: &[AtomicU64]) -> Self {
        let words: [u64; slot::FOUND_BYTES as usize / 8] = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        let half = |byte: i16| (words[byte as usize / 8] >> (byte % 8 * 8)) as i32;
        let again = |reading: i16| half(found::AGAIN + 4 * reading);
        Self {
            what: half(found::WHAT),
            order: half(found::ORDER) as u32,
            index: words[found::INDEX as usize / 8],
            mapcount: half(found::MAPCOUNT),
            refs: [half(found::REFS), again(1), again(3)],
            mappings: [again(0), again(2), again(4)],
            failed: half(found::FAILED) != 0,
        }
    }

    /// What that means for page number `page` of the file; of a large folio only if such a one was part of the self-test.
    pub(super) fn judge(&self, page: u64, knows_large: bool) -> Pin {
        /// Larger folios do not exist.
        const LARGEST_ORDER: u32 = 20;
        let beyond = |refs: i32, expected: i64| match i64::from(refs) - expected {
            0 => Pin::Free,
            more @ 1.. => Pin::Held(more as u32),
            _ => Pin::Unknown,
        };
        match self.what {
            found::ABSENT => Pin::Absent,
            // Of a large folio this is known of its first page; the others count as usual.
            found::PAGE | found::LARGE if self.failed && self.index == page => Pin::Failed,
            found::PAGE if self.index == page => {
                let mapped = i64::from(self.mapcount) + 1;
                match beyond(self.refs[0], 1 + mapped) {
                    _ if mapped < 0 => Pin::Unknown,
                    Pin::Free if mapped > 0 => Pin::Mapped,
                    pin => pin,
                }
            }
            found::LARGE if knows_large && (1..=LARGEST_ORDER).contains(&self.order) => {
                let pages = 1 << self.order;
                let mapped = i64::from(self.mappings[0]) + 1;
                if !(self.index..self.index.saturating_add(pages)).contains(&page) || mapped < 0 {
                    Pin::Unknown
                } else if i64::from(self.refs[0]) == pages as i64 {
                    // Nobody has any of it mapped, nor holds it.
                    Pin::Free
                } else if self.refs.iter().any(|refs| *refs != self.refs[0])
                    || self.mappings.iter().any(|mappings| *mappings != self.mappings[0])
                {
                    Pin::Unknown
                } else {
                    beyond(self.refs[0], pages as i64 + mapped)
                }
            }
            _ => Pin::Unknown,
        }
    }
}

/// The loaded program and its map.
#[derive(Debug)]
pub(super) struct Check {
    program: Program,
    map: Mapping,
    /// Bytes from slot to slot.
    stride: usize,
    slots: [Mutex<()>; SLOTS],
}

impl Check {
    pub(super) fn load(layout: &Layout) -> io::Result<Self> {
        let stride = slot::BYTES.next_multiple_of(8);
        let fd = bpf::create_array(SLOTS as u32, stride as u32)?;
        let map = Mapping::shared(&fd, 0, (stride * SLOTS).next_multiple_of(PAGE_SIZE))?;
        let program = Program::load(program(layout, fd.as_fd()))?;
        Ok(Self { program, map, stride, slots: Default::default() })
    }

    /// See [`super::PinCheck::look`]; of large folios, only if they are known.
    pub(super) fn look(&self, file: impl AsFd, pages: &[u64], knows_large: bool) -> io::Result<Vec<Pin>> {
        const WORDS: usize = slot::FOUND_BYTES as usize / 8;
        let mut pins = Vec::with_capacity(pages.len());
        let (number, _slot) = self.slot();
        let words = self.map.words(number * self.stride, self.stride / 8);
        let set = |byte: usize, value: u64| words[byte / 8].store(value, Ordering::Relaxed);
        let place = |index: usize| slot::FOUND as usize + slot::FOUND_BYTES as usize * index;
        set(slot::FD as usize, file.as_fd().as_raw_fd() as u64);
        for batch in pages.chunks(BATCH) {
            for (index, page) in batch.iter().enumerate() {
                set(slot::PAGES as usize + 8 * index, *page);
                set(place(index), found::NOTHING as u64);
            }
            set(slot::COUNT as usize, batch.len() as u64);
            match self.program.run(&[number as u64])? {
                DONE => {}
                code => return Err(io::Error::other(format!("the pin check did not find the file ({code})"))),
            }
            let found = |index: usize| Found::read(&words[place(index) / 8..][..WORDS]);
            pins.extend(batch.iter().enumerate().map(|(index, page)| found(index).judge(*page, knows_large)));
        }
        // Whoever held a page and let it go has written to it before; that is read after this.
        fence(Ordering::Acquire);
        Ok(pins)
    }

    /// A slot that nobody uses.
    fn slot(&self) -> (usize, MutexGuard<'_, ()>) {
        let free = self.slots.iter().enumerate().find_map(|(number, slot)| Some((number, slot.try_lock().ok()?)));
        // What a thread that panicked left in a slot is written anew.
        free.unwrap_or_else(|| (0, self.slots[0].lock().unwrap_or_else(PoisonError::into_inner)))
    }
}
