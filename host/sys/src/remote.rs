//! Another process's page tables, from outside: finds its 2 MiB units that are mapped huge, and maps units huge again.
//!
//! Before: `pager` knows a view's process and where guest RAM is mapped in it. After: whole units are mapped by one
//! entry.
//! Threads: any. Units: addresses are in the other process, lengths in bytes.
//! Promise: no byte of guest RAM changes. A collapse fills holes where the kernel lets it (see [`Remote::collapse`]),
//! so a caller must know that every hole in the range stands for zeros.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;

use ballast_base::{HUGE_SIZE, Hva, PageIdx};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::page_tables::{self, Wanted};

pub(crate) const MADV_COLLAPSE: i32 = 25;

/// The outcome of a collapse.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collapsed {
    /// Every unit of the range is mapped by one entry now.
    Done,
    /// A page was in use: try again later.
    Busy,
    /// There is a hole, and the kernel leaves it.
    Hole,
    /// There is no free huge page, or the memory cgroup has no space for one.
    NoMemory,
    /// The range cannot be mapped huge: not aligned, registered for write-protection, or forbidden for the process.
    Never,
    /// The process is gone.
    Gone,
}

/// A page that a process maps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedPage {
    /// Its physical address.
    pub address: u64,
    /// The page is mapped once: not by another process, nor a second time by this one (some garbage collectors map
    /// their heap at several addresses). The kernel's page of zeros never is.
    pub is_exclusive: bool,
}

/// A process whose page tables are scanned and collapsed.
#[derive(Debug)]
pub struct Remote {
    pub(crate) process: OwnedFd,
    pagemap: File,
}

impl Remote {
    /// The process with this number. If the number belongs to another process by now, the calls are harmless.
    pub fn open(pid: u32) -> io::Result<Self> {
        let number = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        let process = pidfd_open(number, PidfdFlags::empty())?;
        Ok(Self { process, pagemap: File::open(format!("/proc/{pid}/pagemap"))? })
    }

    /// Map whole units (2 MiB, aligned in address and file) by one entry each: `process_madvise(MADV_COLLAPSE)`.
    ///
    /// Where the file holds the unit as one huge page already, only the page table changes. Otherwise the kernel copies
    /// its pages into a huge page first, which takes milliseconds; touches wait meanwhile. A hole in a range registered
    /// for missing faults is refused from Linux 6.4 on; anywhere else it is filled with zeros.
    pub fn collapse(&self, start: Hva, len: u64) -> io::Result<Collapsed> {
        // Some kernels do nothing for a part of a unit, and report success (7.3).
        if !is_unit_aligned(start) || !len.is_multiple_of(HUGE_SIZE as u64) {
            return Ok(Collapsed::Never);
        }
        let range = libc::iovec { iov_base: start.0 as *mut libc::c_void, iov_len: len as usize };
        // SAFETY: `range` is alive and is only read; the address in it is the other process's, where this advice
        // changes no content but holes (see the file's head), and no bounds.
        let answer = unsafe {
            let process = self.process.as_raw_fd();
            libc::syscall(libc::SYS_process_madvise, process, &raw const range, 1usize, MADV_COLLAPSE, 0u32)
        };
        if answer >= 0 {
            return Ok(if answer as u64 == len { Collapsed::Done } else { Collapsed::Busy });
        }
        let error = io::Error::last_os_error();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EINTR) => Ok(Collapsed::Busy),
            Some(libc::EBUSY) => Ok(Collapsed::Hole),
            Some(libc::ENOMEM) => Ok(Collapsed::NoMemory),
            Some(libc::EINVAL) => Ok(Collapsed::Never),
            Some(libc::ESRCH) => Ok(Collapsed::Gone),
            _ => Err(error),
        }
    }

    /// The parts of a range that are mapped by huge entries, as `(start, end)` in ascending order (Linux 6.7).
    pub fn huge(&self, start: Hva, len: u64) -> io::Result<Vec<(Hva, Hva)>> {
        let found = scan(&self.pagemap, (start.0, start.0 + len), PAGE_IS_HUGE)?;
        Ok(found.into_iter().map(|(start, end)| (Hva(start), Hva(end))).collect())
    }

    /// Write the physical addresses of the pages from `start` on to `out`; `None` for a page that is not mapped, or
    /// whose address the caller may not know.
    pub fn physical(&self, start: Hva, out: &mut [Option<u64>]) -> io::Result<()> {
        let mut found = vec![None; out.len()];
        self.pages(start, &mut found)?;
        found.iter().zip(out).for_each(|(found, out)| *out = found.map(|page| page.address));
        Ok(())
    }

    /// As [`Self::physical`], and whether each page is mapped once.
    pub fn pages(&self, start: Hva, out: &mut [Option<MappedPage>]) -> io::Result<()> {
        const PRESENT: u64 = 1 << 63;
        const EXCLUSIVE: u64 = 1 << 56;
        const FRAME: u64 = (1 << 55) - 1;
        let mut words = vec![0u8; out.len() * 8];
        let page = PageIdx::containing(start.0).0;
        self.pagemap.read_exact_at(&mut words, page * 8)?;
        for (word, out) in words.chunks_exact(8).zip(out) {
            let word = u64::from_ne_bytes(word.try_into().expect("eight bytes"));
            let page = MappedPage { address: PageIdx(word & FRAME).offset(), is_exclusive: word & EXCLUSIVE != 0 };
            *out = Some(page).filter(|page| word & PRESENT != 0 && page.address != 0);
        }
        Ok(())
    }

    /// The parts of a range that are mapped at all (Linux 6.7).
    pub fn mapped(&self, start: Hva, len: u64) -> io::Result<Vec<(Hva, Hva)>> {
        let found = scan(&self.pagemap, (start.0, start.0 + len), PAGE_IS_PRESENT)?;
        Ok(found.into_iter().map(|(start, end)| (Hva(start), Hva(end))).collect())
    }
}

/// Is this address a multiple of 2 MiB?
pub fn is_unit_aligned(addr: Hva) -> bool {
    addr.0.is_multiple_of(HUGE_SIZE as u64)
}

pub(crate) const PAGE_IS_PRESENT: u64 = 1 << 3;
const PAGE_IS_HUGE: u64 = 1 << 6;

/// The pieces of `start..end` whose page-table entries have all these categories (`PAGE_IS_*` of `linux/fs.h`).
pub(crate) fn scan(pagemap: impl AsFd, range: (u64, u64), category: u64) -> io::Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    let wanted = Wanted { all_of: category, any_of: 0, told: category };
    page_tables::scan(pagemap, range, wanted, |start, end, _| found.push((start, end)))?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::uffd::REQUIRED_FEATURES;
    use crate::{Mapping, Uffd, memfd};
    use ballast_base::Bytes;
    use ballast_testkit::skip;

    #[test]
    fn the_physical_addresses_of_a_huge_page_follow_each_other() {
        let Some((_fd, map, remote)) = two_units() else { return };
        let mut found = vec![None; 512];
        remote.physical(Hva(map.addr() as u64), &mut found).expect("pagemap");
        let Some(first) = found[0] else { return skip("root", "physical addresses are hidden") };
        assert!(first.is_multiple_of(HUGE_SIZE as u64));
        assert!(found.iter().zip((first..).step_by(4096)).all(|(found, expected)| *found == Some(expected)));
    }

    #[test]
    fn a_page_that_is_mapped_a_second_time_is_not_exclusive() {
        let fd = memfd::create("ballast-test", Bytes(2 * 4096)).expect("memfd");
        let maps = [0, 1].map(|_| Mapping::shared(&fd, 0, 2 * 4096).expect("map"));
        maps[0].populate(0, 2 * 4096).expect("populate");
        maps[1].populate(0, 4096).expect("populate");
        let remote = Remote::open(std::process::id()).expect("own process");
        let mut found = [None; 2];
        remote.pages(Hva(maps[0].addr() as u64), &mut found).expect("pagemap");
        if found[0].is_none() {
            return skip("root", "physical addresses are hidden");
        }
        assert_eq!(found.map(|page| page.map(|page| page.is_exclusive)), [Some(false), Some(true)]);
    }

    /// Collapses, with retries: the host may be short of free huge pages for a moment, because the kernel takes one
    /// before it finds holes; and the kernel may hold a page for a moment.
    fn collapse(remote: &Remote, start: Hva, len: u64) -> Collapsed {
        let may_pass = |found: &Collapsed| matches!(found, Collapsed::NoMemory | Collapsed::Busy);
        let tries = (0..100).map(|_| remote.collapse(start, len).expect("collapse"));
        tries.into_iter().find(|found| !may_pass(found)).unwrap_or(Collapsed::NoMemory)
    }

    /// Two units, all pages present; `None`, with a printed skip, if nothing can be collapsed.
    fn two_units() -> Option<(OwnedFd, Mapping, Remote)> {
        let fd = memfd::create("ballast-test", Bytes(2 * HUGE_SIZE as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, 2 * HUGE_SIZE).expect("map");
        assert!(is_unit_aligned(Hva(map.addr() as u64)), "a mapping of whole units is aligned");
        map.populate(0, map.len()).expect("populate");
        let remote = Remote::open(std::process::id()).expect("own process");
        let first = collapse(&remote, Hva(map.addr() as u64), HUGE_SIZE as u64);
        if first != Collapsed::Done {
            skip("collapse", format_args!("{first:?}"));
            return None;
        }
        Some((fd, map, remote))
    }

    #[test]
    fn a_collapsed_unit_is_mapped_huge_and_after_a_zap_it_is_unmapped_until_the_next_collapse() {
        let Some((_fd, map, remote)) = two_units() else { return };
        let (start, unit) = (Hva(map.addr() as u64), HUGE_SIZE as u64);
        assert_eq!(remote.huge(start, 2 * unit).expect("scan"), [(start, start + unit)]);
        map.copy_in(5000, &[42]);
        map.zap(0, HUGE_SIZE).expect("zap");
        assert_eq!(remote.mapped(start, 2 * unit).expect("scan"), [(start + unit, start + 2 * unit)]);
        assert_eq!(collapse(&remote, start, 2 * unit), Collapsed::Done);
        assert_eq!(remote.huge(start, 2 * unit).expect("scan"), [(start, start + 2 * unit)]);
        let mut byte = [0];
        map.copy_out(5000, &mut byte);
        assert_eq!(byte, [42]);
    }

    #[test]
    fn a_hole_under_userfaultfd_and_a_range_that_is_not_aligned_are_told_apart() {
        let Some((fd, map, remote)) = two_units() else { return };
        let Ok((uffd, _)) = Uffd::create(REQUIRED_FEATURES) else { return skip("uffd", "not permitted") };
        let (start, unit) = (Hva(map.addr() as u64), HUGE_SIZE as u64);
        uffd.register(start, 2 * unit).expect("register");
        memfd::punch(&fd, unit + 4096, 4096).expect("punch");
        assert_eq!(collapse(&remote, start + unit, unit), Collapsed::Hole);
        assert_eq!(memfd::resident(&fd).expect("stat").0, 1023, "the hole stays");
        assert_eq!(collapse(&remote, start + 4096, 4096), Collapsed::Never);
    }
}
