//! Runs the program of the pin check: it takes a batch of pages, and returns the findings for each.
//!
//! Before: `program` is written for this kernel. After: `own` has tested it, and `pins` offers it.
//! Threads: any, as many at once as there are slots. Units: pages of a file. Promise: a page in an unexpected state is
//! [`Pin::Unknown`].

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{Ordering, fence};
use std::sync::{Mutex, MutexGuard};

use ballast_base::PAGE_SIZE;

use super::found::{self, Found, Pin};
use super::program::{DONE, Layout, program};
use super::slot::{self, BATCH};
use crate::Mapping;
use crate::bpf::{self, Program};
use crate::lock::Lock;

/// Threads that can check at the same time; others wait.
pub(super) const SLOTS: usize = 8;

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

    /// As [`super::PinCheck::pins`]; pages of large folios are judged only if `knows_large`.
    pub(super) fn pins(&self, file: impl AsFd, pages: &[u64], knows_large: bool) -> io::Result<Vec<Pin>> {
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
        // A holder that released a page has written to it before; the caller reads the bytes after this.
        fence(Ordering::Acquire);
        Ok(pins)
    }

    #[cfg(test)]
    pub(super) fn verified(&self) -> io::Result<(u32, u32)> {
        self.program.verified()
    }

    /// An unused slot.
    fn slot(&self) -> (usize, MutexGuard<'_, ()>) {
        let free = self.slots.iter().enumerate().find_map(|(number, slot)| Some((number, slot.try_lock().ok()?)));
        // The contents that a panicked thread left in a slot are overwritten.
        free.unwrap_or_else(|| (0, self.slots[0].locked()))
    }
}
