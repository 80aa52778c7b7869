//! Zap: drop this process's page-table entries of many ranges, with few interruptions of the other CPUs.
//!
//! Before: the caller chose pages to unmap. After: their bytes are unchanged in their files, and a touch faults.
//! Threads: any; a thread that touches the ranges meanwhile may or may not fault. Units: addresses and bytes.
//! Promise: when a call returns, no CPU uses an old translation any more.
//!
//! Each `madvise` of a mapped range ends in a TLB flush on every CPU on which the process runs, and the caller waits
//! for all of them: some 15 us in a virtual machine, and the interrupted threads pay as well. Linux 6.16 does one flush
//! for all ranges of one `process_madvise`.

use std::io;
use std::os::fd::AsRawFd;

use rustix::mm::Advice;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

/// Drop the entries of all these ranges, `(address, bytes)`. All are tried. Returns those that failed, by their index:
/// a range that is not mapped, or locked, or not aligned to pages.
///
/// # Safety
/// Each range is inside mappings that are `MAP_SHARED` and stay mapped during the call, so that nothing is lost.
pub unsafe fn zap(ranges: &[(usize, usize)]) -> Vec<(usize, io::Error)> {
    let mut failed = Vec::new();
    let mut done = 0;
    while let some @ [_, ..] = first(&ranges[done..]) {
        // SAFETY: the caller's promise, twice: a second zap changes nothing.
        unsafe {
            if some.len() == 1 || !together(some) {
                for (index, range) in some.iter().enumerate() {
                    failed.extend(alone(*range).err().map(|error| (done + index, error)));
                }
            }
        }
        done += some.len();
    }
    failed
}

/// The first of these ranges, as many as one call takes: at least one, if there is one.
fn first(ranges: &[(usize, usize)]) -> &[(usize, usize)] {
    /// The kernel cuts off the ranges of a call at 2 GiB less a page in all. This is a multiple of any page size.
    const MOST_BYTES: usize = 1 << 30;
    const MOST: usize = libc::UIO_MAXIOV as usize;
    let mut bytes = 0usize;
    let fits = |range: &&(usize, usize)| {
        bytes = bytes.saturating_add(range.1);
        bytes <= MOST_BYTES
    };
    let count = ranges.iter().take(MOST).take_while(fits).count();
    &ranges[..count.max(1).min(ranges.len())]
}

/// Zap all ranges in one call. Returns false if the kernel refuses (before Linux 6.13), or did not zap all.
///
/// # Safety
/// As [`zap`].
unsafe fn together(ranges: &[(usize, usize)]) -> bool {
    // The pidfd is opened each time: in a child of fork, a kept one would be that of the parent.
    let Ok(this) = pidfd_open(getpid(), PidfdFlags::empty()) else { return false };
    let vectors: Vec<libc::iovec> =
        ranges.iter().map(|&(start, len)| libc::iovec { iov_base: start as *mut _, iov_len: len }).collect();
    // SAFETY: the advice discards no content, as the caller promised; `vectors` is alive and only read.
    let done = unsafe {
        let (this, first) = (this.as_raw_fd(), vectors.as_ptr());
        libc::syscall(libc::SYS_process_madvise, this, first, vectors.len(), libc::MADV_DONTNEED, 0u32)
    };
    usize::try_from(done).is_ok_and(|done| done == ranges.iter().map(|range| range.1).sum())
}

/// Zap one range.
///
/// # Safety
/// As [`zap`].
unsafe fn alone((start, len): (usize, usize)) -> io::Result<()> {
    // SAFETY: the caller's promise.
    unsafe { rustix::mm::madvise(start as *mut _, len, Advice::LinuxDontNeed)? };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use ballast_base::{Bytes, PAGE_SIZE};

    use super::*;
    use crate::Mapping;

    #[test]
    fn no_call_has_more_ranges_or_bytes_than_the_kernel_takes_and_each_range_is_in_one() {
        const GIB: usize = 1 << 30;
        let cases = [vec![(0, PAGE_SIZE); 3000], vec![(0, GIB / 2); 9], vec![(0, 3 * GIB), (0, 1), (0, usize::MAX)]];
        let calls = cases.map(|ranges| {
            let mut rest = &ranges[..];
            let lens = std::iter::from_fn(|| {
                let some = first(rest);
                rest = &rest[some.len()..];
                assert!(some.len() <= 1 || some.iter().map(|range| range.1).sum::<usize>() < 0x7fff_f000);
                Some(some.len()).filter(|len| *len > 0)
            });
            lens.collect::<Vec<_>>()
        });
        assert_eq!(calls, [vec![1024, 1024, 952], vec![2, 2, 2, 2, 1], vec![1, 1, 1]]);
    }

    #[test]
    fn valid_ranges_are_zapped_and_the_others_are_returned() {
        let fd = crate::memfd::create("ballast-test", Bytes(3 * PAGE_SIZE as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, 3 * PAGE_SIZE).expect("map");
        let words = [0, 1, 2].map(|page| &map.words(page * PAGE_SIZE, 1)[0]);
        words.iter().zip(1..).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        let start = map.addr() as usize;
        let is_mapped = || {
            let remote = crate::Remote::open(std::process::id()).expect("this process");
            let mapped = remote.mapped(ballast_base::Hva(start as u64), 3 * PAGE_SIZE as u64).expect("pagemap");
            mapped.into_iter().map(|(from, to)| (to.0 - from.0) / PAGE_SIZE as u64).sum::<u64>()
        };
        assert_eq!(is_mapped(), 3);
        let ranges = [(start, PAGE_SIZE), (start + 1, PAGE_SIZE), (start + 2 * PAGE_SIZE, PAGE_SIZE)];
        // SAFETY: all are inside `map`, which is a shared mapping of a file.
        let failed = unsafe { zap(&ranges) };
        let failed: Vec<_> = failed.into_iter().map(|(index, error)| (index, error.raw_os_error())).collect();
        assert_eq!(failed, [(1, Some(libc::EINVAL))]);
        assert_eq!(is_mapped(), 1);
        assert_eq!(words.map(|word| word.load(Ordering::Relaxed)), [1, 2, 3]);
    }
}
