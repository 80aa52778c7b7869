//! The functions behind our hooks, found once by `dlsym(RTLD_NEXT)`; if not found, the plain system call is used.
//!
//! Promise: each can be called at any time, even before constructors and inside an allocator that `dlsym` uses.

use std::cell::Cell;
use std::ffi::{CStr, c_void};
use std::sync::atomic::{AtomicPtr, Ordering};

thread_local! {
    static LOOKING: Cell<bool> = const { Cell::new(false) };
}

/// A function that a hook hides, by its name.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// The function's address. `None` if there is none, or if this thread is inside `dlsym`.
    pub fn get(&self) -> Option<*mut c_void> {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return Some(known);
        }
        if LOOKING.with(|looking| looking.replace(true)) {
            return None;
        }
        // SAFETY: the name is NUL-terminated and static; RTLD_NEXT is a valid handle for a library that was loaded.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        LOOKING.with(|looking| looking.set(false));
        self.found.store(found, Ordering::Relaxed);
        (!found.is_null()).then_some(found)
    }
}

/// `posix_fallocate`, which is no system call: if it is not found, the call fails.
///
/// # Safety
/// As the C function.
pub unsafe fn posix_fallocate(fd: c_int, offset: off_t, len: off_t) -> c_int {
    static NEXT: Next = Next::new(c"posix_fallocate");
    let Some(function) = NEXT.get() else { return libc::EOPNOTSUPP };
    // SAFETY: this is the address of the C function of this name, whose signature this is.
    let function: unsafe extern "C" fn(c_int, off_t, off_t) -> c_int = unsafe { std::mem::transmute(function) };
    // SAFETY: the caller's promise.
    unsafe { function(fd, offset, len) }
}

/// `ppoll`, whose system call has one more argument.
///
/// # Safety
/// As the C function.
pub unsafe fn ppoll(
    fds: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    type Function =
        unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, *const libc::timespec, *const libc::sigset_t) -> c_int;
    static NEXT: Next = Next::new(c"ppoll");
    match NEXT.get() {
        // SAFETY: this is the C function of this name, whose signature this is; and the caller's promise.
        Some(function) => unsafe { std::mem::transmute::<*mut c_void, Function>(function)(fds, count, timeout, mask) },
        // SAFETY: the caller's promise; the kernel's signal set has 8 bytes.
        None => unsafe { libc::syscall(libc::SYS_ppoll, fds, count, timeout, mask, 8_usize) as c_int },
    }
}

/// Declares functions that execute a program in a new child, which are no system calls: if not found, the call fails.
macro_rules! spawns {
    ($($name:ident, $symbol:literal;)*) => {$(
        /// # Safety
        /// As the C function of the same name.
        pub unsafe fn $name(
            id: *mut libc::pid_t,
            file: *const c_char,
            actions: *const libc::posix_spawn_file_actions_t,
            attributes: *const libc::posix_spawnattr_t,
            words: Words,
            variables: Words,
        ) -> c_int {
            type Function = unsafe extern "C" fn(
                *mut libc::pid_t,
                *const c_char,
                *const libc::posix_spawn_file_actions_t,
                *const libc::posix_spawnattr_t,
                Words,
                Words,
            ) -> c_int;
            static NEXT: Next = Next::new($symbol);
            let Some(function) = NEXT.get() else { return libc::ENOSYS };
            // SAFETY: this is the address of the C function of this name, whose signature this is.
            let function = unsafe { std::mem::transmute::<*mut c_void, Function>(function) };
            // SAFETY: the caller's promise.
            unsafe { function(id, file, actions, attributes, words, variables) }
        }
    )*};
}

spawns! {
    posix_spawn, c"posix_spawn";
    posix_spawnp, c"posix_spawnp";
}

/// Declares `fn name(args) -> ret` that calls the next function of that name, or the system call `$number`.
macro_rules! next {
    ($name:ident, $symbol:literal, $number:expr, ($($arg:ident: $ty:ty),*) -> $ret:ty) => {
        /// # Safety
        /// As the C function of the same name.
        pub unsafe fn $name($($arg: $ty),*) -> $ret {
            static NEXT: Next = Next::new($symbol);
            match NEXT.get() {
                Some(function) => {
                    // SAFETY: this is the address of the C function of this name, whose signature this is.
                    let function: unsafe extern "C" fn($($ty),*) -> $ret = unsafe { std::mem::transmute(function) };
                    // SAFETY: the caller's promise.
                    unsafe { function($($arg),*) }
                }
                // SAFETY: the system call behind that function, with the same arguments; libc sets errno.
                None => unsafe { libc::syscall($number, $($arg),*) as $ret },
            }
        }
    };
}

use libc::{c_char, c_int, c_uint, c_ulong, msghdr, off_t, size_t, ssize_t};

next!(mmap, c"mmap", libc::SYS_mmap,
    (addr: *mut c_void, len: size_t, prot: c_int, flags: c_int, fd: c_int, offset: off_t) -> *mut c_void);
next!(munmap, c"munmap", libc::SYS_munmap, (addr: *mut c_void, len: size_t) -> c_int);
next!(mremap, c"mremap", libc::SYS_mremap,
    (old: *mut c_void, old_len: size_t, new_len: size_t, flags: c_int, new: *mut c_void) -> *mut c_void);
next!(fallocate, c"fallocate", libc::SYS_fallocate, (fd: c_int, mode: c_int, offset: off_t, len: off_t) -> c_int);
next!(madvise, c"madvise", libc::SYS_madvise, (addr: *mut c_void, len: size_t, advice: c_int) -> c_int);
next!(mlock, c"mlock", libc::SYS_mlock, (addr: *const c_void, len: size_t) -> c_int);
next!(mlock2, c"mlock2", libc::SYS_mlock2, (addr: *const c_void, len: size_t, flags: c_uint) -> c_int);
next!(mlockall, c"mlockall", libc::SYS_mlockall, (flags: c_int) -> c_int);
next!(ioctl, c"ioctl", libc::SYS_ioctl, (fd: c_int, request: c_ulong, arg: *mut c_void) -> c_int);
next!(lseek, c"lseek", libc::SYS_lseek, (fd: c_int, offset: off_t, base: c_int) -> off_t);
next!(pread, c"pread", libc::SYS_pread64,
    (fd: c_int, buffer: *mut c_void, len: size_t, offset: off_t) -> ssize_t);
next!(sendfile, c"sendfile", libc::SYS_sendfile,
    (to: c_int, from: c_int, offset: *mut off_t, len: size_t) -> ssize_t);
next!(copy_file_range, c"copy_file_range", libc::SYS_copy_file_range,
    (from: c_int, from_offset: *mut off_t, to: c_int, to_offset: *mut off_t, len: size_t, flags: c_uint) -> ssize_t);
next!(sendmsg, c"sendmsg", libc::SYS_sendmsg, (fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t);

/// Declares `fn name(args) -> c_int` that executes another program by the next function of that name, which is resolved
/// before `main`, because a child between `vfork` and `exec` must not resolve it. Fails if it is not found.
macro_rules! executes {
    ($($name:ident, $symbol:literal, ($($arg:ident: $ty:ty),*);)*) => {
        mod executing {
            use super::Next;
            $(#[allow(non_upper_case_globals, reason = "named like the function")]
            pub static $name: Next = Next::new($symbol);)*
        }

        pub fn find_executing() {
            $(executing::$name.get();)*
        }

        $(/// # Safety
        /// As the C function of the same name.
        pub unsafe fn $name($($arg: $ty),*) -> c_int {
            let Some(function) = executing::$name.get() else {
                // SAFETY: the location of this thread's errno is valid for the thread's life.
                unsafe { *libc::__errno_location() = libc::ENOSYS };
                return -1;
            };
            // SAFETY: this is the address of the C function of this name, whose signature this is.
            let function: unsafe extern "C" fn($($ty),*) -> c_int = unsafe { std::mem::transmute(function) };
            // SAFETY: the caller's promise.
            unsafe { function($($arg),*) }
        })*
    };
}

type Words = *const *const c_char;
executes! {
    execve, c"execve", (path: *const c_char, args: Words, variables: Words);
    execv, c"execv", (path: *const c_char, args: Words);
    execvp, c"execvp", (file: *const c_char, args: Words);
    execvpe, c"execvpe", (file: *const c_char, args: Words, variables: Words);
    fexecve, c"fexecve", (fd: c_int, args: Words, variables: Words);
    execveat, c"execveat", (dir: c_int, path: *const c_char, args: Words, variables: Words, flags: c_int);
}
