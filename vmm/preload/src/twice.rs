//! A second mapping of RAM in the VMM's own process, whose touches raise no faults that the engine serves.
//!
//! Before: `hooks` sees a mapping of a file. After: each page is in its file and stays there, or the call fails.
//! Threads: any VMM thread. Units: bytes of the file.
//! Promise: the protection, the flags and the length of the mapping do not matter: private and read-only mappings would
//! read zeros where pages are far, and a mapping without access may gain it later. Mappings that a VMM made before it
//! attached, or past the C library, are found by the engine's scan for foreign mappers.

use std::ffi::c_int;
use std::os::fd::BorrowedFd;

use ballast_base::PAGE_SIZE;
use ballast_client::visit;
use ballast_sys::memfd;

use crate::announce::announce;
use crate::decide::{self, MAPPED_TWICE};
use crate::pool;

/// Prepares for a mapping of a part of a file. Returns whether the part is RAM already; then each page was restored,
/// and the VM is pinned. `Err` is the errno with which to refuse the call.
pub fn mapping(flags: c_int, fd: c_int, offset: i64, len: usize) -> Result<bool, c_int> {
    let is_of_file = fd >= 0 && flags & libc::MAP_ANONYMOUS == 0;
    let Some(client) = decide::client().filter(|_| is_of_file && offset >= 0) else { return Ok(false) };
    let quiet = visit::enter();
    // SAFETY: borrowed for `fstat` only, which returns EBADF if it is not open.
    let Ok(file) = memfd::file_id(unsafe { BorrowedFd::borrow_raw(fd) }) else { return Ok(false) };
    drop(quiet);
    let (offset, len) = (offset as u64, (len as u64).next_multiple_of(PAGE_SIZE as u64));
    if pool::has_part(file, offset, len) {
        announce("refusing a second mapping of guest RAM: it is the pool's, and not in the VMM's own file");
        return Err(libc::ENODEV);
    }
    if client.of_file(file, offset, len).is_empty() {
        return Ok(false);
    }
    announce(format_args!("{MAPPED_TWICE}: this VM is pinned; restoring all of its memory"));
    client.bring_back(MAPPED_TWICE).map(|()| true).map_err(|error| {
        announce(format_args!("{MAPPED_TWICE}: refused, because not all memory was restored: {error}"));
        libc::EAGAIN
    })
}
