//! Hooks of functions that read a file past its mapping: in a RAM file they would find holes where pages are far.
//!
//! Before: `hooks` has found the RAM files. After: a VMM that copies a RAM file by its data (Cloud Hypervisor's
//! snapshot) learns that the file cannot report holes, and copies memory through the mapping; a read of a RAM file
//! fails.
//! Threads: any VMM thread. Safety: a hook has the contract of the C function of its name.
//! Promise: no far page is read as zeros by these functions. A call on any other file goes through, and costs one more
//! `fstat`.

use std::ffi::{c_int, c_void};

use libc::{off_t, size_t, ssize_t};

use crate::announce::announce;
use crate::hooks::{quietly, refuse};
use crate::{decide, next};

/// Whether this is a RAM file, whose read is refused and announced.
fn refuses(fd: c_int, what: &str) -> bool {
    let is_ram = quietly(false, || decide::is_ram_file(fd));
    if is_ram {
        announce(format_args!("refusing {what} on the file of guest RAM: it would read zeros where pages are far"));
    }
    is_ram
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn lseek(fd: c_int, offset: off_t, base: c_int) -> off_t {
    // The error of a file system without support for holes.
    if matches!(base, libc::SEEK_DATA | libc::SEEK_HOLE) && quietly(false, || decide::is_ram_file(fd)) {
        return refuse(libc::EINVAL, -1);
    }
    // SAFETY: the caller's promise.
    unsafe { next::lseek(fd, offset, base) }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `lseek`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn lseek64(fd: c_int, offset: off_t, base: c_int) -> off_t {
    // SAFETY: the caller's promise.
    unsafe { lseek(fd, offset, base) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread(fd: c_int, buffer: *mut c_void, len: size_t, offset: off_t) -> ssize_t {
    if refuses(fd, "pread") {
        return refuse(libc::EOPNOTSUPP, -1);
    }
    // SAFETY: the caller's promise.
    unsafe { next::pread(fd, buffer, len, offset) }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `pread`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pread64(fd: c_int, buffer: *mut c_void, len: size_t, offset: off_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { pread(fd, buffer, len, offset) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t {
    if refuses(from, "sendfile") {
        return refuse(libc::EOPNOTSUPP, -1);
    }
    // SAFETY: the caller's promise.
    unsafe { next::sendfile(to, from, offset, len) }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `sendfile`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendfile64(to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t {
    // SAFETY: the caller's promise.
    unsafe { sendfile(to, from, offset, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn copy_file_range(
    from: c_int,
    from_offset: *mut off_t,
    to: c_int,
    to_offset: *mut off_t,
    len: size_t,
    flags: u32,
) -> ssize_t {
    if refuses(from, "copy_file_range") {
        return refuse(libc::EOPNOTSUPP, -1);
    }
    // SAFETY: the caller's promise.
    unsafe { next::copy_file_range(from, from_offset, to, to_offset, len, flags) }
}
