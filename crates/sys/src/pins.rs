//! The pin check: does anything but its file hold a page of guest RAM?
//!
//! Before: the page is zapped in every process and that was acknowledged, so nobody comes to hold it without a fault. After:
//! `pager` copies and frees what is [`Pin::Free`] or [`Pin::Absent`], and leaves all else where it is.
//! Threads: any; up to [`SLOTS`] look at once, and others wait for them. Units: pages of 4 KiB, counted from the start of the
//! file. Promise: a page that somebody holds for the whole time of the look is never called free, whatever else the kernel
//! does with it meanwhile; and nothing of the kernel's is written.
//!
//! The kernel counts who holds a page: one for the page cache, one for each mapping, one for everybody else (a device, direct
//! I/O, a system call that has not returned, the list of a CPU on which new pages wait to be sorted). It does not tell these
//! counts to user space, so a BPF program reads them (`pins/program.rs`). It starts from this process's own descriptor and goes
//! the way the kernel goes: the file's tree of pages, the page, its counts. Where in its structures these lie, the kernel
//! itself says ([`Btf`]). All of it happens within one run, under RCU: what the program came by is not freed before it ends.
//!
//! Why a held page is never called free. Such a page cannot be moved, swapped out or taken from the file's tree by anything
//! but a punch: all of these first make sure that nobody holds it. So the program finds this very page, and its count holds
//! the holder's part each time it is read. For a page of 4 KiB that is the whole argument: its count must be 1, and with
//! the page cache's part and the holder's it is 2 at least. A large folio has one count for all its pages, and one for all
//! mappings of any of them. If nobody has any of them mapped, the first count is as many as it has pages, and the same argument
//! holds. Else the two must agree, and they cannot be read in one instant; they are read in turn, six readings of some 20 ns,
//! and all must agree. A holder could hide behind that only if the folio were mapped and unmapped again as many times,
//! and each time within one of those gaps.
//!
//! What is found held though nobody holds it (a CPU's list, a migration that just tries) only stays, and is looked at
//! again later.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ballast_base::PAGE_SIZE;

use crate::Mapping;
use crate::bpf::{self, Program};
use crate::btf::Btf;

mod own;
mod program;
#[cfg(test)]
mod tests;

use own::Drain;
use program::{BATCH, DONE, Layout, found, program, slot};

/// Threads that can look at the same time.
pub const SLOTS: usize = 8;

/// Who holds a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pin {
    /// Nobody but its file. (Of a large folio, other pages may be mapped.)
    Free,
    /// It is not in memory: a hole, or swapped out by the kernel.
    Absent,
    /// It is mapped somewhere, and nobody else holds it. Told of pages of 4 KiB only.
    Mapped,
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
struct Found {
    what: i32,
    order: u32,
    index: u64,
    /// As the kernel has it: one less than there are.
    mapcount: i32,
    refs: [i32; 3],
    mappings: [i32; 3],
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
        }
    }

    /// What that means for page number `page` of the file; of a large folio only if such a one was part of the self-test.
    fn judge(&self, page: u64, knows_large: bool) -> Pin {
        /// Larger folios do not exist.
        const LARGEST_ORDER: u32 = 20;
        let beyond = |refs: i32, expected: i64| match i64::from(refs) - expected {
            0 => Pin::Free,
            more @ 1.. => Pin::Held(more as u32),
            _ => Pin::Unknown,
        };
        match self.what {
            found::ABSENT => Pin::Absent,
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

/// Why there is no pin check.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// The kernel does not describe its types, or they are not as this code knows them.
    #[error("the kernel's layout is not known: {0}")]
    Layout(String),
    /// The kernel does not let this process.
    #[error("{0}")]
    Refused(String),
    /// It ran, and did not see what was there to be seen.
    #[error("its self-test failed: {0}")]
    SelfTest(String),
}

/// The pin check.
#[derive(Debug)]
pub struct PinCheck {
    program: Program,
    map: Mapping,
    /// Bytes from slot to slot.
    stride: usize,
    slots: [Mutex<()>; SLOTS],
    drain: Drain,
    /// The self-test saw a large folio.
    knows_large: bool,
}

impl PinCheck {
    /// Load the program, and see that it tells pages of this process that are held from those that are not: of 4 KiB, and, where
    /// the kernel makes them, large ones. Takes some tens of milliseconds.
    ///
    /// # Errors
    /// Why it cannot be used here. What this machine lacks only for now (memory for a huge page, say) is
    /// [`Unavailable::SelfTest`].
    pub fn new() -> Result<Self, Unavailable> {
        let btf = Btf::of_kernel().map_err(|error| Unavailable::Layout(error.to_string()))?;
        let layout = Layout::of(&btf).map_err(Unavailable::Layout)?;
        drop(btf);
        let mut check = Self::load(&layout).map_err(|error| Unavailable::Refused(why_refused(&error)))?;
        check.test_pages().map_err(Unavailable::SelfTest)?;
        check.knows_large = true;
        check.knows_large = check.test_large().map_err(Unavailable::SelfTest)?;
        Ok(check)
    }

    fn load(layout: &Layout) -> io::Result<Self> {
        let stride = slot::BYTES.next_multiple_of(8);
        let fd = bpf::create_array(SLOTS as u32, stride as u32)?;
        let map = Mapping::shared(&fd, 0, (stride * SLOTS).next_multiple_of(PAGE_SIZE))?;
        let program = Program::load(program(layout, fd.as_fd()))?;
        Ok(Self { program, map, stride, slots: Default::default(), drain: Drain::new()?, knows_large: false })
    }

    /// Who holds these pages of a file of this process, by their numbers; answers as many as there are pages.
    ///
    /// What a page holds is not to be read before this returns: else it may change between the two.
    ///
    /// # Errors
    /// If the kernel does not run the program any more, or it does not find the file.
    pub fn look(&self, file: impl AsFd, pages: &[u64]) -> io::Result<Vec<Pin>> {
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
            pins.extend(batch.iter().enumerate().map(|(index, page)| found(index).judge(*page, self.knows_large)));
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

    /// Have every CPU sort the pages on its lists: each holds up to 31 pages that were filled, or found touched, on it
    /// last, and counts as one that holds them. It takes some tens of microseconds on each CPU that has any, so it is to be
    /// called when pages look held that are probably only there, and not often.
    pub fn drain(&self) {
        self.drain.drain();
    }

    /// Can it tell of large folios? Else their pages are all [`Pin::Unknown`].
    pub fn knows_large(&self) -> bool {
        self.knows_large
    }
}

/// What to say of a kernel that does not let us.
fn why_refused(error: &io::Error) -> String {
    let lockdown = std::fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default();
    if lockdown.contains("[confidentiality]") {
        return "the kernel is locked down for confidentiality: nobody may read its memory".into();
    }
    match error.kind() {
        io::ErrorKind::PermissionDenied => format!("CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN) are needed: {error}"),
        _ if error.raw_os_error() == Some(libc::ENOSYS) => "the kernel has no BPF (CONFIG_BPF_SYSCALL)".into(),
        _ => error.to_string(),
    }
}
