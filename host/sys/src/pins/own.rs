//! The self-test of the pin check, on memory of this process; and the drain of the CPUs' batches of pages.
//!
//! Before: the program is loaded. After: it is known to tell held pages from free ones, or it is not used.
//! Threads: any. Units: bytes, pages. Promise: leaves nothing behind.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use ballast_base::{Bytes, HUGE_SIZE, PAGE_SIZE};

use super::check::Check;
use super::found::Pin;
use super::program::CHUNK;
use crate::{Mapping, memfd};

/// A check, and whether it is to check large folios.
pub(super) type Tested<'a> = (&'a Check, &'a Drain, bool);

/// Check again until the result is as expected: the kernel itself holds pages for a moment.
pub(super) fn expect(
    by: Tested<'_>,
    what: &str,
    file: impl AsFd + Copy,
    pages: &[u64],
    expected: impl Fn(&[Pin]) -> bool,
) -> Result<(), String> {
    const TRIES: u32 = 50;
    let mut pins = Vec::new();
    for _ in 0..TRIES {
        pins = by.0.pins(file, pages, by.2).map_err(|error| error.to_string())?;
        if expected(&pins) {
            return Ok(());
        }
        by.1.drain();
    }
    Err(format!("{what}: {pins:?}"))
}

pub(super) fn test_pages(check: &Check, drain: &Drain) -> Result<(), String> {
    // More pages than a node of the tree has slots, so that there is more than one level.
    const PAGES: u64 = 4 * CHUNK as u64 * CHUNK as u64;
    const USED: [u64; 4] = [0, 1, CHUNK as u64 + 1, PAGES - 1];
    let failed = |error: io::Error| error.to_string();
    let (file, map) = own_memory(Bytes(PAGES * PAGE_SIZE as u64)).map_err(failed)?;
    let at = |page: u64| page as usize * PAGE_SIZE;
    USED.iter().for_each(|page| map.words(at(*page), 1)[0].store(*page + 1, Ordering::Relaxed));
    expect((check, drain, false), "mapped pages", &file, &USED, |pins| pins.iter().all(|pin| *pin == Pin::Mapped))?;
    map.zap(0, map.len()).map_err(failed)?;
    expect((check, drain, false), "free pages", &file, &USED, |pins| pins.iter().all(|pin| *pin == Pin::Free))?;
    expect((check, drain, false), "holes", &file, &[2, CHUNK as u64, PAGES, 1 << 40], |pins| {
        pins.iter().all(|pin| *pin == Pin::Absent)
    })?;
    let held = Held::new(&map, at(1)).map_err(failed)?;
    map.zap(0, map.len()).map_err(failed)?;
    let one_held = |pins: &[Pin]| pins == [Pin::Free, Pin::Held(1), Pin::Free, Pin::Free];
    expect((check, drain, false), "a page that is held", &file, &USED, one_held)?;
    drop(held);
    expect((check, drain, false), "a page that was held", &file, &USED, |pins| pins.iter().all(|pin| *pin == Pin::Free))
}

/// Test a large folio. Returns false if there was none: the kernel makes none, and its pool of huge pages is empty.
pub(super) fn test_large(check: &Check, drain: &Drain) -> Result<bool, String> {
    const PAGES: [u64; 3] = [0, 7, 511];
    let failed = |error: io::Error| error.to_string();
    let Some((file, map)) = own_large_folio().map_err(|error| format!("no huge page for it: {error}"))? else {
        return Ok(false);
    };
    let all = |pin: Pin| move |pins: &[Pin]| pins.iter().all(|found| *found == pin);
    expect((check, drain, true), "a mapped huge page", &file, &PAGES, all(Pin::Free))?;
    map.zap(0, HUGE_SIZE).map_err(failed)?;
    expect((check, drain, true), "a huge page", &file, &PAGES, all(Pin::Free))?;
    let held = Held::new(&map, 7 * PAGE_SIZE).map_err(failed)?;
    expect((check, drain, true), "a huge page that is held and mapped", &file, &PAGES, all(Pin::Held(1)))?;
    map.zap(0, HUGE_SIZE).map_err(failed)?;
    expect((check, drain, true), "a huge page that is held", &file, &PAGES, all(Pin::Held(1)))?;
    drop(held);
    expect((check, drain, true), "a huge page that was held", &file, &PAGES, all(Pin::Free))?;
    Ok(true)
}

pub(super) fn own_memory(size: Bytes) -> io::Result<(OwnedFd, Mapping)> {
    let file = memfd::create("ballast-pin-check", size)?;
    let map = Mapping::shared(&file, 0, size.0 as usize)?;
    Ok((file, map))
}

/// As [`own_memory`], as one large folio; `None` if the kernel has none.
pub(super) fn own_large_folio() -> io::Result<Option<(OwnedFd, Mapping)>> {
    let (file, map) = own_memory(Bytes(HUGE_SIZE as u64))?;
    map.populate(0, HUGE_SIZE)?;
    match collapse(map.addr(), HUGE_SIZE) {
        Ok(()) => return Ok(Some((file, map))),
        // No huge pages in this kernel, or not for this process.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    drop((file, map));
    let file = memfd::create_huge("ballast-pin-check", Bytes(HUGE_SIZE as u64))?;
    let Ok(map) = Mapping::shared(&file, 0, HUGE_SIZE) else { return Ok(None) };
    // If the pool is empty this is an error, while a touch would be a signal.
    Ok(map.populate(0, HUGE_SIZE).is_ok().then_some((file, map)))
}

/// A page that a pipe holds while this value lives.
#[derive(Debug)]
pub(super) struct Held {
    _pipe: (OwnedFd, OwnedFd),
}

impl Held {
    pub(super) fn new(map: &Mapping, offset: usize) -> io::Result<Self> {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
        let range = libc::iovec { iov_base: map.ptr(offset, PAGE_SIZE).cast(), iov_len: PAGE_SIZE };
        // SAFETY: one range, inside a mapping that lives. The kernel takes a reference to its page, and nobody reads
        // the pipe.
        let taken = unsafe { libc::vmsplice(writer.as_raw_fd(), &raw const range, 1, 0) };
        if taken == PAGE_SIZE as isize { Ok(Self { _pipe: (reader, writer) }) } else { Err(io::Error::last_os_error()) }
    }
}

fn collapse(addr: usize, len: usize) -> io::Result<()> {
    const MADV_COLLAPSE: i32 = 25;
    /// Calls before the last error counts: the kernel returns EAGAIN when a page was busy for a moment.
    const TRIES: u32 = 20;
    let mut result = Ok(());
    for _ in 0..TRIES {
        // SAFETY: the call changes how memory is mapped, and neither its bytes nor its bounds.
        result = match unsafe { libc::madvise(addr as *mut libc::c_void, len, MADV_COLLAPSE) } {
            0 => return Ok(()),
            _ => Err(io::Error::last_os_error()),
        };
        if !matches!(&result, Err(error) if error.raw_os_error() == Some(libc::EAGAIN)) {
            break;
        }
    }
    result
}

/// Drains the batches of the CPUs: `MADV_COLLAPSE` begins with that (`lru_add_drain_all` in `madvise_collapse`,
/// `mm/khugepaged.c`), whatever else it does. For a huge page of our own that is mapped as one it does nothing else.
/// (Since Linux 7.3 the range must have a whole huge page, else the call returns before that.)
#[derive(Debug)]
pub(super) struct Drain {
    map: Mapping,
}

impl Drain {
    pub(super) fn new() -> io::Result<Self> {
        let (_, map) = own_memory(Bytes(HUGE_SIZE as u64))?;
        map.populate(0, HUGE_SIZE)?;
        Ok(Self { map })
    }

    pub(super) fn drain(&self) {
        // The self-test has shown that this drains the batches, also if there is no huge page.
        let _ = collapse(self.map.addr(), HUGE_SIZE);
    }
}
