//! A shared mapping of a file, and the only ways Ballast touches memory that another process may write.
//!
//! Before: `memfd` gives the file. After: page-state words, store arenas and test guests live in mappings.
//! Threads: a mapping may be used from any thread; concurrent access is through atomics or raw copies.
//! Promise: no Rust reference to plain memory inside a mapping is ever formed, only references to atomics. A function
//! panics, and touches nothing, if a range is outside the mapping or words are not aligned. A mapping of 2 MiB or more
//! begins at a multiple of 2 MiB, one of 1 GiB or more at a multiple of that, so that either can be of huge pages of
//! its size.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64};

use ballast_base::{GIB, HUGE_SIZE, PAGE_SIZE};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// An owned `MAP_SHARED` mapping; unmapped when dropped.
#[derive(Debug)]
pub struct Mapping {
    pub(crate) base: NonNull<u8>,
    pub(crate) len: usize,
}

// SAFETY: the mapping is memory owned by this value until drop, at a fixed address; nothing in it is thread-bound.
unsafe impl Send for Mapping {}
// SAFETY: every access through `&self` is atomic or a raw copy into or out of memory that is understood to be shared;
// no plain reference into the mapping exists.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Map `len` bytes of `file` from `offset` (page-aligned), shared, readable and writable.
    pub fn shared(file: impl AsFd, offset: u64, len: usize) -> io::Result<Self> {
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let base = if len < HUGE_SIZE {
            // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range: no existing mapping is
            // replaced.
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, prot, flags, file, offset)? }
        } else {
            let place = reserve_aligned(len)?;
            // SAFETY: exactly the reserved range is replaced, and no other code knows it.
            let mapped = unsafe { rustix::mm::mmap(place, len, prot, flags | MapFlags::FIXED, file, offset) };
            if mapped.is_err() {
                // SAFETY: the same range, which still holds nothing.
                let _ = unsafe { rustix::mm::munmap(place, len) };
            }
            mapped?
        };
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mmap returned the null address"))?;
        Ok(Self { base, len })
    }

    /// Map pieces of files one after the other, as [`Self::shared`] maps one: files, offsets and lengths, whole pages
    /// of their files. If one fails, nothing is mapped.
    pub fn shared_pieces<F: AsFd>(pieces: &[(F, u64, usize)]) -> io::Result<Self> {
        if let [(file, offset, len)] = pieces {
            return Self::shared(file, *offset, *len);
        }
        let len = pieces.iter().try_fold(0usize, |sum, (_, _, len)| sum.checked_add(*len));
        let len = len.filter(|len| *len > 0).ok_or(io::ErrorKind::InvalidInput)?;
        let base = NonNull::new(reserve_aligned(len)?.cast()).ok_or_else(|| io::Error::other("mmap returned null"))?;
        // From here on an error unmaps it with the rest.
        let mapping = Self { base, len };
        let (prot, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED | MapFlags::NORESERVE);
        let mut at = 0;
        for (file, offset, len) in pieces {
            let place = mapping.ptr(at, *len).cast();
            // SAFETY: the range is a part of the reservation, and no other code knows it.
            unsafe { rustix::mm::mmap(place, *len, prot, flags | MapFlags::FIXED, file, *offset)? };
            at += len;
        }
        Ok(mapping)
    }

    /// Bytes mapped.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: the kernel refuses to make an empty mapping.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The address of the first byte.
    pub fn addr(&self) -> usize {
        self.base.as_ptr() as usize
    }

    /// The address of byte `offset`, after checking that `len` bytes from there are inside.
    pub fn ptr(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "range {offset:#x}+{len:#x} is outside a mapping of {:#x} bytes",
            self.len
        );
        // SAFETY: `offset <= self.len` was just checked, so the result stays within (or one past) the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }

    /// The `count` 64-bit words from byte `offset`, a multiple of 8, as atomics.
    pub fn words(&self, offset: usize, count: usize) -> &[AtomicU64] {
        assert!(offset.is_multiple_of(8), "word offset {offset:#x} is not aligned");
        let ptr = self.ptr(offset, count * 8).cast::<AtomicU64>();
        // SAFETY: in bounds (checked by `ptr`), aligned (page-aligned base plus a multiple of 8), alive as long as
        // `self`; other writers, in this process or another, also use atomics, or are hostile and change only values.
        unsafe { std::slice::from_raw_parts(ptr, count) }
    }

    /// The `count` bytes from byte `offset`, as atomics.
    pub fn bytes(&self, offset: usize, count: usize) -> &[AtomicU8] {
        let ptr = self.ptr(offset, count).cast::<AtomicU8>();
        // SAFETY: in bounds (checked by `ptr`), alive as long as `self`; see `words` about other writers.
        unsafe { std::slice::from_raw_parts(ptr, count) }
    }

    /// Copy `out.len()` bytes from `offset` out of the mapping.
    pub fn copy_out(&self, offset: usize, out: &mut [u8]) {
        let src = self.ptr(offset, out.len());
        // SAFETY: the source is in bounds; `out` is a private buffer, so the two cannot overlap. If another process
        // writes the source meanwhile the bytes copied are a mix, which the caller's checksum or state word catches.
        unsafe { std::ptr::copy_nonoverlapping(src, out.as_mut_ptr(), out.len()) }
    }

    /// Copy `bytes` into the mapping at `offset`.
    pub fn copy_in(&self, offset: usize, bytes: &[u8]) {
        let dst = self.ptr(offset, bytes.len());
        // SAFETY: the target is in bounds; `bytes` is a live private slice, so the two cannot overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), dst, bytes.len()) }
    }

    /// Write `len` bytes from `offset` to a file: the kernel reads the mapping on our behalf, so memory that would
    /// raise a signal here is an error (`EFAULT`) instead.
    pub fn send_to(&self, file: impl AsFd, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.ptr(offset, len);
        // SAFETY: a write to a file only reads the range, which is inside this mapping; the kernel checks the access.
        let written = unsafe { libc::write(file.as_fd().as_raw_fd(), ptr.cast(), len) };
        if written == len as isize { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Make the pages of a range present and mapped, in one call instead of a fault for each. Contents stay.
    pub fn populate(&self, offset: usize, len: usize) -> io::Result<()> {
        let ptr = self.ptr(offset, len);
        // SAFETY: the range is inside this mapping; the advice changes no content, it only does what touches would do.
        unsafe { rustix::mm::madvise(ptr.cast(), len, Advice::LinuxPopulateWrite)? };
        Ok(())
    }

    /// Make the 2 MiB from `offset` on one huge page of shared memory, if the kernel can: an address and an offset that
    /// are multiples of that, and at least one page of the file there. Holes become zeros. Returns whether it is one.
    pub fn collapse(&self, offset: usize) -> bool {
        let ptr = self.ptr(offset, HUGE_SIZE);
        // SAFETY: the range is inside the mapping; the advice changes which memory holds it, and no byte of it.
        unsafe { libc::madvise(ptr.cast(), HUGE_SIZE, crate::remote::MADV_COLLAPSE) == 0 }
    }

    /// Have the memory of a page fail, as if the hardware had reported it: for tests. Its bytes are lost, here and in
    /// the file. The calling thread gets a `SIGBUS`, as a thread does that touches failed memory.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`, `EINVAL` if the kernel handles no such failures (`CONFIG_MEMORY_FAILURE`).
    pub fn fail_memory(&self, offset: usize) -> io::Result<()> {
        let ptr = self.ptr(offset, PAGE_SIZE);
        // SAFETY: the page is inside this mapping of a file, to whose bytes no Rust reference exists; the caller wants
        // to lose them.
        unsafe { rustix::mm::madvise(ptr.cast(), PAGE_SIZE, Advice::LinuxHwPoison)? };
        Ok(())
    }

    /// Drop this process's page-table entries of a range; the data stays in the file.
    pub fn zap(&self, offset: usize, len: usize) -> io::Result<()> {
        self.zap_all(&[(offset, len)])
    }

    /// [`Self::zap`] of many ranges `(offset, len)`, with few interruptions of the other CPUs (see [`crate::zap`]).
    pub fn zap_all(&self, ranges: &[(usize, usize)]) -> io::Result<()> {
        let ranges: Vec<_> = ranges.iter().map(|&(offset, len)| (self.ptr(offset, len) as usize, len)).collect();
        // SAFETY: each range is inside this shared file mapping, so its contents stay in the file and are mapped again
        // by the next touch.
        let failed = unsafe { crate::zap::zap(&ranges) };
        failed.into_iter().next().map_or(Ok(()), |(_, error)| Err(error))
    }
}

/// Reserve `len` bytes of address space from a multiple of 2 MiB on, or of 1 GiB; the caller maps over them.
fn reserve_aligned(len: usize) -> io::Result<*mut libc::c_void> {
    let align = if len < GIB as usize { HUGE_SIZE } else { GIB as usize };
    let reserved = len.next_multiple_of(PAGE_SIZE).checked_add(align).ok_or(io::ErrorKind::OutOfMemory)?;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a null hint without MAP_FIXED lets the kernel choose a free range: no existing mapping is replaced.
    let start = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), flags)? };
    let skipped = (start as usize).next_multiple_of(align) - start as usize;
    let place = start.wrapping_byte_add(skipped);
    let tail = place.wrapping_byte_add(len.next_multiple_of(PAGE_SIZE));
    // SAFETY: both ranges are parts of the reservation above, outside the `len` bytes that are kept, and hold nothing.
    unsafe {
        if skipped > 0 {
            rustix::mm::munmap(start, skipped)?;
        }
        rustix::mm::munmap(tail, align - skipped)?;
    }
    Ok(place)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping made in `new`, unmapped exactly once; references into it
        // borrow `self` and so are gone.
        if let Err(error) = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) } {
            debug_assert!(false, "unmapping {:#x}+{:#x}: {error}", self.addr(), self.len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ballast_base::Bytes;
    use std::sync::atomic::Ordering;

    #[test]
    fn two_mappings_of_one_file_see_the_same_words() {
        let fd = crate::memfd::create("ballast-test", Bytes(8192)).expect("memfd");
        let a = Mapping::shared(&fd, 0, 8192).expect("map");
        let b = Mapping::shared(&fd, 4096, 4096).expect("map");
        a.words(4096, 2)[1].store(42, Ordering::Release);
        assert_eq!(b.words(0, 2)[1].load(Ordering::Acquire), 42);
        a.zap(0, 8192).expect("zap");
        assert_eq!(a.words(4096, 2)[1].load(Ordering::Acquire), 42);
    }

    #[test]
    fn zapping_thousands_of_ranges_at_once_leaves_their_contents() {
        const PAGES: usize = 6000;
        let fd = crate::memfd::create("ballast-test", Bytes((PAGES * PAGE_SIZE) as u64)).expect("memfd");
        let map = Mapping::shared(&fd, 0, PAGES * PAGE_SIZE).expect("map");
        let word = |page: usize| &map.words(page * PAGE_SIZE, 1)[0];
        (0..PAGES).for_each(|page| word(page).store(page as u64, Ordering::Release));
        let ranges: Vec<_> = (0..PAGES).step_by(2).map(|page| (page * PAGE_SIZE, PAGE_SIZE)).collect();
        map.zap_all(&ranges).expect("zap");
        assert!((0..PAGES).all(|page| word(page).load(Ordering::Acquire) == page as u64));
    }

    #[test]
    #[should_panic(expected = "outside a mapping")]
    fn a_range_outside_the_mapping_panics() {
        let fd = crate::memfd::create("ballast-test", Bytes(4096)).expect("memfd");
        Mapping::shared(&fd, 0, 4096).expect("map").bytes(4095, 2);
    }
}
