//! The exported symbols. Each asks `decide`, then calls the next function of that name.
//!
//! Threads: any VMM thread. Safety: a hook has the contract of the C function of its name.
//! Promise: after a call that goes through, errno is as that call left it. A panic in our part is announced once, and
//! the call goes through as without this library, except that RAM of the pool is refused. If a call fails because the
//! keeper is not ready for RAM, that RAM is mapped nowhere.

use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::Ordering;

use ballast_base::HUGE_SIZE;
use libc::{msghdr, off_t, size_t, ssize_t};

use crate::announce::announce;
#[cfg(target_arch = "x86_64")]
use crate::asleep;
use crate::decide;
use crate::missed;
use crate::next;
use crate::pool;
use crate::shape;
use crate::twice;

/// Runs our part of a call, and keeps errno.
pub fn quietly<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    // SAFETY: the location of this thread's errno is valid for the thread's life.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    let answer = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|_| {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| announce("a bug in the preload library; a call that meets it goes through unchecked"));
        fallback
    });
    // SAFETY: as above.
    unsafe { *errno = before };
    answer
}

pub fn refuse<T>(errno: c_int, answer: T) -> T {
    // SAFETY: the location of this thread's errno is valid for the thread's life.
    unsafe { *libc::__errno_location() = errno };
    answer
}

/// # Safety
/// As `mmap`.
unsafe fn map(addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void {
    if !decide::watching() {
        // SAFETY: the caller's promise.
        return unsafe { next::mmap(addr, len, prot, flags, fd, offset) };
    }
    if shape::is_ram_reservation(addr, len, prot, flags, fd) {
        // SAFETY: a fresh reservation replaces nothing.
        let got = unsafe { reserve_aligned(len, flags) };
        shape::reserved(got, len);
        return got;
    }
    if flags & libc::MAP_FIXED != 0 {
        quietly((), || decide::mapping_over(addr, len));
    }
    let is_new = match quietly(Ok(false), || twice::mapping(flags, fd, offset, len)) {
        Ok(is_ram_already) => !is_ram_already,
        Err(errno) => return refuse(errno, libc::MAP_FAILED),
    };
    let may_be_ram = is_new && shape::looks_like_ram(len, prot, flags, fd);
    if may_be_ram {
        // After a bug, the VMM must not map the stand-in for RAM.
        let fallback = pool::is_wanted().then_some(Err(libc::ENOMEM));
        let locked = if decide::LOCKS_ALL.load(Ordering::Relaxed) { libc::MAP_LOCKED } else { 0 };
        // SAFETY: the caller's promise.
        let provided = quietly(fallback, || unsafe { pool::provide(addr, len, prot, flags | locked, fd, offset) });
        match provided {
            Some(Ok(ram)) => {
                return match quietly(Ok(()), || decide::new_ram_of_pool(ram, flags)) {
                    Ok(()) => addr,
                    Err(errno) => {
                        quietly((), || pool::unmapping(addr, len));
                        // SAFETY: the pool's memory was mapped there just now, and this call fails.
                        unsafe { take_back(addr, len, flags) };
                        refuse(errno, libc::MAP_FAILED)
                    }
                };
            }
            Some(Err(errno)) => {
                quietly((), decide::stop_if_starting);
                return refuse(errno, libc::MAP_FAILED);
            }
            None => {}
        }
    }
    // SAFETY: the caller's promise.
    let mapped = unsafe { next::mmap(addr, len, prot, flags, fd, offset) };
    if mapped == libc::MAP_FAILED {
        return mapped;
    }
    if shape::is_reservation(addr, prot, flags, fd) {
        shape::reserved(mapped, len);
    } else if shape::is_place_of_ram(mapped, len, flags) {
        if !may_be_ram {
            if shape::may_be_missed(len, prot) {
                quietly((), || missed::mapped_private(fd, len as u64));
            }
        } else if let Err(errno) = quietly(Ok(()), || decide::new_ram(mapped, len, flags, fd, offset)) {
            // SAFETY: it was mapped just now, and this call fails.
            unsafe { take_back(mapped, len, flags) };
            return refuse(errno, libc::MAP_FAILED);
        }
    }
    mapped
}

/// Undoes the mapping of RAM that the VMM must not have. What was mapped there before is lost; it usually was a
/// reservation, so a new reservation replaces it.
///
/// # Safety
/// The caller made the mapping just now, with these flags, and no other code knows of it.
unsafe fn take_back(addr: *mut c_void, len: size_t, flags: c_int) {
    // SAFETY: the caller's promise.
    let failed = unsafe {
        if flags & libc::MAP_FIXED != 0 {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
            next::mmap(addr, len, libc::PROT_NONE, flags, -1, 0) == libc::MAP_FAILED
        } else {
            next::munmap(addr, len) != 0
        }
    };
    if failed {
        announce(format_args!("undoing a mapping of RAM: {}", std::io::Error::last_os_error()));
    }
}

/// Reserves `len` bytes of address space at a multiple of 2 MiB.
///
/// # Safety
/// `flags` asks for a private anonymous mapping anywhere.
unsafe fn reserve_aligned(len: size_t, flags: c_int) -> *mut c_void {
    let Some(more) = len.checked_add(HUGE_SIZE) else { return refuse(libc::ENOMEM, libc::MAP_FAILED) };
    // SAFETY: anywhere, so nothing is replaced.
    let got = unsafe { next::mmap(std::ptr::null_mut(), more, libc::PROT_NONE, flags, -1, 0) };
    if got == libc::MAP_FAILED {
        return got;
    }
    let start = (got as usize).next_multiple_of(HUGE_SIZE);
    let head = start - got as usize;
    let tail = more - head - len;
    // SAFETY: both pieces are inside the reservation made above, which no other code knows yet. If an unmap fails, it
    // costs address space only.
    unsafe {
        if head > 0 {
            next::munmap(got, head);
        }
        if tail > 0 {
            next::munmap((start + len) as *mut c_void, tail);
        }
    }
    start as *mut c_void
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(a: *mut c_void, l: size_t, p: c_int, f: c_int, fd: c_int, o: off_t) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { map(a, l, p, f, fd, o) }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `mmap`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(a: *mut c_void, l: size_t, p: c_int, f: c_int, fd: c_int, o: off_t) -> *mut c_void {
    // SAFETY: the caller's promise.
    unsafe { map(a, l, p, f, fd, o) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn munmap(addr: *mut c_void, len: size_t) -> c_int {
    quietly((), || decide::unmapping(addr, len));
    // SAFETY: the caller's promise.
    unsafe { next::munmap(addr, len) }
}

/// # Safety
/// As the C function; the last argument is read only with `MREMAP_FIXED`, as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mremap(
    old: *mut c_void,
    old_len: size_t,
    new_len: size_t,
    flags: c_int,
    new: *mut c_void,
) -> *mut c_void {
    // With a length of 0 it maps the memory a second time.
    let refused = quietly(false, || decide::touches_ram(old, old_len.max(1)));
    if refused {
        announce("refusing to move guest RAM with mremap");
        return refuse(libc::EINVAL, libc::MAP_FAILED);
    }
    if flags & libc::MREMAP_FIXED != 0 {
        quietly((), || decide::mapping_over(new, new_len));
    }
    // SAFETY: the caller's promise.
    unsafe { next::mremap(old, old_len, new_len, flags, new) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn fallocate(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
    if let Some(done) = quietly(None, || pool::punching(fd, mode, offset, len, decide::discarding)) {
        return done.map_or_else(|errno| refuse(errno, -1), |()| 0);
    }
    match quietly(Ok(None), || decide::punching(fd, mode, offset, len)) {
        // SAFETY: the caller's promise.
        Ok(_held) => unsafe { next::fallocate(fd, mode, offset, len) },
        Err(errno) => refuse(errno, -1),
    }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `fallocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fallocate64(fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { fallocate(fd, mode, offset, len) }
}

/// # Safety
/// As the C function, which returns the errno.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fallocate(fd: c_int, offset: off_t, len: off_t) -> c_int {
    if let Some(Err(errno)) = quietly(None, || pool::punching(fd, 0, offset, len, decide::discarding)) {
        return errno;
    }
    match quietly(Ok(None), || decide::punching(fd, 0, offset, len)) {
        // SAFETY: the caller's promise.
        Ok(_held) => unsafe { next::posix_fallocate(fd, offset, len) },
        Err(errno) => errno,
    }
}

/// # Safety
/// As the C function; on 64-bit Linux it is `posix_fallocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_fallocate64(fd: c_int, offset: off_t, len: off_t) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { posix_fallocate(fd, offset, len) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(addr: *mut c_void, len: size_t, advice: c_int) -> c_int {
    let held = match advice {
        libc::MADV_REMOVE => quietly(Ok(None), || decide::removing(addr, len)),
        _ => Ok(None),
    };
    match held {
        // SAFETY: the caller's promise.
        Ok(_held) => unsafe { next::madvise(addr, len, advice) },
        Err(errno) => refuse(errno, -1),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock(addr: *const c_void, len: size_t) -> c_int {
    match quietly(Ok(()), || decide::locking(Some((addr, len)), false)) {
        // SAFETY: the caller's promise.
        Ok(()) => unsafe { next::mlock(addr, len) },
        Err(errno) => refuse(errno, -1),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlock2(addr: *const c_void, len: size_t, flags: c_uint) -> c_int {
    match quietly(Ok(()), || decide::locking(Some((addr, len)), false)) {
        // SAFETY: the caller's promise.
        Ok(()) => unsafe { next::mlock2(addr, len, flags) },
        Err(errno) => refuse(errno, -1),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn mlockall(flags: c_int) -> c_int {
    match quietly(Ok(()), || decide::locking(None, flags & libc::MCL_FUTURE != 0)) {
        // SAFETY: the caller's promise.
        Ok(()) => unsafe { next::mlockall(flags) },
        Err(errno) => refuse(errno, -1),
    }
}

/// # Safety
/// As the C function. Its one optional argument is a word that is passed on as it came, used or not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int {
    if decide::runs_a_vcpu(request) {
        quietly((), decide::starting);
    }
    if let Some((reason, restore)) = shape::ioctl_holds_ram(request)
        && let Err(errno) = quietly(Ok(()), || decide::pin_before(reason, restore))
    {
        return refuse(errno, -1);
    }
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the caller's promise.
    if let Some(answer) = unsafe { asleep::ioctl(fd, request, arg) } {
        return answer;
    }
    // SAFETY: the caller's promise.
    unsafe { next::ioctl(fd, request, arg) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t {
    let sharing = || {
        // SAFETY: the caller's promise that `message` is valid.
        unsafe { decide::keep_stand_ins(message) }?;
        // SAFETY: as above.
        if unsafe { decide::carries_ram(message) } {
            decide::pin_before("another process maps the same RAM (vhost-user, or a passed RAM file)", true)
        } else {
            Ok(())
        }
    };
    match quietly(Ok(()), sharing) {
        // SAFETY: the caller's promise.
        Ok(()) => unsafe { next::sendmsg(fd, message, flags) },
        Err(errno) => refuse(errno, -1),
    }
}
