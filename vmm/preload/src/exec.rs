//! Hooks of all functions by which the C library executes another program, and of `syscall`.
//!
//! Before: the VMM is about to become another program, to which it may hand its RAM, or a program that starts the VMM
//! executes it. After: every page is in its file, and the VMM has this library, or the call fails.
//! Threads: any VMM thread, or a child between `vfork` and `exec`, which shares the VMM's memory: once there
//! is a VM, nothing here allocates.
//! Promise: a call of a child goes through. `syscall` with any other number is the C library's own sequence, whatever
//! stack its thread has afterwards (`clone`).

use std::arch::naked_asm;
use std::ffi::{c_char, c_int, c_long};

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

/// Declares hooks of functions with the new program's words as arguments. The caller has put the first five words into
/// registers and the others on the stack, above the return address. Such a hook takes the return address away and
/// pushes the five, so that all of them are an array, as `execv` wants it.
macro_rules! executes_list {
    ($($name:ident => $with_array:path;)*) => {$(
        /// # Safety
        /// As the C function.
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name() {
            naked_asm!(
                "pop r10",
                "push r9",
                "push r8",
                "push rcx",
                "push rdx",
                "push rsi",
                "mov rsi, rsp",
                // The stack is at a multiple of 16 now, as a call wants it.
                "push r10",
                "call {with_array}",
                "pop r10",
                "add rsp, 40",
                "push r10",
                "ret",
                with_array = sym $with_array,
            )
        }
    )*};
}

executes_list! {
    execl => execv;
    execlp => execvp;
    execle => with_variables;
}

/// `execle`: the variables follow the null pointer behind the words.
///
/// # Safety
/// As the C function; `words` are its arguments from the second on.
unsafe extern "C" fn with_variables(path: *const c_char, words: Words) -> c_int {
    let mut end = words;
    // SAFETY: the caller's promise: a null pointer ends the words, and one more argument follows it.
    let variables = unsafe {
        while !(*end).is_null() {
            end = end.add(1);
        }
        *end.add(1).cast::<Words>()
    };
    // SAFETY: the caller's promise.
    unsafe { execve(path, words, variables) }
}

/// # Safety
/// As the C function.
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall() {
    naked_asm!(
        "cmp rdi, {execve}",
        "je {hooked}",
        "cmp rdi, {execveat}",
        "je {hooked}",
        "mov rax, rdi",
        "mov rdi, rsi",
        "mov rsi, rdx",
        "mov rdx, rcx",
        "mov r10, r8",
        "mov r8, r9",
        "mov r9, [rsp + 8]",
        "syscall",
        "cmp rax, -4095",
        "jae 2f",
        "ret",
        "2:",
        "mov rdi, rax",
        "jmp {failed}",
        execve = const libc::SYS_execve,
        execveat = const libc::SYS_execveat,
        hooked = sym execute_by_number,
        failed = sym failed,
    )
}

/// Return from a system call that failed, as `syscall` does.
extern "C" fn failed(answer: c_long) -> c_long {
    refuse(-answer as c_int, -1)
}

/// # Safety
/// As `syscall` with the number of `execve` or `execveat`.
unsafe extern "C" fn execute_by_number(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
) -> c_long {
    // SAFETY: the caller's promise: these are the arguments of that call.
    let answer = unsafe {
        if number == libc::SYS_execve {
            execve(first as *const c_char, second as Words, third as Words)
        } else {
            execveat(first as c_int, second as *const c_char, third as Words, fourth as Words, fifth as c_int)
        }
    };
    c_long::from(answer)
}
