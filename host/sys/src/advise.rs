//! Has the kernel page memory of another process out to swap, or back in.
//!
//! Before: the caller knows which pages of a process are in memory, or in swap. After: the kernel has moved those that
//! it could move; the page tables tell which.
//! Threads: any; the call does the work. Units: addresses are in the other process.
//! Promise: no byte of the other process changes.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use ballast_base::{Hva, PAGE_SIZE};

/// The kernel takes this many ranges in one call.
const RANGES: usize = 1024;

/// Page these ranges (start and length, whole pages) out, as `process_madvise(MADV_PAGEOUT)` does. `process` is a
/// pidfd. A page that is locked, pinned or mapped by another process stays, and all pages stay if swap is full.
///
/// # Errors
/// The process is gone (`ESRCH`), a range is not mapped or its mapping is locked, or the caller may not do this.
pub fn page_out(process: impl AsFd, ranges: &[(Hva, u64)]) -> io::Result<()> {
    let vectors =
        |(start, len): &(Hva, u64)| libc::iovec { iov_base: start.0 as *mut libc::c_void, iov_len: *len as usize };
    let mut all: Vec<libc::iovec> = ranges.iter().map(vectors).collect();
    let mut left = all.as_mut_slice();
    while !left.is_empty() {
        let count = left.len().min(RANGES);
        // SAFETY: `count` live vectors, which are only read. The addresses in them are the other process's, where this
        // advice changes neither content nor bounds.
        let done = unsafe {
            let process = process.as_fd().as_raw_fd();
            libc::syscall(libc::SYS_process_madvise, process, left.as_ptr(), count, libc::MADV_PAGEOUT, 0u32)
        };
        if done <= 0 {
            let error = io::Error::last_os_error();
            return Err(if done == 0 { io::ErrorKind::WriteZero.into() } else { error });
        }
        let mut done = done as usize;
        let whole = left
            .iter()
            .take_while(|range| {
                range.iov_len <= done && {
                    done -= range.iov_len;
                    true
                }
            })
            .count();
        left = &mut left[whole..];
        if let Some(first) = left.first_mut() {
            (first.iov_base, first.iov_len) = (first.iov_base.wrapping_byte_add(done), first.iov_len - done);
        }
    }
    Ok(())
}

/// Bring the pages of this range of a process back into memory: touches each of them, on the calling thread. A page
/// that was never touched gets memory in a shared mapping, and the kernel's page of zeros in a private one.
///
/// # Errors
/// The process is gone (`ESRCH`), the range is not mapped, or there is no memory.
pub fn bring_back(pid: u32, start: Hva, len: u64) -> io::Result<()> {
    let pages = len / PAGE_SIZE as u64;
    let mut scratch = [0u8; RANGES];
    let local = libc::iovec { iov_base: scratch.as_mut_ptr().cast(), iov_len: RANGES };
    let mut page = 0;
    while page < pages {
        let batch = (pages - page).min(RANGES as u64);
        let first_bytes = (page..page + batch)
            .map(|page| libc::iovec { iov_base: (start.0 + page * PAGE_SIZE as u64) as *mut libc::c_void, iov_len: 1 });
        let remote: Vec<libc::iovec> = first_bytes.collect();
        // SAFETY: the local vector is our live buffer, of as many bytes as are read at most. The remote ones are the
        // other process's addresses, which the kernel checks.
        let read = unsafe {
            let pid = pid.cast_signed();
            libc::process_vm_readv(pid, &raw const local, 1, remote.as_ptr(), remote.len() as libc::c_ulong, 0)
        };
        match u64::try_from(read) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => page += read,
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Anon;
    use rustix::process::{PidfdFlags, getpid, pidfd_open};
    use std::sync::atomic::Ordering;

    #[test]
    fn advice_for_another_process_changes_no_byte() {
        const PAGES: usize = 3000;
        let memory = Anon::new(PAGES * PAGE_SIZE).expect("memory");
        let word = |page: usize| memory.word(page * PAGE_SIZE);
        (0..PAGES).for_each(|page| word(page).store(page as u64 + 1, Ordering::Relaxed));
        let me = pidfd_open(getpid(), PidfdFlags::empty()).expect("a descriptor of this process");
        let start = memory.addr() as u64;
        let range = |page: usize| (Hva(start + (page * PAGE_SIZE) as u64), (1 + page % 2) as u64 * PAGE_SIZE as u64);
        page_out(&me, &(0..PAGES - 1).step_by(2).map(range).collect::<Vec<_>>()).expect("paged out as far as possible");
        bring_back(std::process::id(), Hva(start), memory.len() as u64).expect("paged in");
        assert!((0..PAGES).all(|page| word(page).load(Ordering::Relaxed) == page as u64 + 1));
    }

    #[test]
    fn what_is_not_mapped_is_an_error() {
        let me = pidfd_open(getpid(), PidfdFlags::empty()).expect("a descriptor of this process");
        page_out(&me, &[(Hva(0), PAGE_SIZE as u64)]).expect_err("nothing is there");
        bring_back(std::process::id(), Hva(0), PAGE_SIZE as u64).expect_err("nothing is there");
    }
}
