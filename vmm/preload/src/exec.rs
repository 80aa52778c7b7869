//! Hooks of the functions by which the C library executes another program.
//!
//! Before: the VMM is about to become another program, to which it may hand its RAM, or a program that starts the VMM
//! executes it. After: each page is in its file, and the VMM has this library, or the call fails.
//! Threads: any VMM thread, or a child between `vfork` and `exec`, which shares the VMM's memory: once there is a VM,
//! nothing here allocates.
//! Promise: a call of a child is not refused for far pages.

use std::ffi::{c_char, c_int};

use libc::{pid_t, posix_spawn_file_actions_t, posix_spawnattr_t};

use crate::hooks::{quietly, refuse};
use crate::through::{self, Words};
use crate::{decide, next};

/// Declares hooks of functions that execute another program in this process.
macro_rules! executes {
    ($($name:ident($($arg:ident: $ty:ty),*) hands_on($($given:expr),*);)*) => {$(
        /// # Safety
        /// As the C function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $ty),*) -> c_int {
            // SAFETY: the caller's promise.
            let keeps = quietly(Ok(()), || unsafe { through::hands_on($($given),*) });
            if let Err(errno) = keeps.and_then(|()| quietly(Ok(()), decide::executing)) {
                return refuse(errno, -1);
            }
            // SAFETY: the caller's promise.
            let answer = unsafe { next::$name($($arg),*) };
            quietly((), decide::executed_nothing);
            answer
        }
    )*};
}

executes! {
    execve(path: *const c_char, args: Words, variables: Words) hands_on(path, args, Some(variables));
    execv(path: *const c_char, args: Words) hands_on(path, args, None);
    execvp(file: *const c_char, args: Words) hands_on(file, args, None);
    execvpe(file: *const c_char, args: Words, variables: Words) hands_on(file, args, Some(variables));
    fexecve(fd: c_int, args: Words, variables: Words) hands_on(c"a file".as_ptr(), args, Some(variables));
    execveat(
        dir: c_int, path: *const c_char, args: Words, variables: Words, flags: c_int
    ) hands_on(path, args, Some(variables));
}

/// Declares hooks of functions that execute a program in a new child and return the errno.
macro_rules! spawns {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As the C function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            id: *mut pid_t,
            file: *const c_char,
            actions: *const posix_spawn_file_actions_t,
            attributes: *const posix_spawnattr_t,
            words: Words,
            variables: Words,
        ) -> c_int {
            // SAFETY: the caller's promise.
            match quietly(Ok(()), || unsafe { through::hands_to_child(file, words, variables) }) {
                // SAFETY: the caller's promise.
                Ok(()) => unsafe { next::$name(id, file, actions, attributes, words, variables) },
                Err(errno) => errno,
            }
        }
    )*};
}

spawns! { posix_spawn posix_spawnp }
