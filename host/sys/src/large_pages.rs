//! Large pages of shared memory, from outside the process that maps them: is a page part of one, and the split of one.
//!
//! Before: the caller wants to move some pages of a 2 MiB page that the kernel keeps, and moves, as one. After: each
//! page can be moved alone.
//! Threads: any. Units: addresses of the other process. Promise: no byte changes. A split unmaps the pages of the unit:
//! the caller maps them again, or each touch is a minor fault.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use ballast_base::{Hva, PAGE_SIZE};

use crate::Remote;

/// `KPF_COMPOUND_HEAD`, `KPF_COMPOUND_TAIL` and `KPF_THP` of `linux/kernel-page-flags.h`.
const LARGE: u64 = 1 << 15 | 1 << 16 | 1 << 22;
const MADV_COLD: i32 = 20;

/// Is the page that is mapped at this address part of a large one? `None` if there is none, or the kernel does not say.
pub fn is_large(process: &Remote, page: Hva) -> io::Result<Option<bool>> {
    static FLAGS: OnceLock<Option<File>> = OnceLock::new();
    let Some(flags) = FLAGS.get_or_init(|| File::open("/proc/kpageflags").ok()) else { return Ok(None) };
    let mut frame = [None];
    process.physical(page, &mut frame)?;
    let [Some(address)] = frame else { return Ok(None) };
    let mut word = [0; 8];
    flags.read_exact_at(&mut word, address / PAGE_SIZE as u64 * 8)?;
    Ok(Some(u64::from_ne_bytes(word) & LARGE != 0))
}

/// Have the kernel split the large page that is mapped at this address into base pages, if this process alone maps it
/// and nothing holds a page of it. [`is_large`] tells whether it did.
///
/// There is no call for this. But `MADV_COLD` of a part of a large page splits it first (Linux 5.14 to 7.3; read in
/// `madvise_cold_or_pageout_pte_range`), and then only tells the kernel that the part is cold.
pub fn split(process: &Remote, page: Hva) -> io::Result<()> {
    let range = libc::iovec { iov_base: page.0 as *mut libc::c_void, iov_len: PAGE_SIZE };
    // SAFETY: `range` is alive and is only read; the address in it is the other process's, where this advice changes
    // neither content nor bounds.
    let answer = unsafe {
        let process = process.process.as_raw_fd();
        libc::syscall(libc::SYS_process_madvise, process, &raw const range, 1usize, MADV_COLD, 0u32)
    };
    if answer < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::remote::Collapsed;
    use crate::{Mapping, memfd};
    use ballast_base::{Bytes, HUGE_SIZE};
    use ballast_testkit::skip;

    #[test]
    fn a_large_page_is_split_without_a_changed_byte_and_the_next_one_is_not() {
        let len = 2 * HUGE_SIZE;
        let fd = memfd::create("ballast-test", Bytes(len as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, len).expect("map");
        let word = |page: usize| &map.words(page * PAGE_SIZE, 1)[0];
        (0..1024).for_each(|page| word(page).store(page as u64 + 5, Ordering::Relaxed));
        let remote = Remote::open(std::process::id()).expect("own process");
        let start = Hva(map.addr() as u64);
        let collapsed = remote.collapse(start, len as u64);
        if !matches!(collapsed, Ok(Collapsed::Done)) {
            return skip("collapse", format_args!("{collapsed:?}"));
        }
        let at = |page: u64| start + page * PAGE_SIZE as u64;
        match is_large(&remote, at(3)).expect("own process") {
            None => return skip("root", "flags of pages are hidden"),
            Some(is_large) => assert!(is_large),
        }
        split(&remote, at(0)).expect("permitted");
        assert_eq!(remote.mapped(start, len as u64).expect("scan"), [(at(512), at(1024))], "the unit is unmapped");
        assert!((0..1024).all(|page| word(page).load(Ordering::Relaxed) == page as u64 + 5));
        assert_eq!(
            [3, 511, 512].map(|page| is_large(&remote, at(page)).expect("mapped")),
            [Some(false), Some(false), Some(true)]
        );
    }
}
