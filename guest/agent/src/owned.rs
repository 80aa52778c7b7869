//! Memory of the agent's own, on a node, whose guest-physical pages are known.
//!
//! Before: pages of a node are wanted. After: this process has them, filled and locked, and knows their numbers.
//! Units: bytes of whole pages. Promise: the guest has the memory back when this is dropped, or the process ends.

use std::io;

use ballast_base::{HUGE_SIZE, Hva, PAGE_SIZE, PageIdx};
use ballast_messages::{Run, run};
use ballast_sys::Remote;

use crate::files::last_error;

#[derive(Debug)]
pub struct Owned {
    start: *mut u8,
    len: usize,
    /// The whole mapping, which is larger so that the memory can be aligned.
    mapped: (*mut u8, usize),
}

impl Owned {
    /// Takes this number of pages of a node, or of any. Fails if the node has no more, or they cannot be locked.
    pub fn new(pages: usize, node: Option<u32>) -> io::Result<Self> {
        let len = pages * PAGE_SIZE;
        // From 2 MiB on it may be a huge page, which needs alignment.
        let extra = if len >= HUGE_SIZE { HUGE_SIZE } else { 0 };
        let (read_write, private) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, at a place of the kernel's choice.
        let mapped = unsafe { libc::mmap(std::ptr::null_mut(), len + extra, read_write, private, -1, 0) };
        if mapped == libc::MAP_FAILED {
            return last_error("mapping memory");
        }
        let mapped = mapped.cast::<u8>();
        // SAFETY: within the mapping, which is larger by the alignment.
        let start = unsafe { mapped.add(if extra > 0 { mapped.align_offset(HUGE_SIZE) } else { 0 }) };
        let owned = Self { start, len, mapped: (mapped, len + extra) };
        if let Some(node) = node {
            let mask = [1u64.checked_shl(node).unwrap_or(0), 0];
            let bind = libc::c_long::from(libc::MPOL_BIND);
            // SAFETY: our mapping; the mask has as many bits as is said.
            if unsafe { libc::syscall(libc::SYS_mbind, owned.start, len, bind, mask.as_ptr(), 65, 0) } < 0 {
                return last_error("binding memory to a node");
            }
        }
        // SAFETY: our mapping, which no other code uses.
        if unsafe { libc::madvise(owned.start.cast(), len, libc::MADV_POPULATE_WRITE) } < 0 {
            return last_error("filling memory of a node");
        }
        // SAFETY: as above.
        if unsafe { libc::mlock(owned.start.cast(), len) } < 0 {
            return last_error("locking memory");
        }
        Ok(owned)
    }

    /// Returns the address in this process, and the length.
    pub fn place(&self) -> (usize, usize) {
        (self.start as usize, self.len)
    }

    pub fn pages(&self) -> u64 {
        (self.len / PAGE_SIZE) as u64
    }

    /// Writes at the beginning of one of its pages. Panics if it has no such page.
    pub fn write(&mut self, page: usize, bytes: &[u8]) {
        assert!(page * PAGE_SIZE + bytes.len() <= self.len);
        // SAFETY: inside the mapping, which no other code uses.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.add(page * PAGE_SIZE), bytes.len()) };
    }

    /// Returns the guest-physical page numbers, by the pages' addresses here. Fails if this user may not read them.
    pub fn frames(&self) -> io::Result<Vec<u64>> {
        let mut found = vec![None; self.len / PAGE_SIZE];
        Remote::open(std::process::id())?.physical(Hva(self.start as u64), &mut found)?;
        let frames: Option<Vec<u64>> = found.into_iter().map(|address| Some(PageIdx::containing(address?).0)).collect();
        frames.ok_or_else(|| io::Error::new(io::ErrorKind::PermissionDenied, "/proc/self/pagemap hides pages"))
    }

    /// Returns the guest-physical pages as runs, ascending. Fails like [`Self::frames`].
    pub fn runs(&self) -> io::Result<Vec<Run>> {
        let mut frames = self.frames()?;
        frames.sort_unstable();
        let mut runs = Vec::new();
        frames.into_iter().for_each(|page| run::push(&mut runs, Run::of(page, 1)));
        Ok(runs)
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: the whole mapping, which no other code uses.
        unsafe { libc::munmap(self.mapped.0.cast(), self.mapped.1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_huge_pages_worth_begins_at_a_huge_pages_place() {
        let mut owned = Owned::new(512, None).expect("2 MiB");
        assert_eq!((owned.place().0 % HUGE_SIZE, owned.pages()), (0, 512));
        owned.write(511, &[7; PAGE_SIZE]);
    }
}
