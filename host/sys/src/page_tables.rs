//! The page tables of a process: which pages of its memory are present, and which are in swap.
//!
//! Before: the caller knows where memory is mapped in a process. After: it has the runs of pages that are there.
//! Threads: any. Units: addresses are in the other process.
//! Promise: runs ascend and do not overlap. Nothing of the other process changes.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;

use ballast_base::{Hva, PAGE_SIZE, PageIdx};

/// What an entry of the page table refers to. A page without an entry is in no run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A page in memory.
    Present,
    /// The kernel's page of zeros, which costs no memory. Seen from Linux 6.7 on; before that it is a page in memory.
    Zero,
    /// A page in swap. Memory that is shared has no such entries: its swapped pages have none.
    Swapped,
}

/// Neighbouring pages with entries of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entries {
    /// Its first byte.
    pub start: Hva,
    /// The byte after its last one.
    pub end: Hva,
    /// Its kind.
    pub entry: Entry,
}

/// The page tables of a process.
#[derive(Debug)]
pub struct PageTables {
    pagemap: File,
    /// The kernel has `PAGEMAP_SCAN`.
    scans: bool,
}

impl PageTables {
    /// The page tables of the process that has this number now.
    pub fn open(pid: u32) -> io::Result<Self> {
        let pagemap = File::open(format!("/proc/{pid}/pagemap"))?;
        let scans = scan(&pagemap, (0, PAGE_SIZE as u64), WITH_MEMORY, |_, _, _| ()).is_ok();
        Ok(Self { pagemap, scans })
    }

    /// Whether a process still has these page tables: it has others once it executes a program, and none once it ends.
    pub fn exist(&self) -> bool {
        !matches!(self.pagemap.read_at(&mut [0; 8], 0), Ok(0))
    }

    /// Call `each` with the runs in a range. A process that is gone has none.
    pub fn runs(&self, start: Hva, len: u64, mut each: impl FnMut(Entries)) -> io::Result<()> {
        if !self.scans {
            return self.runs_by_entries(start, len, each);
        }
        let scanned = scan(&self.pagemap, (start.0, start.0 + len), WITH_MEMORY, |start, end, categories| {
            let entry = match categories {
                of if of & ZERO != 0 => Entry::Zero,
                of if of & PRESENT != 0 => Entry::Present,
                _ => Entry::Swapped,
            };
            each(Entries { start: Hva(start), end: Hva(end), entry });
        });
        scanned.or_else(gone)
    }

    /// As [`Self::runs`], from the single entries, which costs more.
    fn runs_by_entries(&self, start: Hva, len: u64, mut each: impl FnMut(Entries)) -> io::Result<()> {
        const ENTRY_PRESENT: u64 = 1 << 63;
        const ENTRY_SWAPPED: u64 = 1 << 62;
        const BATCH: usize = 8192;
        let (mut page, last) = (PageIdx::containing(start.0).0, PageIdx::containing(start.0 + len).0);
        let mut words = vec![0; BATCH * 8];
        let mut run: Option<Entries> = None;
        while page < last {
            let batch = BATCH.min((last - page) as usize);
            let read = match self.pagemap.read_at(&mut words[..batch * 8], page * 8) {
                Ok(read) => read / 8,
                Err(error) => return gone(error),
            };
            if read == 0 {
                break;
            }
            for word in words[..read * 8].chunks_exact(8) {
                let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
                let entry = match word {
                    of if of & ENTRY_PRESENT != 0 => Some(Entry::Present),
                    of if of & ENTRY_SWAPPED != 0 => Some(Entry::Swapped),
                    _ => None,
                };
                let (start, end) = (Hva(PageIdx(page).offset()), Hva(PageIdx(page + 1).offset()));
                page += 1;
                match &mut run {
                    Some(run) if entry == Some(run.entry) && run.end == start => run.end = end,
                    _ => {
                        run.take().into_iter().for_each(&mut each);
                        run = entry.map(|entry| Entries { start, end, entry });
                    }
                }
            }
        }
        run.into_iter().for_each(each);
        Ok(())
    }
}

fn gone(error: io::Error) -> io::Result<()> {
    if error.raw_os_error() == Some(libc::ESRCH) { Ok(()) } else { Err(error) }
}

const PRESENT: u64 = 1 << 3;
const SWAPPED: u64 = 1 << 4;
const ZERO: u64 = 1 << 5;

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of `linux/fs.h`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct ScanRegion {
    start: u64,
    end: u64,
    categories: u64,
}

const PAGEMAP_SCAN: u64 = 0xC060_6610;
const _: () = assert!(size_of::<ScanArg>() == 0x60 && size_of::<ScanRegion>() == 24);

/// Categories of `linux/fs.h` (`PAGE_IS_*`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    /// Only entries that have all of these are reported.
    pub all_of: u64,
    /// Only entries that also have one of these are reported, unless this is 0.
    pub any_of: u64,
    /// The categories that tell runs apart.
    pub told: u64,
}

const WITH_MEMORY: Wanted = Wanted { all_of: 0, any_of: PRESENT | SWAPPED, told: PRESENT | SWAPPED | ZERO };

/// Calls `each` with start, end and categories of each run of wanted entries (Linux 6.7).
pub(crate) fn scan(
    pagemap: impl AsFd,
    (start, end): (u64, u64),
    wanted: Wanted,
    mut each: impl FnMut(u64, u64, u64),
) -> io::Result<()> {
    const BATCH: usize = 1024;
    let mut at = start;
    loop {
        let mut regions = [ScanRegion::default(); BATCH];
        let mut arg = ScanArg {
            size: size_of::<ScanArg>() as u64,
            flags: 0,
            start: at,
            end,
            walk_end: 0,
            vec: regions.as_mut_ptr() as u64,
            vec_len: BATCH as u64,
            max_pages: 0,
            category_inverted: 0,
            category_mask: wanted.all_of,
            category_anyof_mask: wanted.any_of,
            return_mask: wanted.told,
        };
        // SAFETY: `arg` has the kernel's shape and size (asserted above) and `vec` points at as many live regions as it
        // says; both are exclusively ours during the call.
        let answer = unsafe { libc::ioctl(pagemap.as_fd().as_raw_fd(), PAGEMAP_SCAN, &raw mut arg) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        let found = &regions[..(answer as usize).min(BATCH)];
        found.iter().for_each(|region| each(region.start, region.end, region.categories));
        // The kernel may say that it ended before the last region that it reported (6.18, with a full buffer).
        let walked = found.last().map_or(0, |last| last.end).max(arg.walk_end);
        if walked <= at || walked >= end {
            return Ok(());
        }
        at = walked;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Anon;
    use std::sync::atomic::Ordering;

    const PAGES: u64 = 4096;

    /// The pages of each run, counted from the start of the memory.
    fn seen(tables: &PageTables, start: Hva) -> Vec<(u64, u64, Entry)> {
        let mut found = Vec::new();
        let page = |at: Hva| (at.0 - start.0) / PAGE_SIZE as u64;
        tables
            .runs(start, PAGES * PAGE_SIZE as u64, |run| found.push((page(run.start), page(run.end), run.entry)))
            .expect("own page tables");
        found
    }

    #[test]
    fn every_second_page_is_a_run_of_its_own_and_none_is_told_twice() {
        let memory = Anon::new(PAGES as usize * PAGE_SIZE).expect("memory");
        let start = Hva(memory.addr() as u64);
        let mut tables = PageTables::open(std::process::id()).expect("own page tables");
        assert!(seen(&tables, start).is_empty(), "nothing is touched");
        for page in (0..PAGES as usize).step_by(2) {
            memory.word(page * PAGE_SIZE).store(1, Ordering::Relaxed);
        }
        let expected: Vec<_> = (0..PAGES).step_by(2).map(|page| (page, page + 1, Entry::Present)).collect();
        assert_eq!(seen(&tables, start), expected);
        tables.scans = false;
        assert_eq!(seen(&tables, start), expected, "the entries themselves say so, too");
    }
}
